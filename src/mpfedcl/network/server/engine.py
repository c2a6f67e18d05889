"""The engine whose clients are on machines of their own: one message a client and round."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from mpfedcl.experiment import Experiment
from mpfedcl.messages import Broadcast, Failure, LateReading, Update
from mpfedcl.models import Tensors
from mpfedcl.network.message import FORMAT, Kind, Parcel, ParcelError
from mpfedcl.network.packing import (
    pack_broadcast,
    pack_experiment,
    unpack_reading,
    unpack_update,
)
from mpfedcl.network.server.client_registry import POLL_SECONDS, Roster
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import Answer, Courier
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.clock import Clock
from mpfedcl.rounds.measurement import Inspection
from mpfedcl.rounds.update_collector import Intake

_Content = TypeVar("_Content")


class NetworkEngine:
    """Asks clients by messages; each has its data, and what it keeps, at home."""

    def __init__(
        self,
        experiment: Experiment,
        courier: Courier,
        roster: Roster,
        run: str,
        device: torch.device,
        clock: Clock,
        status: Status,
    ) -> None:
        self._experiment = experiment
        self._courier = courier
        self._roster = roster
        self._run = run
        self._device = device
        self._clock = clock
        self._status = status
        self._document = pack_experiment(experiment)
        self._here: dict[str, int] = {}
        self._sizes: dict[str, int] = dict(roster.sizes)
        self._settled: dict[str, int] = {}
        """The last round of each client that counted."""
        self._round = 0
        self._missing: dict[str, str] = {}
        self._heard: set[str] = set()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Training samples by client name; one mapping, which grows as clients come."""
        return self._sizes

    def muster(self) -> Collection[str]:
        """See who is there; a client that has introduced itself since takes part from now on."""
        self._here = self._roster.look()
        known = self._roster.sizes
        self._sizes.clear()
        self._sizes.update(known)
        return known.keys() - self._here.keys()

    def here(self, names: Sequence[str]) -> Sequence[str]:
        """Return the named clients: all updates come to this process."""
        return names

    def unite(self, intake: Intake) -> None:
        """There is nobody to unite with."""

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update | Failure]:
        """Send the broadcast and yield what comes back, until enough have answered or time is up.

        The same message asks clients to read the round before, if it is to be read.
        """
        self._round, self._heard = broadcast.round, set()
        reads = broadcast.round > 1 and self._experiment.reads(broadcast.round - 1)
        for update in self._ask("round", broadcast, names, self._open_update, reads=reads):
            self._heard.add(update.client)
            yield update

    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        confuse: bool = False,
    ) -> None:
        """Nothing yet: clients read a round with the broadcast of the next."""

    def close(self, broadcast: Broadcast) -> dict[str, LateReading | Failure]:
        """Ask all clients that are there to read the last round."""
        self.muster()
        names = sorted(self._here)
        said: dict[str, LateReading | Failure] = {}
        for each in self._ask("close", broadcast, names, _open_reading, reads=True):
            if isinstance(each, Failure):
                said[each.client] = each
            else:
                said |= dict([each])
        return said

    def remarks(self) -> dict[str, Any]:
        """Return why clients are missing, and who may not take part."""
        said = {"missing": self._missing, "refused": self._roster.refused}
        return {name: dict(sorted(each.items())) for name, each in said.items() if each}

    def inspect(
        self, broadcast: Broadcast, following: Broadcast, names: Sequence[str]
    ) -> Inspection:
        """Refuse: the clients' gradients do not travel. Such experiments are not begun."""
        raise AssertionError("clients over a network are not inspected")

    def settle(self, accepted: Sequence[str]) -> None:
        """Write down whose update counted; with the next message each client is told."""
        self._settled |= dict.fromkeys(accepted, self._round)
        # Perhaps its images are others than when it introduced itself.
        self._roster.ask_again(self._heard - set(accepted))

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield nothing: personal models stay with their clients."""
        return iter(())

    def state(self) -> Tensors:
        """Return the last round of each client that counted."""
        return {f"settled/{name}": torch.tensor(r) for name, r in self._settled.items()}

    def load_state(self, state: Tensors) -> None:
        """Take up what `state` returned."""
        self._settled = {k.removeprefix("settled/"): int(v) for k, v in state.items()}

    def _ask(
        self,
        kind: Kind,
        broadcast: Broadcast,
        names: Sequence[str],
        open_answer: Callable[[str, Parcel], _Content],
        *,
        reads: bool,
    ) -> Iterator[_Content | Failure]:
        """Send each named client its message and yield what is in the answers as they come."""
        settings = self._experiment.network
        away = self._sizes.keys() - self._here.keys()
        self._missing = dict.fromkeys(away, "not connected")
        clients = {self._here[name]: name for name in names}
        with self._clock.phase("broadcast"):
            sent = self._send(kind, broadcast, clients, reads=reads)
        waiting = {message: clients[node] for node, message in sent.items()}
        unsent = clients.keys() - sent.keys()
        self._missing |= {clients[node]: "the message could not be sent" for node in unsent}
        # The closing evaluation is nobody's race: all that are there are heard.
        share = settings.enough if kind == "round" else 1.0
        enough = max(1, round(share * len(names)))
        answered = 0
        end = time.monotonic() + settings.round_timeout
        while waiting and answered < enough and time.monotonic() < end:
            with self._clock.phase("train"):
                answers = self._courier.collect(list(waiting))
                self._say(kind, broadcast.round, waiting, answered)
                if not answers:
                    time.sleep(POLL_SECONDS)
            for answer in answers:
                name = waiting.pop(answer.message, None)
                if name is None:
                    continue
                if answer.trouble == "gone":
                    self._missing[name] = answer.reason
                    continue
                opened = _open(name, answer, open_answer)
                answered += not isinstance(opened, Failure)
                yield opened
        why = (
            "enough others had answered"
            if answered >= enough
            else f"no answer within {settings.round_timeout:g} s"
        )
        self._missing |= dict.fromkeys(waiting.values(), why)

    def _send(
        self, kind: Kind, broadcast: Broadcast, clients: Mapping[int, str], *, reads: bool
    ) -> dict[int, str]:
        """Send each node its message; return the messages by node."""
        packed = pack_broadcast(broadcast)
        values = {
            **packed.values,
            "format": FORMAT,
            "run": self._run,
            "experiment": self._document,
            "read": reads,
            "confuse": kind == "close",
        }
        parcels = {
            node: Parcel({**values, "settled": self._settled.get(name, 0)}, packed.arrays)
            for node, name in clients.items()
        }
        return self._courier.send(kind, parcels, self._experiment.network.round_timeout)

    def _open_update(self, name: str, parcel: Parcel) -> Update:
        return _on_device(unpack_update(name, parcel), self._device)

    def _say(self, kind: Kind, number: int, waiting: Mapping[str, str], answered: int) -> None:
        what = "closing evaluation" if kind == "close" else "training"
        details = {"round": number, "rounds": self._experiment.rounds, "answered": answered}
        self._status.say(
            what, **details, waiting=sorted(waiting.values()), missing=sorted(self._missing)
        )


def _open(
    name: str, answer: Answer, open_answer: Callable[[str, Parcel], _Content]
) -> _Content | Failure:
    if answer.parcel is None:
        return Failure(name, answer.reason)
    try:
        return open_answer(name, answer.parcel)
    except ParcelError as error:
        return Failure(name, f"its answer cannot be read: {error}")


def _open_reading(name: str, parcel: Parcel) -> tuple[str, LateReading]:
    return name, unpack_reading(parcel.value("late", dict))


def _on_device(update: Update, device: torch.device) -> Update:
    assert isinstance(update.sums, dict)
    sums = {name: value.to(device) for name, value in update.sums.items()}
    return Update(
        update.client, update.num_samples, sums, update.rows.to(device), update.loss, update.late
    )
