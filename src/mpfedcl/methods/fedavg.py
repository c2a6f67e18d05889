"""FedAvg (McMahan et al., AISTATS 2017)."""

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods.base import Method


class FedAvg(Method):
    """Each client trains the global model; w <- sum_i n_i / n w_i, with n_i its sample count."""

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
