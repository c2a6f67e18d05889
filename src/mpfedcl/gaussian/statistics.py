"""Sufficient statistics of features: sums over samples and clients, to fit classifiers to.

One client's statistics are `counts` [C], `sums` [C, d] and, if its method uses second moments,
`moment` [d, d] = Σ phi phi', all in float64 and all sums over samples, so samples can be added and
removed exactly. The pooled statistics are their sums over all clients, and also:

- `groups` [C], the clients that hold a class, `counts_squared` [C] = Σ_i n_ic² and
  `squares` [C] = Σ_i |s_ic|²/n_ic, from which client effects are estimated;
- `within` [d, d] = Σ_i W_i and `scatter` [] = Σ_i |W_i|²/f_i, if a method uses the scatter
  around each client's class means.

All are sums over clients: subtracting a client that leaves removes it exactly.

If no single client's statistics may be seen (secure aggregation), the differences between clients
are estimated from further sums over clients, the totals. With s_i and n_i the sum and count of all
classes of a client, and f_i = n_i - (classes that it holds), these are also:

- `pairs` [C, C] = Σ_i n_ic n_ic', `shared_pairs` [C, C] = Σ_i n_ic n_ic'/n_i and
  `cubes` [C] = Σ_i n_ic³/n_i;
- `shared_sums` [C, d] = Σ_i (n_ic/n_i) s_i and `lengths` [] = Σ_i |s_i|²/n_i;
- `clients` [], those with a sample, `free_clients` [], those with f_i > 0, and
  `degrees_squared` [] = Σ_i f_i².
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors

SecondMoment = Literal["within", "moment"]
"""The scatter of samples around their class means, or the sum of phi phi'."""
_ROWS_AT_ONCE = 1024
"""Number of clients whose class sums are buffered before they are folded."""
BY_CLASS = ("counts", "sums", "groups", "squares", "counts_squared")
"""The statistics that have a row per class."""
_MATRICES = ("moment", "within")
_WHOLE = {*BY_CLASS, "pairs", "clients", "free_clients", "degrees_squared"} - {"sums", "squares"}
"""Totals that are whole numbers."""


def unit_features(inputs: Tensor) -> Tensor:
    """Return phi(x) = sign(x) sqrt|x|, scaled to norm 1: [..., d] for [..., d].

    The root damps large values; the norm bounds the contribution of a sample to any sum. A sample
    of zeros is mapped to the vector with equal coordinates.

    Example:
        >>> import torch
        >>> unit_features(torch.tensor([[9.0, -16.0], [0.0, 0.0]]))
        tensor([[ 0.6000, -0.8000],
                [ 0.7071,  0.7071]])
    """
    roots = inputs.abs().sqrt() * inputs.sign()
    # |phi|² is the sum of |x|, which may overflow single precision; its root does not.
    lengths = inputs.abs().sum(dim=-1, keepdim=True, dtype=torch.float64).sqrt().to(inputs.dtype)
    even = torch.full_like(roots, inputs.shape[-1] ** -0.5)
    # Compared in this form so that NaN stays NaN.
    return torch.where(lengths == 0, even, roots / lengths)


def project_features(features: Tensor, dimensions: int, seed: int) -> Tensor:
    """Return features in fewer dimensions, of norm 1 again: [..., k] for [..., d].

    The projection depends only on the seed, so it is the same for all clients. The mean over the
    coordinates of a sample is subtracted first, because most features are positive in every class.
    Features that have no more than `dimensions` dimensions are returned unchanged.

    Example:
        >>> import torch
        >>> project_features(torch.eye(8), 3, seed=0).norm(dim=1).round(decimals=4)
        tensor([1., 1., 1., 1., 1., 1., 1., 1.])
    """
    size = features.shape[-1]
    if dimensions >= size:
        return features
    centered = features - features.mean(dim=-1, keepdim=True)
    return normalize(centered @ _projection(size, dimensions, seed).to(features), dim=-1, eps=1e-12)


@lru_cache(maxsize=4)
def _projection(size: int, dimensions: int, seed: int) -> Tensor:
    """Return [d, k] with orthonormal columns."""
    drawn = torch.randn(
        size, dimensions, generator=generator(seed, "projection"), dtype=torch.float64
    )
    basis: Tensor = torch.linalg.qr(drawn).Q
    return basis


# Symmetric matrices and second moments


def center_by_class(features: Tensor, labels: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
    """Return the features minus the mean of their class."""
    return features - (sums / counts.clamp(min=1).unsqueeze(1))[labels]


def within_from_moment(moment: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
    """Return W_i [d, d], a client's scatter within classes, from its Σ phi phi'."""
    return moment - between_classes(counts, sums)


def between_classes(counts: Tensor, sums: Tensor) -> Tensor:
    """Return Σ_c s_c s_c' / n_c [d, d]."""
    scaled = sums / counts.clamp(min=1).sqrt().unsqueeze(1)
    return scaled.T @ scaled


def packed_size(dimension: int) -> int:
    """Return the number of values of a packed symmetric matrix."""
    return dimension * (dimension + 1) // 2


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return the upper half of a symmetric matrix [d, d], row by row."""
    return matrix.flatten()[_upper_places(len(matrix)).to(matrix.device)]


def unpack_symmetric(packed: Tensor, dimension: int) -> Tensor:
    """Return the matrix [d, d] that `pack_symmetric` was given."""
    matrix = packed.new_zeros(dimension * dimension)
    matrix[_upper_places(dimension).to(packed.device)] = packed
    square = matrix.view(dimension, dimension)
    return square + square.triu(1).T


@lru_cache(maxsize=2)
def _upper_places(dimension: int) -> Tensor:
    rows, columns = torch.triu_indices(dimension, dimension)
    places: Tensor = rows * dimension + columns
    return places


# Statistics of several clients of one process


class StackedSums:
    """The statistics of several clients; Σ_i W_i is one product, and each W_i is computed lazily.

    Args:
        features: [samples, d] of all clients, grouped by client.
        labels: [samples].
        sizes: The samples of each client.
        num_classes: C.
        second_moment: The second moment that is sent next to counts and sums, if any.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        sizes: Sequence[int],
        num_classes: int,
        second_moment: SecondMoment | None,
    ) -> None:
        self._sizes = list(sizes)
        self._second_moment = second_moment
        num_clients, dimension = len(self._sizes), features.shape[1]
        owners = torch.arange(num_clients).repeat_interleave(torch.tensor(self._sizes)).to(labels)
        cells = owners * num_classes + labels
        counts = torch.bincount(cells, minlength=num_clients * num_classes)
        sums = features.new_zeros(num_clients * num_classes, dimension)
        sums.index_add_(0, cells, features)
        self._rows = features
        self._small: Tensors = {
            "counts": counts.view(num_clients, num_classes).to(features.dtype),
            "sums": sums.view(num_clients, num_classes, dimension),
        }
        if second_moment == "within":
            self._rows = center_by_class(features, cells, counts, sums)
            self._small["scatter"] = self._scatters(counts.view(num_clients, num_classes))

    def __len__(self) -> int:
        return len(self._sizes)

    def member(self, index: int) -> "MemberSums":
        """Return the statistics of one client."""
        return MemberSums(self, index)

    @property
    def names(self) -> list[str]:
        """The names of the tensors that each client sends."""
        return [*self._small, *([self._second_moment] if self._second_moment else [])]

    def tensor(self, name: str, index: int) -> Tensor:
        """Return one tensor of one client."""
        if name != self._second_moment:
            return self._small[name][index]
        rows = torch.split(self._rows, self._sizes)[index]
        return pack_symmetric(rows.T @ rows)

    def total(self, members: Sequence[int]) -> Tensors:
        """Return the sums over some clients, in float64."""
        chosen = torch.tensor(members, device=self._rows.device)
        total = {n: v[chosen].sum(0, dtype=torch.float64) for n, v in self._small.items()}
        if self._second_moment:
            rows = self._rows
            if len(members) < len(self):
                parts = torch.split(rows, self._sizes)
                rows = torch.cat([parts[index] for index in members])
            total[self._second_moment] = pack_symmetric(rows.T @ rows).double()
        return total

    @cached_property
    def is_finite(self) -> list[bool]:
        """Whether all values of each client are finite: only then is the sum of their squares."""
        squares = self._rows.square().sum(1, dtype=torch.float64)
        return [bool(part.sum().isfinite()) for part in torch.split(squares, self._sizes)]

    @cached_property
    def template(self) -> Tensors:
        """Tensors with the shapes and types that one client sends; their values are undefined."""
        shapes = {name: value[0] for name, value in self._small.items()}
        if self._second_moment:
            size = packed_size(self._rows.shape[1])
            shapes[self._second_moment] = self._rows.new_empty(1).expand(size)
        return shapes

    def _scatters(self, counts: Tensor) -> Tensor:
        """Return |W_i|² / f_i of each client, from the smaller of X X' and X'X."""
        degrees = (counts.sum(1) - (counts > 0).sum(1)).clamp(min=1)
        squares = []
        for rows in torch.split(self._rows, self._sizes):
            product = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
            squares.append(product.square().sum(dtype=torch.float64))
        return (torch.stack(squares) / degrees).to(self._rows.dtype)


class MemberSums(Mapping[str, Tensor]):
    """The statistics of one client in a stack; it never leaves the process that created it."""

    def __init__(self, stack: StackedSums, index: int) -> None:
        self.stack = stack
        self.index = index

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.stack.names:
            raise KeyError(name)
        return self.stack.tensor(name, self.index)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stack.names)

    def __len__(self) -> int:
        return len(self.stack.names)


# Statistics that are kept, and the pool of all clients


def own_statistics(summed: Mapping[str, Tensor]) -> Tensors:
    """Return one client's statistics from its message, in float64."""
    counts, sums = summed["counts"].double(), summed["sums"].double()
    own = {"counts": counts, "sums": sums}
    if "within" in summed:
        within = unpack_symmetric(summed["within"].double(), sums.shape[1])
        own["moment"] = within + between_classes(counts, sums)
    elif "moment" in summed:
        own["moment"] = unpack_symmetric(summed["moment"].double(), sums.shape[1])
    return own


def pool_of_one(own: Tensors, second_moment: SecondMoment | None) -> Tensors:
    """Return the pooled statistics of a federation with only this client."""
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
    """Return the sum of the statistics of two sets of samples, or of two sets of clients."""
    return {name: value + right[name] for name, value in left.items()} if left else right


def take_from_pool(pooled: Tensors, own: Tensors, second_moment: SecondMoment | None) -> Tensors:
    """Return the pooled statistics with one client removed."""
    part = pool_of_one(own, second_moment)
    left = {name: value - part[name] for name, value in pooled.items()}
    # Counts are exact integers; rounding errors of an empty class are set to 0.
    empty = left["counts"] == 0
    for name in BY_CLASS:
        left[name][empty] = 0
    if second_moment == "within" and not bool((left["counts"] - left["groups"]).any()):
        # No client has two samples of a class: a scatter of rounding errors must not be a metric.
        left |= {name: torch.zeros_like(left[name]) for name in ("within", "scatter")}
    return left


def widen_classes(statistics: Tensors, num_classes: int) -> Tensors:
    """Return statistics extended by zeros to `num_classes` classes."""
    wide = dict(statistics)
    for name in BY_CLASS:
        if name in wide:
            missing = num_classes - len(wide[name])
            rows = wide[name].new_zeros(missing, *wide[name].shape[1:])
            wide[name] = torch.cat([wide[name], rows])
    return wide


def sums_to_fit(pooled: Tensors, second_moment: SecondMoment | None) -> Tensors:
    """Return pooled statistics in the form of summed messages, for `OneShot.fit`."""
    sums = {"counts": pooled["counts"], "sums": pooled["sums"]}
    if second_moment == "within":
        sums |= {"within": pack_symmetric(pooled["within"]), "scatter": pooled["scatter"]}
    elif second_moment == "moment":
        sums["moment"] = pack_symmetric(pooled["moment"])
    return sums


def scatter_rows(own: Tensors) -> Tensor:
    """Return rows R [r, d] with R'R = W_i, which replace a client's centered samples."""
    within = within_from_moment(own["moment"], own["counts"], own["sums"])
    spectrum, basis = torch.linalg.eigh(within)
    # The rank is at most samples minus classes; other eigenvalues are rounding errors.
    degrees = int((own["counts"] - 1).clamp(min=0).sum())
    kept = max(0, len(spectrum) - degrees)
    rows: Tensor = (spectrum[kept:].clamp(min=0).sqrt() * basis[:, kept:]).T
    return rows


class PoolTotals:
    """Pooled statistics of many clients, without the second moment of each.

    Computing thousands of single second moments would dominate the server's time.
    """

    def __init__(self) -> None:
        self._small: Tensors = {}
        self._rows: list[Tensor] = []
        self._between: Tensor | float = 0.0
        """Σ rows' rows of the rows that were folded; the rows themselves would fill memory."""

    def add(self, summed: Mapping[str, Tensor]) -> None:
        """Add a client's counts and sums."""
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
        """Return tensors that are summed over processes; `between` is Σ_ic s_ic s_ic' / n_ic."""
        if self._rows:
            self._fold()
        assert isinstance(self._between, Tensor)
        return {**self._small, "between": self._between}


def complete_pool(parts: Tensors, sums: Tensors) -> Tensors:
    """Return the pooled statistics from `PoolTotals.parts` and the sums of all messages."""
    pooled = {name: parts[name] for name in BY_CLASS}
    size = pooled["sums"].shape[1]
    if "within" in sums:
        within = unpack_symmetric(sums["within"].double(), size)
        moment = within + parts["between"]
        return pooled | {"moment": moment, "within": within, "scatter": sums["scatter"].double()}
    if "moment" in sums:
        pooled["moment"] = unpack_symmetric(sums["moment"].double(), size)
    return pooled


# Totals under secure aggregation


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
    for name in found.keys() & _WHOLE:
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
