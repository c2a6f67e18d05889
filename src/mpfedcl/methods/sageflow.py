"""Sageflow (Park et al., NeurIPS 2021)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy, log_softmax

from mpfedcl.experiment.method_settings import SageflowSettings
from mpfedcl.methods import Arrival, Asynchronous, Experiment, InvalidInput, Server, Update
from mpfedcl.methods._asynchronous import freshness, mix

_SMALLEST_LOSS = 1e-8


class Sageflow(Asynchronous):
    """Groups updates by model version at each tick, and weights them by loss on public images.

    Clients of the same version are averaged with weights n_k / F_k^delta if E_k is below a
    threshold: F_k is a model's loss on the public images, E_k the entropy of its predictions.
    Versions are averaged by samples / (staleness + 1)^lambda and mixed into w with the weight
    gamma.
    """

    name = "sageflow"
    summary = "weighs models by their loss on public images, stale ones less"
    paper = "Park et al., NeurIPS 2021"
    interpretation = (
        "Clients and versions are weighted by samples, as in the paper; its code counts clients. "
        "In the first ticks no client is left out."
    )
    keeps = "nothing; the server has public images"
    timing = "ticks"
    defaults: ClassVar[Mapping[str, Any]] = {**Asynchronous.defaults, "public__size": 1000}
    settings: SageflowSettings
    search_space = {**Asynchronous.search_space, "sageflow__entropy": (0.5, 1.0, 2.0)}

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        if experiment.public.size == 0:
            raise InvalidInput(
                "public.size is 0; with sageflow it must be at least 1: the server evaluates "
                "models on public images."
            )

    @torch.no_grad()
    def weigh(self, update: Update, server: Server) -> float:
        """Return n_k 1[E_k < E_th] / F_k^δ: entropy and loss on the public images."""
        params = update.written_out().averaged
        assert self.public is not None
        assert isinstance(params, dict)
        _, logits = self.public.apply(params, self.public.inputs)
        likelihoods = log_softmax(logits.double(), -1)
        entropy = -float((likelihoods.exp() * likelihoods).sum(-1).mean())
        loss = float(cross_entropy(logits.double(), self.public.labels))
        is_warm = int(server.private.get("ticks", 0)) >= self.settings.warm_up
        if is_warm and entropy >= self.settings.entropy:
            return 0.0
        penalty: float = max(loss, _SMALLEST_LOSS) ** self.settings.loss_power
        return update.num_samples / penalty

    def arrive(self, server: Server, arrivals: Sequence[Arrival]) -> Server:
        """Return w <- (1 - γ) w + γ Σ_i a_i v_i,  a_i ∝ (samples of version i) / (s_i + 1)^λ."""
        private = {"ticks": server.private.get("ticks", torch.zeros((), dtype=torch.int64)) + 1}
        ages = [freshness(each.staleness, self.settings.age_power) for each in arrivals]
        weights = [each.num_samples * age for each, age in zip(arrivals, ages, strict=True)]
        if not arrivals:
            return replace(server, private=private)
        groups = [
            (weight / sum(weights), each.means)
            for weight, each in zip(weights, arrivals, strict=True)
        ]
        merged = {
            name: sum((share * means[name] for share, means in groups), torch.zeros_like(value))
            for name, value in server.params.items()
        }
        params = mix(server.params, merged, self.settings.mixing)
        return replace(server, params=params, private=private)
