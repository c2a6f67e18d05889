"""The prototypes of clients that have trained: their own samples embedded, then clustered."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mpfedcl.core.rng import seed_for
from mpfedcl.data.client_data import ClientData
from mpfedcl.engines.trained_clients import TrainedClients, distinct_groups
from mpfedcl.methods import prototype_rule
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.assembly import Assembly


class ClientPrototypes:
    """Makes the prototypes of several clients together."""

    def __init__(self, assembly: Assembly) -> None:
        self._seed = assembly.experiment.seed
        self._rule = prototype_rule(assembly.method)
        like = next(iter(assembly.initial.values()))
        self._none = Prototypes.empty(assembly.model.embedding_size, like.dtype, like.device)

    def none(self) -> Prototypes:
        """Return what a client has that makes no prototypes."""
        return self._none

    @torch.no_grad()
    def embed(
        self, clients: Sequence[ClientData], groups: Iterable[TrainedClients]
    ) -> list[Tensor]:
        """Return the clients' embeddings of their own samples, where prototypes are made."""
        found = {
            name: self._rule.project(embeddings)
            for group in distinct_groups(groups)
            for name, embeddings in zip(group.names, group.embed(), strict=True)
        }
        return [found[client.name] for client in clients]

    def cluster(
        self, clients: Sequence[ClientData], embeddings: Sequence[Tensor], round_number: int
    ) -> list[Prototypes]:
        """Return each client's prototypes."""
        # A client whose training has blown up sends no prototypes; the guard deals with its model.
        sound = [number for number, each in enumerate(embeddings) if _is_sound(each)]
        rows = self._rule.summarize(
            [embeddings[number] for number in sound],
            [clients[number].labels for number in sound],
            [seed_for(self._seed, round_number, clients[n].name, "clusters") for n in sound],
        )
        found = dict(zip(sound, rows, strict=True))
        return [found.get(number, self._none) for number in range(len(clients))]


def _is_sound(embeddings: Tensor) -> bool:
    """Tell whether embeddings can be clustered: all finite, and so are their squares."""
    return bool(embeddings.square().sum(dtype=torch.float64) < 1e30)
