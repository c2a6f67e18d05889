"""The contrastive loss L_R between embeddings and the prototypes of a pool."""

import math
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.functional import embedding_bag

from mpfedcl.prototypes.pool import Padding, PrototypePool

Form = Literal["slots", "pooled", "literal"]

_LARGEST_EXPONENT = 80
"""exp(-80) is well above the smallest float32, so a sum of such terms keeps all its digits."""
LARGEST_TABLE = 2**19
"""Entries up to which a table of slices is the fastest way to sum them; lists from there on."""


class ContrastTargets(NamedTuple):
    """A pool as the loss wants it: tensors only, made once per round and used for every batch.

    Most slices (client, slot) of a skewed pool are padding throughout and hence the same. Each
    distinct slice is kept once, with its share of all N·K as its weight.
    """

    vectors: Tensor
    """[V, d] the M real prototypes, then the C class means."""
    classes: Tensor
    """[V] int64, the class of each real prototype; -1 for the class means."""
    slices: Tensor
    """[S, C] int64, the vector that each class has in each distinct slice."""
    weights: Tensor
    """[S] how much of the N·K slices each stands for; they sum to 1."""
    present: Tensor
    """[C] bool, the classes that any client holds."""
    mean_targets: Tensor
    """[C, d] Σ_s weight_s U[s, c]: the mean vector of each class over the slices."""
    members: "MemberTable | MemberLists"
    """Which vectors stand in which slice, absent classes aside."""


class MemberTable(NamedTuple):
    """Members as a matrix: few slices are summed by one product."""

    counts: Tensor
    """[V, S] how often each vector stands in each slice."""


class MemberLists(NamedTuple):
    """Members as lists, both ways: with many slices a matrix would be nearly all zeros.

    Only the class means, which stand in many slices, keep theirs.
    """

    means: Tensor
    """[last of V, S] how often each class mean stands in each slice."""
    vectors: Tensor
    """The real prototypes of slice 0, then of slice 1, and so on."""
    slice_starts: Tensor
    """[S] where each slice's list begins."""
    slices: Tensor
    """The slices that prototype 0 stands in, then prototype 1, and so on."""
    vector_starts: Tensor
    """[M] where each prototype's list begins."""


class PoolGrid(NamedTuple):
    """A pool padded to a vector for every client, slot and class."""

    vectors: Tensor
    """[V, d] the M real prototypes, then the C class means; constants from here on."""
    classes: Tensor
    """[V] int64, the class of each real prototype; -1 for the class means."""
    slots: Tensor
    """[N, K, C] int64, the vector in each slot."""
    present: Tensor
    """[C] bool, the classes that any client holds."""

    @classmethod
    def pad(cls, pool: PrototypePool, padding: Padding = "all") -> Self:
        """Put the class mean wherever a client has no prototype."""
        slots = pool.slots(padding)
        means = torch.arange(pool.num_classes, device=slots.device) + len(pool)
        return cls(
            vectors=torch.cat([pool.vectors, pool.class_means()]).detach(),
            classes=torch.cat([pool.labels, torch.full_like(means, -1)]),
            slots=torch.where(slots < 0, means, slots),
            present=pool.present,
        )

    def targets(self, clients: Tensor | None = None) -> ContrastTargets:
        """Return what `contrastive_loss` works with.

        With `clients`, indices into the pool's names, only their slices count; class means stay
        those of the whole pool.
        """
        slots = self.slots if clients is None else self.slots[clients]
        vectors, classes, present = self.vectors, self.classes, self.present
        if len(slots):
            slices, repeats = torch.unique(slots.flatten(0, 1), dim=0, return_counts=True)
        else:
            # One slice of absent classes: the arithmetic of the loss goes through and yields 0.
            slices = torch.arange(len(vectors), device=present.device)[-len(present) :].unsqueeze(0)
            repeats = torch.ones_like(slices[:, 0])
        counted = present if len(slots) else ~present
        if clients is not None:
            # What the drawn clients do not use costs nothing.
            used, places = torch.unique(slices, return_inverse=True)
            vectors, classes, slices = vectors[used], classes[used], places.view_as(slices)
        weights = repeats.to(vectors.dtype) / repeats.sum()
        return ContrastTargets(
            vectors=vectors,
            classes=classes,
            slices=slices,
            weights=weights,
            present=present,
            mean_targets=_average_slices(vectors, slices, weights),
            members=_find_members(slices, counted, vectors, int((classes >= 0).sum())),
        )


def prepare_contrast(pool: PrototypePool, padding: Padding = "all") -> ContrastTargets:
    """Lay a whole pool out for `contrastive_loss`."""
    return PoolGrid.pad(pool, padding).targets()


def _average_slices(vectors: Tensor, slices: Tensor, weights: Tensor) -> Tensor:
    """Return [C, d]: the mean over slices of the vector that each class has in them."""
    num_classes = slices.shape[1]
    shares = vectors.new_zeros(num_classes, len(vectors))
    for row, column in zip(shares, slices.unbind(1), strict=True):
        row.index_add_(0, column, weights)
    return shares @ vectors


def _find_members(
    slices: Tensor, counted: Tensor, vectors: Tensor, num_real: int
) -> "MemberTable | MemberLists":
    """Note down which vectors stand in which slice, in the classes that are counted.

    The first `num_real` vectors are prototypes, the others class means.
    """
    if len(slices) * len(vectors) <= LARGEST_TABLE:
        return MemberTable(_count_members(slices, counted, vectors))
    num_slices = len(slices)
    real = (slices < num_real) & counted
    places, members = real.nonzero()[:, 0], slices[real]
    in_slice = torch.bincount(places, minlength=num_slices)
    in_vector = torch.bincount(members, minlength=num_real)
    # A slice's own row of the table counts means alone: prototypes are put aside.
    aside = torch.where(real, num_real, slices) - num_real
    means = _count_members(aside.clamp(min=0), counted & ~real, vectors[num_real:])
    return MemberLists(
        means,
        members,
        in_slice.cumsum(0) - in_slice,
        places[members.argsort(stable=True)],
        in_vector.cumsum(0) - in_vector,
    )


def _count_members(slices: Tensor, counted: Tensor, vectors: Tensor) -> Tensor:
    """Return [V, S]: how often each vector stands in each slice, where it counts."""
    table = vectors.new_zeros(len(slices), len(vectors))
    table.scatter_add_(1, slices, counted.to(vectors.dtype).expand(slices.shape))
    return table.T.contiguous()


def contrastive_loss(
    z: Tensor,
    labels: Tensor,
    mask: Tensor,
    targets: ContrastTargets,
    temperature: float = 0.07,
    form: Form = "slots",
    reach: float = math.inf,
) -> Tensor:
    """Return L_R, a scalar, for embeddings z [B, d] of classes `labels` [B].

    With p_ik(a) = exp(z·U[i,k,a]/τ) / Σ_{a' present} exp(z·U[i,k,a']/τ):

        slots    mean over samples, clients i and slots k of -log p_ik(y)
        pooled   mean over samples of -log( Σ_{m of class y} exp(z·u_m/τ) / Σ_m exp(z·u_m/τ) )
        literal  as slots, with the mean of -log p_ik(a) over the present classes a other than y

    `reach` is a bound on |z·u| if one is known: where it keeps the exponentials in range, each is
    computed once and the slices' sums are one product. Samples with `mask` False, and samples whose
    class is absent, are left out of the mean; if none remains the loss is 0, with a gradient of
    zeros. Only masks decide, so it can be transformed by `torch.func.vmap` and `grad`.
    """
    label = labels.where(mask, 0)
    counted = mask & targets.present[label]
    everyone = _is_everyone(counted)
    if not everyone:
        # What is left out is set to 0: whatever a padding row holds, its gradient is 0, not NaN.
        z = z.masked_fill(~counted.unsqueeze(1), 0)
    z = z / temperature
    logits = z @ targets.vectors.T
    if form == "pooled":
        losses = _contrast_all(logits, label, targets)
    else:
        if 2 * reach / temperature <= _LARGEST_EXPONENT:
            totals = _sum_powers(logits, targets.members, reach / temperature)
        else:
            totals = _sum_by_slice(logits, targets)
        losses = totals @ targets.weights - _aim(z, label, targets, literal=form == "literal")
        if form == "literal":
            # Where one class alone is present there is no other to look at.
            losses = losses.masked_fill(targets.present.sum() < 2, 0)
    if everyone:
        return losses.mean()
    return losses.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def _is_everyone(counted: Tensor) -> bool:
    """Return whether no sample is left out, if that is cheap to find out; else False."""
    is_cheap = counted.device.type == "cpu" and not is_functorch_wrapped_tensor(counted)
    return is_cheap and len(counted) > 0 and bool(counted.all())


def prototype_contrastive_loss(
    z: Tensor,
    labels: Tensor,
    pool: PrototypePool,
    temperature: float = 0.07,
    form: Form = "slots",
    padding: Padding = "all",
) -> Tensor:
    """Return L_R, the contrastive loss of embeddings against the prototypes of all clients.

    Args:
        z: [B, d] embeddings, used as they are: normalize them if the pool is of unit vectors.
        labels: [B] classes.
        pool: The prototypes of all clients; constants.
        temperature: τ, above 0.
        form: `slots` (the paper's text), `pooled` or `literal`; see `contrastive_loss`.
        padding: What stands where a client has fewer than K prototypes of a class.

    Returns:
        A scalar, the mean over the samples whose class has prototypes; its gradient flows to z.

    Example:
        >>> from mpfedcl import cluster_prototypes
        >>> z, labels = torch.eye(2), torch.tensor([0, 1])
        >>> mine = cluster_prototypes(z, labels, num_classes=2, num_prototypes=1)
        >>> pool = PrototypePool.gather({"a": mine}, num_classes=2, num_prototypes=1)
        >>> round(float(prototype_contrastive_loss(z, labels, pool, temperature=1.0)), 4)
        0.3133
    """
    if z.dim() != 2 or z.shape[1] != pool.dimension or not z.is_floating_point():
        raise ValueError(
            f"embeddings are {z.dtype} of shape {tuple(z.shape)}; "
            f"they must be floating point of shape [B, {pool.dimension}]."
        )
    if labels.shape != z.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}; "
            f"they must be integers of shape [{len(z)}]."
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}; it must be above 0 and finite.")
    if form not in get_args(Form):
        raise ValueError(f"form is {form!r}; it must be one of {', '.join(get_args(Form))}.")
    wrong = labels[(labels < 0) | (labels >= pool.num_classes)]
    if len(wrong):
        raise ValueError(
            f"label {int(wrong[0])} is out of range; it must be from 0 to {pool.num_classes - 1}."
        )
    targets = prepare_contrast(pool.to(z.device, z.dtype), padding)
    real = torch.ones(len(z), dtype=torch.bool, device=z.device)
    return contrastive_loss(
        z,
        labels.to(z.device, torch.int64),
        real,
        targets,
        temperature,
        form,
        _find_reach(z.detach(), targets.vectors),
    )


def _find_reach(z: Tensor, vectors: Tensor) -> float:
    """Return a bound on |z·u|, from the largest norms."""
    if not z.numel() or not vectors.numel():
        return 0.0
    bound = float(z.norm(dim=1).max() * vectors.norm(dim=1).max())
    # Not a number for queries that are none; a little more, for the rounding of the products.
    return bound * 1.001 if math.isfinite(bound) else math.inf


def _sum_powers(logits: Tensor, members: MemberTable | MemberLists, top: float) -> Tensor:
    """Return [B, S]: log Σ_{a present} exp(logit) of each slice; no logit may exceed `top`."""
    powers = (logits - top).exp()
    if isinstance(members, MemberTable):
        sums = powers @ members.counts
    else:
        means, *lists = members
        num_real = powers.shape[1] - len(means)
        real = _ListSum.apply(powers[:, :num_real].T, *lists)  # type: ignore[no-untyped-call]
        sums = real.T + powers[:, num_real:] @ means
    return sums.log() + top


def _sum_by_slice(logits: Tensor, targets: ContrastTargets) -> Tensor:
    """Return [B, S]: log Σ_{a present} exp(logit) of each slice, for logits of any size."""
    # Classes before slices: a softmax over ten neighboring numbers takes twice the time.
    rows = targets.slices.T
    logits = logits.index_select(1, rows.flatten()).reshape(len(logits), *rows.shape)
    return _mask(logits, targets.present.unsqueeze(1)).logsumexp(dim=1)


def _aim(z: Tensor, label: Tensor, targets: ContrastTargets, *, literal: bool) -> Tensor:
    """Return [B]: the logit that a sample is drawn to, averaged over the slices."""
    aims = targets.mean_targets
    if literal:
        present = targets.present.unsqueeze(1)
        others = (aims * present).sum(0) - aims
        aims = others / (targets.present.sum() - 1).clamp(min=1)
    return (z * aims[label]).sum(1)


def _contrast_all(logits: Tensor, label: Tensor, targets: ContrastTargets) -> Tensor:
    """Return [B]: each sample's loss by one softmax over all real prototypes."""
    log_share = _mask(logits, targets.classes >= 0).log_softmax(dim=1)
    return -_mask(log_share, targets.classes == label.unsqueeze(1)).logsumexp(dim=1)


def _mask(logits: Tensor, keep: Tensor) -> Tensor:
    """Put what is not kept out of a softmax's reach; finite, so that a row of nothing is no NaN."""
    return logits.masked_fill(~keep, torch.finfo(logits.dtype).min)


class _ListSum(torch.autograd.Function):
    """out[s] = Σ_{v in the list of s} x[v] for rows x [V, B]; its derivative is the same, turned.

    torch has this as `embedding_bag`, which knows neither `vmap` nor derivatives of derivatives.
    """

    @staticmethod
    def forward(rows: Tensor, members: Tensor, starts: Tensor, *_turned: Tensor) -> Tensor:
        return embedding_bag(members, rows.contiguous(), starts, mode="sum")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        members, starts, turned, turned_starts = ctx.saved_tensors
        turned_sum = _ListSum.apply(slopes[0], turned, turned_starts, members, starts)  # type: ignore[no-untyped-call]
        return turned_sum, None, None, None, None

    @staticmethod
    def vmap(_info: Any, in_dims: tuple[int | None, ...], rows: Tensor, *lists: Tensor) -> Any:
        # Rows may be as long as they like: clients side by side are longer rows.
        assert in_dims[0] is not None
        rows = rows.movedim(in_dims[0], 1)
        sums = _ListSum.apply(rows.flatten(1), *lists)  # type: ignore[no-untyped-call]
        return sums.view(len(sums), *rows.shape[1:]), 1
