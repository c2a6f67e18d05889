"""Bounds on updates relative to the other clients: share, norm and direction.

Validation rejects updates that no honest client could send. Updates that are possible but unusual
are bounded here: a client's weight by the sample counts of the others, the norm of its change by
those of the round before, and its weight again by its reputation, the running agreement of its
direction with the others. A bounded update still counts, so an unusual honest client loses little
and a malicious one gains little. All bounds are known before the first update of a round, so
updates fold one by one.

A malicious change of usual norm may still point the wrong way (flipped signs, flipped labels). One
round does not show it, because honest clients differ; a client that disagrees round after round
loses its weight. Only a sketch of each change is kept until the round ends.
"""

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from statistics import median
from types import MappingProxyType

import torch
from safetensors.torch import load
from torch import Tensor

from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.experiment.settings import ValidationSettings
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.rounds.aggregation import Aggregator, Peers
from mpfedcl.rounds.processors.clip import Clip, changes_of, squared_change

FEWEST = 5
"""Fewest clients of a round whose directions are compared."""
_SIZE = 4096
"""Values of a sketch: cosines are exact to about 1/64."""
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
def sketch(changes: Tensors) -> Tensor:
    """Return a count sketch [4096] of norm 1; zeros for a change of zero.

    Each value is added to, or subtracted from, one random entry, so that inner products are
    preserved on average.
    """
    found = torch.zeros(_SIZE, dtype=torch.float64)
    for name, value in changes.items():
        places, signs = _draw(name, value.numel())
        found.index_add_(0, places, signs * value.flatten().cpu().double())
    norm = float(found.norm())
    return found / norm if norm else found


@cache
def _draw(name: str, count: int) -> tuple[Tensor, Tensor]:
    draw = generator(0, name, "sketch")
    places = torch.randint(_SIZE, (count,), generator=draw)
    return places, torch.randint(2, (count,), generator=draw).double() * 2 - 1


def update_reputations(
    before: Mapping[str, float], sketches: Mapping[str, Tensor], strictness: float
) -> dict[str, float]:
    """Return all clients' reputations after a round; 0 for typical agreement with the others.

    A round's score is the cosine between a client's change and the trusted sum of the others, in
    standard deviations above the median cosine.
    """
    names = sorted(name for name, each in sketches.items() if bool(each.any()))
    if len(names) < FEWEST:
        return dict(before)
    rows = torch.stack([sketches[name] for name in names])
    trust = torch.tensor([trusted(before.get(n, 0.0), strictness) for n in names]).double()
    others = (trust @ rows) - trust.unsqueeze(1) * rows
    cosines = (rows * others).sum(1) / others.norm(dim=1).clamp(min=1e-12)
    middle = cosines.quantile(0.5)
    spread = 1.4826 * (cosines - middle).abs().quantile(0.5) + _LEAST_SPREAD
    found = ((cosines - middle) / spread).clamp(-_GREATEST, _GREATEST).tolist()
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
SHARE, NORM, DIRECTION = "bound on share", "bound on norm", "bound on direction"
"""Names of the bounds in a record's `processed`."""


class RelativeBounds:
    """The bounds of one round.

    They follow from the lower median of the clients' sample counts, so that one client of two
    cannot set its own bound, from the median norm of the changes in the round before (None in the
    first round), and from the clients' reputations so far.
    """

    def __init__(
        self,
        settings: ValidationSettings,
        median_size: int | None,
        norm: float | None,
        reputations: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.settings = settings
        self.reputations = reputations
        self._stated = settings.stated_sizes
        self._most_samples = math.inf if median_size is None else settings.share_cap * median_size
        self.largest_norm = None if norm is None else self.norm_limit([norm])
        """The norm to which changes are clipped; None before the first round."""

    def norm_limit(self, norms: Iterable[float]) -> float | None:
        """Return the norm to which changes are clipped, given the norms of a round."""
        middle = _median_norm(norms)
        return None if middle is None else self.settings.clip_factor * middle

    def check_claim(self, client: str, num_samples: int) -> str | None:
        """Return why a client's statistics cannot count in full, as sums must, or None."""
        most = self._stated.get(client, _MOST_MEDIANS * self._most_samples)
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

    Updates fold as they come. Only in the first round, without a norm of the round before, are they
    kept until all have come.
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
        self._sketches: dict[str, Tensor] = {}
        limit = bounds.largest_norm if bounds else None
        self._clip = Clip(limit, NORM) if limit is not None else None
        self._waiting: list[tuple[Update, float]] = []
        self._is_settled = False

    @property
    def median_norm(self) -> float | None:
        """The median norm of the changes as sent, after `settle`; None without any."""
        return _median_norm(self._norms.values())

    def add(self, update: Update, weight: float) -> None:
        """Add an update with the method's weight."""
        if self._bounds is None:
            self._pass_on(update, weight)
            return
        share = self._bounds.share(update.client, update.num_samples)
        if share < 1:
            self._note(SHARE, update)
        written = update.written_out().averaged
        assert isinstance(written, dict)
        assert update.averaged is not None
        self._norms[update.client] = math.sqrt(squared_change(update.averaged, self._broadcast))
        self._sketches[update.client] = sketch(changes_of(written, self._broadcast))
        if self._clip is None:
            self._waiting.append((update, weight * share))
        else:
            self._pass_on(update, weight * share, self._bounds.reputations)

    def settle(self, peers: Peers | None = None) -> None:
        """Add the kept updates; `peers` are the other processes of a run."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._bounds is not None:
            for part in peers.gather(json.dumps(self._norms).encode()) if peers else []:
                self._norms |= json.loads(part)
            for part in peers.gather(pack_tensors(self._sketches)) if peers else []:
                self._sketches |= load(part)
            self.reputations = update_reputations(
                self._bounds.reputations, self._sketches, self._bounds.settings.strictness
            )
            limit = self._bounds.norm_limit(self._norms.values())
            if self._clip is None and limit is not None:
                self._clip = Clip(limit, NORM)
            for update, weight in self._waiting:
                self._pass_on(update, weight, self.reputations)
            self._waiting = []
        if peers is not None:
            self._rule.merge(peers)

    def result(self) -> Tensors:
        """Return the aggregate of the rule."""
        self.settle()
        return self._rule.result()

    def remarks(self) -> list[str]:
        """Return remarks for the round's record, after `result`."""
        return self._rule.remarks()

    def _pass_on(
        self, update: Update, weight: float, reputations: Mapping[str, float] | None = None
    ) -> None:
        """Add an update to the rule: clipped, and weighted by the client's reputation."""
        if self._bounds is not None and reputations is not None:
            reputation = reputations.get(update.client, 0.0)
            trust = trusted(reputation, self._bounds.settings.strictness)
            if trust < 1:
                self._note(DIRECTION, update)
            weight *= trust
        if self._clip is not None:
            update = self._clip.outgoing(update, self._broadcast)
            if NORM in update.processed:
                self._note(NORM, update)
        self.weights[update.client] = weight
        self._rule.add(update, weight)

    def _note(self, bound: str, update: Update) -> None:
        self.processed.setdefault(bound, []).append(update.client)


def _median_norm(norms: Iterable[float]) -> float | None:
    found = [each for each in norms if each > 0]
    return median(found) if found else None
