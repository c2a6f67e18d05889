"""What a federation's server knows between two rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from mpfedcl.methods import Server
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.arrival_state import ArrivalState


@dataclass(frozen=True)
class RoundState:
    """All that the next round depends on."""

    round: int
    server: Server
    prototypes: dict[str, tuple[int, Prototypes]]
    """Each client's latest prototypes and the round they came in."""
    median_length: float | None = None
    """Of the clients' changes in the last round that had any, where updates are bounded."""
    standings: Mapping[str, float] = field(default_factory=dict)
    """How far each client has gone the others' way, where updates are bounded."""
    virtual_seconds: float = 0.0
    """What the virtual clock shows, where there is one."""
    arrivals: ArrivalState | None = None
    """Who is under way, with asynchronous methods."""

    def to(self, device: torch.device) -> Self:
        """Return the state on a device."""
        return replace(
            self,
            server=Server(
                *(
                    {name: value.to(device) for name, value in part.items()}
                    for part in (self.server.params, self.server.extra, self.server.private)
                )
            ),
            prototypes={
                name: (received, rows.to(device))
                for name, (received, rows) in self.prototypes.items()
            },
            arrivals=None if self.arrivals is None else self.arrivals.to(device),
        )
