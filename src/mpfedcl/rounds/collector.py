"""The collector of a round: validates each update, folds it into sums, and counts."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import add_statistics, complete_pool, pool_parts
from mpfedcl.methods import Method, OneShot, Server, Tally
from mpfedcl.methods.messages import Broadcast, Failure, Total, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation import Peers, find_aggregator
from mpfedcl.rounds.processors import ProcessorChain
from mpfedcl.rounds.prototype_pool import exchange_prototypes, pack_named, unpack_named
from mpfedcl.rounds.reputation import BoundedAggregation, RelativeBounds
from mpfedcl.rounds.validation import (
    UpdateValidator,
    drop_misplaced,
    find_odd_clients,
)

_LONGEST_REASON = 300
"""Characters of a reason, which may quote what a client sent."""
_BY_CLIENT = ("losses", "weights", "rejected", "uploads")
"""Attributes of a collector that have a value per client."""
_IN_TOTAL = ("withheld", "processed", "bytes_up", "largest")
"""Further attributes that processes add up."""
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
        self._pools_sums = isinstance(method, OneShot) and not keep_sums
        self._parts: Tensors = {}
        """Pooled statistics that are not sums of messages."""
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
        self.aggregation = BoundedAggregation(
            rule(validator.template, experiment), broadcast, bounds
        )
        self._bounds = bounds
        self._waiting: list[Update] = []
        """Updates whose statistics are added once all have come."""
        self._is_settled = False
        self._remarks: dict[str, Any] = {}
        self._processors = ProcessorChain(experiment)
        self._method, self._validator, self._server = method, validator, server
        self._broadcast, self._chosen = broadcast, frozenset(chosen)

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
            problem = "this client answered twice"
        else:
            problem = self._validator.check(update, self._broadcast) or problem
        if problem is None and update.client not in self._chosen:
            problem = "this client was not asked"
        if problem is None and self._bounds is not None and update.summed:
            problem = self._bounds.check_claim(update.client, update.num_samples)
        if problem is None:
            self._weigh(update)
        else:
            self._reject(update, problem)

    def merge(self, peers: Peers) -> None:
        """Combine the collectors of all processes, so that each has the whole round."""
        self.settle(peers)
        self._add_up(self._validator.sums)
        self.sums = peers.sum(self.sums)
        if self._pools_sums:
            self._parts = peers.sum(add_statistics(self._parts, pool_parts(self._validator.sums)))
        if self.client_sums is not None:
            # Only the leading process writes them, and receives them one at a time.
            own = (pack_named(name, sums) for name, sums in self.client_sums.items())
            self.client_sums = dict(map(unpack_named, peers.gather_to_leader(own)))
        own_state = {name: getattr(self, name) for name in (*_BY_CLIENT, *_IN_TOTAL)}
        states, self.prototypes = exchange_prototypes(own_state, self.prototypes, peers)
        for name in _BY_CLIENT:
            setattr(self, name, {n: value for each in states for n, value in each[name].items()})
        self.withheld = [name for each in states for name in each["withheld"]]
        self.processed = {}
        for mark, clients in (pair for each in states for pair in each["processed"].items()):
            self.processed.setdefault(mark, []).extend(clients)
        self.bytes_up = sum(each["bytes_up"] for each in states)
        for name in self.largest:
            self.largest[name] = max(each["largest"][name] for each in states)

    def settle(self, peers: Peers | None = None) -> None:
        """Fold the updates that waited for the others; once, before results are asked for."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._bounds is not None:
            self._reject_odd_sums(self._bounds, peers)
        self.aggregation.settle(peers)
        self.weights |= self.aggregation.weights
        self.processed |= self.aggregation.processed

    def drop_misplaced_prototypes(self) -> None:
        """Drop prototypes whose labels contradict the other clients and the global model."""
        if self._bounds is None or self._validator.sums:
            return
        classifier = self._validator.classifier_of(self._broadcast)
        num_classes, factor = self._method.num_classes, self._bounds.settings.odd_factor
        kept = drop_misplaced(self.prototypes, num_classes, factor, classifier)
        self.prototypes = kept.prototypes
        if kept.dropped:
            self.processed[MISPLACED] = sorted(kept.dropped)
            self._remarks["prototypes_dropped"] = kept.dropped
        if kept.unchecked:
            self._remarks["prototypes_not_checked"] = {
                "classes": kept.unchecked,
                "reason": "too few clients, or only one class of a client, to compare them with",
            }

    def means(self) -> Tensors:
        """Return the aggregated parameters."""
        return self.aggregation.result()

    def remarks(self) -> dict[str, Any]:
        """Return remarks about the aggregation for the round's record."""
        remarks = self.aggregation.remarks()
        return {**self._remarks, **({"aggregation": remarks} if remarks else {})}

    def tally(self, sizes: Mapping[str, int], num_samples: int) -> Tally:
        """Return the accepted clients; `num_samples` is the total of all clients."""
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
        if not self._pools_sums or not self.prototypes:
            return {}
        return complete_pool(self._parts, self.sums)

    def _process(self, update: Update) -> tuple[Update, str | None]:
        """Return the processed update, or the update as sent and the reason of a failure."""
        for name in update.processed:
            if name not in self._processors.names:
                shown = repr(str(name)[:40])
                return update, f"it was processed by {shown}, which is not in the experiment"
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
        """Weigh an update by the method, and fold it in if the weight is valid."""
        # Under a privacy budget all clients count alike: sample counts are not disclosed.
        weight = 0.0 if update.averaged is None else 1.0
        try:
            if weight and not self._method.experiment.privacy.has_budget:
                weight = self._method.weigh(update, self._server)
        except InvalidInput:
            raise
        # A method's formula may overflow on a client's values.
        except Exception as error:
            self._reject(update, f"it cannot be weighed ({type(error).__name__})")
            return
        if not 0 <= weight < math.inf:
            self._reject(update, f"its weight is {weight!r}; it must be finite and not negative")
            return
        if update.averaged is None:
            self.withheld.append(update.client)
        else:
            self.aggregation.add(update, weight)
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

    def _reject_odd_sums(self, bounds: RelativeBounds, peers: Peers | None) -> None:
        """Add the waiting statistics, except of clients whose class means are outliers."""
        if not self._validator.sums:
            return
        own = {each.client: self.prototypes[each.client] for each in self._waiting}
        everyone = exchange_prototypes(None, own, peers)[1] if peers else own
        odd = find_odd_clients(everyone, self._method.num_classes, bounds.settings.odd_factor)
        for update in self._waiting:
            if update.client not in odd:
                self._add_statistics(update)
                continue
            for known in (self.prototypes, self.weights, self.losses):
                known.pop(update.client)
            self._reject(
                update,
                f"its class means differ from the others' {odd[update.client]:.3g} times as much "
                f"as chance explains; at most {bounds.settings.odd_factor:g}",
            )
        self._waiting = []

    def _add_statistics(self, update: Update) -> None:
        self._add_up(update.summed)
        if self.client_sums is not None:
            self.client_sums[update.client] = update.summed
        if self._pools_sums:
            self._parts = add_statistics(self._parts, pool_parts(update.summed))

    def _add_up(self, summed: Mapping[str, Tensor]) -> None:
        # In double precision: many clients add up, and one that leaves is subtracted again.
        for name, value in summed.items():
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
