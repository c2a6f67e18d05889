"""Runs killed at random moments and resumed, until a hundred kills have hit: `make soak`."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from command_processes import CommandProcess
from mpfedcl import run
from mpfedcl.experiment import Experiment
from small_experiments import HIDDEN, assert_same_run, flags, read_records, small

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("MPFEDCL_KILLS", "100"))
"""Of runs under way: those that come before the first record, or too late, are counted apart."""
SEED = int(os.environ.get("MPFEDCL_SEED", "0"))
MOST_SECONDS = 1800.0
ROUNDS = 30
METHODS = ("mp-fedcl", "fedavg", "fedproto", "fedgauss")
CHANGES = {"rounds": ROUNDS, "model__hidden": HIDDEN}

EARLY = "before a process wrote its first record"
BETWEEN = "between rounds"
CLOSING = "after the last round, at the summary"
LATE = "too late, after the end"


class Whole:
    """A run that nobody disturbed, and how long it takes as a process."""

    def __init__(self, images: Path, folder: Path, method: str) -> None:
        self.words = ["run", *flags(images, method=method, **CHANGES), "--out"]
        self.path = folder / method
        run(_experiment(images, method), self.path)
        self.rounds = len(read_records(self.path))
        # The first process waits for the one that it is forked from.
        for name in ("first", "timed"):
            begin = time.monotonic()
            process = CommandProcess([*self.words, folder / f"{method}-{name}"], folder)
            out, err = process.communicate()
            assert process.returncode == 0, out + err
            self.seconds = time.monotonic() - begin


def _experiment(images: Path, method: str) -> Experiment:
    return small(images, method, **CHANGES)


def test_runs_killed_at_random_moments_resume_bit_identically(images: Path, tmp_path: Path) -> None:
    wholes = [Whole(images, tmp_path, method) for method in METHODS]
    end = time.monotonic() + MOST_SECONDS
    hits: Counter[str] = Counter()
    runs = 0
    try:
        while hits[BETWEEN] + hits[CLOSING] < KILLS:
            assert time.monotonic() < end, f"not {KILLS} kills in {MOST_SECONDS:g} s"
            draw = random.Random(SEED * 1_000_003 + runs)
            _kill_and_resume(draw, wholes[runs % len(METHODS)], tmp_path / f"killed-{runs}", hits)
            runs += 1
    finally:
        print(f"\n{runs} runs ended with the same bits; kills: {dict(hits)}")


def _kill_and_resume(draw: random.Random, whole: Whole, path: Path, hits: Counter[str]) -> None:
    """Kill a run once or twice, resume it to its end, and hold it to the undisturbed one."""
    process = CommandProcess([*whole.words, path], path.parent)
    # One in three is killed once more while it resumes.
    for _ in range(1 + (draw.random() < 1 / 3)):
        before = _count_records(path)
        time.sleep(draw.uniform(0, whole.seconds))
        process.kill()
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        done = _count_records(path)
        is_late = process.returncode == 0
        hits[LATE if is_late else _describe(before, done, whole.rounds)] += 1
        begins_anew = not (path / "experiment.toml").exists()
        words = [*whole.words, path] if begins_anew else ["run", "--resume", path]
        process = CommandProcess(words, path.parent)
    out, err = process.communicate()
    assert process.returncode == 0, f"{path.name}: {out}{err}"
    assert "Traceback" not in err
    assert_same_run(path, whole.path)


def _count_records(path: Path) -> int:
    """Count whole lines: the last one may have been cut by a kill."""
    records = path / "rounds.jsonl"
    return records.read_bytes().count(b"\n") if records.exists() else 0


def _describe(before: int, done: int, rounds: int) -> str:
    if done == before:
        return EARLY
    return BETWEEN if done < rounds else CLOSING
