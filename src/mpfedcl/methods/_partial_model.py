"""Methods whose clients each train a part of the model: some units of every hidden layer."""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import Part, generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.base import Batch, Context, Server, Tally
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.methods.messages import Broadcast
from mpfedcl.models.units import feeding_layers, hidden_units, mask_params

_LEAST_SCORE = 1e-12
"""Added to scores: units without a score are equally likely, and follow all others."""


class PartialModel(FedAvg, ABC):
    """FedAvg on parts of the model; a subclass defines each client's part in `masks`."""

    name = ""
    sends = "its part of the model"
    totals_suffice = False
    share: float
    """The share of the units of each hidden layer that a client trains."""
    fill: Literal["holders", "zero"] = "holders"
    """Whether to average a parameter over the clients that trained it, or all, others unchanged."""
    scales = False
    """Whether activations of a part are scaled up to those of the whole model during training."""

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        model = experiment.model.name
        if model not in (None, "mlp", "cnn"):
            raise InvalidInput(
                f"model.name is {model!r}; with method {self.name} it must be mlp or cnn, whose "
                "hidden units are known."
            )
        for field in ("train", "share"):
            if patterns := getattr(experiment.model, field):
                raise InvalidInput(
                    f"model.{field} is {' '.join(patterns)!r}; with method {self.name} it must be "
                    "left out: the method draws the part of the model that a client trains."
                )
        rule = experiment.aggregation.rule
        if rule != "mean":
            raise InvalidInput(
                f"aggregation.rule is {rule!r}; with method {self.name} it must be mean: clients "
                "hold different parts of the model."
            )

    @abstractmethod
    def masks(self, server: Server, client: str, round_number: int) -> Tensors:
        """Return boolean masks [units] by hidden layer of the units that a client is sent.

        An empty dictionary means the whole model. Parameters that a client was not sent keep the
        server's values in its update.
        """

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return the cross-entropy of the part, with scaled activations if `scales`."""
        if self.scales and self.share < 1:
            # Larger weights from hidden units make up for those that are missing.
            sizes, params = hidden_units(params), dict(params)
            for layer, before in feeding_layers(params).items():
                if before in sizes:
                    factor = sizes[before] / self._num_kept(sizes[before])
                    params[f"{layer}.weight"] = params[f"{layer}.weight"] * factor
        return super().loss(params, batch, context)

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Average each parameter over the clients that trained it; untrained ones are unchanged."""
        if self.fill == "holders" and tally.units:
            means = mean_of_holders(server.params, means, tally)
        return super().reduce(server, means, tally)

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Return the share of hidden units that no client has in this round."""
        if not broadcast.units:
            return {}
        parts = list(broadcast.units.values())
        had = [torch.stack([part[layer] for part in parts]).any(0) for layer in parts[0]]
        idle = sum(int((~each).sum()) for each in had)
        return {"parts": {"untrained_units": idle / sum(len(each) for each in had)}}

    def draw_units(self, params: Tensors, scores: Tensors, *key: Part) -> Tensors:
        """Draw the units of a part from each hidden layer, in proportion to their scores."""
        if self.share == 1:
            return {}
        seed = self.experiment.seed
        return {
            layer: draw_weighted(
                scores.get(layer, torch.zeros(size, dtype=torch.float64)),
                self._num_kept(size),
                generator(seed, *key, "units", layer),
            ).to(params[f"{layer}.weight"].device)
            for layer, size in hidden_units(params).items()
        }

    def _num_kept(self, size: int) -> int:
        return max(1, round(self.share * size))


def draw_weighted(scores: Tensor, count: int, key: torch.Generator) -> Tensor:
    """Return a mask of `count` units, drawn one after the other in proportion to their scores."""
    draws = torch.rand(len(scores), generator=key, dtype=torch.float64)
    # The largest of u^(1/score): as powers they would all be zero.
    places = (draws.log() / (scores.cpu() + _LEAST_SCORE)).topk(count).indices
    return torch.zeros(len(scores), dtype=torch.bool).index_fill(0, places, True)


def mean_of_holders(params: Tensors, means: Tensors, tally: Tally) -> Tensors:
    """Return Σ n_i m_i w_i / Σ n_i m_i, given means over all clients with unchanged values."""
    total = sum(tally.weights)
    held = {n: torch.zeros_like(value, dtype=torch.float64) for n, value in means.items()}
    for name, weight in zip(tally.names, tally.weights, strict=True):
        masks = mask_params(params, tally.units.get(name, {}))
        for each, value in held.items():
            value.add_(masks[each], alpha=weight)
    found = {}
    for name, mean in means.items():
        share = held[name] / total
        moved = params[name] + (mean - params[name]) / share.to(mean)
        # Bit-identical to the mean if all or no clients trained a parameter.
        found[name] = torch.where(share == 1, mean, torch.where(share == 0, params[name], moved))
    return found
