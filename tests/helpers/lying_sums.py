"""A server that tells clients different lists of survivors, with some clients on its side."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy
from cryptography.hazmat.primitives.asymmetric import ec

from mpfedcl.privacy.secure_aggregation import NothingOpened, ProtocolError
from mpfedcl.privacy.secure_aggregation.primitives import (
    SECRET_BYTES,
    Ring,
    add_stream,
    join_shares,
    sign,
)
from mpfedcl.privacy.secure_aggregation.protocol import (
    Session,
    SumClient,
    SumServer,
    own_key,
    pair_key,
)

_SIZE = 4
"""Values of a client."""


class LyingServer:
    """A secure aggregation up to the masked values, and what its server then tries.

    The last `colluders` clients tell the server all that they know, and sign whatever it wants.
    The victim is the first client. If the server `hides` clients, it tells the victim that only as
    few as possible have shared their secrets, so that few masks are in the victim's values.
    """

    def __init__(
        self, names: Sequence[str], colluders: int, *, signs: bool = True, hides: bool = False
    ) -> None:
        self.names, self.victim = list(names), names[0]
        self.honest = self.names[: len(names) - colluders]
        self.colluders = self.names[len(self.honest) :]
        generator = numpy.random.default_rng(0)
        self.numbers: dict[str, Ring] = {
            name: generator.integers(0, 2**64, _SIZE, dtype=numpy.uint64) for name in names
        }
        session = Session("0" * 32, 1, 2 / 3)
        # Only clients whose signatures count need keys of their own.
        keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
        self._keys = keys if signs else {}
        self.clients = {n: SumClient(n, session, self._keys.get(n)) for n in names}
        adverts = {name: client.advertise() for name, client in self.clients.items()}
        self.server = SumServer(session, _SIZE, adverts)
        self.roster = self.server.roster
        for name, client in self.clients.items():
            self.server.take_shares(name, client.share(self.roster))
        others = [*self.colluders, *self.honest[1:]]
        self.seen_by_victim = others[: self.roster.threshold - 1] if hides else others
        self.masked = {}
        for name, client in self.clients.items():
            sealed = self.server.shares_for(name)
            if name == self.victim:
                sealed = {other: sealed[other] for other in self.seen_by_victim}
            self.masked[name] = client.mask(self.numbers[name], sealed)
        self.seeds: dict[str, dict[int, bytes]] = {name: {} for name in names}
        self.keys: dict[str, dict[int, bytes]] = {name: {} for name in names}
        """Shares of each client's secrets, by the place of the client that revealed them."""
        for name in self.colluders:
            self._ask_colluder(name)

    def read_victim(self) -> list[int] | None:
        """Return the victim's values, if the server can collect both of its secrets.

        Some honest clients are told that the victim is left, the others that it has vanished.
        """
        alive, gone = self.names, self.names[1:]
        half = (len(self.honest) + 1) // 2
        self._collect({n: alive if i < half else gone for i, n in enumerate(self.honest)})
        seed, secret = self._join(self.seeds), self._join(self.keys)
        if seed is None or secret is None:
            return None
        keys = {n: pair_key(self.roster, self.victim, n, secret) for n in self.seen_by_victim}
        return self._unmask(seed, keys)

    def read_victim_by_hiding(self) -> list[int] | None:
        """Return the victim's values, if the server can open all masks in them.

        All honest clients are told that the victim is left; of the few clients that the victim
        has seen, each is told to vanish to as many clients as their lists allow.
        """
        spare = len(self.names) - self.roster.threshold
        targets = [name for name in self.seen_by_victim if name in self.honest]
        votes = dict.fromkeys(targets, 0)
        lists = {}
        for name in (self.victim, *sorted(self.honest[1:], key=lambda each: each in targets)):
            fewest = sorted((each for each in targets if each != name), key=votes.__getitem__)
            for each in fewest[:spare]:
                votes[each] += 1
            known = [self.victim, *self.seen_by_victim] if name == self.victim else self.names
            # The victim knows of no more than the threshold, so it can miss none of them.
            missing = fewest[: len(known) - self.roster.threshold]
            lists[name] = [each for each in known if each not in missing]
        self._collect(lists)
        seed = self._join(self.seeds)
        secrets = {n: self.clients[n]._secrets["masking"] for n in self.colluders}
        for name in targets:
            if (secret := self._join(self.keys, name)) is None:
                return None
            secrets[name] = secret
        if seed is None:
            return None
        found = {n: pair_key(self.roster, n, self.victim, secrets[n]) for n in self.seen_by_victim}
        return self._unmask(seed, found)

    def _unmask(self, seed: bytes, pair_keys: Mapping[str, bytes]) -> list[int]:
        """Take the streams of the keys out of the victim's masked values."""
        values = self.masked[self.victim].copy()
        add_stream(values, own_key(self.roster, self.victim, seed), subtract=True)
        for other, key in pair_keys.items():
            add_stream(values, key, subtract=self.victim < other)
        return list(map(int, values))

    def open_labeled(
        self, lists: Callable[[str], Collection[str]], alive: Sequence[str]
    ) -> Ring | None:
        """Return the sum of the clients `alive`, if each client's list gives enough shares."""
        self._collect({name: lists(name) for name in self.honest})
        total = sum((self.masked[name] for name in alive), numpy.zeros(_SIZE, dtype=numpy.uint64))
        for name in self.names:
            found = self._join(self.seeds if name in alive else self.keys, name)
            if found is None:
                return None
            if name in alive:
                add_stream(total, own_key(self.roster, name, found), subtract=True)
                continue
            for other in alive:
                add_stream(total, pair_key(self.roster, name, other, found), subtract=other < name)
        return numpy.asarray(total)

    def shares_of_both_kinds(self) -> list[str]:
        """Return the honest clients that have revealed both secrets of one client."""
        places = [self.roster.place(name) for name in self.honest]
        return [
            self.names[place]
            for place in places
            if any(place in self.seeds[n] and place in self.keys[n] for n in self.names)
        ]

    def _collect(self, lists: Mapping[str, Collection[str]]) -> None:
        """Let honest clients sign their lists, and reveal to them what the server has."""
        signed: dict[bytes, dict[str, bytes]] = {}
        for name in self.honest:
            content = self.roster.listed(lists[name])
            try:
                signature = self.clients[name].confirm(lists[name])
            except (NothingOpened, ProtocolError):
                continue
            signed.setdefault(content, {})[name] = signature
        for content, signatures in signed.items():
            for name in self.colluders:
                signatures[name] = sign(self._keys[name], content)[0] if self._keys else b""
        everything = {name: each for group in signed.values() for name, each in group.items()}
        for name in self.honest:
            content = self.roster.listed(lists[name])
            try:
                # Clients without keys take any text for a signature.
                given = signed.get(content, {}) if self._keys else everything
                revealed = self.clients[name].reveal(given)
            except ProtocolError:
                continue
            place = self.roster.place(name)
            for other, share in revealed.seeds.items():
                self.seeds[other][place] = share
            for other, share in revealed.keys.items():
                self.keys[other][place] = share

    def _ask_colluder(self, name: str) -> None:
        client, place = self.clients[name], self.roster.place(name)
        for other in self.names:
            if other != name and (content := client._unseal(other)) is not None:
                self.keys[other][place] = content[:SECRET_BYTES]
                self.seeds[other][place] = content[SECRET_BYTES:]

    def _join(self, shares: dict[str, dict[int, bytes]], name: str = "") -> bytes | None:
        found = shares[name or self.victim]
        if len(found) < self.roster.threshold:
            return None
        chosen = sorted(found)[: self.roster.threshold]
        return join_shares({place: found[place] for place in chosen})
