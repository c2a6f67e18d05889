"""FedBN (Li et al., ICLR 2021)."""

from mpfedcl.methods import Experiment, FedAvg, InvalidInput
from mpfedcl.models import is_normalization


class FedBN(FedAvg):
    """FedAvg for all parameters but those of normalization layers, which each client keeps."""

    name = "fedbn"
    summary = "FedAvg; normalization layers stay with each client"
    family = "personal models"
    paper = "Li et al., ICLR 2021"
    interpretation = (
        "The paper's layers are batch normalization with each client's statistics; here the "
        "scales and shifts stay with each client, of group normalization (--model.norm group) or "
        "of a trained ResNet-18, whose statistics are constants."
    )
    sends = "its model without normalization layers"
    keeps = "scales and shifts of its normalization layers"
    primary_predictor = "personal_classifier"

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        if experiment.model.norm == "none" and not experiment.encoder.train:
            raise InvalidInput(
                f"model.norm is 'none', and {self.name} keeps normalization layers with each "
                "client; it must be group (with --model.name cnn), or encoder.train must be true."
            )

    def shared(self, parameter: str) -> bool:
        """Send all but normalization layers."""
        return super().shared(parameter) and not is_normalization(parameter)
