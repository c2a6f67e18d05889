"""The collectors of secure aggregation, which see only the total of a round.

In a simulation, the collector runs the whole protocol; remote clients mask their updates.
"""

import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import CollectsStatistics, OneShot, Tally
from mpfedcl.methods.messages import Failure, Total, Update
from mpfedcl.privacy.private_rounds import ALL_CLIENTS
from mpfedcl.privacy.secure_aggregation import NothingOpened, describe_lost_round
from mpfedcl.privacy.secure_aggregation.layout import SumLayout
from mpfedcl.privacy.secure_aggregation.primitives import OutOfRange
from mpfedcl.privacy.secure_aggregation.protocol import Session, SumClient, SumServer
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation import Peers
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.collector import UpdateCollector


class TotalCollector(UpdateCollector):
    """The total of a round; an impossible total rejects all its clients."""

    total: Total | None = None
    """The total of the accepted clients, once it is known."""

    @property
    def accepted(self) -> list[str]:
        """The clients whose updates are in the total."""
        return list(self.total.clients) if self.total else []

    def add(self, update: Update | Failure | Total) -> None:
        """Add the total, or note why a client is not in it."""
        if isinstance(update, Failure):
            self._reject(update, update.reason)
        elif isinstance(update, Update):
            self._reject(update, "its update is not masked, and this run has secure aggregation")
        elif reason := self._check_total(update):
            for name in update.clients:
                self._reject(Failure(name, ""), f"the total of all clients is impossible: {reason}")
        else:
            self._accept_total(update)

    def means(self) -> Tensors:
        """Return Σ w_i x_i / Σ w_i, in the types that clients send."""
        if self.total is None or not self.total.weight:
            return {}
        weight, template = self.total.weight, self._validator.template
        return {
            name: (value / weight).to(template[name]) for name, value in self.total.averaged.items()
        }

    def tally(self, sizes: Mapping[str, int], num_samples: int) -> Tally:
        """Return the total and the names of the clients in it."""
        assert self.total is not None
        share = self.total.num_samples / max(1, num_samples)
        return Tally(self.accepted, [], [], [], share, self.prototypes, self.sums)

    def pooled_statistics(self) -> Tensors:
        """Return the statistics that a method keeps of the total."""
        if self.total is None or not isinstance(self._method, OneShot):
            return {}
        return self._method.statistics_of(self.sums)

    def _accept_total(self, total: Total) -> None:
        self.total = total
        self.noise = total.noise
        self.weights = dict.fromkeys(total.clients, total.weight / len(total.clients))
        # In double precision, like sums of single clients.
        self.sums = {name: value.double() for name, value in total.summed.items()}
        self.bytes_up = total.num_bytes
        self.largest = {"parameters": total.num_parameters, "prototype_floats": 0}
        if self._method.trains and total.num_samples:
            self.mean_loss = total.loss / total.num_samples
        like = self._broadcast.pool.vectors
        none = Prototypes.empty(like.shape[1], like.dtype, like.device)
        if isinstance(self._method, OneShot):
            found = self._method.prototypes_of(Update(ALL_CLIENTS, 0, {}, none, None, self.sums))
            none = replace(found, vectors=found.vectors.to(like))
        self.prototypes = {ALL_CLIENTS: none}

    @torch.no_grad()
    def _check_total(self, total: Total) -> str | None:
        """Return why honest clients cannot have this total, or None."""
        if not total.is_possible:
            return "a number is out of range"
        if total.num_samples < 0 or total.weight < 0:
            return "its number of samples is negative"
        if total.weight:
            sent = self._broadcast.params
            squares = sum(
                float((value / total.weight - sent.get(name, 0)).square().sum())
                for name, value in total.averaged.items()
            )
            most = self._method.experiment.validation.max_norm
            if math.sqrt(squares) > most:
                return f"the model changed by {math.sqrt(squares):.3g}; at most {most:g}"
        elif any(bool(value.any()) for value in total.averaged.values()):
            return "models have come without any weight"
        if not isinstance(self._method, CollectsStatistics):
            return None
        return self._method.validate_totals(total.summed)


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
            for name in self._left("confirm", survivors):
                opened.take_signature(name, self._clients[name].confirm(survivors))
            for name in self._left("reveal", signatures := opened.signatures):
                opened.take_revealed(name, self._clients[name].reveal(signatures))
            super().add(self._layout.total(opened.open(), survivors, opened.bytes_up))
        except NothingOpened as error:
            self._lose(error)

    def _left(self, stage: str, asked: Collection[str]) -> list[str]:
        return [name for name in sorted(asked) if not self.drops_out(stage, name)]

    def _lose(self, error: NothingOpened) -> None:
        self._sum = None
        self._remarks["warnings"] = [describe_lost_round(self._broadcast.round, error)]
