"""From an experiment to a finished run on this machine, in one process or in several."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from mpfedcl.core.errors import InvalidInput, LostWorker, RunCutShort
from mpfedcl.core.files import unused_folder
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.client_split import is_same_partition
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines import (
    DispatchingEngine,
    DistributedEngine,
    InProcessEngine,
)
from mpfedcl.engines.hardware import cap_threads, find_device
from mpfedcl.engines.workers import WorkerGroup, assign_clients, is_worker, open_worker_group
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_missing_encoder
from mpfedcl.methods import Asynchronous, ClosedForm, find_method
from mpfedcl.models import Model
from mpfedcl.models.feature_cache import shared_inputs
from mpfedcl.privacy.secure_aggregation.checks import (
    check_enough_clients,
    check_secure_aggregation,
    describe_secure_aggregation,
)
from mpfedcl.privacy.secure_aggregation.layout import fix_noise
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.evaluation import Workload, settle_evaluation
from mpfedcl.rounds.systems import SystemModel, check_clock, check_timing
from mpfedcl.runs.budget import limit_rounds
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Callbacks, FinalModels, Observer, RunResult
from mpfedcl.runs.run_loop import RunLoop
from mpfedcl.runs.worker_count import choose_workers

_WORKER = "mpfedcl.runs.worker"
"""The program that each worker process runs."""


def run_simulation(
    experiment: Experiment, out: Path | str | None, observer: Observer, callbacks: Callbacks
) -> RunResult:
    """Run an experiment into a new run directory."""
    _refuse_in_worker()
    asked = experiment.rounds
    for notice in describe_missing_encoder(experiment):
        observer.on_warning(notice)
    method = find_method(experiment.method)
    experiment = experiment.resolved(method.defaults)
    check_timing(method, experiment)
    check_clock(method, experiment)
    check_secure_aggregation(experiment)
    if asked not in (experiment.rounds, Experiment.model_fields["rounds"].default):
        observer.on_warning(
            f"rounds is {asked}, but {experiment.method} has one exchange and trains nothing: one "
            "round is run."
        )
    experiment = fix_noise(limit_rounds(experiment, observer.on_warning))
    attach = callbacks.attach(experiment)
    notices: list[str] = []
    with _lead_processes(experiment, notices) as (experiment, group):
        # Everything that can be wrong with the input is found before the folder is made.
        simulation = _Simulation(experiment, group, notices)
        path = Path(out) if out is not None else _free_folder(experiment)
        with RunDirectory.create(path, simulation.experiment) as directory:
            return simulation.run(directory, attach(path, observer))


def resume_simulation(
    path: Path, changes: Mapping[str, Any], observer: Observer, callbacks: Callbacks
) -> RunResult:
    """Resume a run from its newest sound checkpoint, with some settings changed."""
    _refuse_in_worker()
    with RunDirectory.resume(path) as directory:
        changed = directory.read_experiment().replace(**changes)
        for check in (check_timing, check_clock):
            check(find_method(changed.method), changed)
        changed = limit_rounds(changed, observer.on_warning, path)
        attach = callbacks.attach(changed)
        notices: list[str] = []
        with _lead_processes(changed, notices) as (experiment, group):
            simulation = _Simulation(experiment, group, notices)
            return simulation.run(directory, attach(path, observer))


def follow() -> None:
    """Work in the process group that this process was started in, until its leader has finished."""
    with open_worker_group(1, _WORKER) as group:
        assert group is not None
        document = group.broadcast().decode()
        experiment = Experiment.parse_toml(document, Path("experiment"))
        group.expect_within(experiment.worker_timeout)
        _Simulation(experiment, group).follow()


class _Simulation(RunLoop):
    """An experiment set up on this machine: data loaded, model made, clients in place."""

    _writes_beside = True
    _has_personal_models = True

    def __init__(
        self,
        experiment: Experiment,
        group: WorkerGroup | None,
        notices: Sequence[str] = (),
    ) -> None:
        cap_threads()
        self._notices = notices
        device = find_device(experiment.device)
        self._group = group
        self._data, model = _load_in_turn(experiment, device, group)
        self._own_tests = self._data.table.local_tests()
        self._label_counts = self._data.label_counts_by_client()
        self.experiment = experiment = _settle_evaluation(experiment, self._data, model)
        """With all that was left open filled in."""
        assembly = assemble(
            experiment,
            model,
            num_classes=self._data.num_classes,
            input_size=self._data.input_size,
            device=device,
            public=self._data.public,
        )
        engine = self._make_engine(assembly, group, device)
        if experiment.secure_aggregation:
            engine = _add_securely(assembly, engine)
        pace = SystemModel.of(assembly, self._label_counts)
        super().__init__(assembly, engine, self._data.class_names, pace)

    def _make_engine(
        self, assembly: Assembly, group: WorkerGroup | None, device: torch.device
    ) -> Engine:
        """Return the engine of all clients; keep only the data of this process."""
        is_asynchronous = isinstance(assembly.method, Asynchronous)
        kind = DispatchingEngine if is_asynchronous else InProcessEngine
        if group is None:
            return kind(assembly, self._data)
        sizes = self._data.sizes
        self._data = self._data.with_clients(assign_clients(sizes, group.size)[group.rank])
        return DistributedEngine(kind(assembly, self._data), sizes, group, device)

    def run(self, directory: RunDirectory, observer: Observer) -> RunResult:
        """Run the rounds that are left, on the data that the run was begun on."""
        self._check_data(directory)
        secure = describe_secure_aggregation(self._experiment)
        for notice in [*self._data.notices, *secure, *self._notices]:
            observer.on_warning(notice)
        return super().run(directory, observer)

    def _write_models(self, directory: RunDirectory, round_number: int, observer: Observer) -> None:
        """Write the models, the personal ones one by one."""
        server = self._round_loop.state.server
        models = FinalModels(
            directory=directory,
            round=round_number,
            method=self._method,
            model=self._assembly.model,
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

    def _check_data(self, directory: RunDirectory) -> None:
        """Write down who holds what; refuse to resume a run whose data have changed since."""
        if directory.read_json("federation.json") is not None:
            raise InvalidInput(
                f"{directory.path} is a run over a network; it must be resumed by mpfedcl "
                "federation start --resume."
            )
        now, before = self._data.partition, directory.read_json("partition.json")
        if before is not None and not is_same_partition(before, now):
            raise InvalidInput(
                f"{directory.path} was begun on other data; images and encoder must be the same "
                "as then, or the run must be started again in a new folder."
            )
        directory.write_partition(now)


def _add_securely(assembly: Assembly, engine: Engine) -> Engine:
    # Only now: what it needs is an extra.
    from mpfedcl.engines.secure_aggregation import SecureAggregationEngine

    check_enough_clients(assembly.experiment, len(engine.sizes))
    return SecureAggregationEngine(assembly, engine)


def _refuse_in_worker() -> None:
    """Refuse to begin a run in a process that was started to work for another."""
    if is_worker():
        raise InvalidInput(
            "this process was started by torchrun to work for another; only the command must be "
            "started so: torchrun -m mpfedcl run. In Python, give the experiment workers."
        )


def _settle_evaluation(experiment: Experiment, data: FederatedData, model: Model) -> Experiment:
    """Fill in how often a run is evaluated, and of how many clients; alike in all processes."""
    method = find_method(experiment.method)(experiment, data.num_classes)
    if isinstance(method, ClosedForm):
        model = method.make_model(data.input_size)
    like = model.init(torch.Generator(), torch.float32)
    work = Workload.of(
        method,
        torch.from_numpy(data.label_counts()),
        (len(data.test_labels), sum(len(client.test) for client in data.clients)),
        sum(value.numel() for value in like.values()),
        model.embedding_size,
    )
    return settle_evaluation(experiment, method, work)


@contextmanager
def _lead_processes(
    experiment: Experiment, notices: list[str]
) -> Iterator[tuple[Experiment, WorkerGroup | None]]:
    """Open a process group for an experiment and tell it what to run, if more than one process.

    `notices` gets what the user should know of their number.
    """
    choice = choose_workers(experiment, find_method(experiment.method))
    notices += choice.notices
    try:
        with ExitStack() as stack:
            group = None
            try:
                opened = open_worker_group(choice.count, _WORKER, experiment.worker_timeout)
                group = stack.enter_context(opened)
            except (LostWorker, OSError) as error:
                if experiment.workers != "auto":
                    raise
                notices[:] = [f"1 worker: others could not be started ({error})."]
            experiment = experiment.replace(workers=1 if group is None else group.size)
            if group is not None:
                group.broadcast(experiment.to_toml().encode())
            yield experiment, group
    except RunCutShort:
        raise
    except LostWorker as error:
        raise LostWorker(f"a worker was lost before the first round ({error}).") from None


def _load_in_turn(
    experiment: Experiment, device: torch.device, group: WorkerGroup | None
) -> tuple[FederatedData, Model]:
    """Load; the leader goes first, so that only one process encodes what is not cached yet."""
    takes_turns = group is not None and experiment.encoder.name not in (None, "none")
    if group is not None and takes_turns and not group.is_leader:
        group.wait()
    with shared_inputs(group is not None):
        loaded = load_data_and_model(experiment, device)
    if group is not None and takes_turns and group.is_leader:
        group.wait()
    return loaded


def _free_folder(experiment: Experiment) -> Path:
    """Return a folder under runs that says what is in it."""
    method = experiment.method.rpartition(":")[2]
    stem = f"{method}-{experiment.dataset.name}-{experiment.partition.kind}-seed{experiment.seed}"
    return unused_folder(Path("runs") / stem)
