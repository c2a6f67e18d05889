"""Several runs, some at the same time: each in a process of its own, gone on with where it was."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.runs import RunDirectory
from mpfedcl.simulation import Observer, resume, run


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
    """Up to `jobs` processes that make runs; they stay for the next plans until it is left."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

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
        if self._pool is None:
            # Fresh processes, not forks: forking a process that has threads can hang it.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=context, initializer=_enlist)
        waiting: set[Future[str | None]] = set()
        queue = list(todo)
        complete = True
        while queue or waiting:
            while queue and len(waiting) < self._jobs and not should_stop():
                plan = queue.pop(0)
                waiting.add(self._pool.submit(_work, plan.experiment.to_toml(), str(plan.path)))
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


def _run_plan(experiment: Experiment, path: Path, observer: Observer) -> bool:
    if RunDirectory(path).holds_run():
        done = resume(
            path,
            experiment.rounds,
            observer,
            engine=experiment.engine,
            workers=experiment.workers,
        )
        return done.summary is not None
    return run(experiment, path, observer).summary is not None


def _enlist() -> None:
    """Make this process end when its parent does, and leave Ctrl-C to the run it makes."""
    # A process that waits for work would die of it, and a pool that loses one is broken.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        # Without its parent it would wait for work for ever.
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(document: str, path: str) -> str | None:
    """Make one run in a process of its own; return None, "stopped", or what was wrong."""
    from mpfedcl.progress import gentle_interrupt, silent

    with gentle_interrupt(silent()) as stop:
        try:
            experiment = Experiment.parse_toml(document, Path(path))
            finished = _run_plan(experiment, Path(path), Observer(should_stop=stop))
        except InvalidInput as error:
            return str(error)
    return None if finished else "stopped"
