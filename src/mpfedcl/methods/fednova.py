"""FedNova, normalized averaging (Wang et al., NeurIPS 2020)."""

from dataclasses import replace

from torch import zeros_like

from mpfedcl.experiment.method_settings import FedNovaSettings
from mpfedcl.methods import FedAvg, Server, Tally, Tensors, Update


class FedNova(FedAvg):
    """Averages directions d_i = (w - w_i) / a_i, with a_i the effective number of a client's steps.

    w <- w - (sum_i p_i a_i) (sum_i p_i d_i) with p_i = n_i / n: clients that take more steps no
    longer pull the average to their own optimum. Equivalently, FedAvg with the weights n_i / a_i
    and a longer step of the server. The server computes a_i itself, so that no client can forge it.
    """

    name = "fednova"
    summary = "averages updates divided by their steps, not models"
    paper = "Wang et al., NeurIPS 2020"
    keeps = "nothing; the server: a velocity, if it has momentum"
    needs_sgd = True
    settings: FedNovaSettings
    search_space = {**FedAvg.search_space, "fednova__momentum": (0.0, 0.5, 0.9)}

    def init_server(self, params: Tensors) -> Server:
        """Start with a velocity of zero if the server has momentum."""
        has_velocity = self.settings.momentum > 0
        rest = {name: zeros_like(value) for name, value in params.items()}
        return Server(params, private=rest if has_velocity else {})

    def weigh(self, update: Update, server: Server) -> float:
        """Return n_i / a_i."""
        return update.num_samples / self._length(update.num_samples)

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Move by c (mean - w), c = (sum_i p_i a_i) (sum_i p_i / a_i) >= 1."""
        lengths = [self._length(size) for size in tally.sizes]
        pairs = list(zip(tally.weights, lengths, strict=True))
        samples = sum(weight * length for weight, length in pairs)
        gone = sum(weight * length**2 for weight, length in pairs) / samples
        step = gone * sum(tally.weights) / samples
        velocity = {n: step * (mean - server.params[n]) for n, mean in means.items()}
        for name, before in server.private.items():
            velocity[name] += self.settings.momentum * before
        params = {n: server.params[n] + v for n, v in velocity.items()}
        kept = velocity if server.private else {}
        return replace(server, params={**server.params, **params}, private=kept)

    def _length(self, num_samples: int) -> float:
        train = self.experiment.train
        return train.effective_steps(train.num_steps(num_samples))
