"""Several runs, some at the same time: each in a process of its own, resumed where it was."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

from mpfedcl.core.errors import InvalidInput
from mpfedcl.engines.hardware import usable_cores, usable_memory
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.models.feature_cache import begin_reuse, end_reuse
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer, RunResult

Jobs = int | Literal["auto"]
_BYTES_OF_A_JOB = 2**30
"""What a process takes, with a model and data of usual size: large data are shared by all."""


@dataclass(frozen=True)
class Runner:
    """The functions that make runs: `run` and `resume` of `mpfedcl`.

    They stand above studies, so they are handed down; processes import them by name.
    """

    run: Callable[..., RunResult]
    resume: Callable[..., RunResult]


@dataclass(frozen=True)
class JobOptions:
    """How several runs are made."""

    runner: Runner
    jobs: Jobs = 1
    """Runs at the same time; auto: as many as cores and memory allow."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked between rounds; True ends all runs after the round under way."""
    on_wait: Callable[[], None] = lambda: None
    """Called now and then while runs are under way."""


@dataclass(frozen=True)
class PlannedRun:
    """A run to be made: what and where. One that is there with fewer rounds is resumed."""

    experiment: Experiment
    path: Path

    def rounds_done(self) -> int:
        """Return how many rounds are on record."""
        return len(RunDirectory(self.path).read_records())

    def summary(self) -> dict[str, Any] | None:
        """Return the summary if the run is complete."""
        return RunDirectory(self.path).read_summary()

    def is_done(self) -> bool:
        """Tell whether the run has got as far as the plan asks, or is on its way beyond."""
        rounds, directory = self.experiment.rounds, RunDirectory(self.path)
        summary = directory.read_summary()
        if summary is not None:
            return bool(summary["rounds"] >= rounds)
        # A run that is to have more rounds has lost its summary.
        return self.rounds_done() >= rounds and directory.read_experiment().rounds > rounds


def count_jobs(jobs: Jobs, workers: int | Literal["auto"] = 1) -> int:
    """Return how many runs are made at the same time: as asked, or one per core with room for it.

    Each run has one thread in each of its workers, so that no core has more than one to serve; a
    run that leaves their number open has one worker where there are several runs.
    """
    if jobs != "auto":
        if jobs < 0:
            raise InvalidInput(f"jobs is {jobs}; it must be auto, or 1 or more.")
        # What auto was called before.
        if jobs:
            return jobs
    cores = usable_cores() // (1 if workers == "auto" else workers)
    return max(1, min(cores, usable_memory() // _BYTES_OF_A_JOB))


def run_planned(planned: Sequence[PlannedRun], options: JobOptions) -> bool:
    """Run what is not done; tell whether everything is done now."""
    with JobPool(options) as pool:
        return pool.run(planned)


class JobPool:
    """Up to `options.jobs` processes that make runs; they serve until the pool is closed.

    Closed by an error, it waits for the rounds under way; by an interrupt, it ends them at once.
    """

    def __init__(self, options: JobOptions) -> None:
        self._options = options
        self._jobs = 0
        self._pool: ProcessPoolExecutor | None = None
        # Fresh processes, not forks: forking a process that has threads can hang it.
        self._context = multiprocessing.get_context("spawn")

    def __enter__(self) -> Self:
        # Runs in this very process; those of the pool do the same for themselves.
        begin_reuse()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end_reuse()
        if self._pool is None:
            return
        self._stop.value = True
        try:
            if kind is None or issubclass(kind, Exception):
                self._pool.shutdown(cancel_futures=True)
        finally:
            # Whoever still works is not waited for: an interrupt may also come while we wait.
            self._parent_end.close()
            self._pool.shutdown(cancel_futures=True)

    def run(self, planned: Sequence[PlannedRun]) -> bool:
        """Run what is not done; tell whether everything is done now."""
        todo = order_runs([each for each in planned if not each.is_done()])
        options = self._options
        if self._pool is None and (self._num_jobs(todo) <= 1 or len(todo) <= 1):
            observer = Observer(
                on_round=lambda _: options.on_wait(), should_stop=options.should_stop
            )
            return all(
                not options.should_stop()
                and _run_or_resume(options.runner, each.experiment, each.path, observer)
                for each in todo
            )
        try:
            return self._run_in_processes(todo)
        except BrokenProcessPool:
            raise InvalidInput(
                f"jobs is {self._jobs}; one of them was ended from outside (out of memory?): the "
                "same command continues where it stopped, and fewer jobs need less memory."
            ) from None

    def _num_jobs(self, todo: Sequence[PlannedRun]) -> int:
        if not self._jobs and todo:
            self._jobs = count_jobs(self._options.jobs, todo[0].experiment.setting("workers"))
        return self._jobs

    def _run_in_processes(self, todo: Sequence[PlannedRun]) -> bool:
        options = self._options
        for folder in {each.path.parent for each in todo}:
            # Where nothing can be written is found out before processes are started.
            folder.mkdir(parents=True, exist_ok=True)
        waiting: set[Future[str | None]] = set()
        queue = list(todo)
        complete = True
        while queue or waiting:
            while queue and len(waiting) < self._num_jobs(todo) and not options.should_stop():
                waiting.add(self._submit(queue.pop(0)))
            if options.should_stop() and self._pool is not None:
                self._stop.value = True
            if not waiting:
                return False
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            for each in done:
                outcome = each.result()
                if outcome not in (None, "stopped"):
                    raise InvalidInput(outcome)
                complete = complete and outcome is None
            options.on_wait()
        return complete

    def _submit(self, planned: PlannedRun) -> Future[str | None]:
        if self._pool is None:
            self._pool = self._start_processes()
        # The first call starts the processes, and they begin with what is held back here: an
        # interrupt of the whole group must not meet them while they are still importing.
        with _blocked(signal.SIGINT):
            return self._pool.submit(
                _run_in_process,
                self._options.runner,
                planned.experiment.to_toml(),
                str(planned.path),
            )

    def _start_processes(self) -> ProcessPoolExecutor:
        # Not an Event: a process that is killed while it looks at one leaves it locked.
        self._stop = self._context.RawValue("b", 0)
        child_end, self._parent_end = self._context.Pipe(duplex=False)
        # It lets signals through again once it has started, so not while they are held back.
        resource_tracker.ensure_running()
        return ProcessPoolExecutor(
            self._jobs,
            mp_context=self._context,
            initializer=_prepare_process,
            initargs=(self._stop, child_end),
        )


def order_runs(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return runs in the order in which they are made.

    The longest first, so that the last one does not run alone for long; of equally long ones those
    on the same data one after the other, so that a process need not load them again.
    """
    places: dict[str, int] = {}

    def place_of(experiment: Experiment) -> int:
        shared = ("dataset", "partition", "encoder", "clients", "seed", "dtype")
        text = repr([experiment.setting(name) for name in shared])
        return places.setdefault(text, len(places))

    keys = [(-each.experiment.rounds, place_of(each.experiment)) for each in planned]
    return [planned[at] for at in sorted(range(len(planned)), key=keys.__getitem__)]


def _run_or_resume(runner: Runner, experiment: Experiment, path: Path, observer: Observer) -> bool:
    if RunDirectory(path).holds_run():
        result = runner.resume(
            path,
            experiment.rounds,
            observer,
            **{name: experiment.setting(name) for name in RESULT_NEUTRAL_SETTINGS},
        )
    else:
        result = runner.run(experiment, path, observer)
    return result.summary is not None


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_stop: list[Any] = []
"""In a process of a pool: what the parent sets when runs are to end after their round."""


def _prepare_process(stop: Any, parent: Connection) -> None:
    """Make this process end when its parent does or closes the pool; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _stop[:] = [stop]
    begin_reuse(shared=True)

    def end_with_parent() -> None:
        # Nothing is ever sent: this returns when the other end is closed, by whatever it is.
        with contextlib.suppress(EOFError, OSError):
            parent.recv_bytes()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _run_in_process(runner: Runner, document: str, path: str) -> str | None:
    """Make one run in a process of its own; return None, "stopped", or what was wrong."""
    (stop,) = _stop
    observer = Observer(should_stop=lambda: bool(stop.value))
    if observer.should_stop():
        return "stopped"
    try:
        experiment = Experiment.parse_toml(document, Path(path))
        if experiment.setting("workers") == "auto":
            # The cores have a run each.
            experiment = experiment.replace(workers=1)
        finished = _run_or_resume(runner, experiment, Path(path), observer)
    except InvalidInput as error:
        return str(error)
    return None if finished else "stopped"
