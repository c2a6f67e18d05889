"""Several runs, some at the same time: each in a process of its own, gone on with where it was."""

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
from typing import Any, Self

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import INDIFFERENT, Experiment
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.run_loop import Observer
from mpfedcl.runs.simulation import resume, run


@dataclass(frozen=True)
class Plan:
    """A run to be made: what and where. One that is there with fewer rounds is gone on with."""

    experiment: Experiment
    path: Path

    @property
    def method(self) -> str:
        """The method's name."""
        return self.experiment.method

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


def run_plans(
    plans: Sequence[Plan],
    jobs: int,
    should_stop: Callable[[], bool],
    on_wait: Callable[[], None],
) -> bool:
    """Run what is not done, `jobs` at a time; tell whether everything is done now."""
    with Crew(jobs) as crew:
        return crew.run(plans, should_stop, on_wait)


class Crew:
    """Up to `jobs` processes that make runs; they stay for the next plans until it is left.

    Left by an error, it waits for the rounds under way; left by an interrupt, it ends them at once.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        # Fresh processes, not forks: forking a process that has threads can hang it.
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
            # Whoever still works is not waited for: an interrupt may also come while we wait.
            self._lifeline.close()
            self._pool.shutdown(cancel_futures=True)

    def run(
        self, plans: Sequence[Plan], should_stop: Callable[[], bool], on_wait: Callable[[], None]
    ) -> bool:
        """Run what is not done; tell whether everything is done now."""
        todo = [plan for plan in plans if not plan.is_done()]
        if self._pool is None and (self._jobs <= 1 or len(todo) <= 1):
            for plan in todo:
                watch = Observer(on_round=lambda _: on_wait(), should_stop=should_stop)
                if should_stop() or not _run_plan(plan.experiment, plan.path, watch):
                    return False
            return True
        try:
            return self._run_in_processes(todo, should_stop, on_wait)
        except BrokenProcessPool:
            raise InvalidInput(
                f"jobs is {self._jobs}; one of them was ended from outside (out of memory?): the "
                "same command goes on where it stopped, and fewer jobs need less memory."
            ) from None

    def _run_in_processes(
        self, todo: Sequence[Plan], should_stop: Callable[[], bool], on_wait: Callable[[], None]
    ) -> bool:
        for folder in {plan.path.parent for plan in todo}:
            # Where nothing can be written is found out before processes are started.
            folder.mkdir(parents=True, exist_ok=True)
        waiting: set[Future[str | None]] = set()
        queue = list(todo)
        complete = True
        while queue or waiting:
            while queue and len(waiting) < self._jobs and not should_stop():
                waiting.add(self._submit(queue.pop(0)))
            if should_stop() and self._pool is not None:
                self._stop.value = True
            if not waiting:
                return False
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            for each in done:
                outcome = each.result()
                if outcome not in (None, "stopped"):
                    raise InvalidInput(outcome)
                complete = complete and outcome is None
            on_wait()
        return complete

    def _submit(self, plan: Plan) -> Future[str | None]:
        if self._pool is None:
            self._enlist()
        assert self._pool is not None
        # The first call starts the processes, and they begin with what is held back here: an
        # interrupt of the whole group must not meet them while they are still importing.
        with _held_back(signal.SIGINT):
            return self._pool.submit(_work, plan.experiment.to_toml(), str(plan.path))

    def _enlist(self) -> None:
        # Not an Event: a process that is killed while it looks at one leaves it locked.
        self._stop = self._context.RawValue("b", 0)
        there, self._lifeline = self._context.Pipe(duplex=False)
        # It lets signals through again once it has started, so not while they are held back.
        resource_tracker.ensure_running()
        self._pool = ProcessPoolExecutor(
            self._jobs,
            mp_context=self._context,
            initializer=_report_for_work,
            initargs=(self._stop, there),
        )


def _run_plan(experiment: Experiment, path: Path, observer: Observer) -> bool:
    if RunDirectory(path).holds_run():
        done = resume(
            path,
            experiment.rounds,
            observer,
            **{name: experiment.setting(name) for name in INDIFFERENT},
        )
        return done.summary is not None
    return run(experiment, path, observer).summary is not None


@contextlib.contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_stop: list[Any] = []
"""In a process of a crew: what the parent raises when runs are to end after their round."""


def _report_for_work(stop: Any, lifeline: Connection) -> None:
    """Make this process end when its parent does or lets go of it; what Ctrl-C means it decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _stop[:] = [stop]

    def watch() -> None:
        # Nothing is ever sent: this returns when the other end is closed, by whatever it is.
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(document: str, path: str) -> str | None:
    """Make one run in a process of its own; return None, "stopped", or what was wrong."""
    (stop,) = _stop
    observer = Observer(should_stop=lambda: bool(stop.value))
    if observer.should_stop():
        return "stopped"
    try:
        experiment = Experiment.parse_toml(document, Path(path))
        finished = _run_plan(experiment, Path(path), observer)
    except InvalidInput as error:
        return str(error)
    return None if finished else "stopped"
