"""Gradient inversion: reconstruct images from the update of one client.

The gradient of a linear layer's weights for one neuron is a sum of the inputs, each times the
error at that neuron; that of its bias is the sum of the errors. Their quotient is the input
itself if only one image activates the neuron, and a mixture of inputs otherwise. So the first layer
of the MLP gives one reconstruction per neuron, without the optimization that deep leakage from
gradients needs for other layers.

The attacker is the server: it has the model that it sent and the model that it received. Each image
of the client is compared with the most similar reconstruction (SSIM), and so are images of other
clients. An image counts as reconstructed if the similarity is above 0.9.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curious_server import Digits, SeenRound, draw_holdings, load_digits, observe
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import pixel_constants
from outcome import Outcome
from ssim import ssim

READ_OFF = 0.9
CLIENTS = 5
JUDGED = 12
"""Images of each client that are looked for."""
WEIGHT, BIAS = "hidden.0.weight", "hidden.0.bias"


@dataclass(frozen=True)
class Case:
    """A client's images and steps, and the share of them that may be read off."""

    name: str
    images: int
    batch: int
    least: float
    most: float
    settings: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("1 image, one step", 1, 1, 1, 1),
    Case("8 images, one step", 8, 8, 0.2, 1),
    Case("32 images, one step", 32, 32, 0, 0.5),
    Case("100 images, 4 steps of 32", 100, 32, 0, 0.1),
    Case("400 images, 13 steps of 32", 400, 32, 0, 0.05),
    Case("8 images, secure sum of 5", 8, 8, 0, 0.5, {"secure_aggregation": True}),
    Case("8 images, let out by budget 3", 8, 8, 0, 0, {"privacy__epsilon": 3.0}),
]


def attack(*, full: bool) -> list[Outcome]:
    """Read images off the first round's updates."""
    digits = load_digits("fedavg")
    outcomes = []
    for case in CASES:
        own, strangers = measure(digits, case, range(10 if full else 2))
        share = float((own > READ_OFF).double().mean())
        expected = (
            f"at least {100 * case.least:g} % read off"
            if case.least
            else f"at most {100 * case.most:g} % read off"
        )
        seen = f"{100 * share:.0f} %, SSIM {own.mean():.2f}, others {strangers.mean():.2f}"
        ok = case.least <= share <= case.most
        outcomes.append(Outcome(f"image from an update: {case.name}", expected, seen, ok))
    return outcomes


def measure(digits: Digits, case: Case, seeds: range) -> tuple[Tensor, Tensor]:
    """Return the similarity of clients' images and of strangers' to the best picture of each."""
    own, strangers = [], []
    for seed in seeds:
        holdings, others = draw_holdings(CLIENTS, case.images, len(digits.labels), seed)
        given = {"seed": seed, "rounds": 1, "train__batch_size": case.batch, **case.settings}
        (seen,) = observe(digits, holdings, **given)
        pictures = _pictures(digits, seen, _seen_model(seen, case))
        held = torch.cat(holdings) if case.settings else holdings[0]
        own.append(_best(pictures, digits.pixels[held[:JUDGED]]))
        strangers.append(_best(pictures, digits.pixels[others[:JUDGED]]))
    return torch.cat(own), torch.cat(strangers)


def _seen_model(seen: SeenRound, case: Case) -> Tensors:
    """Return the model that the attacker sees: a client's, the mean of all, or what is let out."""
    if "privacy__epsilon" in case.settings:
        return seen.following
    if case.settings:
        (total,) = seen.totals
        return {name: value / total.weight for name, value in total.averaged.items()}
    averaged = next(iter(seen.updates.values())).averaged
    assert isinstance(averaged, dict)
    return averaged


def _pictures(digits: Digits, seen: SeenRound, model: Tensors) -> Tensor:
    """Return what the quotients of the first layer's changes show, in 0 to 1."""
    sent = seen.broadcast.params
    weight, bias = (model[name].double() - sent[name] for name in (WEIGHT, BIAS))
    told = bias.abs() > bias.abs().max() * 1e-3
    inputs = weight[told] / bias[told].unsqueeze(1)
    mean, deviation = pixel_constants(digits.experiment)
    return (inputs * deviation + mean).view(-1, 28, 28).clamp(0, 1).float()


def _best(pictures: Tensor, images: Tensor) -> Tensor:
    """Return each image's similarity to the most similar picture."""
    return torch.stack(
        [ssim(pictures, each.expand(len(pictures), 28, 28)).max() for each in images]
    )
