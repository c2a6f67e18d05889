"""Run many experiments once: finished runs are kept, interrupted ones are resumed."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import mpfedcl

Record = dict[str, Any]
"""A line of rounds.jsonl."""


@dataclass(frozen=True)
class Runs:
    """A folder of runs, named by what they are.

    A run of 130 rounds is a run of 60 rounds that was resumed: the learning rate does not depend
    on the number of rounds. So studies that ask for different lengths share one run.
    """

    folder: Path
    jobs: int = 1
    quick: bool = False
    """At most three rounds and one seed, to see that everything runs."""

    def prepare(self, experiment: mpfedcl.Experiment) -> mpfedcl.Experiment:
        """Return an experiment as it is run here."""
        return experiment.replace(rounds=min(3, experiment.rounds)) if self.quick else experiment

    def path(self, experiment: mpfedcl.Experiment) -> Path:
        """Return where the run of an experiment is, or will be."""
        settings = experiment.replace(rounds=1).to_toml()
        data = os.environ.get("MPFEDCL_DATA", "")
        digest = hashlib.sha256(f"{data}\n{settings}".encode()).hexdigest()[:12]
        name = f"{experiment.method}-{experiment.dataset.name}-seed{experiment.seed}-{digest}"
        return self.folder / name.replace(":", "-")

    def complete(self, experiments: Iterable[mpfedcl.Experiment]) -> None:
        """Run or resume all experiments that are not finished, several at the same time."""
        longest: dict[Path, mpfedcl.Experiment] = {}
        for experiment in map(self.prepare, experiments):
            path = self.path(experiment)
            if path not in longest or longest[path].rounds < experiment.rounds:
                longest[path] = experiment
        due = {path: each for path, each in longest.items() if not _is_finished(path, each.rounds)}
        if self.jobs == 1 or len(due) < 2:
            for number, (path, experiment) in enumerate(due.items(), start=1):
                run_or_resume(experiment.to_toml(), path)
                _tell(number, len(due), path)
            return
        # A process per job: more threads would only wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(self.jobs, mp_context=get_context("spawn")) as pool:
            waiting = {
                pool.submit(run_or_resume, experiment.to_toml(), path): path
                for path, experiment in due.items()
            }
            for number, done in enumerate(as_completed(waiting), start=1):
                done.result()
                _tell(number, len(due), waiting[done])

    def records(self, experiment: mpfedcl.Experiment) -> list[Record]:
        """Return the records of a run, run now if need be, up to the experiment's last round."""
        experiment = self.prepare(experiment)
        self.complete([experiment])
        lines = (self.path(experiment) / "rounds.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines[: experiment.rounds]]

    def by_seed(self, experiment: mpfedcl.Experiment, seeds: Sequence[int]) -> list[list[Record]]:
        """Return the records of a run for each seed."""
        seeds = seeds[:1] if self.quick else seeds
        several = [experiment.replace(seed=seed) for seed in seeds]
        self.complete(several)
        return [self.records(each) for each in several]

    def summary(self, experiment: mpfedcl.Experiment) -> dict[str, Any]:
        """Return the summary of a run that is not longer than asked, run now if need be."""
        self.complete([experiment])
        path = self.path(self.prepare(experiment)) / "summary.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def run_or_resume(settings: str, path: Path) -> None:
    """Bring a run to its last round; it travels as text, which every process can read."""
    experiment = mpfedcl.Experiment.parse_toml(settings, path)
    if path.exists():
        try:
            mpfedcl.resume(path, rounds=experiment.rounds)
        except mpfedcl.InvalidInput:
            # Killed before its first checkpoint.
            shutil.rmtree(path)
        else:
            return
    mpfedcl.run(experiment, path)


def _is_finished(path: Path, rounds: int) -> bool:
    if not (path / "summary.json").is_file():
        return False
    return len((path / "rounds.jsonl").read_text().splitlines()) >= rounds


def _tell(number: int, total: int, path: Path) -> None:
    print(f"{number} of {total}: {path.name}", file=sys.stderr, flush=True)


def training_seconds(record: Record) -> float:
    """Return the seconds of a round without evaluation and checkpoints."""
    phases = record["seconds"].items()
    return float(sum(spent for name, spent in phases if name not in ("evaluate", "checkpoint")))
