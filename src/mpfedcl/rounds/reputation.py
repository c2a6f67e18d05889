"""Bounds on updates relative to the other clients: share, norm and direction.

Validation rejects updates that no honest client could send. Updates that are possible but unusual
are bounded here: a client's weight by the sample counts of the others, the norm of its change by
those of the round before, and its weight again by its reputation, the running agreement of its
direction with the others. A bounded update still counts, so an unusual honest client loses little
and a malicious one gains little.

A malicious change of usual norm may still point the wrong way (flipped signs, flipped labels). One
client that opposes the others loses the weight of the round, and one that does so again loses it
for long. Directions are compared exactly, and so all updates are kept until the round ends:
a sketch that is folded on the way has a null space, in which a client that knows it can hide.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low
from types import MappingProxyType

import torch
from safetensors.torch import load
from torch import Tensor

from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.experiment.settings import ValidationSettings
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.rounds.aggregation import Aggregator, Peers
from mpfedcl.rounds.processors.clip import Clip, squared_change

FEWEST = 5
"""Fewest clients of a round whose directions are compared."""
_FALL, _RISE, _RETURN = 0.5, 0.05, 0.01
"""Weight of a round in a reputation that falls, rises, or rises after trust was lost."""
_WIDTH = 0.5
"""How far below `-strictness` all weight is lost."""
_COMMON = 0.07
"""Least typical cosine of a round that is judged: once a model has nearly converged, or if the
clients' classes have nothing in common, honest changes point anywhere."""
_GREATEST = 2.0
"""Largest score of a round: two rounds are needed to lose trust for good."""


@torch.no_grad()
def compare_directions(
    models: Mapping[str, Tensors],
    start: Tensors,
    parameters: Iterable[str],
    peers: Peers | None = None,
) -> tuple[list[str], Tensor]:
    """Return the clients whose model has changed, and the cosines [n, n] of their changes.

    `models` are the clients' `parameters`, which were `start` before or, without an entry, zero.
    `peers` are the other processes of a run, with the models of the other clients.
    """
    names: list[str] = []
    products = torch.zeros(0, 0, dtype=torch.float64)
    # By parameter, so that all changes are never held, or sent to another process, at once.
    for parameter in sorted(parameters):
        known = start.get(parameter, torch.zeros(()))
        rows = {name: (each[parameter] - known).flatten() for name, each in models.items()}
        for part in peers.gather(pack_tensors(rows)) if peers else []:
            rows |= load(part)
        names = sorted(rows)
        if names:
            # In double precision: the products of long changes are beyond float32.
            changes = torch.stack([rows[name].cpu() for name in names]).double()
            products = changes @ changes.T + (products if len(products) else 0)
    norms = products.diagonal().sqrt()
    moved = norms.nonzero().squeeze(1)
    cosines = products[moved][:, moved] / torch.outer(norms[moved], norms[moved])
    return [names[place] for place in moved.tolist()], cosines


def score_directions(
    before: Mapping[str, float], names: Sequence[str], cosines: Tensor, strictness: float
) -> dict[str, float]:
    """Return how far each client's agreement is from the typical one, as a multiple of it.

    A client's agreement is the median of its cosines with the other clients, weighted by trust:
    one malicious client of five does not move it as it moves the sum of their changes. The typical
    agreement scores 0, none -1, and the opposite of it -2. `cosines` [n, n] are those between the
    clients. Rounds in which the typical client agrees with few others have no scores.
    """
    if len(names) < FEWEST:
        return {}
    trust = torch.tensor([trusted(before.get(name, 0.0), strictness) for name in names]).double()
    others = ~torch.eye(len(names), dtype=torch.bool)
    agreement = torch.stack(
        [_find_median(row[kept], trust[kept]) for row, kept in zip(cosines, others, strict=True)]
    )
    typical = _find_median(agreement, trust)
    if typical < _COMMON:
        return {}
    found = ((agreement - typical) / typical).clamp(-_GREATEST, _GREATEST).tolist()
    return dict(zip(names, found, strict=True))


def update_reputations(
    before: Mapping[str, float], scores: Mapping[str, float], strictness: float
) -> dict[str, float]:
    """Return all clients' reputations after a round; 0 for a client that is new or typical."""
    mixed = {name: _mix(before.get(name, 0.0), now, strictness) for name, now in scores.items()}
    return {**before, **mixed}


def trusted(reputation: float, strictness: float) -> float:
    """Return the share of a client's weight that counts: below 1 from `-strictness` on."""
    return min(1.0, max(0.0, 1 + (strictness + reputation) / _WIDTH))


def _find_median(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted median; 0 without weight."""
    if not bool(weights.any()):
        return values.new_zeros(())
    ordered, order = values.sort()
    reached = weights[order].cumsum(0)
    # Half of the weight may be reached exactly: then the median lies between two values.
    half = reached[-1] / 2
    low, high = (reached < half).sum(), (reached <= half).sum()
    return (ordered[low] + ordered[high.clamp(max=len(values) - 1)]) / 2


def _mix(before: float, now: float, strictness: float) -> float:
    rise = _RISE if before > -strictness else _RETURN
    return before + (now - before) * (_FALL if now < before else rise)


_MOST_MEDIANS = 15
"""Statistics cannot be down-weighted: a client above this multiple of the share cap is rejected."""
SHARE, NORM, DIRECTION = "bound on share", "bound on norm", "bound on direction"
"""Names of the bounds in a record's `processed`."""


class RelativeBounds:
    """The bounds of one round.

    They follow from the sample counts `sizes` of all clients, from the median norm of the changes
    in the round before (None in the first round), and from the clients' reputations so far.
    """

    def __init__(
        self,
        settings: ValidationSettings,
        sizes: Sequence[int],
        norm: float | None,
        reputations: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.settings = settings
        self.reputations = reputations
        self._stated = settings.stated_sizes
        self._most_samples = self._most_claimed = math.inf
        if sizes:
            typical = settings.share_cap * median_low(sizes)
            self._most_samples, self._most_claimed = typical, _MOST_MEDIANS * typical
        self.largest_norm = None if norm is None else self.norm_limit([norm])
        """The norm to which changes are clipped; None before the first round."""

    def norm_limit(self, norms: Iterable[float]) -> float | None:
        """Return the norm to which changes are clipped, given the norms of a round."""
        middle = _median_norm(norms)
        return None if middle is None else self.settings.clip_factor * middle

    def check_claim(self, client: str, num_samples: int) -> str | None:
        """Return why a client's statistics cannot count in full, as sums must, or None."""
        most = self._stated.get(client, self._most_claimed)
        if num_samples <= most:
            return None
        return (
            f"it claims {num_samples:,} samples; at most {most:,.0f}, as the others have so few. "
            f"If it is true, say so: --validation.sizes {client}:{num_samples}"
        )

    def share(self, client: str, num_samples: int) -> float:
        """Return the share of a client's samples that counts: at most `share_cap` medians."""
        most = self._stated.get(client, self._most_samples)
        return min(1.0, most / max(1, num_samples))


class BoundedAggregation:
    """An aggregation rule whose updates are bounded first, if there are bounds.

    Bounded updates are kept until all have come.
    """

    def __init__(
        self, rule: Aggregator, broadcast: Broadcast, bounds: RelativeBounds | None
    ) -> None:
        self.weights: dict[str, float] = {}
        """The weight of each client's update."""
        self.processed: dict[str, list[str]] = {}
        """The clients that each bound has changed; complete after `settle`."""
        self.reputations: dict[str, float] = {}
        """Of all clients after this round; complete after `settle`, empty without bounds."""
        self._rule, self._broadcast, self._bounds = rule, broadcast, bounds
        self._norms: dict[str, float] = {}
        self._waiting: list[tuple[Update, float]] = []
        self._is_settled = False

    @property
    def median_norm(self) -> float | None:
        """The median norm of the changes as sent, after `settle`; None without any."""
        return _median_norm(self._norms.values())

    def add(self, update: Update, weight: float) -> None:
        """Add an update with the method's weight."""
        if self._bounds is None:
            self.weights[update.client] = weight
            self._rule.add(update, weight)
            return
        assert update.averaged is not None
        self._norms[update.client] = math.sqrt(squared_change(update.averaged, self._broadcast))
        self._waiting.append((update, weight))

    def settle(self, peers: Peers | None = None) -> None:
        """Add the kept updates; `peers` are the other processes of a run."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._bounds is not None:
            self._add_bounded(self._bounds, peers)
        if peers is not None:
            self._rule.merge(peers)

    def result(self) -> Tensors:
        """Return the aggregate of the rule."""
        self.settle()
        return self._rule.result()

    def remarks(self) -> list[str]:
        """Return remarks for the round's record, after `result`."""
        return self._rule.remarks()

    def _add_bounded(self, bounds: RelativeBounds, peers: Peers | None) -> None:
        """Add the kept updates to the rule: clipped, and weighted by share and reputation."""
        for part in peers.gather(json.dumps(self._norms).encode()) if peers else []:
            self._norms |= json.loads(part)
        models: dict[str, Tensors] = {}
        for update, _ in self._waiting:
            averaged = update.written_out().averaged
            assert isinstance(averaged, dict)
            models[update.client] = averaged
        names, cosines = compare_directions(
            models, self._broadcast.params, self._rule.template, peers
        )
        strictness = bounds.settings.strictness
        scores = score_directions(bounds.reputations, names, cosines, strictness)
        self.reputations = update_reputations(bounds.reputations, scores, strictness)
        limit = bounds.largest_norm or bounds.norm_limit(self._norms.values())
        clip = None if limit is None else Clip(limit, NORM)
        for update, weight in self._waiting:
            share = bounds.share(update.client, update.num_samples)
            # A client counts by what it has shown over rounds, and by this round.
            standing = min(self.reputations.get(update.client, 0.0), scores.get(update.client, 0.0))
            trust = trusted(standing, strictness)
            bounded = update if clip is None else clip.outgoing(update, self._broadcast)
            found = {SHARE: share < 1, DIRECTION: trust < 1, NORM: NORM in bounded.processed}
            for bound, applies in found.items():
                if applies:
                    self.processed.setdefault(bound, []).append(update.client)
            self.weights[update.client] = weight * share * trust
            self._rule.add(bounded, weight * share * trust)
        self._waiting = []


def _median_norm(norms: Iterable[float]) -> float | None:
    found = [each for each in norms if each > 0]
    return median(found) if found else None
