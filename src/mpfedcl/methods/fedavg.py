"""FedAvg (McMahan et al., 2017)."""

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods.base import Method


class FedAvg(Method):
    """w = sum_i |D_i| / |D| * w_i: the clients' models are averaged by their number of samples."""

    name = "fedavg"
    summary = "averages the clients' models by number of samples"
    paper = "McMahan et al., AISTATS 2017"
    totals_suffice = True

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        if not experiment.share_model:
            raise InvalidInput(
                f"share_model is False; {self.name} averages models, so it must be True."
            )
