"""From an experiment to a finished run on this machine."""

from collections.abc import Sequence
from pathlib import Path

import torch

from mpfedcl.rounds.clock import Clock
from mpfedcl.runs.run_loop import Course, Observer, RunResult
from mpfedcl.data.client_data import is_same_deal
from mpfedcl.deployment.calibration import Calibrator
from mpfedcl.engines import DistributedEngine, Engine, InProcessEngine, deal_clients
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.rounds.round_loop import Federation
from mpfedcl.files import free_folder
from mpfedcl.engines.hardware import cap_threads, find_device
from mpfedcl.runs.leader import led, refuse_to_follow
from mpfedcl.data.loading import load_in_turn
from mpfedcl.methods import find_method
from mpfedcl.models import Model, Tensors
from mpfedcl.rng import generator
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.engines.process_group import Team, team_of
from mpfedcl.tracking import attach, find_trackers


def run(
    experiment: Experiment, out: Path | str | None = None, observer: Observer | None = None
) -> RunResult:
    """Run an experiment into a new run directory and return what came of it."""
    refuse_to_follow()
    experiment = experiment.resolved(find_method(experiment.method).defaults)
    trackers = find_trackers(experiment.track)
    with led(experiment) as (experiment, team):
        # Everything that can be wrong with the input is found before the folder is made.
        simulation = _Simulation(experiment, team)
        path = Path(out) if out is not None else _free_folder(experiment)
        with RunDirectory.create(path, experiment) as directory:
            return simulation.go(directory, attach(trackers, path, observer or Observer()))


def resume(
    path: Path | str,
    rounds: int | None = None,
    observer: Observer | None = None,
    *,
    engine: str | None = None,
    workers: int | None = None,
    track: Sequence[str] | None = None,
    track_to: Path | None = None,
    trail: bool | None = None,
) -> RunResult:
    """Go on with a run from its newest sound checkpoint, with more rounds if so asked.

    Where the clients are run and who looks on makes no difference, so that may change too.
    """
    refuse_to_follow()
    with RunDirectory.resume(Path(path)) as directory:
        asked = {
            "rounds": rounds,
            "engine": engine,
            "workers": workers,
            "track": track,
            "track_to": track_to,
            "trail": trail,
        }
        changes = {name: value for name, value in asked.items() if value is not None}
        changed = directory.read_experiment().replace(**changes)
        trackers = find_trackers(changed.track)
        with led(changed) as (experiment, team):
            simulation = _Simulation(experiment, team)
            watching = attach(trackers, directory.path, observer or Observer())
            return simulation.go(directory, watching)


def follow() -> None:
    """Work in the team that this process was started in, until its leader has finished."""
    with team_of(1) as team:
        assert team is not None
        document = team.share().decode()
        _Simulation(Experiment.parse_toml(document, Path("experiment")), team).follow()


class _Simulation(Course):
    """An experiment set up on this machine: data loaded, model made, clients in place."""

    def __init__(self, experiment: Experiment, team: Team | None = None) -> None:
        cap_threads()
        device = find_device(experiment.device)
        dtype = getattr(torch, experiment.dtype)
        method_class = find_method(experiment.method)
        self._experiment = experiment
        self._team = team
        self._device = device
        self.data, model = load_in_turn(experiment, device, team)
        self._model = model
        self._own_tests = {client.name: client.test for client in self.data.clients}
        self._method = method_class(experiment, self.data.num_classes)
        drawn = model.init(generator(experiment.seed, "weights"), dtype)
        initial = {name: value.to(device) for name, value in drawn.items()}
        self._clock = Clock()
        self._engine = self._make_engine(model, initial)
        federation = Federation(
            experiment,
            self._method,
            self._engine,
            initial,
            dimension=model.embedding_size,
            clock=self._clock,
        )
        super().__init__(
            experiment,
            self._method,
            federation,
            self._engine,
            self._clock,
            device,
            self.data.class_names,
        )

    def _make_engine(self, model: Model, initial: Tensors) -> Engine:
        sizes = {client.name: len(client.labels) for client in self.data.clients}
        if self._team is not None:
            share = deal_clients(sizes, self._team.size)[self._team.rank]
            self.data = self.data.only(share)
        engine = InProcessEngine(
            self._experiment, self._method, model, self.data, initial, self._clock
        )
        if self._team is None:
            return engine
        return DistributedEngine(engine, sizes, self._team, self._device)

    def go(self, directory: RunDirectory, observer: Observer) -> RunResult:
        """Run the rounds that are left, on the data that the run was begun on."""
        self._check_data(directory)
        return super().go(directory, observer)

    def _write_models(self, directory: RunDirectory, number: int) -> None:
        """Write the models, and how far from the pool each puts the images it is tested on."""
        averaged, pool = self._federation.averaged_model, self._pool
        calibrator = Calibrator(
            self._model, self._method, pool, self.data.test_inputs, self._own_tests
        )
        calibrator.measure_average(averaged)
        directory.write_models(averaged, pool, calibrator.listen(self._personal_models()))
        if (calibration := calibrator.to_json(number)) is not None:
            directory.write_json("calibration.json", calibration)

    def _check_data(self, directory: RunDirectory) -> None:
        """Write down who holds what; refuse to go on with a run whose data have changed since."""
        if directory.read_json("federation.json") is not None:
            raise InvalidInput(
                f"{directory.path} is a run over a network; it must be gone on with by mpfedcl "
                "federation start --resume."
            )
        now, before = self.data.partition, directory.read_json("partition.json")
        if before is not None and not is_same_deal(before, now):
            raise InvalidInput(
                f"{directory.path} was begun on other data; images and encoder must be the same "
                "as then, or the run must be begun anew."
            )
        directory.write_json("partition.json", now)


def _free_folder(experiment: Experiment) -> Path:
    """Return a folder under runs that says what is in it."""
    method = experiment.method.rpartition(":")[2]
    stem = f"{method}-{experiment.dataset.name}-{experiment.partition.kind}-seed{experiment.seed}"
    return free_folder(Path("runs") / stem)
