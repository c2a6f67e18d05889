"""The engine whose clients are on machines of their own: one message a client and round."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from mpfedcl.clock import Clock
from mpfedcl.convergence.measurement import Inspection
from mpfedcl.exchange import Broadcast, Failure, LateReading, Update
from mpfedcl.experiment import Experiment
from mpfedcl.intake import Intake
from mpfedcl.models import Tensors
from mpfedcl.network.courier import Answer, Courier
from mpfedcl.network.parcels import pack_broadcast, unpack_reading, unpack_update
from mpfedcl.network.roster import POLL_SECONDS, Roster
from mpfedcl.network.status import Status
from mpfedcl.network.wire import FORMAT, Kind, Parcel, ParcelError
from mpfedcl.prototypes import PrototypePool
from mpfedcl.readings import Readings


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
        self._document = experiment.to_toml()
        self._here: dict[str, int] = {}
        self._sizes: dict[str, int] = dict(roster.sizes)
        self._settled: dict[str, int] = {}
        """The last round of each client that counted."""
        self._round = 0
        self._missing: dict[str, str] = {}

    @property
    def sizes(self) -> Mapping[str, int]:
        """Training samples by client name; one mapping, which grows as clients come."""
        return self._sizes

    def muster(self) -> None:
        """See who is there; a client that has introduced itself since takes part from now on."""
        self._here = self._roster.look()
        known = self._roster.sizes
        self._sizes.clear()
        self._sizes.update(known)

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
        self._round = broadcast.round
        reads = broadcast.round > 1 and self._experiment.reads(broadcast.round - 1)
        for name, answer in self._ask("round", broadcast, names, reads=reads, confuse=False):
            yield self._open(name, answer)

    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        confuse: bool = False,
    ) -> None:
        """Nothing yet: clients read a round with the broadcast of the next."""

    def close(self, broadcast: Broadcast) -> Readings | None:
        """Ask all clients that are there to read the last round."""
        self._here = self._roster.look()
        names = sorted(self._here)
        late: dict[str, LateReading] = {}
        for name, answer in self._ask("close", broadcast, names, reads=True, confuse=True):
            try:
                if answer.parcel is not None:
                    late[name] = unpack_reading(answer.parcel.value("late", dict))
            except ParcelError:
                # The model is final; one client's numbers are missing, as if it had not answered.
                continue
        return Readings.gather(late) if late else None

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
        *,
        reads: bool,
        confuse: bool,
    ) -> Iterator[tuple[str, Answer]]:
        """Send each named client its message and yield answers as they come."""
        settings = self._experiment.network
        self._missing = {name: "not connected" for name in names if name not in self._here}
        with self._clock.phase("broadcast"):
            packed = pack_broadcast(broadcast)
            parcels = {
                self._here[name]: Parcel(
                    {
                        **packed.values,
                        "format": FORMAT,
                        "run": self._run,
                        "experiment": self._document,
                        "settled": self._settled.get(name, 0),
                        "read": reads,
                        "confuse": confuse,
                    },
                    packed.arrays,
                )
                for name in names
                if name in self._here
            }
            sent = self._courier.send(kind, parcels, settings.round_timeout)
        clients = {node: name for name, node in self._here.items()}
        waiting = {message: clients[node] for node, message in sent.items()}
        unsent = parcels.keys() - sent.keys()
        self._missing |= {clients[node]: "the message could not be sent" for node in unsent}
        enough = max(1, round(settings.enough * len(names)))
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
                answered += answer.trouble is None
                yield name, answer
        why = (
            "enough others had answered"
            if answered >= enough
            else f"no answer within {settings.round_timeout:g} s"
        )
        self._missing |= dict.fromkeys(waiting.values(), why)

    def _open(self, name: str, answer: Answer) -> Update | Failure:
        if answer.parcel is None:
            return Failure(name, answer.reason)
        try:
            update = unpack_update(name, answer.parcel)
        except ParcelError as error:
            return Failure(name, f"its answer cannot be read: {error}")
        return _on_device(update, self._device)

    def _say(self, kind: Kind, number: int, waiting: Mapping[str, str], answered: int) -> None:
        what = "closing evaluation" if kind == "close" else "training"
        details = {"round": number, "rounds": self._experiment.rounds, "answered": answered}
        self._status.say(
            what, **details, waiting=sorted(waiting.values()), missing=sorted(self._missing)
        )


def _on_device(update: Update, device: torch.device) -> Update:
    assert isinstance(update.sums, dict)
    sums = {name: value.to(device) for name, value in update.sums.items()}
    return Update(
        update.client, update.num_samples, sums, update.rows.to(device), update.loss, update.late
    )
