"""A client's part in secure aggregation.

Its secrets between messages are in a file that only its user can read. What it has answered is
stored before it is sent: a client that is killed and restarted never sends a different answer to
the same request. Other clients' keys come from `known-clients.pub`, a file of the client's
operator; a client that is not in it is refused, because the server could have invented it.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from mpfedcl.core.files import read_bounded, write_atomically
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.policy import refusal
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.setup.folders import ClientSettings
from mpfedcl.network.transport import Message, MessageError
from mpfedcl.privacy.secure_aggregation import NothingOpened, ProtocolError
from mpfedcl.privacy.secure_aggregation.primitives import OutOfRange, Ring
from mpfedcl.privacy.secure_aggregation.protocol import (
    Advert,
    Roster,
    Session,
    SumClient,
    read_bytes,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

_Opened = dict[str, list[str]]
"""The clients in the sums that this client has helped to open, by round."""
_ROUNDS_REMEMBERED = 16
"""Rounds whose opened sums are remembered; older rounds are refused."""


class SecureAggregation:
    """One client's part in the secure aggregation of one round.

    Without a key in the settings (in a dry run) nothing is signed or checked.
    """

    def __init__(self, settings: ClientSettings, experiment: Experiment, message: Message) -> None:
        run = message.value("run", str)
        self._store = ClientStateStore(settings.state, run)
        self._settings, self._message = settings, message
        self._file = self._store.folder / "secure-sum.json"
        self._round = message.value("round", int)
        self._session = Session(run, self._round, experiment.secure.threshold)
        self._policy = settings.policy.secure_aggregation
        self._shares = count_noise_shares(experiment)

    def answer(self) -> Message:
        """Return the answer to a stage without training; to the same request, the same answer."""
        stages = {
            "advertise": self._advertise,
            "share": self._share,
            "confirm": self._confirm,
            "reveal": self._reveal,
        }
        stage = self._message.value("stage", str)
        if stage not in stages:
            raise MessageError(f"stage is {stage[:40]!r}; it must be one of {', '.join(stages)}")
        asked = [self._message.values.get(n) for n in ("adverts", "survivors", "signatures")]
        request = sha256(json.dumps([stage, *asked], sort_keys=True).encode()).hexdigest()
        with _refusals():
            stored = self._read()
            if stored.get("round") == self._round and stored.get("request") == request:
                return Message(stored["answer"])
            client = self._new_client() if stage == "advertise" else self._load()
            values = stages[stage](client, stored["opened"])
            self._save(client, stored["opened"], request=request, answer=values)
            return Message(values)

    def mask(self, encode: Callable[[int], Ring]) -> Message:
        """Return the masked values; `encode` computes the values for a number of clients."""
        with _refusals():
            client = self._load()
            given = self._message.value("sealed", dict)
            sealed = {name: read_bytes(each, "a sealed share") for name, each in given.items()}
            self._check_peers(sealed)
            masked = client.mask(encode(client.num_clients), sealed)
            # Saved before sending: the same masks must not be used for other values.
            self._save(client, self._read()["opened"])
        return Message({}, {"masked": masked})

    def _advertise(self, client: SumClient, opened: _Opened) -> dict[str, Any]:
        # Replaces the secrets of an unfinished round.
        if len(opened) == _ROUNDS_REMEMBERED and self._round < min(map(int, opened)):
            raise ProtocolError(f"round {self._round} is over")
        return {"advert": client.advertise().to_values()}

    def _share(self, client: SumClient, _: _Opened) -> dict[str, Any]:
        given = self._message.value("adverts", dict)
        adverts = {name: Advert.from_values(each) for name, each in given.items()}
        self._check_keys(adverts)
        sealed = client.share(Roster(self._session, adverts))
        return {"sealed": {name: each.hex() for name, each in sealed.items()}}

    def _confirm(self, client: SumClient, opened: _Opened) -> dict[str, Any]:
        survivors = sorted({str(each) for each in self._message.value("survivors", list)})
        # Two sums of the same updates would reveal the difference between their clients.
        if opened.get(str(self._round), survivors) != survivors:
            raise ProtocolError(f"the sum of round {self._round} was opened for other clients")
        self._check_peers(survivors)
        return {"signature": client.confirm(survivors).hex()}

    def _reveal(self, client: SumClient, opened: _Opened) -> dict[str, Any]:
        given = self._message.value("signatures", dict)
        signatures = {str(name): read_bytes(each, "a signature") for name, each in given.items()}
        revealed = client.reveal(signatures)
        opened[str(self._round)] = list(client.survivors)
        return {
            "seeds": {name: each.hex() for name, each in revealed.seeds.items()},
            "keys": {name: each.hex() for name, each in revealed.keys.items()},
        }

    def _check_keys(self, adverts: Mapping[str, Advert]) -> None:
        """Reject clients whose key is not the one that the operator knows."""
        if self._settings.key is None:
            return
        known = read_known_clients(self._settings.known_clients)
        for name, advert in adverts.items():
            if name != self._settings.name and known.get(name) != advert.identity:
                raise ProtocolError(
                    f"the key of {name[:64]!r} is not that in known-clients.pub of this client"
                )
        self._check_peers(adverts)

    def _check_peers(self, names: Collection[str]) -> None:
        """Reject a sum with too few clients whose keys are known."""
        if self._settings.key is None:
            return
        peers = len({*names} - {self._settings.name})
        if peers < (least := self._policy.min_verified_peers):
            raise refusal("secure_aggregation min_verified_peers", least, f"a sum with {peers}")
        if peers + 1 < self._shares:
            raise ProtocolError(
                f"a sum of {peers + 1} clients has too few for a share of 1/{self._shares} of the "
                "noise"
            )

    def _new_client(self) -> SumClient:
        return SumClient(self._settings.name, self._session, self._key())

    def _key(self) -> "ec.EllipticCurvePrivateKey | None":
        if self._settings.key is None:
            return None
        # Imported here, because clients without keys do not need `cryptography`.
        from mpfedcl.network.setup.keys import load_node_key

        return load_node_key(self._settings.key)

    def _load(self) -> SumClient:
        values = self._read()
        if values.get("round") != self._round:
            raise ProtocolError(f"it has not started round {self._round}")
        name, content = self._settings.name, values["client"]
        return SumClient.from_values(name, self._session, content, self._key())

    def _save(self, client: SumClient, opened: _Opened, **answered: Any) -> None:
        """Save the secrets and the last answer, before it is sent."""
        latest = dict(sorted(opened.items(), key=lambda each: int(each[0]))[-_ROUNDS_REMEMBERED:])
        self._store.make_folder()
        values = {"round": self._round, "client": client.to_values(), "opened": latest, **answered}
        write_atomically(self._file, json.dumps(values).encode())

    def _read(self) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return {"opened": {}}
        except (OSError, ValueError):
            raise ProtocolError("secure-sum.json is damaged") from None
        return values


def count_noise_shares(experiment: Experiment) -> int:
    """Return the number of honest clients that share the noise of a budget."""
    return experiment.secure.honest_clients if experiment.privacy.has_budget else 1


def check_conditions(settings: ClientSettings, experiment: Experiment) -> None:
    """Refuse an experiment whose secure aggregation breaks the rules of this client's operator."""
    policy = settings.policy.secure_aggregation
    if not experiment.secure_aggregation:
        if policy.required:
            raise refusal("secure_aggregation required", "true", "a run without it")
        return
    with _refusals():
        if settings.key is not None:
            read_known_clients(settings.known_clients)
    # The noise of this client would be too little if fewer of the others add theirs.
    if (shares := count_noise_shares(experiment)) > (stated := policy.honest_clients or 1):
        raise refusal("secure_aggregation honest_clients", stated, f"a share of 1/{shares}")


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
    honest = experiment.secure.honest_clients
    drawn = {
        "numbers": torch.from_numpy(encode(num_clients).view(numpy.int64)),
        "honest": torch.tensor(honest),
    }
    kept = keep(drawn)
    if honest < int(kept["honest"]):
        raise ProtocolError("its share of the noise was drawn for more honest clients")
    return kept["numbers"].numpy().view(numpy.uint64)


def read_known_clients(path: Path | None) -> dict[str, bytes]:
    """Return the public keys of other clients by name; each line ends with the name."""
    try:
        lines = read_bounded(path).splitlines() if path else []
    except OSError:
        lines = []
    parts = [line.split() for line in lines]
    found = {
        part[2].decode(errors="replace"): b" ".join(part[:2]) for part in parts if len(part) == 3
    }
    if not found:
        raise ProtocolError("known-clients.pub of this client contains no keys")
    return found
