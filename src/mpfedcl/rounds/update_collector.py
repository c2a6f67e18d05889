"""What comes in during a round: each update judged, then folded, and everything counted."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import MemberSums, PoolTotals, StackedSums, complete_pool
from mpfedcl.methods import Method, OneShot, Server, Tally
from mpfedcl.methods.messages import Broadcast, Failure, Total, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation import Peers, find_aggregator
from mpfedcl.rounds.bounded_aggregation import BoundedAggregation
from mpfedcl.rounds.bounds import RelativeBounds
from mpfedcl.rounds.class_outliers import FEWEST_HOLDERS, drop_misplaced, find_odd_clients
from mpfedcl.rounds.process_messages import gather_prototypes
from mpfedcl.rounds.processors import ProcessorChain
from mpfedcl.rounds.validation import UpdateValidator

_LONGEST_REASON = 300
"""It may quote what a stranger sent, and stays in the records."""
MISPLACED = "misplaced prototypes"
"""What a record's `processed` says of the clients whose prototypes were left out."""


class UpdateCollector:
    """The updates of one round, as far as they are accepted."""

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
        """Whose updates each processor has changed."""
        self.sums: Tensors = {}
        """Complete after `merge` and `tally`."""
        self.client_sums: dict[str, Tensors] | None = {} if keep_sums else None
        """What each client has sent to be added up, where that is to be kept."""
        self._totals = PoolTotals() if isinstance(method, OneShot) and not keep_sums else None
        self._parts: Tensors | None = None
        """What the totals of all processes come to."""
        self._stack: StackedSums | None = None
        self._members: list[int] = []
        self.noise: Tensor | None = None
        """Where clients have added the noise that a budget asks for: its variance over that."""
        self.mean_loss: float | None = None
        """Where losses are known in total alone."""
        self.bytes_up = 0
        self.uploads: dict[str, int] = {}
        """The bytes that each client has sent."""
        self.largest = {"parameters": 0, "prototype_floats": 0}
        """The largest upload of one client."""
        experiment = method.experiment
        rule = find_aggregator(experiment.aggregation.rule)
        self.template = validator.template
        """Tensors of the shapes and types of what is averaged."""
        self._aggregation = BoundedAggregation(
            rule(validator.template, experiment, broadcast.round), broadcast, bounds
        )
        self._bounds = bounds
        self._waiting: list[Update] = []
        """Whose sums are added once all are there."""
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
        """Judge an update; fold it in, or write down why not. A client's first verdict stands."""
        assert not isinstance(update, Total)
        if isinstance(update, Failure):
            self._reject(update, update.reason)
            return
        if malformed := self._validator.judge_form(update):
            self._reject(update, malformed)
            return
        num_bytes = update.num_bytes
        self.bytes_up += num_bytes
        self.uploads[update.client] = num_bytes
        update, problem = self._process(update)
        if update.client in self.prototypes or update.client in self.rejected:
            self._reject(update, "this client answered twice")
        elif reason := self._validator.judge(update, self._broadcast) or problem:
            self._reject(update, reason)
        elif update.client not in self._chosen:
            self._reject(update, "this client was not asked")
        elif too_many := self._judge_claim(update):
            self._reject(update, too_many)
        else:
            self._weigh(update)

    def merge(self, peers: Peers) -> None:
        """Take in what the updates in other processes came to; the rest is plain values."""
        self.settle(peers)
        self._add_stack()
        for name, zero in self._validator.sums.items():
            self._add_up(name, zero)
        self.sums = peers.sum(self.sums)
        if self._totals is not None:
            self._totals.add(self._validator.sums)
            self._parts = peers.sum(self._totals.parts())

    def settle(self, peers: Peers | None = None) -> None:
        """Fold what had to wait until all updates were there; once, before anything is asked."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._bounds is not None:
            self._reject_odd_sums(self._bounds, peers)
        self._aggregation.settle(peers)
        self.weights |= self._aggregation.weights
        self.processed |= self._aggregation.processed

    def drop_misplaced_prototypes(self) -> None:
        """Leave out prototypes that lie where the other clients have another class."""
        if self._bounds is None or self._validator.sums:
            return
        kept = drop_misplaced(self.prototypes, self._method.num_classes, self._bounds.odd_factor)
        self.prototypes = kept.prototypes
        if kept.dropped:
            self.processed[MISPLACED] = sorted(kept.dropped)
            self._remarks["prototypes_left_out"] = kept.dropped
        if kept.unjudged:
            self._remarks["prototypes_not_judged"] = {
                "classes": kept.unjudged,
                "reason": f"fewer than {FEWEST_HOLDERS} clients hold them: no rule can find who "
                "lies",
            }

    def means(self) -> Tensors:
        """Return what the tensors to be averaged came to."""
        return self._aggregation.result()

    @property
    def median_length(self) -> float | None:
        """The median length of the changes that clients sent, after `means`; None: unbounded."""
        return self._aggregation.median_length

    @property
    def standings(self) -> dict[str, float]:
        """How far clients have gone the others' way so far, after `means`; empty: unbounded."""
        return self._aggregation.standings

    def remarks(self) -> dict[str, Any]:
        """Return what the round's record should say of the aggregation."""
        told = self._aggregation.remarks()
        return {**self._remarks, **({"aggregation": told} if told else {})}

    def tally(self, sizes: Mapping[str, int], num_samples: int) -> Tally:
        """Return whose updates these were; `num_samples` are those of all clients together."""
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
        """Return what a method keeps where only the total is kept; after `tally`."""
        if self._totals is None or not self.prototypes:
            return {}
        parts = self._totals.parts() if self._parts is None else self._parts
        return complete_pool(parts, self.sums)

    def _process(self, update: Update) -> tuple[Update, str | None]:
        """Return an update as the guard judges it, or as it came and what went wrong."""
        odd = [name for name in update.processed if name not in self._processors.names]
        if odd:
            return update, f"it was processed by {str(odd[0])[:40]!r}, which nobody asked for"
        if len(set(update.processed)) < len(update.processed):
            return update, "it was processed twice by the same"
        try:
            unpacked = self._processors.unpack(update, self._broadcast)
            # Before more is computed with them: a small tensor may be stretched to a huge one.
            if problem := self._validator.judge_shapes(unpacked):
                return update, problem
            return self._processors.incoming(unpacked, self._broadcast), None
        # What a stranger sends may fail in any way; the guard knows better words for most of them.
        except Exception as error:
            return update, f"it cannot be processed ({type(error).__name__})"

    def _weigh(self, update: Update) -> None:
        """Accept an update with the method's weight, if it has one."""
        weight = 0.0
        try:
            if update.averaged is not None:
                # Under a budget all count alike: how many samples a client has is not told.
                is_private = self._method.experiment.privacy.has_budget
                weight = 1.0 if is_private else self._method.weigh(update, self._server)
        # A method's own formula on a stranger's numbers may overflow.
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
            # What is odd shows only beside the others'.
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

    def _judge_claim(self, update: Update) -> str | None:
        if self._bounds is None or not update.summed_shapes:
            return None
        return self._bounds.judge_claim(update.client, update.num_samples)

    def _reject_odd_sums(self, bounds: RelativeBounds, peers: Peers | None) -> None:
        """Add up what has waited, but for clients whose class means are odd beside the others'."""
        if not self._validator.sums:
            return
        own = {each.client: self.prototypes[each.client] for each in self._waiting}
        everyone = gather_prototypes(own, peers) if peers else own
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
        """Add up what is still waiting for others of its stack."""
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
    """Pass updates on in the order of `chosen`, whatever their arrival: sums depend on the order.

    One that comes early waits for those before it; what nobody asked for comes last.
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
