"""FedPer (Arivazhagan et al., 2019)."""

from functools import cached_property

from mpfedcl.experiment.method_settings import FedPerSettings
from mpfedcl.methods import Experiment, FedAvg, InvalidInput, Tensors


class FedPer(FedAvg):
    """The first layers are averaged, the last ones stay with each client; all are trained together.

    Layers are counted by position in the model; a normalization belongs to the layer before it.
    """

    name = "fedper"
    summary = "averages the first layers; the last stay with each client"
    family = "personal models"
    paper = "Arivazhagan et al., arXiv 2019"
    interpretation = "All clients begin with the same last layers."
    sends = "all layers but the last"
    keeps = "its last layers"
    primary_predictor = "personal_classifier"
    settings: FedPerSettings
    search_space = {**FedAvg.search_space, "fedper__layers": (1, 2)}

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        if self.settings.layers and experiment.privacy.has_budget:
            raise InvalidInput(
                f"fedper.layers is {self.settings.layers}; with a privacy budget it must be 0: "
                "only a model that clients share may be evaluated there."
            )

    def shared(self, parameter: str) -> bool:
        """Send all but the last layers."""
        return parameter not in self._personal

    @cached_property
    def _personal(self) -> frozenset[str]:
        """The parameters of the last layers, found by their position in the model."""
        layers, number = _by_layer(self.initial), self.settings.layers
        if number > len(layers):
            raise InvalidInput(
                f"fedper.layers is {number}; the model has {len(layers)} layers, so it must be at "
                f"most {len(layers)}."
            )
        return frozenset(name for layer in layers[len(layers) - number :] for name in layer)


def _by_layer(params: Tensors) -> list[list[str]]:
    """Group parameters by layer: each matrix begins a layer, which includes biases and norms."""
    layers: list[list[str]] = []
    for name, value in params.items():
        if value.dim() > 1 or not layers:
            layers.append([])
        layers[-1].append(name)
    return layers
