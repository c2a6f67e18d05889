"""The server of a federation over a network: the same round loop, its clients elsewhere."""

import secrets
from pathlib import Path
from typing import Any

import torch

from mpfedcl.data.loading import find_encoder_of, make_mlp, make_model
from mpfedcl.engines.hardware import cap_threads, find_device
from mpfedcl.errors import InvalidInput, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.files import free_folder
from mpfedcl.methods import find_method
from mpfedcl.models import Model
from mpfedcl.network.packing import Introduction
from mpfedcl.network.server.client_registry import Form, Roster, agree_on_classes
from mpfedcl.network.server.engine import NetworkEngine
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import Courier
from mpfedcl.rng import generator
from mpfedcl.rounds.clock import Clock
from mpfedcl.rounds.round_loop import Federation
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.run_loop import Course, Observer, RunResult
from mpfedcl.tracking import attach, find_trackers

_MOST_IDLE_ROUNDS = 3
"""Rounds in a row in which nobody was accepted; waiting on would only wait."""


def serve(
    courier: Courier,
    experiment: Experiment,
    out: Path | None = None,
    status: Path | None = None,
    observer: Observer | None = None,
) -> RunResult:
    """Wait for clients, run an experiment with them into a new run directory, and return it."""
    telling = Status(status)
    experiment = check_experiment(experiment)
    # What is missing is said before anybody is waited for.
    trackers = find_trackers(experiment.track)
    roster = _gather(courier, experiment, telling)
    experiment = agree_on_classes(experiment, roster.members)
    roster.adopt(experiment)
    path = out if out is not None else free_folder(Path("runs") / f"{experiment.method}-network")
    with RunDirectory.create(path, experiment) as directory:
        watching = attach(trackers, path, observer or Observer())
        return _go(courier, experiment, roster, directory, telling, watching)


def serve_again(
    courier: Courier,
    path: Path,
    rounds: int | None = None,
    status: Path | None = None,
    observer: Observer | None = None,
) -> RunResult:
    """Go on with a run from its newest sound checkpoint."""
    telling = Status(status)
    with RunDirectory.resume(path) as directory:
        experiment = directory.read_experiment()
        if rounds is not None:
            experiment = experiment.replace(rounds=rounds)
        known = directory.read_json("federation.json")
        if known is None and directory.read_records():
            raise InvalidInput(
                f"resume is {str(path)!r}; it must be a run over a network, and this one is not."
            )
        trackers = find_trackers(experiment.track)
        form = (known["input_size"], known["encoder"]) if known else None
        roster = _gather(courier, check_experiment(experiment), telling, form)
        experiment = agree_on_classes(experiment, roster.members)
        roster.adopt(experiment)
        watching = attach(trackers, path, observer or Observer())
        return _go(courier, experiment, roster, directory, telling, watching)


def check_experiment(experiment: Experiment) -> Experiment:
    """Return the experiment with nothing left open; refuse what cannot be run over a network."""
    experiment = experiment.resolved(find_method(experiment.method).defaults)
    if experiment.diagnostics:
        raise InvalidInput(
            f"diagnostics is {', '.join(experiment.diagnostics)}; over a network it must be left "
            "out: clients' gradients do not travel."
        )
    if experiment.workers > 1:
        raise InvalidInput(f"workers is {experiment.workers}; over a network it must be 1.")
    return experiment


def _gather(
    courier: Courier, experiment: Experiment, status: Status, form: Form | None = None
) -> Roster:
    roster = Roster(experiment, courier, status, form)
    roster.gather()
    return roster


def _go(
    courier: Courier,
    experiment: Experiment,
    roster: Roster,
    directory: RunDirectory,
    status: Status,
    observer: Observer,
) -> RunResult:
    cap_threads()
    device = find_device(experiment.device)
    classes = experiment.dataset.classes
    assert roster.form is not None
    known = directory.read_json("federation.json") or {
        "run": secrets.token_hex(16),
        **dict(zip(("input_size", "encoder"), roster.form, strict=True)),
    }
    directory.write_json("federation.json", known)
    clock = Clock()
    engine = NetworkEngine(experiment, courier, roster, known["run"], device, clock, status)
    method = find_method(experiment.method)(experiment, len(classes))
    model = _make_model(experiment, roster.form, device)
    drawn = model.init(generator(experiment.seed, "weights"), getattr(torch, experiment.dtype))
    initial = {name: value.to(device) for name, value in drawn.items()}
    federation = Federation(
        experiment, method, engine, initial, dimension=model.embedding_size, clock=clock
    )
    course = Course(experiment, method, federation, engine, clock, device, classes)
    watch = _Watch(roster, directory, classes, status, observer)
    try:
        return course.go(directory, watch.observer)
    except RunCutShort as error:
        raise RunCutShort(f"{error} Go on with --resume {directory.path}") from None


def _make_model(experiment: Experiment, form: Form, device: torch.device) -> Model:
    num_classes = len(experiment.dataset.classes)
    input_size, fingerprint = form
    if experiment.encoder.train:
        encoder = find_encoder_of(experiment, device)
        if fingerprint != encoder.fingerprint:
            raise InvalidInput(
                "encoder.weights are not those of the clients; with encoder.train all must begin "
                "with the same."
            )
        return make_model(encoder, input_size, num_classes, trains_encoder=True)
    is_encoded = experiment.encoder.name not in (None, "none")
    return make_mlp(input_size, num_classes, is_encoded=is_encoded)


class _Watch:
    """Keeps what is said of the clients up to date, and ends a run in which nobody answers."""

    def __init__(
        self,
        roster: Roster,
        directory: RunDirectory,
        classes: tuple[str, ...],
        status: Status,
        observer: Observer,
    ) -> None:
        self._roster, self._directory, self._classes = roster, directory, classes
        self._idle = self._rounds = 0
        self._observer = observer
        self.observer = Observer(
            self._on_start,
            self._on_round,
            observer.on_warning,
            lambda: observer.should_stop() or status.asked_to_stop(),
            observer.on_finish,
        )

    def _on_start(self, experiment: Experiment, rounds_done: int) -> None:
        self._rounds = experiment.rounds
        self._describe()
        self._observer.on_start(experiment, rounds_done)

    def _on_round(self, record: Any) -> None:
        self._describe()
        self._observer.on_round(record)
        self._idle = self._idle + 1 if record["unchanged"] else 0
        if self._idle >= _MOST_IDLE_ROUNDS and record["round"] < self._rounds:
            raise RunCutShort(f"no client was accepted in {self._idle} rounds.")

    def _describe(self) -> None:
        """Write down who holds what, as clients say it; those who have left stay on record."""
        before = self._directory.read_json("partition.json") or {"clients": {}}
        told = {
            name: {"train": _by_class(member, self._classes), "test": member.test}
            for name, member in self._roster.members.items()
        }
        clients = {**before["clients"], **told}
        encoders = {each.encoder for each in self._roster.members.values() if each.encoder}
        content = {
            "classes": list(self._classes),
            "clients": {name: clients[name] for name in sorted(clients)},
            "input_means": {},
            # What the experiment says of data is for clients that have none of their own.
            "network": True,
            # Whoever uses the model must put images through the same encoder.
            **({"encoder": encoders.pop()} if encoders else {}),
        }
        if content != before:
            self._directory.write_json("partition.json", content)


def _by_class(member: Introduction, classes: tuple[str, ...]) -> list[int]:
    counts = dict(zip(member.classes, member.train, strict=True))
    return [counts.get(name, 0) for name in classes]
