"""FedProx (Li et al., MLSys 2020)."""

from torch import Tensor

from mpfedcl.experiment.method_settings import FedProxSettings
from mpfedcl.methods import Batch, Context, FedAvg, Tensors


class FedProx(FedAvg):
    """FedAvg with the local loss f_i(w) + mu/2 |w - w_global|^2; the proximal term limits drift."""

    name = "fedprox"
    summary = "FedAvg with a proximal term: weights stay near the global ones"
    paper = "Li et al., MLSys 2020"
    settings: FedProxSettings
    search_space = {**FedAvg.search_space, "fedprox__mu": (0.001, 0.01, 0.1, 1.0)}

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy + mu/2 |w - w_global|^2."""
        distances = [(params[name] - context.start[name]).square().sum() for name in params]
        proximity = self.settings.mu / 2 * sum(distances[1:], distances[0])
        return super().loss(params, batch, context) + proximity
