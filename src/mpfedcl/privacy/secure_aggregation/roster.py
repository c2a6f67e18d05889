"""The participants of one secure aggregation and their public keys."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Self

from mpfedcl.privacy.secure_aggregation import (
    LEAST_CLIENTS,
    NothingOpened,
    ProtocolError,
    least_left,
)
from mpfedcl.privacy.secure_aggregation.primitives import SECRET_BYTES, is_signed, is_usable


@dataclass(frozen=True)
class Session:
    """The identity of one aggregation; messages of another run or round are rejected."""

    run: str
    round: int
    share: float
    """The sum is opened only if more than this share of the clients is left."""

    @property
    def label(self) -> bytes:
        """The label to which keys and messages of the session are bound."""
        return json.dumps(
            ["mpfedcl secure aggregation 1", self.run, self.round, self.share]
        ).encode()


@dataclass(frozen=True)
class Advert:
    """The public keys and commitment of a client."""

    channel: bytes
    """Public key with which others seal shares for the client."""
    masking: bytes
    """Public key of its pairwise masks."""
    commitment: bytes
    """Commitment to the seed of its own mask, so that shares of another seed are detected."""
    signature: bytes = b""
    """By the client's key in the federation, if it has one."""
    identity: bytes = b""
    """That key's public half."""

    def __post_init__(self) -> None:
        for name in ("channel", "masking", "commitment"):
            if len(getattr(self, name)) != SECRET_BYTES:
                raise ProtocolError(f"{name} must have {SECRET_BYTES} bytes")
        if self.channel == self.masking:
            raise ProtocolError("channel and masking must be two keys")
        if not (is_usable(self.channel) and is_usable(self.masking)):
            raise ProtocolError("these keys are invalid for key agreement")

    def signed_content(self, session: Session, client: str) -> bytes:
        """Return the bytes that a client signs: its keys, bound to the session."""
        parts = [each.hex() for each in (self.channel, self.masking, self.commitment)]
        return session.label + json.dumps(["advert", client, *parts]).encode()

    def is_signed(self, session: Session, client: str) -> bool:
        """Return whether the owner of the identity has signed these keys for this sum."""
        return is_signed(self.identity, self.signature, self.signed_content(session, client))

    def to_values(self) -> dict[str, str]:
        """Return plain values."""
        return {name: value.hex() for name, value in vars(self).items()}

    @classmethod
    def from_values(cls, values: object) -> Self:
        """Read plain values from a client."""
        if not isinstance(values, dict):
            raise ProtocolError("an advert must be a table")
        return cls(
            *(
                read_bytes(values.get(name), name)
                for name in ("channel", "masking", "commitment", "signature", "identity")
            )
        )

    def signed(self, signature: bytes, identity: bytes) -> Self:
        """Return the advert with a signature and its public key."""
        return replace(self, signature=signature, identity=identity)


def find_odd(
    session: Session, adverts: Mapping[str, Advert], identities: Mapping[str, bytes]
) -> dict[str, str]:
    """Return the clients with invalid keys, and the reason: one such key would abort the sum.

    `identities` are the keys that clients have used before.
    """
    shown = Counter(key for each in adverts.values() for key in (each.channel, each.masking))
    have_keys = 2 * sum(bool(each.identity) for each in adverts.values()) > len(adverts)
    odd: dict[str, str] = {}
    for name, advert in adverts.items():
        if shown[advert.channel] > 1 or shown[advert.masking] > 1:
            odd[name] = "another client has sent the same key"
        elif (have_keys or advert.identity) and not advert.is_signed(session, name):
            odd[name] = "its keys are not signed"
        elif identities.get(name, advert.identity) != advert.identity:
            odd[name] = "its keys are signed by another key than before"
    return odd


@dataclass(frozen=True)
class Roster:
    """The clients of a sum in order of name, and the sum's session."""

    session: Session
    adverts: Mapping[str, Advert]

    def __post_init__(self) -> None:
        count = len(self.adverts)
        if count < LEAST_CLIENTS:
            raise NothingOpened(f"{count} clients take part; a secure sum needs {LEAST_CLIENTS}")
        keys = {
            each for advert in self.adverts.values() for each in (advert.channel, advert.masking)
        }
        if len(keys) < 2 * count:
            raise ProtocolError("two clients have sent the same key")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The clients in order of name."""
        return tuple(sorted(self.adverts))

    @property
    def threshold(self) -> int:
        """Number of clients required to open the sum."""
        return least_left(len(self.adverts), self.session.share)

    def check_enough(self, count: int) -> None:
        """Raise NothingOpened unless `count` clients suffice to open the sum."""
        if count < self.threshold:
            raise NothingOpened(
                f"{count} of {len(self.names)} clients are left; {self.threshold} are needed"
            )

    @cached_property
    def label(self) -> bytes:
        """The label of all later messages: clients with different rosters cannot interact."""
        parts = [[name, self.adverts[name].to_values()] for name in self.names]
        return self.session.label + sha256(json.dumps(parts).encode()).digest()

    def place(self, name: str) -> int:
        """Return the index of a client among the names."""
        return self.names.index(name)

    def purpose(self, word: str, *clients: str) -> bytes:
        """Return the purpose of a key: one use between some clients of this roster."""
        return self.label + json.dumps([word, *clients]).encode()


def read_bytes(value: object, name: str, *, most: int = 4096) -> bytes:
    """Return the bytes of a hexadecimal text from a client."""
    if not isinstance(value, str) or len(value) > 2 * most:
        raise ProtocolError(f"{name} must be hexadecimal digits of at most {most} bytes")
    try:
        return bytes.fromhex(value)
    except ValueError:
        raise ProtocolError(f"{name} must be hexadecimal digits") from None
