"""The contrastive loss L_R between embeddings and the prototypes of a pool."""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mpfedcl.prototypes.pool import Padding, PrototypePool

Form = Literal["slots", "pooled", "literal"]


class ContrastTargets(NamedTuple):
    """A pool as the loss wants it: tensors only, made once a round and used for every batch.

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
    """[C] bool, the classes that somebody holds."""


def prepare_contrast(pool: PrototypePool, padding: Padding = "all") -> ContrastTargets:
    """Lay a pool out for `contrastive_loss`; the prototypes are constants from here on."""
    slots = pool.slots(padding).flatten(0, 1)
    means = torch.arange(pool.num_classes, device=slots.device) + len(pool)
    if len(pool):
        slices, repeats = torch.unique(
            torch.where(slots < 0, means, slots), dim=0, return_counts=True
        )
    else:
        # One slice of absent classes: the arithmetic of the loss goes through and yields 0.
        slices, repeats = means.unsqueeze(0), torch.ones_like(means[:1])
    return ContrastTargets(
        vectors=torch.cat([pool.vectors, pool.class_means()]).detach(),
        classes=torch.cat([pool.labels, torch.full_like(means, -1)]),
        slices=slices,
        weights=repeats.to(pool.vectors.dtype) / repeats.sum(),
        present=pool.present,
    )


def contrastive_loss(
    z: Tensor,
    labels: Tensor,
    mask: Tensor,
    targets: ContrastTargets,
    temperature: float = 0.07,
    form: Form = "slots",
) -> Tensor:
    """Return L_R, a scalar, for embeddings z [B, d] of classes `labels` [B].

    With p_ik(a) = exp(z·U[i,k,a]/τ) / Σ_{a' present} exp(z·U[i,k,a']/τ):

        slots    mean over samples, clients i and slots k of -log p_ik(y)
        pooled   mean over samples of -log( Σ_{m of class y} exp(z·u_m/τ) / Σ_m exp(z·u_m/τ) )
        literal  as slots, with the mean of -log p_ik(a) over the present classes a other than y

    Samples with `mask` False, and samples whose class is absent, are left out of the mean; if none
    remains the loss is 0, with a gradient of zeros. Only masks decide, so it can be transformed by
    `torch.func.vmap` and `grad`.
    """
    label = labels.where(mask, 0)
    counted = mask & targets.present[label]
    # What is left out is set to 0 first: whatever a padding row holds, its gradient is 0, not NaN.
    z = z.masked_fill(~counted.unsqueeze(1), 0)
    logits = (z / temperature) @ targets.vectors.T
    if form == "pooled":
        losses = _contrast_all(logits, label, targets)
    else:
        losses = _contrast_slices(logits, label, targets, literal=form == "literal")
    return losses.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def prototype_contrastive_loss(
    z: Tensor,
    labels: Tensor,
    pool: PrototypePool,
    temperature: float = 0.07,
    form: Form = "slots",
    padding: Padding = "all",
) -> Tensor:
    """Return L_R, a scalar whose gradient flows to z [B, d] only; see `contrastive_loss`.

    Both are used as they are: normalise z first if the pool was made from unit vectors.
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
    return contrastive_loss(z, labels.to(z.device, torch.int64), real, targets, temperature, form)


def _contrast_slices(
    logits: Tensor, label: Tensor, targets: ContrastTargets, *, literal: bool
) -> Tensor:
    """Return [B]: each sample's loss, averaged over the slices by their weights."""
    # Classes before slices: a softmax over ten neighbouring numbers takes twice the time.
    rows = targets.slices.T
    logits = logits.index_select(1, rows.flatten()).reshape(len(logits), *rows.shape)
    present = targets.present.unsqueeze(1)
    log_share = _mask(logits, present).log_softmax(dim=1)
    place = label.view(-1, 1, 1).expand(-1, 1, rows.shape[1])
    aim = log_share.gather(1, place).squeeze(1)
    if literal:
        # masked, not multiplied: an absent class may stand at minus infinity.
        everything = log_share.masked_fill(~present, 0).sum(1)
        aim = (everything - aim) / (targets.present.sum() - 1).clamp(min=1)
    return -(aim @ targets.weights)


def _contrast_all(logits: Tensor, label: Tensor, targets: ContrastTargets) -> Tensor:
    """Return [B]: each sample's loss by one softmax over all real prototypes."""
    log_share = _mask(logits, targets.classes >= 0).log_softmax(dim=1)
    return -_mask(log_share, targets.classes == label.unsqueeze(1)).logsumexp(dim=1)


def _mask(logits: Tensor, keep: Tensor) -> Tensor:
    """Put what is not kept out of a softmax's reach; finite, so that a row of nothing is no NaN."""
    return logits.masked_fill(~keep, torch.finfo(logits.dtype).min)
