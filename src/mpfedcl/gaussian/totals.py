"""Totals under secure aggregation: the contribution of each client, and estimates from totals.

If no single client's statistics may be seen (secure aggregation), the differences between clients
are estimated from further sums over clients. Next to the pooled statistics of
`mpfedcl.gaussian.statistics` these are, with n_ic and s_ic a client's counts and sums by class, n_i
and s_i those of all its classes and f_i = n_i - (classes that it holds):

- `pairs` [C, C] = Σ_i n_ic n_ic', `shared_pairs` [C, C] = Σ_i n_ic n_ic'/n_i and
  `cubes` [C] = Σ_i n_ic³/n_i;
- `shared_sums` [C, d] = Σ_i (n_ic/n_i) s_i and `lengths` [] = Σ_i |s_i|²/n_i;
- `clients` [], those with a sample, `free_clients` [], those with f_i > 0, and
  `degrees_squared` [] = Σ_i f_i².
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian.effects import ClientEffects
from mpfedcl.gaussian.plausibility import check_matrix
from mpfedcl.gaussian.statistics import BY_CLASS, pack_symmetric, unpack_symmetric

_MATRICES = ("moment", "within")
_WHOLE = (
    *("counts", "groups", "counts_squared", "pairs"),
    *("clients", "free_clients", "degrees_squared"),
)
_ROUNDING = 1e-3


def totals_of_one(pooled: Tensors, *, with_effects: bool) -> Tensors:
    """Return the contribution of a client to the totals, given its pooled statistics.

    Counts are integers, and symmetric matrices are packed. Without samples all values are zero.
    """
    found = dict(pooled)
    if with_effects:
        counts, sums = pooled["counts"], pooled["sums"]
        size, degrees = counts.sum(), (counts - 1).clamp(min=0).sum()
        at_least_one = size.clamp(min=1)
        whole = sums.sum(0)
        found |= {
            "pairs": torch.outer(counts, counts),
            "shared_pairs": torch.outer(counts, counts) / at_least_one,
            "cubes": counts**3 / at_least_one,
            "shared_sums": torch.outer(counts / at_least_one, whole),
            "lengths": whole.square().sum() / at_least_one,
            "clients": (size > 0).double(),
            "free_clients": (degrees > 0).double(),
            "degrees_squared": degrees.square(),
        }
    for name in found.keys() & set(_MATRICES):
        found[name] = pack_symmetric(found[name])
    for name in found.keys() & set(_WHOLE):
        found[name] = found[name].round().long()
    return found


def pooled_of_totals(totals: Mapping[str, Tensor]) -> Tensors:
    """Return the pooled statistics in totals, in float64 and with unpacked matrices."""
    size = totals["sums"].shape[1]
    return {
        name: unpack_symmetric(totals[name].double(), size)
        if name in _MATRICES
        else totals[name].double()
        for name in (*BY_CLASS, *_MATRICES, "scatter")
        if name in totals
    }


def estimate_effects_of_totals(totals: Tensors, means: Tensor, trace: float) -> ClientEffects:
    """Return the same estimates as `estimate_effects`, from totals instead of client means.

    Args:
        totals: In float64.
        means: mu_c [C, d], zeros for a class that no client holds.
        trace: tr(S).
    """
    counts = totals["counts"]
    held = counts.clamp(min=1)
    room = float(counts.sum() - (totals["counts_squared"] / held).sum())
    if not trace or room <= 1e-9 * float(counts.sum()):
        return ClientEffects(0.0, 0.0)
    around = totals["squares"].sum() - (totals["sums"].square().sum(1) / held).sum()
    spare = float(totals["groups"].sum() - (counts > 0).sum())
    total = max(0.0, float(around) / trace - spare) / room
    shared = totals["shared_pairs"]
    between = (
        totals["lengths"]
        - 2 * (means * totals["shared_sums"]).sum()
        + (means @ means.T * shared).sum()
    )
    own = shared.diagonal()
    from_effect = own * (1 + totals["counts_squared"] / held**2) - 2 * totals["cubes"] / held
    from_noise = totals["clients"] - (own / held).sum()
    from_shift = (
        counts.sum()
        - 2 * (totals["counts_squared"] / held).sum()
        + (shared * totals["pairs"] / torch.outer(held, held)).sum()
    )
    gap = float(from_shift - from_effect.sum())
    if abs(gap) <= 1e-9 * float(counts.sum()):
        # Clients of one class each: a shift and an effect on the class are the same.
        return ClientEffects(0.0, total)
    excess = float(between) / trace - float(from_noise) - total * float(from_effect.sum())
    shift = min(max(excess / gap, 0.0), total)
    return ClientEffects(shift, total - shift)


def find_impossible_totals(totals: Mapping[str, Tensor]) -> str | None:
    """Return why these totals are impossible for features of norm 1, or None."""
    counts, sums = totals["counts"].double(), totals["sums"].double()
    if bool((counts < 0).any()) or bool((totals["groups"].double() > counts).any()):
        return "counts are negative, or fewer than the clients that hold the class"
    slack = _ROUNDING * (1 + counts)
    lengths = sums.norm(dim=1)
    if bool((lengths > counts + slack).any()):
        label = int((lengths - counts).argmax())
        return f"class {label} has a sum of norm {lengths[label]:.4g} and a count of " + (
            f"{counts[label]:.0f}"
        )
    squares = totals["squares"].double()
    if bool((squares < -slack).any()) or bool((squares > counts + slack).any()):
        return "the squares of the clients' class sums are inconsistent with the counts"
    wanted = {"moment": float(counts.sum()), "within": float(counts.sum() - squares.sum())}
    for name in totals.keys() & wanted.keys():
        if reason := check_matrix(totals[name], sums.shape[1], wanted[name], counts, in_full=True):
            return reason
    return None
