"""From an experiment to a finished run on this machine."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfedcl.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from mpfedcl.clock import Clock
from mpfedcl.data.federated import FederatedData, load_federated
from mpfedcl.data.imageset import Listing
from mpfedcl.data.inputs import byte_inputs, feature_inputs
from mpfedcl.data.reader import data_folder
from mpfedcl.data.split import Indices
from mpfedcl.engines import InProcessEngine
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import DatasetSettings, Experiment
from mpfedcl.federation import Federation, FederationState
from mpfedcl.methods import Method, Server, find_method
from mpfedcl.models import Mlp, Model
from mpfedcl.models.encoder import Encoder, find_encoder
from mpfedcl.models.trainable import make_trainable
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rng import generator
from mpfedcl.runs import RunDirectory, summarize_run

_HIDDEN = (512, 512, 256)

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunResult:
    """What `run` gives back; everything else is in the run directory at `path`."""

    path: Path
    experiment: Experiment
    accuracy: float | None
    """The headline: the method's reading on the clients' own tests in the last round, in %."""
    history: list[dict[str, Any]]
    """The rounds' records."""
    pool: PrototypePool | None
    summary: dict[str, Any] | None
    """None where the run was stopped before its last round."""


@dataclass(frozen=True)
class Observer:
    """How a run is watched and stopped from outside."""

    on_start: Callable[[Experiment, int], None] = lambda *_: None
    on_round: Callable[[Record], None] = lambda *_: None
    on_warning: Callable[[str], None] = lambda *_: None
    should_stop: Callable[[], bool] = lambda: False


def run(
    experiment: Experiment, out: Path | str | None = None, observer: Observer | None = None
) -> RunResult:
    """Run an experiment into a new run directory and return what came of it."""
    experiment = experiment.resolved(find_method(experiment.method).defaults)
    # Everything that can be wrong with the input is found before the folder is made.
    simulation = _Simulation(experiment)
    path = Path(out) if out is not None else _free_folder(experiment)
    with RunDirectory.create(path, experiment) as directory:
        return simulation.go(directory, observer or Observer())


def resume(
    path: Path | str, rounds: int | None = None, observer: Observer | None = None
) -> RunResult:
    """Go on with a run from its newest sound checkpoint, with more rounds if so asked."""
    with RunDirectory.resume(Path(path)) as directory:
        experiment = directory.read_experiment()
        if rounds is not None and rounds != experiment.rounds:
            experiment = experiment.replace(rounds=rounds)
        simulation = _Simulation(experiment)
        return simulation.go(directory, observer or Observer())


def _load(experiment: Experiment, device: torch.device) -> tuple[FederatedData, Model]:
    """Return the clients' data and the model that fits them: pixels, features, or both trained."""
    settings = experiment.encoder
    if settings.name in (None, "none"):
        if settings.train or settings.weights is not None:
            raise InvalidInput(
                "encoder.name is 'none'; with encoder.train or encoder.weights it must name an "
                "encoder, such as resnet18."
            )
        data = load_federated(experiment).to(device)
        return data, Mlp((data.input_size, *_HIDDEN), data.num_classes)
    # For one's own pictures the root is the set itself; weights mostly lie with the other data.
    folders = [data_folder(each)[0] for each in (experiment.dataset, DatasetSettings())]
    found: list[Encoder] = []

    def make_inputs(listing: Listing, rows: Indices, experiment: Experiment) -> Tensor:
        # Only once the data are dealt out: data that are missing are the first thing to say.
        encoder = find_encoder(str(settings.name), settings.weights, *folders, device=device)
        found.append(encoder)
        make = byte_inputs(encoder) if settings.train else feature_inputs(encoder)
        return make(listing, rows, experiment)

    data = load_federated(experiment, make_inputs).to(device)
    (encoder,) = found
    # On record, so that a run is not gone on with behind other weights.
    data.partition["encoder"] = encoder.fingerprint
    if settings.train:
        return data, make_trainable(encoder, data.num_classes)
    return data, Mlp((data.input_size, _HIDDEN[-1]), data.num_classes)


class _Simulation:
    """An experiment set up: data loaded, model made, clients in place."""

    def __init__(self, experiment: Experiment) -> None:
        cap_threads()
        device = _find_device(experiment.device)
        dtype = getattr(torch, experiment.dtype)
        method_class = find_method(experiment.method)
        self._experiment = experiment
        self._device = device
        self.data, model = _load(experiment, device)
        self._method: Method = method_class(experiment, self.data.num_classes)
        drawn = model.init(generator(experiment.seed, "weights"), dtype)
        initial = {name: value.to(device) for name, value in drawn.items()}
        self._clock = Clock()
        self._engine = InProcessEngine(
            experiment, self._method, model, self.data, initial, self._clock
        )
        self._federation = Federation(
            experiment,
            self._method,
            self._engine,
            initial,
            dimension=model.embedding_size,
            clock=self._clock,
        )

    def go(self, directory: RunDirectory, observer: Observer) -> RunResult:
        """Run the rounds that are left and write down what came of them."""
        self._check_data(directory)
        records = self._restore(directory, observer)
        rounds, done = self._experiment.rounds, self._federation.state.round
        # A round that was not run as the last one has left no models, and perhaps no readings.
        if done >= rounds and not done == rounds == directory.read_experiment().rounds:
            raise InvalidInput(
                f"rounds is {rounds}; this run has already done {done}, so it must be at least "
                f"{done + 1}, or left out."
            )
        if done < rounds:
            directory.remove_summary()
        directory.write_experiment(self._experiment)
        observer.on_start(self._experiment, self._federation.state.round)
        while self._federation.state.round < rounds and not observer.should_stop():
            records.append(self._round(directory))
            observer.on_round(records[-1])
            if records[-1]["unchanged"]:
                reasons = records[-1]["clients"]["rejected"].values()
                why = f" ({next(iter(reasons))})" if reasons else ""
                observer.on_warning(f"Round {records[-1]['round']}: no client was accepted{why}.")
        return self._conclude(directory, records)

    def _check_data(self, directory: RunDirectory) -> None:
        """Write down who holds what; refuse to go on with a run whose data have changed since."""
        now, before = self.data.partition, directory.read_json("partition.json")
        if before is not None and not _is_same(before, now):
            raise InvalidInput(
                f"{directory.path} was begun on other data; images and encoder must be the same "
                "as then, or the run must be begun anew."
            )
        directory.write_json("partition.json", now)

    def _round(self, directory: RunDirectory) -> dict[str, Any]:
        number = self._federation.state.round + 1
        is_last = number == self._experiment.rounds
        record = self._federation.run_round(
            evaluate=is_last or number % self._experiment.evaluate_every == 0
        ).to_json()
        with self._clock.phase("checkpoint"):
            if is_last:
                # Before the checkpoint: a crash in between runs this round again and rewrites them.
                pool = self._federation.pool if self._method.shares_prototypes else None
                directory.write_models(
                    self._federation.averaged_model,
                    pool,
                    self._engine.personal_models(self._federation.shared_parameters),
                )
            save_checkpoint(
                directory.checkpoints,
                Checkpoint(self._federation.state, self._engine.state(), record),
            )
        record["seconds"]["checkpoint"] = self._clock.lap()["checkpoint"]
        directory.append_record(record)
        return record

    def _restore(self, directory: RunDirectory, observer: Observer) -> list[dict[str, Any]]:
        checkpoint, problems = load_checkpoint(directory.checkpoints)
        for problem in problems:
            observer.on_warning(f"Checkpoint {problem}; going back to the one before.")
        if problems and checkpoint is None:
            observer.on_warning("No sound checkpoint is left; starting over from round 1.")
        if checkpoint is not None:
            self._federation.state = _moved(checkpoint.state, self._device)
            self._engine.load_state(checkpoint.clients)
        return directory.rewind_records(checkpoint.record if checkpoint else None)

    def _conclude(self, directory: RunDirectory, records: list[dict[str, Any]]) -> RunResult:
        summary = None
        if self._federation.state.round == self._experiment.rounds:
            summary = summarize_run(self._experiment, self._method.reading, records)
            directory.write_json("summary.json", summary)
        return RunResult(
            path=directory.path,
            experiment=self._experiment,
            accuracy=summary["accuracy"] if summary else None,
            history=records,
            pool=self._federation.pool if self._method.shares_prototypes else None,
            summary=summary,
        )


def _is_same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Tell whether two descriptions are of the same data, up to rounding in the inputs."""
    means, others = before.get("input_means", {}), now["input_means"]
    return {**before, "input_means": None} == {**now, "input_means": None} and all(
        math.isclose(means[name], value, rel_tol=1e-4, abs_tol=1e-6)
        for name, value in others.items()
    )


def cap_threads() -> None:
    """Use one thread, unless OMP_NUM_THREADS says otherwise.

    Batches of 32 gain little from a second one, two processes that spin on the same cores are tens
    of times slower, and sums come out differently with every number of threads: with one, the same
    experiment gives the same bits whatever the number of cores and of runs at the same time.
    """
    # Libraries loaded later, such as scikit-learn, read it when they start.
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if not asked.isdecimal() or int(asked) < 1:
        asked = os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(int(asked))


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        # Some devices exist in name only; a number that comes back shows that this one computes.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InvalidInput(
            f"device is {name!r}; it must be a device that this torch can use, such as cpu."
        ) from None
    return device


def _free_folder(experiment: Experiment) -> Path:
    """Return runs/<what it is>, numbered if that exists."""
    method = experiment.method.rpartition(":")[2]
    stem = f"{method}-{experiment.dataset.name}-{experiment.partition.kind}-seed{experiment.seed}"
    path, number = Path("runs") / stem, 2
    while path.exists():
        path, number = Path("runs") / f"{stem}-{number}", number + 1
    return path


def _moved(state: FederationState, device: torch.device) -> FederationState:
    """Return a state read from disk on the device of the run."""
    return FederationState(
        state.round,
        Server(
            {name: value.to(device) for name, value in state.server.params.items()},
            {name: value.to(device) for name, value in state.server.extra.items()},
        ),
        {
            name: (
                received,
                Prototypes(rows.vectors.to(device), rows.labels.to(device), rows.counts.to(device)),
            )
            for name, (received, rows) in state.rows.items()
        },
    )
