"""A client's part in secure aggregation.

Its secrets between messages are in a file that only its user can read. A client that is killed and
restarted therefore never sends a different answer to the same request. A client trusts another
client's key on first use, as ssh does, and stores it in a file. Operators may compare fingerprints
by telephone.
"""

import base64
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.transport import Message, MessageError
from mpfedcl.privacy.secure_aggregation import NothingOpened, ProtocolError, least_left
from mpfedcl.privacy.secure_aggregation.primitives import OutOfRange, Ring, signature_algorithm
from mpfedcl.privacy.secure_aggregation.protocol import (
    Advert,
    Roster,
    Session,
    SumClient,
    read_bytes,
)

_ROUNDS_REMEMBERED = 16
"""Rounds whose opened sums are remembered."""


class SecureAggregation:
    """One client's part in the secure aggregation of one round.

    `key` is the client's private key; without one (in a dry run) nothing is signed or checked.
    """

    def __init__(
        self, name: str, folder: Path, key: Path | None, experiment: Experiment, message: Message
    ) -> None:
        run = message.value("run", str)
        self._store = ClientStateStore(folder, run)
        self._name, self._message, self._key = name, message, key
        self._known = folder / "known-clients.json"
        self._file = self._store.folder / "secure-sum.json"
        self._round = message.value("round", int)
        self._session = Session(run, self._round, experiment.secure.threshold)

    def answer(self) -> Message:
        """Return the answer to a stage without training."""
        stages = {"advertise": self._advertise, "share": self._share, "reveal": self._reveal}
        stage = self._message.value("stage", str)
        if stage not in stages:
            raise MessageError(f"stage is {stage[:40]!r}; it must be one of {', '.join(stages)}")
        with _refusals():
            return stages[stage]()

    def mask(self, encode: Callable[[int], Ring]) -> Message:
        """Return the masked values; `encode` computes the values for a number of clients."""
        with _refusals():
            client = self._load()
            given = self._message.value("sealed", dict)
            sealed = {name: read_bytes(each, "a sealed share") for name, each in given.items()}
            masked = client.mask(encode(client.num_clients), sealed)
            # Saved before sending: the same masks must not be used for other values.
            self._save(client)
        return Message({}, {"masked": masked})

    def _advertise(self) -> Message:
        client = SumClient(self._name, self._session)
        advert = client.advertise()
        if self._key is not None:
            advert = sign_advert(self._key, advert, self._session, self._name)
        # This replaces the secrets of an unfinished round.
        self._save(client)
        return Message({"advert": advert.to_values()})

    def _share(self) -> Message:
        client = self._load()
        given = self._message.value("adverts", dict)
        adverts = {name: Advert.from_values(each) for name, each in given.items()}
        roster = Roster(self._session, adverts)
        if self._key is not None:
            self._check_keys(adverts)
        sealed = client.share(roster)
        self._save(client)
        return Message({"sealed": {name: each.hex() for name, each in sealed.items()}})

    def _check_keys(self, adverts: dict[str, Advert]) -> None:
        """Reject unsigned keys, and keys other than the known ones."""
        for name, advert in adverts.items():
            if not advert.is_signed(self._session, name):
                raise ProtocolError(f"the keys of {name} are not signed by that client")
        others = {name: each.identity for name, each in adverts.items() if name != self._name}
        for name in meet_clients(self._known, others):
            print(
                f"First secure aggregation with {name}; its key is {fingerprint(others[name])}.",
                file=sys.stderr,
                flush=True,
            )

    def _reveal(self) -> Message:
        client = self._load()
        survivors = [str(each) for each in self._message.value("survivors", list)]
        opened = self._read()["opened"]
        # Two sums of the same updates would reveal the difference between their clients.
        if opened.get(str(self._round), sorted(survivors)) != sorted(survivors):
            raise ProtocolError(f"the sum of round {self._round} was opened for other clients")
        revealed = client.reveal(survivors)
        self._save(client, {**opened, str(self._round): sorted(survivors)})
        return Message(
            {
                "seeds": {name: each.hex() for name, each in revealed.seeds.items()},
                "keys": {name: each.hex() for name, each in revealed.keys.items()},
            }
        )

    def _load(self) -> SumClient:
        values = self._read()
        if values.get("round") != self._round:
            raise ProtocolError(f"it has not started round {self._round}")
        return SumClient.from_values(self._name, self._session, values["client"])

    def _save(self, client: SumClient, opened: dict[str, Any] | None = None) -> None:
        if opened is None:
            opened = self._read()["opened"]
        latest = dict(sorted(opened.items(), key=lambda each: int(each[0]))[-_ROUNDS_REMEMBERED:])
        self._store.make_folder()
        values = {"round": self._round, "client": client.to_values(), "opened": latest}
        write_atomically(self._file, json.dumps(values).encode())

    def _read(self) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return {"opened": {}}
        except (OSError, ValueError):
            raise ProtocolError("secure-sum.json is damaged") from None
        return values


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ProtocolError, NothingOpened) as error:
        raise ClientRefusal(f"it stops the secure aggregation: {error}.") from None
    except OutOfRange as error:
        raise ClientRefusal(str(error)) from None


def draw_once(
    keep: Callable[[Tensors], Tensors],
    experiment: Experiment,
    encode: Callable[[int], Ring],
    num_clients: int,
) -> Ring:
    """Return a client's noisy values of a round, which are drawn once; `keep` stores them."""
    drawn = {
        "numbers": torch.from_numpy(encode(num_clients).view(numpy.int64)),
        "clients": torch.tensor(num_clients),
    }
    kept = keep(drawn)
    share = experiment.secure.threshold
    if least_left(num_clients, share) < least_left(int(kept["clients"]), share):
        raise ProtocolError("its share of the noise was drawn for a sum of more clients")
    return kept["numbers"].numpy().view(numpy.uint64)


def sign_advert(key: Path, advert: Advert, session: Session, name: str) -> Advert:
    """Return the advert signed with a client's private key, made by `mpfedcl federation init`."""
    # Imported here, because clients without keys do not need `cryptography`.
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from mpfedcl.network.setup.keys import load_node_key

    private = load_node_key(key)
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    signature = private.sign(advert.signed_content(session, name), signature_algorithm())
    return advert.signed(signature, public)


def fingerprint(public: bytes) -> str:
    """Return the fingerprint of a key as shown by `ssh-keygen -l`."""
    parts = public.split()
    blob = base64.b64decode(parts[1]) if len(parts) > 1 else public
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def meet_clients(path: Path, keys: Mapping[str, bytes]) -> list[str]:
    """Reject clients whose key has changed; store new clients and return their names.

    The file `path` holds the keys of other clients, as this client has seen them first.
    """
    try:
        known: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        known = {}
    except (OSError, ValueError):
        known = None
    if not isinstance(known, dict):
        # A damaged file must not count as empty: then any key would be accepted.
        raise InvalidInput(f"{path} cannot be read; it must be repaired or removed.")
    for name, key in keys.items():
        if known.get(name, key.decode()) != key.decode():
            raise ProtocolError(
                f"{name} has another key than before; if that is intended, its line must be "
                "removed from known-clients.json on the client"
            )
    new = [name for name in keys if name not in known]
    if new:
        known |= {name: keys[name].decode() for name in new}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(known, indent=1, sort_keys=True).encode())
    return new
