"""FedBN (Li et al., ICLR 2021)."""

from mpfedcl.methods import Experiment, FedAvg, InvalidInput, Server, Tensors


class FedBN(FedAvg):
    """FedAvg for all parameters but those of normalization layers, which each client keeps."""

    name = "fedbn"
    summary = "FedAvg; normalization layers stay with each client"
    family = "personal models"
    paper = "Li et al., ICLR 2021"
    interpretation = (
        "Batch normalization (of resnet18 or your own model) stays with each client, running "
        "statistics included, as in the paper; so do the scales and shifts of group normalization "
        "(--model.norm group) and of a trained encoder, whose statistics are constants."
    )
    sends = "its model without normalization layers"
    keeps = "its normalization layers"
    primary_predictor = "personal_classifier"

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        name = experiment.model.name
        lacks = name in ("mlp", "linear") or (name == "cnn" and experiment.model.norm == "none")
        if lacks and not experiment.encoder.train:
            raise self._lacks_layers()

    def init_server(self, params: Tensors) -> Server:
        """Check that the model has layers to keep."""
        if not self.layers.normalization:
            raise self._lacks_layers()
        return super().init_server(params)

    def _lacks_layers(self) -> InvalidInput:
        return InvalidInput(
            f"model.name is {self.experiment.model.name!r} without normalization layers, which "
            f"{self.name} keeps with each client; it must be cnn with model.norm group, resnet8, "
            "resnet18 or your own model with some, or encoder.train must be true."
        )

    def shared(self, parameter: str) -> bool:
        """Send all but normalization layers."""
        return super().shared(parameter) and parameter not in self.layers.normalization
