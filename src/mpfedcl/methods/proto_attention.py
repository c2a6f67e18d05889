"""Prototype attention (after Michieli and Ozay, 2021)."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from mpfedcl.experiment.method_settings import ProtoAttentionSettings
from mpfedcl.methods import FedAvg, Prototypes, Server, SharesPrototypes, Tally, Tensors, Update
from mpfedcl.methods._prototypes import CLASS_MEANS, update_class_means

_LARGEST_EXPONENT = 50.0
"""Bounds the exponent, so that weights stay finite; beyond it one client dominates anyway."""


class ProtoAttention(SharesPrototypes, FedAvg):
    """FedAvg in which a client counts more if its class means are well separated.

    Its weight is n_i exp(margin_i / t). The margin is the mean difference between the distances of
    its class means to the nearest other global class mean and to their own one, in units of the
    mean distance between global class means. Those are the sample-weighted means of the last round.
    """

    name = "proto-attention"
    summary = "FedAvg; clients with well-separated class means count more"
    paper = "Michieli and Ozay, arXiv 2021"
    interpretation = (
        "The formula is ours, after the paper's abstract: margins are to last round's class means."
    )
    sends = "its model and class means"
    keeps = "nothing; the server: global class means"
    sends_pool = False
    clustering = "mean"
    settings: ProtoAttentionSettings
    search_space = {**FedAvg.search_space, "proto_attention__temperature": (0.3, 1.0, 3.0)}

    def weigh(self, update: Update, server: Server) -> float:
        """Return n exp(margin / temperature), or n before there are global class means."""
        if CLASS_MEANS not in server.private:
            return update.num_samples
        sign = 1 if self.settings.prefers == "wide" else -1
        margin = (
            find_margin(update.prototypes, server.private[CLASS_MEANS]) / self.settings.temperature
        )
        bounded = max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, margin))
        return update.num_samples * math.exp(sign * bounded)

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Average the models, and update the global class means for the next round."""
        renewed = update_class_means(server.private, tally.prototypes, self.num_classes)
        return replace(super().reduce(server, means, tally), private=renewed)


def find_margin(prototypes: Prototypes, means: Tensor) -> float:
    """Return the mean margin of class means: distance to the nearest other class minus their own.

    In units of the mean distance between the global means [C, d]. Classes without a global mean,
    which has zeros, are left out; 0 if nothing can be compared.
    """
    known = means.any(dim=1)
    unit = torch.pdist(means[known]).mean() if known.sum() > 1 else means.new_zeros(())
    own = known[prototypes.labels]
    if not own.any() or unit == 0:
        return 0.0
    labels = prototypes.labels[own]
    distances = torch.cdist(prototypes.vectors[own], means).masked_fill(~known, torch.inf)
    near = distances.gather(1, labels.unsqueeze(1)).squeeze(1)
    others = distances.scatter(1, labels.unsqueeze(1), torch.inf).amin(dim=1)
    return float((others - near).mean() / unit)
