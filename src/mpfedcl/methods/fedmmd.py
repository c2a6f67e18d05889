"""FedMMD, two-stream federated learning (Yao et al., VCIP 2018 and arXiv 2019)."""

import torch
from torch import Tensor

from mpfedcl.experiment.method_settings import FedMmdSettings
from mpfedcl.methods import Batch, Context, FedAvg, Tensors

_POWERS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e2, 1e3, 1e4, 1e5, 1e6)
VARIANCES = tuple(sorted((*_POWERS, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0)))
"""Variances of the Gaussian kernels that are summed, as in the authors' code."""


class FedMmd(FedAvg):
    """FedAvg whose clients keep their outputs distributed like those of the received model.

    The local loss is cross-entropy + weight * MMD^2 between the outputs x of the trained model and
    y of the received one: mean k(x, x') + mean k(y, y') - 2 mean k(x, y) with k a sum of 19
    Gaussians.
    """

    name = "fedmmd"
    summary = "FedAvg; keeps outputs distributed like the global model's"
    paper = "Yao et al., VCIP 2018 and arXiv 2019"
    interpretation = "The discrepancy has no lower threshold."
    settings: FedMmdSettings
    search_space = {**FedAvg.search_space, "fedmmd__weight": (0.01, 0.1, 1.0)}

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy + weight * MMD² of trained and received outputs."""
        trained, frozen = (context.apply(model, batch.inputs) for model in (params, context.start))
        place = 1 if self.settings.outputs == "logits" else 0
        compare = discrepancy if self.settings.form == "mmd" else _half_square
        between = compare(trained[place], frozen[place], batch.mask)
        return batch.cross_entropy(trained[1]) + self.settings.weight * between


def discrepancy(left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Return MMD² of two sets [B, d] with the same mask [B]: Σ_ab v_a v_b k(u_a, u_b).

    u are the rows of both sets; v is 1/n for the left and -1/n for the right. The diagonal counts.
    """
    share = mask.to(left) / mask.sum().clamp(min=1)
    points = torch.cat([left, right]).masked_fill(~torch.cat([mask, mask]).unsqueeze(1), 0)
    # Differences, not products, which are too inexact for the narrowest kernels.
    squares = (points.unsqueeze(1) - points.unsqueeze(0)).square().sum(-1)
    rates = -0.5 / torch.tensor(VARIANCES, dtype=left.dtype, device=left.device)
    kernel = (squares.unsqueeze(-1) * rates).exp().sum(-1)
    shares = torch.cat([share, -share])
    return shares @ kernel @ shares


def _half_square(left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    squares = (left - right).square().sum(-1).masked_fill(~mask, 0)
    return squares.sum() / 2 / mask.sum().clamp(min=1)
