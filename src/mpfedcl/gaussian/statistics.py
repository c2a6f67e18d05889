"""A federation as sums that are kept: what a client adds to them, and what they are without it.

One client's statistics are `counts` [C], `sums` [C, d] and, where its method has second moments,
`moment` [d, d] = Σ phi phi', all in float64 and all sums over samples: those of more samples are
added, those of fewer subtracted. The pooled statistics have the same of all clients, and beside:

- `groups` [C], the clients that hold a class, `counts_squared` [C] = Σ_i n_ic² and
  `squares` [C] = Σ_i |s_ic|²/n_ic, from which effects of clients are found;
- `within` [d, d] = Σ_i W_i and `scatter` [] = Σ_i |W_i|²/f_i, where a method works with the scatter
  around each client's own class means.

They are sums over clients: a client that leaves is subtracted, and nothing is left of it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian.stacked_sums import SecondMoment
from mpfedcl.gaussian.sums import (
    moment_from_within,
    pack_symmetric,
    unpack_symmetric,
    within_from_moment,
)

_ROWS_AT_ONCE = 1024
"""Clients whose class sums are kept until they are folded."""
BY_CLASS = ("counts", "sums", "groups", "squares", "counts_squared")
"""The statistics that have a row per class."""


def own_statistics(summed: Mapping[str, Tensor]) -> Tensors:
    """Return one client's statistics from what it has sent, in float64."""
    counts, sums = summed["counts"].double(), summed["sums"].double()
    own = {"counts": counts, "sums": sums}
    if "within" in summed:
        within = unpack_symmetric(summed["within"].double(), sums.shape[1])
        own["moment"] = moment_from_within(within, counts, sums)
    elif "moment" in summed:
        own["moment"] = unpack_symmetric(summed["moment"].double(), sums.shape[1])
    return own


def pool_of_one(own: Tensors, second_moment: SecondMoment | None) -> Tensors:
    """Return the pooled statistics of a federation that has this one client alone."""
    counts, sums = own["counts"], own["sums"]
    pooled = {
        **own,
        "groups": (counts > 0).double(),
        "squares": sums.square().sum(1) / counts.clamp(min=1),
        "counts_squared": counts.square(),
    }
    if second_moment == "within":
        within = within_from_moment(own["moment"], counts, sums)
        degrees = (counts - 1).clamp(min=0).sum().clamp(min=1)
        pooled |= {"within": within, "scatter": within.square().sum() / degrees}
    return pooled


def add_statistics(left: Tensors, right: Tensors) -> Tensors:
    """Return what both have in all: two parts of a client's samples, or two parts of a pool."""
    return {name: value + right[name] for name, value in left.items()} if left else right


def take_from_pool(pooled: Tensors, own: Tensors, second_moment: SecondMoment | None) -> Tensors:
    """Return the pooled statistics without a client that is in them."""
    part = pool_of_one(own, second_moment)
    left = {name: value - part[name] for name, value in pooled.items()}
    # Counts are whole numbers and come out exactly; what rounding leaves of an empty class is 0.
    empty = left["counts"] == 0
    for name in BY_CLASS:
        left[name][empty] = 0
    if second_moment == "within" and not bool((left["counts"] - left["groups"]).any()):
        # No client has two samples of a class: a scatter of rounding alone would be a metric.
        left |= {name: torch.zeros_like(left[name]) for name in ("within", "scatter")}
    return left


def widen_classes(statistics: Tensors, num_classes: int) -> Tensors:
    """Return statistics with room for more classes, of which there is nothing yet."""
    wide = dict(statistics)
    for name in BY_CLASS:
        if name in wide:
            missing = num_classes - len(wide[name])
            rows = wide[name].new_zeros(missing, *wide[name].shape[1:])
            wide[name] = torch.cat([wide[name], rows])
    return wide


def sums_to_fit(pooled: Tensors, second_moment: SecondMoment | None) -> Tensors:
    """Return pooled statistics as clients' messages add up, for a method to fit."""
    sums = {"counts": pooled["counts"], "sums": pooled["sums"]}
    if second_moment == "within":
        sums |= {"within": pack_symmetric(pooled["within"]), "scatter": pooled["scatter"]}
    elif second_moment == "moment":
        sums["moment"] = pack_symmetric(pooled["moment"])
    return sums


def scatter_rows(own: Tensors) -> Tensor:
    """Return rows R [r, d] with R'R = W_i: they stand for a client's centered samples."""
    within = within_from_moment(own["moment"], own["counts"], own["sums"])
    spectrum, basis = torch.linalg.eigh(within)
    # No more directions than samples less classes; the others are rounding.
    degrees = int((own["counts"] - 1).clamp(min=0).sum())
    kept = max(0, len(spectrum) - degrees)
    rows: Tensor = (spectrum[kept:].clamp(min=0).sqrt() * basis[:, kept:]).T
    return rows


class PoolTotals:
    """The statistics of many clients whose second moments are known in total alone.

    A thousand of them would take longer to write out than all else that a server does.
    """

    def __init__(self) -> None:
        self._small: Tensors = {}
        self._rows: list[Tensor] = []
        self._between: Tensor | float = 0.0
        """Of the rows that are folded already: a hundred thousand clients have a million."""

    def add(self, summed: Mapping[str, Tensor]) -> None:
        """Take in a client's counts and sums."""
        own = {name: summed[name].double() for name in ("counts", "sums")}
        self._small = add_statistics(self._small, pool_of_one(own, None))
        held = own["counts"] > 0
        self._rows.append(own["sums"][held] / own["counts"][held].sqrt().unsqueeze(1))
        if len(self._rows) >= _ROWS_AT_ONCE:
            self._fold()

    def _fold(self) -> None:
        rows = torch.cat(self._rows)
        self._between, self._rows = self._between + rows.T @ rows, []

    def parts(self) -> Tensors:
        """Return what adds up over processes; `between` is Σ_ic s_ic s_ic' / n_ic."""
        if self._rows:
            self._fold()
        assert isinstance(self._between, Tensor)
        return {**self._small, "between": self._between}


def complete_pool(parts: Tensors, sums: Tensors) -> Tensors:
    """Return the pooled statistics of clients' totals, and of what their messages add up to."""
    pooled = {name: parts[name] for name in BY_CLASS}
    size = pooled["sums"].shape[1]
    if "within" in sums:
        within = unpack_symmetric(sums["within"].double(), size)
        moment = within + parts["between"]
        return pooled | {"moment": moment, "within": within, "scatter": sums["scatter"].double()}
    if "moment" in sums:
        pooled["moment"] = unpack_symmetric(sums["moment"].double(), size)
    return pooled
