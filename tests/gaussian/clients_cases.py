"""Clients with known classes and effects, and what they come to by slow loops."""

from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpfedcl.gaussian import ClientMeans

Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class Client:
    """Some samples of unit length with their classes."""

    features: Tensor
    labels: Tensor


def draw_clients(
    seed: int, sizes: list[list[int]], *, size: int = 6, shift: float = 0.0, effect: float = 0.0
) -> list[Client]:
    """Draw `sizes[i][c]` samples of each class for each client, of unit length."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    means = draw(len(sizes[0]), size)
    clients = []
    for counts in sizes:
        moved = shift * draw(size)
        parts = [
            means[c] + moved + effect * draw(size) + draw(n, size) for c, n in enumerate(counts)
        ]
        features = torch.cat(parts)
        labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        order = torch.randperm(len(labels), generator=generator)
        unit = features / features.norm(dim=1, keepdim=True)
        clients.append(Client(unit[order], labels[order]))
    return clients


def group_means(clients: list[Client], num_classes: int) -> ClientMeans:
    """Return the class means of all clients, by a loop."""
    vectors, labels, counts, owners = [], [], [], []
    for owner, client in enumerate(clients):
        for label in range(num_classes):
            own = client.features[client.labels == label]
            if len(own):
                vectors.append(own.mean(0))
                labels.append(label)
                counts.append(float(len(own)))
                owners.append(owner)
    return ClientMeans(
        torch.stack(vectors),
        torch.tensor(labels),
        torch.tensor(counts, dtype=torch.float64),
        torch.tensor(owners),
        len(clients),
        num_classes,
    )


def within_by_loop(client: Client, num_classes: int) -> Array:
    """Return W_i = sum phi phi' - sum_c s_c s_c'/n_c, sample by sample."""
    size = client.features.shape[1]
    found = numpy.zeros((size, size))
    for row in client.features.numpy():
        found += numpy.outer(row, row)
    for label in range(num_classes):
        own = client.features[client.labels == label].numpy()
        if len(own):
            total = own.sum(0)
            found -= numpy.outer(total, total) / len(own)
    return found
