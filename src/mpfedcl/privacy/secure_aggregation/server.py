"""The server's side of secure aggregation: forward shares, add masked values, open the sum."""

from collections.abc import Callable, Mapping
from itertools import combinations, islice

import numpy

from mpfedcl.privacy.secure_aggregation import NothingOpened, ProtocolError
from mpfedcl.privacy.secure_aggregation.client import Revealed, own_key, pair_key
from mpfedcl.privacy.secure_aggregation.fixed_point import Ring
from mpfedcl.privacy.secure_aggregation.primitives import (
    SECRET_BYTES,
    add_stream,
    commit,
    join_shares,
    public_key,
)
from mpfedcl.privacy.secure_aggregation.roster import Advert, Roster, Session

SEALED_BYTES = 2 * SECRET_BYTES + 16
"""Two shares, and the tag that authenticates them."""
_MOST_TRIALS = 200
"""Combinations of shares that are tried: a client may have sent invalid shares."""


class SumServer:
    """One aggregation; an invalid reply raises `ProtocolError` and excludes only that client.

    Args:
        session: The identity of the aggregation.
        size: Number of values that each client adds.
        adverts: The adverts of the clients that have answered.
    """

    def __init__(self, session: Session, size: int, adverts: Mapping[str, Advert]) -> None:
        self.roster = Roster(session, dict(adverts))
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._total = numpy.zeros(size, dtype=numpy.uint64)
        self._survivors: list[str] = []
        self._revealed: dict[str, Revealed] = {}

    def take_shares(self, name: str, sealed: Mapping[str, bytes]) -> None:
        """Add the shares that a client has sealed for the other clients."""
        self._check_known(name, self._sealed)
        if set(sealed) != set(self.roster.names) - {name}:
            raise ProtocolError("it must seal a share for every other client")
        if any(len(each) != SEALED_BYTES for each in sealed.values()):
            raise ProtocolError(f"a sealed share must have {SEALED_BYTES} bytes")
        self._sealed[name] = sealed

    @property
    def sharers(self) -> list[str]:
        """The clients whose shares have arrived, in order of name; they will send their values."""
        self.roster.check_enough(len(self._sealed))
        return sorted(self._sealed)

    def shares_for(self, name: str) -> dict[str, bytes]:
        """Return the shares that the others have sealed for a client."""
        return {other: self._sealed[other][name] for other in self.sharers if other != name}

    def take_masked(self, name: str, masked: Ring) -> None:
        """Add a client's masked values to the sum."""
        self._check_known(name, self._survivors)
        if name not in self._sealed:
            raise ProtocolError("it has not shared its secrets")
        if masked.dtype != numpy.uint64 or masked.shape != self._total.shape:
            raise ProtocolError(
                f"its masked values are {list(masked.shape)} of {masked.dtype}; expected "
                f"{list(self._total.shape)} of uint64"
            )
        self._total += masked
        self._survivors.append(name)

    @property
    def survivors(self) -> list[str]:
        """The clients whose values are in the sum, in order of name."""
        self.roster.check_enough(len(self._survivors))
        return sorted(self._survivors)

    def take_revealed(self, name: str, revealed: Revealed) -> None:
        """Add the shares that a survivor reveals."""
        self._check_known(name, self._revealed)
        left = set(self.survivors)
        if name not in left:
            raise ProtocolError("it has sent no values")
        vanished = self._sealed.keys() - left
        if not (set(revealed.seeds) <= left and set(revealed.keys) <= vanished):
            raise ProtocolError("it reveals shares that must stay secret")
        shares = [*revealed.seeds.values(), *revealed.keys.values()]
        if any(len(each) != SECRET_BYTES for each in shares):
            raise ProtocolError(f"a share must have {SECRET_BYTES} bytes")
        self._revealed[name] = revealed

    def open(self) -> Ring:
        """Return the sum of the survivors' values; raise NothingOpened with too few shares."""
        survivors = self.survivors
        # All secrets first: a sum is opened completely or not at all.
        seeds = {name: self._find_seed(name) for name in survivors}
        vanished = sorted(self._sealed.keys() - set(survivors))
        secrets = {name: self._find_masking(name) for name in vanished}
        total = self._total.copy()
        for name, seed in seeds.items():
            add_stream(total, own_key(self.roster, name, seed), subtract=True)
        for name, secret in secrets.items():
            for other in survivors:
                # Remove the mask that the survivor has added for this pair.
                key = pair_key(self.roster, name, other, secret)
                add_stream(total, key, subtract=other < name)
        return total

    @property
    def bytes_up(self) -> int:
        """Bytes of received keys, shares and masked values."""
        keys = [bytes_ for each in self.roster.adverts.values() for bytes_ in vars(each).values()]
        sealed = [share for each in self._sealed.values() for share in each.values()]
        revealed = [
            share
            for each in self._revealed.values()
            for share in (*each.seeds.values(), *each.keys.values())
        ]
        return sum(map(len, keys + sealed + revealed)) + self._total.nbytes * len(self._survivors)

    def _find_seed(self, name: str) -> bytes:
        advert, label = self.roster.adverts[name], self.roster.session.label
        shares = {n: each.seeds[name] for n, each in self._revealed.items() if name in each.seeds}
        return self._join(name, shares, lambda found: commit(found, label) == advert.commitment)

    def _find_masking(self, name: str) -> bytes:
        advert = self.roster.adverts[name]
        shares = {n: each.keys[name] for n, each in self._revealed.items() if name in each.keys}
        return self._join(name, shares, lambda found: public_key(found) == advert.masking)

    def _join(
        self, name: str, shares: Mapping[str, bytes], is_right: Callable[[bytes], bool]
    ) -> bytes:
        needed = self.roster.threshold
        if len(shares) < needed:
            raise NothingOpened(
                f"{len(shares)} clients have revealed a share of the secret of {name}; "
                f"{needed} are needed"
            )
        for chosen in islice(combinations(sorted(shares), needed), _MOST_TRIALS):
            found = join_shares({self.roster.place(each): shares[each] for each in chosen})
            if is_right(found):
                return found
        raise NothingOpened(f"the shares of the secret of {name} are inconsistent")

    def _check_known(self, name: str, before: object) -> None:
        if name not in self.roster.adverts:
            raise ProtocolError("it does not take part in this sum")
        if name in before:  # type: ignore[operator]
            raise ProtocolError("it has answered this stage already")
