"""Secure aggregation in a simulation: the collector runs the whole protocol in this process."""

import secrets
from collections.abc import Collection
from typing import Any

from mpfedcl.methods.messages import Failure, Total, Update
from mpfedcl.privacy.secure_aggregation import NothingOpened, describe_lost_round
from mpfedcl.privacy.secure_aggregation.client import SumClient
from mpfedcl.privacy.secure_aggregation.fixed_point import OutOfRange
from mpfedcl.privacy.secure_aggregation.layout import SumLayout
from mpfedcl.privacy.secure_aggregation.roster import Session
from mpfedcl.privacy.secure_aggregation.server import SumServer
from mpfedcl.rounds.aggregation import Peers
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.collector import TotalCollector


class MaskingCollector(TotalCollector):
    """Masks each update as its client would, and opens only the total."""

    def __init__(self, *arguments: Any, assembly: Assembly) -> None:
        super().__init__(*arguments)
        self._layout = SumLayout(assembly)
        # Masks cancel out: no result depends on this token.
        run, share = secrets.token_hex(16), assembly.experiment.secure.threshold
        session = Session(run, self._broadcast.round, share)
        self._clients = {n: SumClient(n, session) for n in self._left("advertise", self._chosen)}
        adverts = {name: client.advertise() for name, client in self._clients.items()}
        self._sum: SumServer | None = None
        try:
            self._sum = SumServer(session, self._layout.size, adverts)
            for name in self._left("share", self._sum.roster.names):
                self._sum.take_shares(name, self._clients[name].share(self._sum.roster))
            self._to_mask = {*self._left("mask", self._sum.sharers)}
        except NothingOpened as error:
            self._lose(error)

    def drops_out(self, stage: str, client: str) -> bool:
        """Return whether a client drops out before it answers a stage of the protocol."""
        return False

    def add(self, update: Update | Failure | Total) -> None:
        """Mask the update of a client, and add it to the total."""
        if not isinstance(update, Update):
            super().add(update)
        elif self._sum is not None and update.client in self._to_mask:
            try:
                values = self._layout.encode(update, len(self._sum.roster.names))
                shares = self._sum.shares_for(update.client)
                masked = self._clients[update.client].mask(values, shares)
                self._sum.take_masked(update.client, masked)
            except OutOfRange as error:
                self._reject(update, str(error))

    def settle(self, peers: Peers | None = None) -> None:
        """Open the total, if enough clients are left."""
        if self._sum is None:
            return
        opened, self._sum = self._sum, None
        try:
            survivors = opened.survivors
            for name in self._left("reveal", survivors):
                opened.take_revealed(name, self._clients[name].reveal(survivors))
            size = len(opened.roster.names)
            super().add(self._layout.total(opened.open(), survivors, size, opened.bytes_up))
        except NothingOpened as error:
            self._lose(error)

    def _left(self, stage: str, asked: Collection[str]) -> list[str]:
        return [name for name in sorted(asked) if not self.drops_out(stage, name)]

    def _lose(self, error: NothingOpened) -> None:
        self._sum = None
        self._remarks["warnings"] = [describe_lost_round(self._broadcast.round, error)]
