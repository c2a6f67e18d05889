"""The contrastive loss L_R between embeddings and the prototypes of a pool."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.functional import embedding_bag

from mpfedcl.prototypes.pool import Padding, PrototypePool
from mpfedcl.prototypes.targets import ContrastTargets, MemberLists, MemberTable, prepare_contrast

Form = Literal["slots", "pooled", "literal"]

_LARGEST_EXPONENT = 80
"""exp(-80) is well above the smallest float32, so a sum of such terms keeps all its digits."""


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
    """Tell whether no sample is left out, where that is cheap to know; False where it is not."""
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
    """Return a bound on |z·u|, by the lengths of the longest."""
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
