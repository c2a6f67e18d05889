"""Bounds on updates relative to the other clients: share, norm and direction.

Validation rejects updates that no honest client could send. Updates that are possible but unusual
are bounded here: a client's weight by the sample counts of the others, the norm of its change by
those of the round before, and its weight again by its reputation, the running agreement of its
direction with the others. A bounded update still counts, so an unusual honest client loses little
and a malicious one gains little.

A malicious change of usual norm may still point the wrong way (flipped signs, flipped labels). One
round does not show it, because honest clients differ; a client that disagrees round after round
loses its weight. Directions are compared exactly, and so all updates are kept until the round ends:
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
_FALL, _RISE, _RETURN = 0.3, 0.05, 0.01
"""Weight of a round in a reputation that falls, rises, or rises after trust was lost: once a model
has nearly converged, honest changes point anywhere, and a malicious client looks like the
others."""
_WIDTH = 0.5
"""Standard deviations between the first loss of weight and the loss of all weight."""
_LEAST_SPREAD = 0.05
"""Least standard deviation of cosines; clients that differ less are not distinguished."""
_GREATEST = 6.0
"""Largest number of standard deviations that a round may count."""


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


def update_reputations(
    before: Mapping[str, float], names: Sequence[str], cosines: Tensor, strictness: float
) -> dict[str, float]:
    """Return all clients' reputations after a round; 0 for typical agreement with the others.

    A round's score is the cosine between a client's change and the trusted sum of the others, in
    standard deviations above the median one. `cosines` [n, n] are those between the clients.
    """
    if len(names) < FEWEST:
        return dict(before)
    trust = torch.tensor([trusted(before.get(n, 0.0), strictness) for n in names]).double()
    along = cosines @ trust - trust
    squares = trust @ cosines @ trust - 2 * trust * along - trust.square()
    agreement = along / squares.clamp(min=1e-24).sqrt()
    middle = agreement.quantile(0.5)
    spread = 1.4826 * (agreement - middle).abs().quantile(0.5) + _LEAST_SPREAD
    found = ((agreement - middle) / spread).clamp(-_GREATEST, _GREATEST).tolist()
    now = dict(zip(names, found, strict=True))
    return {
        **before,
        **{name: _mix(before.get(name), each, strictness) for name, each in now.items()},
    }


def trusted(reputation: float, strictness: float) -> float:
    """Return the share of a client's weight that counts: below 1 from `-strictness` on."""
    return min(1.0, max(0.0, 1 + (strictness + reputation) / _WIDTH))


def _mix(before: float | None, now: float, strictness: float) -> float:
    if before is None:
        return now
    rise = _RISE if before > -strictness else _RETURN
    return before + (now - before) * (_FALL if now < before else rise)


_MOST_MEDIANS = 5
"""Statistics cannot be down-weighted: a client above this multiple of the share cap is rejected."""
_ONE_OF = 5
"""One of so many clients may claim a false size."""
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
            malicious = min(max(1, len(sizes) // _ONE_OF), len(sizes) - 1)
            self._most_samples = min(typical, sorted(sizes)[-1 - malicious])
            self._most_claimed = _MOST_MEDIANS * typical
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
        """Return the share of a client's samples that counts.

        At most `share_cap` medians, and no more than the next largest client below the largest
        fifth: so false claims of one of five do not outweigh the largest honest client.
        """
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
        self.reputations = update_reputations(bounds.reputations, names, cosines, strictness)
        # A client counts by what it has shown before, or else in this round.
        known = bounds.reputations or self.reputations
        limit = bounds.largest_norm or bounds.norm_limit(self._norms.values())
        clip = None if limit is None else Clip(limit, NORM)
        for update, weight in self._waiting:
            share = bounds.share(update.client, update.num_samples)
            trust = trusted(known.get(update.client, 0.0), strictness)
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
