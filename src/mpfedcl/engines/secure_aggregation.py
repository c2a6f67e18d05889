"""Secure aggregation in a simulation: the whole protocol in this process."""

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from mpfedcl.methods.messages import Broadcast, Failure, Total, Update
from mpfedcl.privacy.secure_aggregation import NothingOpened, describe_lost_round
from mpfedcl.privacy.secure_aggregation.client import SumClient
from mpfedcl.privacy.secure_aggregation.fixed_point import OutOfRange
from mpfedcl.privacy.secure_aggregation.layout import SumLayout
from mpfedcl.privacy.secure_aggregation.roster import Session
from mpfedcl.privacy.secure_aggregation.server import SumServer
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine, WrappedEngine

Vanishes = Callable[[int, str, str], bool]
"""(round, stage, client) -> whether the client drops out before it answers that stage."""


class SecureAggregationEngine(WrappedEngine):
    """Let another engine train, mask each update, and yield only the total."""

    def __init__(
        self,
        assembly: Assembly,
        engine: Engine,
        vanishes: Vanishes = lambda _round, _stage, _client: False,
    ) -> None:
        super().__init__(engine)
        self._layout = SumLayout(assembly)
        self._share = assembly.experiment.secure.threshold
        self._clock = assembly.clock
        self._vanishes = vanishes
        # Masks cancel out: no result depends on this token.
        self._run = secrets.token_hex(16)
        self._told: dict[str, Any] = {}

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update | Failure | Total]:
        """Train the named clients; yield their total, if enough are left to open it."""
        self._told = {}
        try:
            yield from self._add_up(broadcast, names, keep)
        except NothingOpened as error:
            self._told = {"warnings": [describe_lost_round(broadcast.round, error)]}

    def remarks(self) -> dict[str, Any]:
        """Return the remarks of the engine, and why the sum was lost."""
        return {**super().remarks(), **self._told}

    def _add_up(
        self, broadcast: Broadcast, names: Sequence[str], keep: Collection[str]
    ) -> Iterator[Failure | Total]:
        session = Session(self._run, broadcast.round, self._share)

        def left(stage: str, asked: Collection[str]) -> list[str]:
            return [n for n in asked if not self._vanishes(broadcast.round, stage, n)]

        with self._clock.phase("mask"):
            clients = {name: SumClient(name, session) for name in left("advertise", names)}
            adverts = {name: client.advertise() for name, client in clients.items()}
            server = SumServer(session, self._layout.size, adverts)
            for name in left("share", server.roster.names):
                server.take_shares(name, clients[name].share(server.roster))
        sharers = server.sharers
        for update in self._engine.train(broadcast, left("mask", sharers), keep=keep):
            assert not isinstance(update, Total)
            with self._clock.phase("mask"):
                try:
                    self._take(server, clients[update.client], update)
                except OutOfRange as error:
                    yield Failure(update.client, str(error))
        survivors = server.survivors
        with self._clock.phase("mask"):
            for name in left("reveal", survivors):
                server.take_revealed(name, clients[name].reveal(survivors))
            yield self._layout.total(
                server.open(), survivors, len(server.roster.names), server.bytes_up
            )

    def _take(self, server: SumServer, client: SumClient, update: Update | Failure) -> None:
        assert isinstance(update, Update)
        numbers = self._layout.encode(update, len(server.roster.names))
        masked = client.mask(numbers, server.shares_for(update.client))
        server.take_masked(update.client, masked)
