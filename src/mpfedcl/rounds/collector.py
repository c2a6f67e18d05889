"""The collector of a round: validates each update, folds it into sums, and counts.

`TotalCollector` is the collector of secure aggregation, which sees only the total of a round.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import MemberSums, PoolTotals, StackedSums, complete_pool
from mpfedcl.methods import CollectsStatistics, Method, OneShot, Server, Tally
from mpfedcl.methods.messages import Broadcast, Failure, Total, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation import Peers, find_aggregator
from mpfedcl.rounds.processors import ProcessorChain
from mpfedcl.rounds.prototype_pool import exchange_prototypes, pack_named, unpack_named
from mpfedcl.rounds.reputation import BoundedAggregation, RelativeBounds
from mpfedcl.rounds.validation import (
    FEWEST_HOLDERS,
    UpdateValidator,
    drop_misplaced,
    find_odd_clients,
)

_LONGEST_REASON = 300
"""Characters of a reason, which may quote what a client sent."""
_BY_CLIENT = ("losses", "weights", "rejected", "uploads")
"""Attributes of a collector that have a value per client."""
MISPLACED = "misplaced prototypes"
"""The name in a record's `processed` for clients whose prototypes were dropped."""


class UpdateCollector:
    """The accepted updates of one round."""

    def __init__(
        self,
        method: Method,
        validator: UpdateValidator,
        server: Server,
        broadcast: Broadcast,
        chosen: Collection[str],
        *,
        keep_sums: bool = False,
        bounds: RelativeBounds | None = None,
    ) -> None:
        self.prototypes: dict[str, Prototypes] = {}
        self.losses: dict[str, float | None] = {}
        self.weights: dict[str, float] = {}
        self.rejected: dict[str, str] = {}
        self.withheld: list[str] = []
        self.processed: dict[str, list[str]] = {}
        """The clients whose updates each processor has changed."""
        self.sums: Tensors = {}
        """Complete after `merge` and `tally`."""
        self.client_sums: dict[str, Tensors] | None = {} if keep_sums else None
        """The statistics of each client, if they are kept."""
        self._totals = PoolTotals() if isinstance(method, OneShot) and not keep_sums else None
        self._parts: Tensors | None = None
        """The totals over all processes."""
        self._stack: StackedSums | None = None
        self._members: list[int] = []
        self.noise: Tensor | None = None
        """The variance of the noise that clients add, relative to what the budget requires."""
        self.mean_loss: float | None = None
        """If only the total of the losses is known."""
        self.bytes_up = 0
        self.uploads: dict[str, int] = {}
        """Bytes sent by each client."""
        self.largest = {"parameters": 0, "prototype_floats": 0}
        """The largest upload of one client."""
        experiment = method.experiment
        rule = find_aggregator(experiment.aggregation.rule)
        self.template = validator.template
        """Tensors with the shapes and types of the averaged parameters."""
        self._aggregation = BoundedAggregation(
            rule(validator.template, experiment, broadcast.round), broadcast, bounds
        )
        self._bounds = bounds
        self._waiting: list[Update] = []
        """Updates whose statistics are added once all have come."""
        self._is_settled = False
        self._remarks: dict[str, Any] = {}
        self._processors = ProcessorChain(experiment)
        self._method = method
        self._validator = validator
        self._server = server
        self._broadcast = broadcast
        self._chosen = frozenset(chosen)

    @property
    def accepted(self) -> list[str]:
        """The clients whose updates count, in order of name."""
        return sorted(self.prototypes)

    def add(self, update: Update | Failure | Total) -> None:
        """Validate an update and fold it in, or note the reason for its rejection."""
        assert not isinstance(update, Total)
        if isinstance(update, Failure):
            self._reject(update, update.reason)
            return
        if malformed := self._validator.check_form(update):
            self._reject(update, malformed)
            return
        num_bytes = update.num_bytes
        self.bytes_up += num_bytes
        self.uploads[update.client] = num_bytes
        update, problem = self._process(update)
        if update.client in self.prototypes or update.client in self.rejected:
            self._reject(update, "this client answered twice")
        elif reason := self._validator.check(update, self._broadcast) or problem:
            self._reject(update, reason)
        elif update.client not in self._chosen:
            self._reject(update, "this client was not asked")
        elif too_many := self._check_claim(update):
            self._reject(update, too_many)
        else:
            self._weigh(update)

    def merge(self, peers: Peers) -> None:
        """Combine the collectors of all processes, so that each has the whole round."""
        self.settle(peers)
        self._add_stack()
        for name, zero in self._validator.sums.items():
            self._add_up(name, zero)
        self.sums = peers.sum(self.sums)
        if self._totals is not None:
            self._totals.add(self._validator.sums)
            self._parts = peers.sum(self._totals.parts())
        if self.client_sums is not None:
            # Only the leading process writes them, and receives them one at a time.
            own = (pack_named(name, sums) for name, sums in self.client_sums.items())
            self.client_sums = dict(map(unpack_named, peers.gather_to_leader(own)))
        plain = (*_BY_CLIENT, "withheld", "processed", "bytes_up", "largest")
        own_state = {name: getattr(self, name) for name in plain}
        states, self.prototypes = exchange_prototypes(own_state, self.prototypes, peers)
        for name in _BY_CLIENT:
            setattr(self, name, {n: value for each in states for n, value in each[name].items()})
        self.withheld = [name for each in states for name in each["withheld"]]
        self.processed = {
            mark: [client for each in states for client in each["processed"].get(mark, [])]
            for mark in {mark for each in states for mark in each["processed"]}
        }
        self.bytes_up = sum(each["bytes_up"] for each in states)
        self.largest = {
            name: max(each["largest"][name] for each in states) for name in self.largest
        }

    def settle(self, peers: Peers | None = None) -> None:
        """Fold the updates that waited for the others; once, before results are asked for."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._bounds is not None:
            self._reject_odd_sums(self._bounds, peers)
        self._aggregation.settle(peers)
        self.weights |= self._aggregation.weights
        self.processed |= self._aggregation.processed

    def drop_misplaced_prototypes(self) -> None:
        """Drop prototypes that are nearer to another class of the other clients."""
        if self._bounds is None or self._validator.sums:
            return
        kept = drop_misplaced(self.prototypes, self._method.num_classes, self._bounds.odd_factor)
        self.prototypes = kept.prototypes
        if kept.dropped:
            self.processed[MISPLACED] = sorted(kept.dropped)
            self._remarks["prototypes_dropped"] = kept.dropped
        if kept.unchecked:
            self._remarks["prototypes_not_checked"] = {
                "classes": kept.unchecked,
                "reason": f"fewer than {FEWEST_HOLDERS} clients hold them: no rule can find a "
                "malicious one",
            }

    def means(self) -> Tensors:
        """Return the aggregated parameters."""
        return self._aggregation.result()

    @property
    def median_norm(self) -> float | None:
        """The median norm of the clients' changes, after `means`; None if not bounded."""
        return self._aggregation.median_norm

    @property
    def reputations(self) -> dict[str, float]:
        """The clients' reputations, after `means`; empty if not bounded."""
        return self._aggregation.reputations

    def remarks(self) -> dict[str, Any]:
        """Return remarks about the aggregation for the round's record."""
        remarks = self._aggregation.remarks()
        return {**self._remarks, **({"aggregation": remarks} if remarks else {})}

    def tally(self, sizes: Mapping[str, int], num_samples: int) -> Tally:
        """Return the accepted clients; `num_samples` is the total of all clients."""
        self._add_stack()
        names = self.accepted
        counts = [sizes[name] for name in names]
        return Tally(
            names,
            counts,
            [self.weights[name] for name in names],
            [self.losses[name] for name in names],
            sum(counts) / num_samples,
            self.prototypes,
            self.sums,
            {name: each for name, each in self._broadcast.units.items() if name in self.prototypes},
        )

    def pooled_statistics(self) -> Tensors:
        """Return the pooled statistics if only these are kept; after `tally`."""
        if self._totals is None or not self.prototypes:
            return {}
        parts = self._totals.parts() if self._parts is None else self._parts
        return complete_pool(parts, self.sums)

    def _process(self, update: Update) -> tuple[Update, str | None]:
        """Return the processed update, or the update as sent and the reason of a failure."""
        odd = [name for name in update.processed if name not in self._processors.names]
        if odd:
            return (
                update,
                f"it was processed by {str(odd[0])[:40]!r}, which is not in the experiment",
            )
        if len(set(update.processed)) < len(update.processed):
            return update, "it was processed twice by the same processor"
        try:
            unpacked = self._processors.unpack(update, self._broadcast)
            # Checked before any computation: a small tensor may be expanded to a huge one.
            if problem := self._validator.check_shapes(unpacked):
                return update, problem
            return self._processors.incoming(unpacked, self._broadcast), None
        # A client's values may fail in any way; validation has a better reason for most of them.
        except Exception as error:
            return update, f"it cannot be processed ({type(error).__name__})"

    def _weigh(self, update: Update) -> None:
        """Weigh an update by the method, and accept it if the weight is valid."""
        weight = 0.0
        try:
            if update.averaged is not None:
                # Under a privacy budget all clients count alike: sample counts are not disclosed.
                is_private = self._method.experiment.privacy.has_budget
                weight = 1.0 if is_private else self._method.weigh(update, self._server)
        # A method's formula may overflow on a client's values.
        except Exception as error:
            self._reject(update, f"it cannot be weighed ({type(error).__name__})")
            return
        if not 0 <= weight < math.inf:
            self._reject(update, f"its weight is {weight!r}; it must be finite and not negative")
            return
        self._accept(update, weight)

    def _accept(self, update: Update, weight: float) -> None:
        if update.averaged is None:
            self.withheld.append(update.client)
        else:
            self._aggregation.add(update, weight)
        if self._bounds is None:
            self._add_statistics(update)
        elif update.summed:
            # Outliers show only in comparison with the others.
            self._waiting.append(update)
        self.weights[update.client] = weight
        self.losses[update.client] = update.loss
        self.prototypes[update.client] = (
            self._method.prototypes_of(update)
            if isinstance(self._method, OneShot)
            else update.prototypes
        )
        for name in update.processed:
            self.processed.setdefault(name, []).append(update.client)
        sizes = {
            "parameters": update.num_parameters,
            "prototype_floats": update.prototypes.vectors.numel(),
        }
        self.largest = {name: max(self.largest[name], size) for name, size in sizes.items()}

    def _check_claim(self, update: Update) -> str | None:
        if self._bounds is None or not update.summed_shapes:
            return None
        return self._bounds.check_claim(update.client, update.num_samples)

    def _reject_odd_sums(self, bounds: RelativeBounds, peers: Peers | None) -> None:
        """Add the waiting statistics, except of clients whose class means are outliers."""
        if not self._validator.sums:
            return
        own = {each.client: self.prototypes[each.client] for each in self._waiting}
        everyone = exchange_prototypes(None, own, peers)[1] if peers else own
        odd = find_odd_clients(everyone, self._method.num_classes, bounds.odd_factor)
        for update in self._waiting:
            if update.client not in odd:
                self._add_statistics(update)
                continue
            for known in (self.prototypes, self.weights, self.losses):
                known.pop(update.client)
            self._reject(
                update,
                f"its class means differ from the others' {odd[update.client]:.3g} times as much "
                f"as chance explains; at most {bounds.odd_factor:g}",
            )
        self._waiting = []

    def _add_statistics(self, update: Update) -> None:
        self._add_sums(update.summed)
        if self.client_sums is not None:
            self.client_sums[update.client] = dict(update.summed)
        if self._totals is not None:
            self._totals.add(update.summed)

    def _add_sums(self, summed: Mapping[str, Tensor]) -> None:
        if not isinstance(summed, MemberSums):
            self._add_stack()
            for name, value in summed.items():
                self._add_up(name, value)
            return
        if self._stack is not summed.stack:
            self._add_stack()
        self._stack = summed.stack
        self._members.append(summed.index)

    def _add_stack(self) -> None:
        """Add the members of the current stack."""
        if self._stack is not None:
            for name, value in self._stack.total(self._members).items():
                self._add_up(name, value)
        self._stack, self._members = None, []

    def _add_up(self, name: str, value: Tensor) -> None:
        # In double precision: many clients add up, and one that leaves is subtracted again.
        wide = value.double() if value.is_floating_point() else value
        self.sums[name] = self.sums[name] + wide if name in self.sums else wide

    def _reject(self, update: Update | Failure, reason: str) -> None:
        name = update.client if isinstance(update.client, str) else repr(update.client)
        if name in self.prototypes or name in self.rejected:
            name = f"{name} (again)"
        self.rejected.setdefault(name, reason[:_LONGEST_REASON])


def in_name_order(
    updates: Iterable[Update | Failure | Total], chosen: Sequence[str]
) -> Iterator[Update | Failure | Total]:
    """Yield updates in the order of `chosen`: floating-point sums depend on the order.

    An early update waits for those before it; updates that were not asked for come last.
    """
    early: dict[str, Update | Failure | Total] = {}
    last: list[Update | Failure | Total] = []
    expected = deque(chosen)
    for update in updates:
        # A list, not a set: a name that cannot be hashed must not end the round.
        if update.client not in expected or update.client in early:
            last.append(update)
            continue
        early[update.client] = update
        while expected and expected[0] in early:
            yield early.pop(expected.popleft())
    yield from (early[name] for name in sorted(early))
    yield from last


OWNER = "global"
"""The owner of prototypes made from a total."""


class TotalCollector(UpdateCollector):
    """The total of a round; an impossible total rejects all its clients."""

    total: Total | None = None
    """The total of the accepted clients, once it is known."""

    @property
    def accepted(self) -> list[str]:
        """The clients whose updates are in the total."""
        return list(self.total.clients) if self.total else []

    def add(self, update: Update | Failure | Total) -> None:
        """Add the total, or note why a client is not in it."""
        if isinstance(update, Failure):
            self._reject(update, update.reason)
        elif isinstance(update, Update):
            self._reject(update, "its update is not masked, and this run has secure aggregation")
        elif reason := self._check_total(update):
            for name in update.clients:
                self._reject(Failure(name, ""), f"the total of all clients is impossible: {reason}")
        else:
            self._accept_total(update)

    def means(self) -> Tensors:
        """Return Σ w_i x_i / Σ w_i, in the types that clients send."""
        if self.total is None or not self.total.weight:
            return {}
        weight, template = self.total.weight, self._validator.template
        return {
            name: (value / weight).to(template[name]) for name, value in self.total.averaged.items()
        }

    def tally(self, sizes: Mapping[str, int], num_samples: int) -> Tally:
        """Return the total and the names of the clients in it."""
        assert self.total is not None
        share = self.total.num_samples / max(1, num_samples)
        return Tally(self.accepted, [], [], [], share, self.prototypes, self.sums)

    def pooled_statistics(self) -> Tensors:
        """Return the statistics that a method keeps of the total."""
        if self.total is None or not isinstance(self._method, OneShot):
            return {}
        return self._method.statistics_of(self.sums)

    def _accept_total(self, total: Total) -> None:
        self.total = total
        self.noise = total.noise
        self.weights = dict.fromkeys(total.clients, total.weight / len(total.clients))
        # In double precision, like sums of single clients.
        self.sums = {name: value.double() for name, value in total.summed.items()}
        self.bytes_up = total.num_bytes
        self.largest = {"parameters": total.num_parameters, "prototype_floats": 0}
        if self._method.trains and total.num_samples:
            self.mean_loss = total.loss / total.num_samples
        like = self._broadcast.pool.vectors
        none = Prototypes.empty(like.shape[1], like.dtype, like.device)
        if isinstance(self._method, OneShot):
            found = self._method.prototypes_of(Update(OWNER, 0, {}, none, None, self.sums))
            none = replace(found, vectors=found.vectors.to(like))
        self.prototypes = {OWNER: none}

    @torch.no_grad()
    def _check_total(self, total: Total) -> str | None:
        """Return why honest clients cannot have this total, or None."""
        if not total.is_possible:
            return "a number is out of range"
        if total.num_samples < 0 or total.weight < 0:
            return "its number of samples is negative"
        if total.weight:
            sent = self._broadcast.params
            squares = sum(
                float((value / total.weight - sent.get(name, 0)).square().sum())
                for name, value in total.averaged.items()
            )
            most = self._method.experiment.validation.max_norm
            if math.sqrt(squares) > most:
                return f"the model changed by {math.sqrt(squares):.3g}; at most {most:g}"
        elif any(bool(value.any()) for value in total.averaged.values()):
            return "models have come without any weight"
        if not isinstance(self._method, CollectsStatistics):
            return None
        return self._method.validate_totals(total.summed)
