"""Validation of statistics: reject values that no samples can have, before they are summed."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpfedcl.gaussian.statistics import unpack_symmetric

_ROUNDING = 1e-3
"""A generous tolerance for single precision; smaller errors are harmless."""


def find_impossible_sums(
    summed: Mapping[str, Tensor], num_samples: int, *, in_full: bool
) -> str | None:
    """Return why these sums are impossible for features of norm 1, or None.

    Args:
        summed: `counts`, `sums` and, if the method has them, `within` and `scatter`, or `moment`.
        num_samples: The number of samples that the client has announced.
        in_full: Whether to check positive semidefiniteness too, at the cost of a factorization.
    """
    counts, sums = summed["counts"].double(), summed["sums"].double()
    if not bool((counts.round() == counts).all()) or bool((counts < 0).any()):
        return "the class counts must be nonnegative integers"
    if float(counts.sum()) > num_samples:
        return f"the class counts sum to {counts.sum():.0f}; this client has {num_samples}"
    lengths = sums.norm(dim=1)
    if bool((lengths > counts * (1 + _ROUNDING) + _ROUNDING).any()):
        label = int((lengths - counts).argmax())
        return (
            f"the sum of class {label} has the norm {lengths[label]:.4g}; at most its count, "
            f"{counts[label]:.0f}"
        )
    between = (lengths.square() / counts.clamp(min=1)).sum()
    if "within" in summed:
        wanted = float(counts.sum() - between)
        return _check_matrix(summed["within"], sums.shape[1], wanted, counts, in_full=in_full) or (
            _check_scatter(summed["within"], sums.shape[1], summed["scatter"], counts)
        )
    if "moment" in summed:
        wanted = float(counts.sum())
        return _check_matrix(summed["moment"], sums.shape[1], wanted, counts, in_full=in_full)
    return None


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
        if reason := _check_matrix(totals[name], sums.shape[1], wanted[name], counts, in_full=True):
            return reason
    return None


def _check_matrix(
    packed: Tensor, size: int, wanted: float, counts: Tensor, *, in_full: bool
) -> str | None:
    """Return why a packed second moment cannot be one with this trace, or None."""
    slack = _ROUNDING * max(1.0, float(counts.sum()))
    trace = float(packed[_diagonal(size).to(packed.device)].double().sum())
    if abs(trace - wanted) > slack:
        return f"the second moment has the trace {trace:.4g}; its counts and sums say {wanted:.4g}"
    if in_full:
        matrix = unpack_symmetric(packed.double(), size)
        matrix.diagonal().add_(slack / 10)
        _, failed_at = torch.linalg.cholesky_ex(matrix)
        if int(failed_at):
            return "the second moment is not positive semidefinite"
    return None


def _check_scatter(packed: Tensor, size: int, scatter: Tensor, counts: Tensor) -> str | None:
    degrees = max(1.0, float(counts.sum()) - int((counts > 0).sum()))
    squares = packed.double().square()
    whole = 2 * float(squares.sum()) - float(squares[_diagonal(size).to(packed.device)].sum())
    if abs(float(scatter) - whole / degrees) > _ROUNDING * max(1.0, whole / degrees):
        return f"the scatter is {float(scatter):.4g}; its matrix says {whole / degrees:.4g}"
    return None


def _diagonal(size: int) -> Tensor:
    """Return where the diagonal of a packed matrix lies."""
    rows = torch.arange(size)
    return rows * size - rows * (rows - 1) // 2
