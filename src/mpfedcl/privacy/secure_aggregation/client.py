"""The client's side of secure aggregation; each stage is answered once."""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from mpfedcl.privacy.secure_aggregation import ProtocolError
from mpfedcl.privacy.secure_aggregation.fixed_point import Ring
from mpfedcl.privacy.secure_aggregation.primitives import (
    SECRET_BYTES,
    add_stream,
    agree,
    commit,
    derive,
    public_key,
    seal,
    split_secret,
    unseal,
)
from mpfedcl.privacy.secure_aggregation.roster import Advert, Roster, Session

_STAGES = ("advertise", "share", "mask", "reveal", "over")


@dataclass(frozen=True)
class Revealed:
    """Shares of others' secrets, by client: of a seed or of a masking key, never of both."""

    seeds: Mapping[str, bytes] = field(default_factory=dict)
    keys: Mapping[str, bytes] = field(default_factory=dict)


class SumClient:
    """One client in one aggregation; `to_values` and `from_values` save it over a restart.

    Args:
        name: The name of the client.
        session: The identity of the aggregation.
    """

    def __init__(self, name: str, session: Session) -> None:
        self._name, self._session = name, session
        self._next = "advertise"
        self._secrets = {
            kind: secrets.token_bytes(SECRET_BYTES) for kind in ("channel", "masking", "seed")
        }
        self._roster: Roster | None = None
        self._sealed: dict[str, bytes] = {}

    def advertise(self) -> Advert:
        """Return the public keys, and the commitment to the seed."""
        self._enter("advertise")
        return self._advert()

    def share(self, roster: Roster) -> dict[str, bytes]:
        """Split the secrets; return a sealed share for each other client."""
        self._enter("share")
        own = roster.adverts.get(self._name)
        if roster.session != self._session:
            raise ProtocolError("the roster is of another run or round")
        # Without the signature, which is added elsewhere.
        if own is None or own.signed(b"", b"") != self._advert():
            raise ProtocolError("the roster lacks the keys of this client")
        self._roster = roster
        count, threshold = len(roster.names), roster.threshold
        keys = split_secret(self._secrets["masking"], count, threshold)
        seeds = split_secret(self._secrets["seed"], count, threshold)
        self._secrets["own share"] = seeds[roster.place(self._name)]
        return {
            other: self._seal(other, keys[place] + seeds[place])
            for place, other in enumerate(roster.names)
            if other != self._name
        }

    def mask(self, values: Ring, sealed: Mapping[str, bytes]) -> Ring:
        """Return the masked values, given the shares that others have sealed for this client.

        The sum will contain the masks of these clients and of this one.
        """
        self._enter("mask")
        roster = self._known_roster
        if not set(sealed) <= set(roster.names) - {self._name}:
            raise ProtocolError("shares come from clients that are not in the roster")
        self._known_roster.check_enough(1 + len(sealed))
        self._sealed = dict(sealed)
        masked = values.copy()
        add_stream(masked, own_key(roster, self._name, self._secrets["seed"]))
        for other in sorted(sealed):
            key = pair_key(roster, self._name, other, self._secrets["masking"])
            add_stream(masked, key, subtract=self._name > other)
        return masked

    def reveal(self, survivors: Collection[str]) -> Revealed:
        """Return the shares that open the sum of the survivors."""
        self._enter("reveal")
        known = {*self._sealed, self._name}
        left = set(survivors)
        if self._name not in left or not left <= known:
            raise ProtocolError("the survivors include clients that have not shared their secrets")
        self._known_roster.check_enough(len(left))
        seeds, keys = {self._name: self._secrets["own share"]}, {}
        for other in sorted(self._sealed):
            content = self._unseal(other)
            if content is None:
                # An invalid share: the shares of other clients must suffice.
                continue
            if other in left:
                seeds[other] = content[SECRET_BYTES:]
            else:
                keys[other] = content[:SECRET_BYTES]
        # Deleted, so that a second request cannot be answered.
        self._secrets, self._sealed = {}, {}
        return Revealed(seeds, keys)

    @property
    def num_clients(self) -> int:
        """The number of clients in the roster, which bounds the values of each client."""
        if self._roster is None:
            raise ProtocolError(f"mask was requested; the next stage is {self._next}")
        return len(self._roster.names)

    def to_values(self) -> dict[str, Any]:
        """Return the secret state of this client as plain values."""
        return {
            "next": self._next,
            "secrets": {name: value.hex() for name, value in self._secrets.items()},
            "sealed": {name: value.hex() for name, value in self._sealed.items()},
            "adverts": {
                name: advert.to_values()
                for name, advert in (self._roster.adverts if self._roster else {}).items()
            },
        }

    @classmethod
    def from_values(cls, name: str, session: Session, values: Mapping[str, Any]) -> Self:
        """Restore a client from `to_values`."""
        client = cls(name, session)
        client._next = values["next"]
        client._secrets = {n: bytes.fromhex(text) for n, text in values["secrets"].items()}
        client._sealed = {n: bytes.fromhex(text) for n, text in values["sealed"].items()}
        adverts = {n: Advert.from_values(each) for n, each in values["adverts"].items()}
        client._roster = Roster(session, adverts) if adverts else None
        return client

    def _advert(self) -> Advert:
        return Advert(
            public_key(self._secrets["channel"]),
            public_key(self._secrets["masking"]),
            commit(self._secrets["seed"], self._session.label),
        )

    def _enter(self, stage: str) -> None:
        """Reject a repeated or early stage: an answer could reveal a secret."""
        if stage != self._next:
            raise ProtocolError(f"{stage} was requested; the next stage is {self._next}")
        self._next = _STAGES[_STAGES.index(stage) + 1]

    @property
    def _known_roster(self) -> Roster:
        assert self._roster is not None
        return self._roster

    def _seal(self, other: str, content: bytes) -> bytes:
        purpose = self._known_roster.purpose("share", self._name, other)
        public = self._known_roster.adverts[other].channel
        return seal(agree(self._secrets["channel"], public, purpose), content, purpose)

    def _unseal(self, other: str) -> bytes | None:
        purpose = self._known_roster.purpose("share", other, self._name)
        public = self._known_roster.adverts[other].channel
        key = agree(self._secrets["channel"], public, purpose)
        content = unseal(key, self._sealed[other], purpose)
        return content if content and len(content) == 2 * SECRET_BYTES else None


def own_key(roster: Roster, name: str, seed: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return derive(seed, roster.purpose("own mask", name))


def pair_key(roster: Roster, name: str, other: str, secret: bytes) -> bytes:
    """Return the key of a pair's mask, from the secret of one and the public key of the other."""
    purpose = roster.purpose("pair mask", *sorted((name, other)))
    return agree(secret, roster.adverts[other].masking, purpose)
