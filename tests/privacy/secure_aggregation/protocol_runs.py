"""Whole secure aggregation in this process, in which clients vanish at any stage."""

from collections.abc import Collection, Mapping

import numpy
from cryptography.hazmat.primitives.asymmetric import ec

from mpfedcl.privacy.secure_aggregation.primitives import Ring
from mpfedcl.privacy.secure_aggregation.protocol import Session, SumClient, SumServer

SESSION = Session("0" * 32, 1, 2 / 3)
NAMES = ("ana", "bo", "cy", "di", "ed", "flo", "gil")
"""Five of these seven open a sum."""
NOBODY: Collection[str] = ()
KEYS = [ec.generate_private_key(ec.SECP384R1()) for _ in range(32)]
"""Keys of clients in the federation."""


class Sum:
    """A sum under way; each stage takes the names of those who vanish before they answer it."""

    def __init__(
        self,
        numbers: Mapping[str, Ring],
        session: Session = SESSION,
        gone: Collection[str] = NOBODY,
        *,
        signs: bool = False,
    ) -> None:
        self.numbers, self.session = numbers, session
        here = [name for name in numbers if name not in gone]
        self.keys = {name: KEYS[place] if signs else None for place, name in enumerate(here)}
        self.clients = {name: SumClient(name, session, self.keys[name]) for name in here}
        adverts = {name: client.advertise() for name, client in self.clients.items()}
        self.server = SumServer(session, len(next(iter(numbers.values()))), adverts)
        self.seen: dict[str, Ring] = {}

    def share(self, gone: Collection[str] = NOBODY) -> None:
        self._lose(gone)
        for name, client in self.clients.items():
            self.server.take_shares(name, client.share(self.server.roster))

    def mask(self, gone: Collection[str] = NOBODY) -> None:
        sharers = self.server.sharers
        self._lose(gone)
        for name in sharers:
            if name in self.clients:
                sealed = self.server.shares_for(name)
                self.seen[name] = self.clients[name].mask(self.numbers[name], sealed)
                self.server.take_masked(name, self.seen[name])

    def confirm(self, gone: Collection[str] = NOBODY) -> None:
        survivors = self.server.survivors
        self._lose(gone)
        for name in survivors:
            if name in self.clients:
                self.server.take_signature(name, self.clients[name].confirm(survivors))

    def reveal(self, gone: Collection[str] = NOBODY) -> None:
        signatures = self.server.signatures
        self._lose(gone)
        for name in signatures:
            if name in self.clients:
                self.server.take_revealed(name, self.clients[name].reveal(signatures))

    def run(
        self,
        before_share: Collection[str] = NOBODY,
        before_mask: Collection[str] = NOBODY,
        before_confirm: Collection[str] = NOBODY,
        before_reveal: Collection[str] = NOBODY,
    ) -> Ring:
        self.share(before_share)
        self.mask(before_mask)
        self.confirm(before_confirm)
        self.reveal(before_reveal)
        return self.server.open()

    def _lose(self, gone: Collection[str]) -> None:
        self.clients = {n: client for n, client in self.clients.items() if n not in gone}


def draw(names: Collection[str], size: int, seed: int = 0) -> dict[str, Ring]:
    generator = numpy.random.default_rng(seed)
    return {name: generator.integers(0, 2**64, size, dtype=numpy.uint64) for name in names}


def add_up(numbers: Mapping[str, Ring], names: Collection[str]) -> Ring:
    """Return the sum of some clients, by Python's own integers."""
    columns = zip(*(numbers[name].tolist() for name in names), strict=True)
    return numpy.array([sum(column) % 2**64 for column in columns], dtype=numpy.uint64)
