"""Jobs: several runs in parallel, each in its own process; interrupted runs are resumed."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.processes import receive_at_end_of_parent
from mpfedcl.engines.hardware import PROCESS_BYTES, usable_cores, usable_memory
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.experiment.datasets import GIVEN
from mpfedcl.experiment.experiment import take_choices
from mpfedcl.models.feature_cache import shared_inputs
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer, RunResult

Jobs = int | Literal["auto"]
_BYTES_OF_A_JOB = 2**30
"""Memory of a process with a model and data of usual size; large data are shared."""


Execute = Callable[[Experiment, Path, Observer], RunResult]
"""Runs an experiment into a folder, or resumes the run in it: `mpfedcl.api.run_or_resume`.

The function belongs to a higher layer, so it is passed in; processes import it by name.
"""


@dataclass(frozen=True)
class JobOptions:
    """How several runs are executed."""

    execute: Execute
    jobs: Jobs = 1
    """Parallel runs; auto: as many as cores and memory allow."""
    should_stop: Callable[[], bool] = lambda: False
    """Called between rounds; True stops all runs after the current round."""
    on_wait: Callable[[], None] = lambda: None
    """Called regularly while runs are active."""


@dataclass(frozen=True)
class PlannedRun:
    """An experiment and its run directory. A run with fewer rounds is resumed."""

    experiment: Experiment
    path: Path

    def rounds_done(self) -> int:
        """Return the number of recorded rounds."""
        return len(RunDirectory(self.path).read_records())

    def is_done(self) -> bool:
        """Return whether the run has at least the planned rounds."""
        rounds, directory = self.experiment.rounds, RunDirectory(self.path)
        summary = directory.read_summary()
        if summary is not None:
            return bool(summary["rounds"] >= rounds)
        # A run that is being extended has no summary.
        return self.rounds_done() >= rounds and directory.read_experiment().rounds > rounds


def reject_budget(base: Experiment, study: str) -> None:
    """Reject a study of several runs under a privacy budget."""
    if base.privacy.has_budget:
        raise InvalidInput(
            f"privacy.epsilon is {base.privacy.epsilon:g}; for {study} it must be left out: each "
            "run on private data is a release, and a choice among runs spends the budgets of all "
            "of them. Choose on data that need no budget."
        )


def reject_repeated(name: str, values: Sequence[object]) -> None:
    """Reject an empty list, or one with the same value twice."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidInput(f"{name} is {values!r}; it must be several, in a list.")
    if not values or len(set(values)) < len(values):
        raise InvalidInput(f"{name} is {list(values)}; it must name at least one, and each once.")


def count_jobs(jobs: Jobs, workers: int | Literal["auto"] = 1) -> int:
    """Return the number of parallel runs: at most as given, and one per core if memory allows.

    Each worker of a run has one thread, so that each core serves one thread. A run with automatic
    workers has one worker if there are several runs.
    """
    if jobs != "auto":
        if not isinstance(jobs, int) or jobs < 1:
            raise InvalidInput(f"jobs is {jobs}; it must be auto, or 1 or more.")
        return max(1, min(jobs, usable_cores(), usable_memory() // PROCESS_BYTES))
    cores = usable_cores() // (1 if workers == "auto" else workers)
    return max(1, min(cores, usable_memory() // _BYTES_OF_A_JOB))


def reject_other_runs(planned: Sequence[PlannedRun], out: Path) -> None:
    """Reject a folder that already holds a run with other settings than planned."""
    for each in planned:
        directory = RunDirectory(each.path)
        if not directory.holds_run():
            continue
        begun = directory.read_experiment()
        asked = take_choices(each.experiment, begun)
        neutral = {name: asked.setting(name) for name in RESULT_NEUTRAL_SETTINGS}
        if begun.replace(**neutral) != asked:
            raise InvalidInput(
                f"out is {str(out)!r}; {each.path.name} in it holds a run with other settings: "
                "give another folder, or the settings it was begun with."
            )


def run_planned(planned: Sequence[PlannedRun], options: JobOptions) -> bool:
    """Execute the runs that are not done; return whether all are done now."""
    with JobPool(options) as pool:
        return pool.run(planned)


class JobPool:
    """Up to `options.jobs` processes that execute runs until the pool is closed.

    An error waits for the current rounds; an interrupt ends the processes at once.
    """

    def __init__(self, options: JobOptions) -> None:
        self._options = options
        self._jobs = 0
        self._pool: ProcessPoolExecutor | None = None
        # Spawned, because forking a process with threads can hang.
        self._context = multiprocessing.get_context("spawn")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        self._stop.value = True
        try:
            if kind is None or issubclass(kind, Exception):
                self._pool.shutdown(cancel_futures=True)
        finally:
            # Does not wait for active processes: an interrupt may come while waiting, too.
            self._parent_end.close()
            self._pool.shutdown(cancel_futures=True)

    def run(self, planned: Sequence[PlannedRun]) -> bool:
        """Execute the runs that are not done; return whether all are done now."""
        todo = order_runs([each for each in planned if not each.is_done()])
        options = self._options
        if self._pool is None and (self._num_jobs(todo) <= 1 or len(todo) <= 1):
            observer = Observer(
                on_round=lambda _: options.on_wait(), should_stop=options.should_stop
            )
            return all(
                not options.should_stop()
                and options.execute(each.experiment, each.path, observer).summary is not None
                for each in todo
            )
        try:
            return self._run_in_processes(todo)
        except BrokenProcessPool:
            raise InvalidInput(
                f"jobs is {self._jobs}; one of them was killed (out of memory?): the "
                "same command continues where it stopped, and fewer jobs need less memory."
            ) from None

    def _num_jobs(self, todo: Sequence[PlannedRun]) -> int:
        if not self._jobs and any(_stays_in_process(each.experiment) for each in todo):
            if self._options.jobs not in ("auto", 1):
                raise InvalidInput(
                    f"jobs is {self._options.jobs}; it must be 1, because other processes cannot "
                    "import a method or a model of this program: define it in a file to run "
                    "several at a time."
                )
            self._jobs = 1
        if not self._jobs and todo:
            self._jobs = count_jobs(self._options.jobs, todo[0].experiment.setting("workers"))
        return self._jobs

    def _run_in_processes(self, todo: Sequence[PlannedRun]) -> bool:
        options = self._options
        for folder in {each.path.parent for each in todo}:
            # Fails before processes start if the folder cannot be written.
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
        # The first call starts the processes, which inherit the signal mask: Ctrl-C must not
        # interrupt them while they are importing.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            document = planned.experiment.to_toml()
            return self._pool.submit(
                _run_in_process, self._options.execute, document, str(planned.path)
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start_processes(self) -> ProcessPoolExecutor:
        # Not an Event, which a killed process may leave locked.
        self._stop = self._context.RawValue("b", 0)
        child_end, self._parent_end = self._context.Pipe(duplex=False)
        # It unblocks signals when it starts, so it must start before they are blocked.
        resource_tracker.ensure_running()
        return ProcessPoolExecutor(
            self._jobs,
            mp_context=self._context,
            initializer=_prepare_process,
            initargs=(self._stop, child_end),
        )


def _stays_in_process(experiment: Experiment) -> bool:
    """Return whether other processes cannot import the method or the model."""
    # A process imports the script that started it, but no notebook.
    has_file = hasattr(sys.modules["__main__"], "__file__")
    models = experiment.model.names
    names = (experiment.method, *models)
    is_of_notebook = any(name.startswith("__main__:") for name in names) and not has_file
    return is_of_notebook or any(name.startswith(GIVEN) for name in models)


def order_runs(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return runs in the order of execution.

    The longest come first, so that the last one does not run alone for long; equally long ones are
    grouped by their seed and so by their data, which a process then loads once.
    """
    return sorted(planned, key=lambda each: (-each.experiment.rounds, each.experiment.seed))


_stop: list[Any] = []
"""In a process of a pool: the flag by which the parent stops runs after their round."""


def _prepare_process(stop: Any, parent: Connection) -> None:
    """Let this process end with its parent or the pool; the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _stop[:] = [stop]
    receive_at_end_of_parent(signal.SIGKILL)

    def end_with_parent() -> None:
        # Nothing is ever sent: this returns when the other end is closed.
        with contextlib.suppress(EOFError, OSError):
            parent.recv_bytes()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _run_in_process(execute: Execute, document: str, path: str) -> str | None:
    """Execute one run in its own process; return None, "stopped" or an error message."""
    (stop,) = _stop
    observer = Observer(should_stop=lambda: bool(stop.value))
    if observer.should_stop():
        return "stopped"
    try:
        experiment = Experiment.parse_toml(document, Path(path))
        if experiment.setting("workers") == "auto":
            # Each core has a run.
            experiment = experiment.replace(workers=1)
        with shared_inputs():
            finished = execute(experiment, Path(path), observer).summary is not None
    except InvalidInput as error:
        return str(error)
    return None if finished else "stopped"
