"""FedTGP, trainable global prototypes (Zhang et al., AAAI 2024)."""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, relu

from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import FedTgpSettings
from mpfedcl.methods import (
    Batch,
    Broadcast,
    Context,
    Method,
    PrototypePool,
    Server,
    SharesPrototypes,
    Tally,
)

_PROTOTYPES = "prototypes"
"""The name of [C, d] in the broadcast: the trained prototypes."""
_BATCH_SIZE = 10


class FedTGP(SharesPrototypes):
    """Only class means are sent; the server trains global prototypes that keep classes apart.

    The global prototypes are U = net(embedding of each class), with one hidden layer. The server
    minimizes -log softmax_c(-|m - U_c| - margin [c = y])_y over the clients' class means m of
    class y. The margin is the largest distance of a mean class to its nearest other, at most
    `fedtgp.margin`. The local loss is cross-entropy + λ |z - U_y|² / d.
    """

    name = "fedtgp"
    summary = "shares class means only; the server trains global prototypes"
    paper = "Zhang et al., AAAI 2024"
    interpretation = (
        "The personal model's classifier predicts; the authors' code takes the nearest global "
        "prototype. Batches at the server have 10 prototypes."
    )
    sends = "its class means"
    keeps = "its model; the server: the prototype network"
    primary_predictor = "personal_classifier"
    shares_model = False
    sends_pool = False
    clustering = "mean"
    normalizes = False
    settings: FedTgpSettings
    search_space = {**Method.search_space, "fedtgp__weight": (0.1, 1.0, 10.0)}

    def prepare(self, broadcast: Broadcast) -> Tensor:
        """Return the trained prototypes [C, d]; none before the second round."""
        like = broadcast.pool.vectors
        return broadcast.extra.get(_PROTOTYPES, like.new_zeros(0, like.shape[1]))

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy + λ times the squared distance to the prototype of the class."""
        embeddings, logits = context.apply(params, batch.inputs)
        entropy = batch.cross_entropy(logits)
        if not len(context.received):
            return entropy
        squares = (embeddings - context.received[batch.labels]).square().mean(dim=-1)
        return entropy + self.settings.weight * batch.mean(squares)

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Train the prototypes on the clients' class means."""
        if not any(len(each) for each in tally.prototypes.values()):
            return server
        pool = PrototypePool.gather(tally.prototypes, num_classes=self.num_classes)
        net = dict(server.private) or self._first_network(pool)
        rounds = int(net["rounds"])
        weights = {n: w.clone().requires_grad_() for n, w in net.items() if n != "rounds"}
        margin = min(_largest_gap(pool), self.settings.margin)
        order = generator(self.experiment.seed, rounds, "trained prototypes")
        for _ in range(self.settings.epochs):
            for rows in torch.split(torch.randperm(len(pool), generator=order), _BATCH_SIZE):
                _descend(weights, pool.vectors[rows], pool.labels[rows], margin, self.settings.lr)
        trained = {n: w.detach() for n, w in weights.items()}
        return replace(
            server,
            extra={_PROTOTYPES: _make_prototypes(trained)},
            private={**trained, "rounds": net["rounds"] + 1},
        )

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return one global prototype per class: the average over its owners."""
        return pool.averaged_over_owners()

    def _first_network(self, pool: PrototypePool) -> Tensors:
        """Return the network as PyTorch's layers begin: normal embeddings, uniform weights."""
        draws, size = generator(self.experiment.seed, "prototype network"), pool.dimension
        shapes = {"hidden": (size, size), "bias": (size,), "out": (size, size), "offset": (size,)}
        bound = 1 / math.sqrt(size)
        drawn = {
            name: bound * (2 * torch.rand(*shape, generator=draws) - 1)
            for name, shape in shapes.items()
        }
        drawn["embedding"] = torch.randn(self.num_classes, size, generator=draws)
        found = {name: value.to(pool.vectors) for name, value in drawn.items()}
        return {**found, "rounds": torch.tensor(0)}


def _make_prototypes(net: Tensors) -> Tensor:
    """Return the prototypes [C, d] of all classes."""
    hidden = relu(net["embedding"] @ net["hidden"].T + net["bias"])
    return hidden @ net["out"].T + net["offset"]


def _descend(weights: Tensors, points: Tensor, labels: Tensor, margin: float, lr: float) -> None:
    """Take one step, in place, on the margin loss of some class means."""
    distances = torch.cdist(
        points, _make_prototypes(weights), compute_mode="donot_use_mm_for_euclid_dist"
    )
    shifted = distances.scatter_add(
        1, labels.unsqueeze(1), distances.new_full((len(labels), 1), margin)
    )
    loss = cross_entropy(-shifted, labels)
    for weight, slope in zip(
        weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True
    ):
        weight.data.sub_(slope, alpha=lr)


def _largest_gap(pool: PrototypePool) -> float:
    """Return the largest distance of a class's mean to that of the nearest other class."""
    means = pool.averaged_over_owners().vectors
    if len(means) < 2:
        return 0.0
    return float(torch.cdist(means, means).fill_diagonal_(torch.inf).amin(dim=1).max())
