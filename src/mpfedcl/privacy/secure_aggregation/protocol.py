"""The two parties of secure aggregation, and what they agree on; independent of the transport."""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any, Self

import numpy

from mpfedcl.privacy.secure_aggregation import (
    LEAST_CLIENTS,
    NothingOpened,
    ProtocolError,
    least_left,
)
from mpfedcl.privacy.secure_aggregation.primitives import (
    SECRET_BYTES,
    Ring,
    add_stream,
    agree,
    commit,
    derive,
    is_signed,
    is_usable,
    join_shares,
    public_key,
    seal,
    sign,
    split_secret,
    unseal,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

SEALED_BYTES = 2 * SECRET_BYTES + 16
"""Two shares, and the tag that authenticates them."""
_STAGES = ("advertise", "share", "mask", "confirm", "reveal", "over")
_MOST_TRIALS = 200
"""Combinations of shares that are tried: a client may have sent invalid shares."""


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
            ["mpfedcl secure aggregation 2", self.run, self.round, self.share]
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
        return cls(*(read_bytes(values.get(each.name), each.name) for each in fields(cls)))

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

    def listed(self, survivors: Collection[str]) -> bytes:
        """Return the bytes that a client signs to confirm a list of survivors."""
        return self.purpose("survivors", *sorted(survivors))

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


@dataclass(frozen=True)
class Revealed:
    """Shares of others' secrets, by client: of a seed or of a masking key, never of both."""

    seeds: Mapping[str, bytes] = field(default_factory=dict)
    keys: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def shares(self) -> list[bytes]:
        """All shares, of seeds and of keys."""
        return [*self.seeds.values(), *self.keys.values()]


class SumClient:
    """One client in one aggregation; `to_values` and `from_values` save it over a restart.

    `key` is the client's key in the federation. Without one (in a simulation, where no server
    could lie) nothing is signed, and signatures are not verified.
    """

    def __init__(
        self, name: str, session: Session, key: "ec.EllipticCurvePrivateKey | None" = None
    ) -> None:
        self._name, self._session, self._key = name, session, key
        self._next = "advertise"
        self._secrets = {
            kind: secrets.token_bytes(SECRET_BYTES) for kind in ("channel", "masking", "seed")
        }
        self._roster: Roster | None = None
        self._sealed: dict[str, bytes] = {}
        self._survivors: tuple[str, ...] = ()

    def advertise(self) -> Advert:
        """Return the public keys and the commitment to the seed, signed."""
        self._enter("advertise")
        advert = self._advert()
        if self._key is None:
            return advert
        signature, identity = sign(self._key, advert.signed_content(self._session, self._name))
        return advert.signed(signature, identity)

    def share(self, roster: Roster) -> dict[str, bytes]:
        """Split the secrets; return a sealed share for each other client."""
        self._enter("share")
        own = roster.adverts.get(self._name)
        if roster.session != self._session:
            raise ProtocolError("the roster is of another run or round")
        if own is None or own.signed(b"", b"") != self._advert():
            raise ProtocolError("the roster lacks the keys of this client")
        for name, advert in roster.adverts.items():
            if self._key is not None and not advert.is_signed(self._session, name):
                raise ProtocolError(f"the keys of {name} are not signed by that client")
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
        roster.check_enough(1 + len(sealed))
        self._sealed = dict(sealed)
        masked = values.copy()
        add_stream(masked, own_key(roster, self._name, self._secrets["seed"]))
        for other in sorted(sealed):
            key = pair_key(roster, self._name, other, self._secrets["masking"])
            add_stream(masked, key, subtract=self._name > other)
        return masked

    def confirm(self, survivors: Collection[str]) -> bytes:
        """Sign the list of the clients in the sum; this client will sign no other list."""
        self._enter("confirm")
        left = set(survivors)
        if self._name not in left or not left <= {*self._sealed, self._name}:
            raise ProtocolError("the survivors include clients that have not shared their secrets")
        roster = self._known_roster
        roster.check_enough(len(left))
        self._survivors = tuple(sorted(left))
        return b"" if self._key is None else sign(self._key, roster.listed(left))[0]

    def reveal(self, signatures: Mapping[str, bytes]) -> Revealed:
        """Return the shares that open the sum, given the survivors' signatures of their list."""
        self._enter("reveal")
        roster, left = self._known_roster, self._survivors
        signers = {self._name, *(n for n in left if self._is_confirmed(n, signatures.get(n)))}
        if len(signers) < roster.threshold:
            raise ProtocolError(
                f"{len(signers)} clients have signed the list of survivors that this client was "
                f"shown; {roster.threshold} are needed"
            )
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

    def _is_confirmed(self, name: str, signature: bytes | None) -> bool:
        """Return whether a client has signed the list of survivors that this client has signed."""
        if signature is None or self._key is None:
            return signature is not None
        roster = self._known_roster
        content = roster.listed(self._survivors)
        return is_signed(roster.adverts[name].identity, signature, content)

    @property
    def survivors(self) -> tuple[str, ...]:
        """The clients in the list that this client has signed."""
        return self._survivors

    @property
    def num_clients(self) -> int:
        """The number of clients in the roster, which bounds the values of each client."""
        return len(self._known_roster.names)

    def to_values(self) -> dict[str, Any]:
        """Return the secret state of this client as plain values."""
        return {
            "next": self._next,
            "secrets": {name: value.hex() for name, value in self._secrets.items()},
            "sealed": {name: value.hex() for name, value in self._sealed.items()},
            "survivors": list(self._survivors),
            "adverts": {
                name: advert.to_values()
                for name, advert in (self._roster.adverts if self._roster else {}).items()
            },
        }

    @classmethod
    def from_values(
        cls,
        name: str,
        session: Session,
        values: Mapping[str, Any],
        key: "ec.EllipticCurvePrivateKey | None" = None,
    ) -> Self:
        """Restore a client from `to_values`."""
        client = cls(name, session, key)
        client._next = values["next"]
        client._secrets = {n: bytes.fromhex(text) for n, text in values["secrets"].items()}
        client._sealed = {n: bytes.fromhex(text) for n, text in values["sealed"].items()}
        client._survivors = tuple(values["survivors"])
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
        if self._roster is None:
            raise ProtocolError(f"mask was requested; the next stage is {self._next}")
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


class SumServer:
    """One aggregation; an invalid reply raises `ProtocolError` and excludes only that client.

    Each client adds `size` values. `adverts` are those of the clients that have answered.
    """

    def __init__(self, session: Session, size: int, adverts: Mapping[str, Advert]) -> None:
        self.roster = Roster(session, dict(adverts))
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._total = numpy.zeros(size, dtype=numpy.uint64)
        self._survivors: list[str] = []
        self._signatures: dict[str, bytes] = {}
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

    def take_signature(self, name: str, signature: bytes) -> None:
        """Add a survivor's signature of the list of survivors."""
        self._check_known(name, self._signatures)
        left, identity = self.survivors, self.roster.adverts[name].identity
        if name not in left:
            raise ProtocolError("it has sent no values")
        # Another's invalid signature must not count for the clients either.
        if identity and not is_signed(identity, signature, self.roster.listed(left)):
            raise ProtocolError("it has not signed the list of survivors")
        self._signatures[name] = signature

    @property
    def signatures(self) -> dict[str, bytes]:
        """The signatures of the list of survivors; their clients will reveal their shares."""
        needed, found = self.roster.threshold, len(self._signatures)
        if found < needed:
            raise NothingOpened(
                f"{found} clients have signed the list of survivors; {needed} are needed"
            )
        return dict(sorted(self._signatures.items()))

    def take_revealed(self, name: str, revealed: Revealed) -> None:
        """Add the shares that a survivor reveals."""
        self._check_known(name, self._revealed)
        left = set(self.survivors)
        if name not in self._signatures:
            raise ProtocolError("it has not signed the list of survivors")
        vanished = self._sealed.keys() - left
        if not (set(revealed.seeds) <= left and set(revealed.keys) <= vanished):
            raise ProtocolError("it reveals shares that must stay secret")
        if any(len(each) != SECRET_BYTES for each in revealed.shares):
            raise ProtocolError(f"a share must have {SECRET_BYTES} bytes")
        self._revealed[name] = revealed

    def open(self) -> Ring:
        """Return the sum of the survivors' values; raise NothingOpened with too few shares."""
        survivors = self.survivors
        vanished = sorted(self._sealed.keys() - set(survivors))
        # All secrets first: a sum is opened completely or not at all.
        found_seeds = {name: self._find_seed(name) for name in survivors}
        found_keys = {name: self._find_masking(name) for name in vanished}
        total = self._total.copy()
        for name, seed in found_seeds.items():
            add_stream(total, own_key(self.roster, name, seed), subtract=True)
        for name, secret in found_keys.items():
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
        revealed = [share for each in self._revealed.values() for share in each.shares]
        signatures = list(self._signatures.values())
        return sum(map(len, keys + sealed + signatures + revealed)) + self._total.nbytes * len(
            self._survivors
        )

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
