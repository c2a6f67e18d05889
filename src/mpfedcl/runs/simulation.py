"""Simulation: runs an experiment on this machine, in one process or in several."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput, LostWorker, RunCutShort
from mpfedcl.core.files import unused_folder
from mpfedcl.data.client_split import is_same_partition
from mpfedcl.data.loading import load_data_and_models
from mpfedcl.engines import DispatchingEngine, DistributedEngine, InProcessEngine
from mpfedcl.engines.hardware import cap_threads, find_device
from mpfedcl.engines.worker_group import WorkerGroup, assign_clients, is_worker, open_worker_group
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Asynchronous
from mpfedcl.models.feature_cache import shared_inputs
from mpfedcl.privacy.secure_aggregation import (
    check_enough_clients,
    describe_secure_aggregation,
)
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.rounds.systems import SystemModel
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Attach, Callbacks, FinalModels, Observer, RunResult
from mpfedcl.runs.plan import Plan, plan, plan_evaluation
from mpfedcl.runs.run_loop import RunLoop
from mpfedcl.runs.worker_count import choose_workers

_WORKER = "mpfedcl.runs.worker"
"""The program that each worker process runs."""


def run_simulation(
    experiment: Experiment, out: Path | str | None, observer: Observer, callbacks: Callbacks
) -> RunResult:
    """Run an experiment into a new run directory."""
    _refuse_in_worker()
    with _prepare(plan(experiment), observer, callbacks) as (simulation, attach):
        # Invalid input is rejected before the folder is created.
        path = Path(out) if out is not None else _free_folder(simulation.experiment)
        with RunDirectory.create(path, simulation.experiment) as directory:
            return simulation.run(directory, attach(path, observer))


def resume_simulation(
    path: Path, changes: Mapping[str, Any], observer: Observer, callbacks: Callbacks
) -> RunResult:
    """Resume a run from its newest valid checkpoint, with changed settings."""
    _refuse_in_worker()
    with RunDirectory.resume(path) as directory:
        planned = plan(directory.read_experiment().replace(**changes), run=path)
        with _prepare(planned, observer, callbacks) as (simulation, attach):
            return simulation.run(directory, attach(path, observer))


@contextmanager
def _prepare(
    planned: Plan, observer: Observer, callbacks: Callbacks
) -> Iterator[tuple["_Simulation", Attach]]:
    """Start the processes of a planned run, load its data, and yield it with its callbacks."""
    experiment = planned.experiment
    attach = callbacks.attach(experiment)
    asked, count = experiment.workers, choose_workers(experiment)
    try:
        with ExitStack() as stack:
            group = None
            try:
                opened = open_worker_group(count, _WORKER, experiment.worker_timeout)
                group = stack.enter_context(opened)
            except (LostWorker, OSError) as error:
                if asked != "auto":
                    raise
                observer.on_warning(f"1 worker: others could not be started ({error}).")
            experiment = experiment.replace(workers=1 if group is None else group.size)
            if group is not None:
                group.broadcast(experiment.to_toml().encode())
            simulation = _Simulation(experiment, group)
            # Only now: invalid data are reported in one line.
            for notice in planned.notices:
                observer.on_warning(notice)
            if asked != experiment.workers and (asked != "auto" or group is not None):
                limits = " (at most one per core and client, and as many as fit into memory)"
                given = f"{experiment.workers}{'' if asked == 'auto' else limits}"
                observer.on_warning(f"workers is {asked}; the run has {given}.")
            yield simulation, attach
    except RunCutShort:
        raise
    except LostWorker as error:
        raise LostWorker(f"a worker was lost before the first round ({error}).") from None


def follow() -> None:
    """Work for the leader of this process's group until it has finished."""
    with open_worker_group(1, _WORKER) as group:
        assert group is not None
        document = group.broadcast().decode()
        experiment = Experiment.parse_toml(document, Path("experiment"))
        group.expect_within(experiment.worker_timeout)
        _Simulation(experiment, group).follow()


class _Simulation(RunLoop):
    """An experiment on this machine, with data, model and engine."""

    def __init__(self, experiment: Experiment, group: WorkerGroup | None) -> None:
        cap_threads()
        device = find_device(experiment.device)
        self._group = group
        # The cache of features lets one process encode the samples while the others wait.
        with shared_inputs(group is not None):
            self._data, model, models = load_data_and_models(experiment, device)
            if group is not None:
                # Encoding may take longer than any exchange.
                group.wait()
        self._own_tests = self._data.table.local_tests()
        self._label_counts = self._data.label_counts_by_client()
        self.experiment = experiment = plan_evaluation(experiment, self._data, model)
        """The experiment with all defaults resolved."""
        assembly = assemble(
            experiment,
            model,
            num_classes=self._data.num_classes,
            input_size=self._data.input_size,
            device=device,
            public=self._data.public,
            models=models,
        )
        if experiment.secure_aggregation:
            check_enough_clients(experiment, len(self._data.sizes))
        engine = self._make_engine(assembly, group)
        systems = SystemModel.of(assembly, self._label_counts)
        super().__init__(assembly, engine, self._data.class_names, systems)

    def _make_engine(self, assembly: Assembly, group: WorkerGroup | None) -> Engine:
        """Return the engine of all clients; keep only the data of this process."""
        if group is None:
            is_asynchronous = isinstance(assembly.method, Asynchronous)
            kind = DispatchingEngine if is_asynchronous else InProcessEngine
            return kind(assembly, self._data)
        sizes = self._data.sizes
        self._data = self._data.with_clients(assign_clients(sizes, group.size)[group.rank])
        return DistributedEngine(assembly, self._data, sizes, group)

    def run(self, directory: RunDirectory, observer: Observer) -> RunResult:
        """Run the remaining rounds on the data that the run began with."""
        self._check_data(directory)
        secure = describe_secure_aggregation(self._experiment)
        for notice in [*self._data.notices, *secure]:
            observer.on_warning(notice)
        return super().run(directory, observer)

    def _write_models(
        self, directory: RunDirectory, record: RoundRecord, observer: Observer
    ) -> None:
        """Write the models, the personalized ones one by one."""
        server = self._round_loop.state.server
        models = FinalModels(
            directory=directory,
            round=record.round,
            method=self._method,
            model_of=lambda client: self._assembly.of(client).model,
            pool=self._pool,
            averaged=self._round_loop.global_model,
            personal=self._personal_models(),
            test_inputs=self._data.test_inputs,
            test_labels=self._data.test_labels,
            local_tests=self._own_tests,
            label_counts=self._label_counts,
            fitted={**server.extra, **server.private},
        )
        directory.write_models(models.averaged, models.pool, observer.on_models(models))
        most, trained = self._experiment.most_personal_models, len(record.clients.answered)
        if self._keeps_personal_models and trained > most:
            observer.on_warning(
                f"models/ has {most:,} personalized models; {trained:,} clients trained in the "
                "last round. --most-personal-models sets the limit."
            )

    def _check_data(self, directory: RunDirectory) -> None:
        """Write the partition; reject a resumed run whose data have changed."""
        if directory.read_json("federation.json") is not None:
            raise InvalidInput(
                f"{directory.path} is a run over a network; it must be resumed by mpfedcl "
                "federation start --resume."
            )
        now, before = self._data.partition, directory.read_json("partition.json")
        for field in ("model", "models"):
            if before is not None and before.get(field) != now.get(field):
                names = ", ".join(self._experiment.model.names)
                raise InvalidInput(
                    f"model.name is {names!r}, whose code or constants have changed since "
                    f"{directory.path} was started; it must be the same model."
                )
        if before is not None and not is_same_partition(before, now):
            raise InvalidInput(
                f"{directory.path} was started with other data; images and encoder must be the "
                "same, or the run must be started again in a new folder."
            )
        directory.write_partition(now)


def _refuse_in_worker() -> None:
    """Reject a run in a process that torchrun started as a worker."""
    if is_worker():
        raise InvalidInput(
            "this process is a worker of torchrun, which must start the command itself: torchrun "
            "-m mpfedcl run. In Python, set workers of the experiment."
        )


def _free_folder(experiment: Experiment) -> Path:
    """Return an unused folder below runs, named after the experiment."""
    method = experiment.method.rpartition(":")[2]
    dataset = experiment.dataset.name.replace(":", "-")
    stem = f"{method}-{dataset}-{experiment.partition.kind}-seed{experiment.seed}"
    return unused_folder(Path("runs") / stem)
