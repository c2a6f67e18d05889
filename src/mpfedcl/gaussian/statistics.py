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

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors

SecondMoment = Literal["within", "moment"]
"""The scatter of samples around their class means, or the sum of phi phi'."""
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


def random_features(inputs: Tensor, count: int) -> Tensor:
    """Return features of norm 1 for samples of few values: [..., d + 1 + count] for [..., d].

    `unit_features` keeps only the direction of a sample, and a class can lie anywhere, not only on
    one side of a plane. So a constant sqrt(d) is appended to the values first, which keeps their
    norm, and then `count` public random directions, each cut off at 0. Both parts have equal norms.

    Example:
        >>> random_features(torch.eye(3), 5).shape
        torch.Size([3, 9])
        >>> random_features(torch.eye(3), 0).square().sum(dim=1)
        tensor([1., 1., 1.])
    """
    size = inputs.shape[-1]
    constant = torch.full_like(inputs[..., :1], size**0.5)
    direct = unit_features(torch.cat([inputs, constant], dim=-1))
    if not count:
        return direct
    turned = (direct @ _directions(size + 1, count).to(direct)).relu()
    lengths = turned.norm(dim=-1, keepdim=True)
    even = torch.full_like(turned, count**-0.5)
    turned = torch.where(lengths == 0, even, turned / lengths)
    both: Tensor = torch.cat([direct, turned], dim=-1) * 0.5**0.5
    return both


@lru_cache(maxsize=4)
def _directions(size: int, count: int) -> Tensor:
    """Return [d, k] random directions, the same for all clients and experiments."""
    key = generator(0, "random features", size)
    return torch.randn(size, count, generator=key, dtype=torch.float64)


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


# The message of a client


def sum_samples(
    features: Tensor, labels: Tensor, num_classes: int, second_moment: SecondMoment | None
) -> Tensors:
    """Return the statistics that a client sends, with a packed second moment if there is one."""
    counts = torch.bincount(labels, minlength=num_classes)
    sums = features.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, features)
    found = {"counts": counts.to(features.dtype), "sums": sums}
    if second_moment is None:
        return found
    is_within = second_moment == "within"
    rows = center_by_class(features, labels, counts, sums) if is_within else features
    matrix = rows.T @ rows
    found[second_moment] = pack_symmetric(matrix)
    if is_within:
        degrees = (counts - 1).clamp(min=0).sum().clamp(min=1)
        squares = matrix.square().sum(dtype=torch.float64)
        found["scatter"] = (squares / degrees).to(features.dtype)
    return found


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


def pool_parts(summed: Mapping[str, Tensor]) -> Tensors:
    """Return the part of the pooled statistics that the sum of all messages lacks, of one client.

    `between` is Σ_c s_ic s_ic' / n_ic. The client's second moment itself is not computed, which
    would dominate the server's time with thousands of clients.
    """
    own = {name: summed[name].double() for name in ("counts", "sums")}
    parts = pool_of_one(own, None)
    if "within" in summed:
        held = own["counts"] > 0
        parts["between"] = between_classes(own["counts"][held], own["sums"][held])
    return parts


def complete_pool(parts: Tensors, sums: Tensors) -> Tensors:
    """Return the pooled statistics from the sum of all `pool_parts` and of all messages."""
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


def effect_totals(counts: Tensor, sums: Tensor) -> Tensors:
    """Return the totals of how clients differ, from counts [N, C] and sums [N, d]."""
    sizes, degrees = counts.sum(1), (counts - 1).clamp(min=0).sum(1)
    at_least_one = sizes.clamp(min=1)
    shares = counts / at_least_one.unsqueeze(1)
    return {
        "pairs": counts.T @ counts,
        "shared_pairs": counts.T @ shares,
        "cubes": (counts.square() * shares).sum(0),
        "shared_sums": shares.T @ sums,
        "lengths": (sums.square().sum(1) / at_least_one).sum(),
        "clients": (sizes > 0).double().sum(),
        "free_clients": (degrees > 0).double().sum(),
        "degrees_squared": degrees.square().sum(),
    }


def totals_of_one(pooled: Tensors, *, with_effects: bool) -> Tensors:
    """Return the contribution of a client to the totals, given its pooled statistics.

    Counts are integers, and symmetric matrices are packed. Without samples all values are zero.
    """
    found = dict(pooled)
    if with_effects:
        found |= effect_totals(pooled["counts"].unsqueeze(0), pooled["sums"].sum(0, keepdim=True))
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
