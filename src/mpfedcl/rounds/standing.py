"""How far each client goes the others' way: its standing, which grows and falls over rounds.

A change of honest length may still point the wrong way: a turned sign, labels that are exchanged.
One round does not tell, because honest clients differ; but who is far below the others round after
round counts less, and in the end for nothing. Only a sketch of each change is kept until the round
is over, so that updates fold one by one.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors

FEWEST = 5
"""Clients of a round from which on their directions are compared."""
_SIZE = 4096
"""Numbers of a sketch: cosines are kept to about 1/64."""
_FALL, _RISE, _RETURN = 0.3, 0.05, 0.01
"""What a round counts in a standing that falls, that rises, and that rises after trust was lost:
once a model has nearly converged, honest changes point anywhere, and a liar looks like the rest."""
_WIDTH = 0.5
"""Deviations from where a client begins to count less to where it counts for nothing."""
_LEAST_SPREAD = 0.05
"""Of cosines; clients that differ less are not told apart."""
_GREATEST = 6.0
"""Deviations that one round may count."""


def sketch(changes: Tensors) -> Tensor:
    """Return a sketch [4096] of length 1; zeros of a change that is none.

    Each number is added to, or subtracted from, one place that is drawn by its name and index, so
    that inner products are kept on average (a count sketch).
    """
    found = torch.zeros(_SIZE, dtype=torch.float64)
    for name, value in changes.items():
        places, signs = _draw(name, value.numel())
        found.index_add_(0, places, signs * value.detach().flatten().cpu().double())
    length = float(found.norm())
    return found / length if length else found


@cache
def _draw(name: str, count: int) -> tuple[Tensor, Tensor]:
    draw = generator(0, name, "sketch")
    places = torch.randint(_SIZE, (count,), generator=draw)
    return places, torch.randint(2, (count,), generator=draw).double() * 2 - 1


def update_standings(
    before: Mapping[str, float], sketches: Mapping[str, Tensor], strictness: float
) -> dict[str, float]:
    """Return all clients' standings after a round: 0 for one that goes the others' way as most do.

    Each is compared with the sum of the others, as far as these are trusted: how many deviations
    its cosine lies below the median one.
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


def trusted(standing: float, strictness: float) -> float:
    """Return what part of a client's weight counts: less from `-strictness` deviations on."""
    return min(1.0, max(0.0, 1 + (strictness + standing) / _WIDTH))


def _mix(before: float | None, now: float, strictness: float) -> float:
    if before is None:
        return now
    rise = _RISE if before > -strictness else _RETURN
    return before + (now - before) * (_FALL if now < before else rise)
