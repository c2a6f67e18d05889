"""Federated Dropout (Caldas et al., 2018)."""

from mpfedcl.experiment.method_settings import FedDropoutSettings
from mpfedcl.methods import Experiment, FedAvg, PartialModel, Server, Tensors


class FedDropout(PartialModel):
    """Each client trains a smaller network: a random share of the units of each hidden layer.

    The units are drawn for each client and round. The server averages each parameter over the
    clients that trained it: w <- sum_i n_i m_i w_i / sum_i n_i m_i with masks m_i in {0, 1}.
    Traffic in both directions and computation shrink; the whole model predicts.
    """

    name = "fed-dropout"
    summary = "each client trains a random part of the model's units"
    paper = "Caldas et al., 2018"
    interpretation = (
        "A parameter is averaged over the clients that trained it; no lossy compression."
    )
    settings: FedDropoutSettings
    search_space = {**FedAvg.search_space, "fed_dropout__scale": (False, True)}

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        self.share, self.fill = self.settings.share, self.settings.fill
        self.scales = self.settings.scale

    def masks(self, server: Server, client: str, round_number: int) -> Tensors:
        """Draw the units that a client trains in this round."""
        return self.draw_units(server.params, {}, round_number, client)
