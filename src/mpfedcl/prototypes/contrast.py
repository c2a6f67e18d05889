"""The contrastive loss L_R between embeddings and the prototypes of a pool."""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from mpfedcl.prototypes.kmeans import check_range
from mpfedcl.prototypes.pool import Padding, PrototypePool

Form = Literal["slots", "pooled", "literal"]

_LARGEST_EXPONENT = 80
"""exp(-80) is well above the smallest float32, so a sum of such terms keeps all its digits."""
LARGEST_TABLE = 2**19
"""Entries up to which a product with a table of slices is the fastest way to sum them."""


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
    table: Tensor | None
    """[V, S] how often each vector stands in each slice, absent classes aside; None if large."""


def prepare_contrast(pool: PrototypePool, padding: Padding = "all") -> ContrastTargets:
    """Lay a pool out for `contrastive_loss`; class means stand where a client has no prototype."""
    slots, present = pool.slots(padding), pool.present
    vectors = torch.cat([pool.vectors, pool.class_means()]).detach()
    means = torch.arange(pool.num_classes, device=slots.device) + len(pool)
    if len(slots):
        grid = torch.where(slots < 0, means, slots)
        slices, repeats = torch.unique(grid.flatten(0, 1), dim=0, return_counts=True)
    else:
        # One slice of absent classes: the arithmetic of the loss goes through and yields 0.
        slices, repeats = means.unsqueeze(0), torch.ones_like(means[:1])
    weights = repeats.to(vectors.dtype) / repeats.sum()
    shares = vectors.new_zeros(len(present), len(vectors))
    shares.scatter_add_(1, slices.T, weights.expand(len(present), -1))
    table = None
    if not len(slots) or len(slices) * len(vectors) <= LARGEST_TABLE:
        counted = present if len(slots) else ~present
        by_slice = vectors.new_zeros(len(slices), len(vectors))
        by_slice.scatter_add_(1, slices, counted.to(vectors.dtype).expand(slices.shape))
        table = by_slice.T.contiguous()
    return ContrastTargets(
        vectors=vectors,
        classes=torch.cat([pool.labels, torch.full_like(means, -1)]),
        slices=slices,
        weights=weights,
        present=present,
        mean_targets=shares @ vectors,
        table=table,
    )


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
    # Whether no sample is left out, if that is cheap to find out.
    is_cheap = counted.device.type == "cpu" and not is_functorch_wrapped_tensor(counted)
    everyone = is_cheap and len(counted) > 0 and bool(counted.all())
    if not everyone:
        # What is left out is set to 0: whatever a padding row holds, its gradient is 0, not NaN.
        z = z.masked_fill(~counted.unsqueeze(1), 0)
    z = z / temperature
    logits = z @ targets.vectors.T
    if form == "pooled":
        losses = _contrast_all(logits, label, targets)
    else:
        if 2 * reach / temperature <= _LARGEST_EXPONENT:
            totals = _sum_powers(logits, targets, reach / temperature)
        else:
            totals = _sum_by_slice(logits, targets)
        losses = totals @ targets.weights - _aim(z, label, targets, literal=form == "literal")
        if form == "literal":
            # Where one class alone is present there is no other to look at.
            losses = losses.masked_fill(targets.present.sum() < 2, 0)
    if everyone:
        return losses.mean()
    return losses.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


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
    check_range("label", labels, pool.num_classes)
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


def _sum_powers(logits: Tensor, targets: ContrastTargets, top: float) -> Tensor:
    """Return [B, S]: log Σ_{a present} exp(logit) of each slice; no logit may exceed `top`."""
    powers = (logits - top).exp()
    if targets.table is not None:
        return (powers @ targets.table).log() + top
    return _take(powers, targets.slices[:, targets.present]).sum(1).log() + top


def _sum_by_slice(logits: Tensor, targets: ContrastTargets) -> Tensor:
    """Return [B, S]: log Σ_{a present} exp(logit) of each slice, for logits of any size."""
    found = _take(logits, targets.slices)
    return _mask(found, targets.present.unsqueeze(1)).logsumexp(dim=1)


def _take(values: Tensor, slices: Tensor) -> Tensor:
    """Return [B, C, S]: the values [B, V] in the slices [S, C]."""
    # Classes before slices: a softmax over ten neighboring numbers takes twice the time.
    rows = slices.T
    return values.index_select(1, rows.flatten()).reshape(len(values), *rows.shape)


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
