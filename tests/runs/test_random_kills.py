"""A hundred runs, each killed at a random moment and resumed: `make soak`."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_processes import CommandProcess
from mpfedcl import run
from mpfedcl.experiment import Experiment
from small_experiments import HIDDEN, assert_same_run, flags, small

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("MPFEDCL_KILLS", "100"))
SEED = int(os.environ.get("MPFEDCL_SEED", "0"))
ROUNDS = 12
METHODS = ("mp-fedcl", "fedavg", "fedproto", "fedgauss")
CHANGES = {"rounds": ROUNDS, "model__hidden": HIDDEN}


class Whole:
    """A run that nobody disturbed, and how long it takes as a process."""

    def __init__(self, images: Path, folder: Path, method: str) -> None:
        self.words = ["run", *flags(images, method=method, **CHANGES), "--out"]
        self.path = folder / method
        run(_experiment(images, method), self.path)
        begin = time.monotonic()
        assert CommandProcess([*self.words, folder / f"{method}-timed"], folder).wait() == 0
        self.seconds = time.monotonic() - begin


def _experiment(images: Path, method: str) -> Experiment:
    return small(images, method, **CHANGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def wholes(images: Path, folder: Path) -> dict[str, Whole]:
    return {method: Whole(images, folder, method) for method in METHODS}


@pytest.fixture(scope="module")
def tally() -> Iterator[dict[str, int]]:
    """Count what the kills hit; a soak that never hits a run under way has shown nothing."""
    hits = dict.fromkeys(("before a checkpoint", "between rounds", "after the end"), 0)
    yield hits
    print(f"\n{KILLS} runs ended with the same bits; kills: {hits}")
    assert hits["between rounds"] >= KILLS // 3


@pytest.mark.parametrize("number", range(KILLS))
def test_a_kill_at_a_random_moment(
    number: int,
    wholes: dict[str, Whole],
    folder: Path,
    tally: dict[str, int],
) -> None:
    draw = random.Random(SEED * 1_000_003 + number)
    whole = wholes[METHODS[number % len(METHODS)]]
    path = folder / f"killed-{number}"
    process = CommandProcess([*whole.words, path], folder)
    # One in three is killed once more while it resumes.
    for _ in range(1 + (draw.random() < 1 / 3)):
        time.sleep(draw.uniform(0, whole.seconds))
        process.kill()
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        tally[_describe(path, process.returncode)] += 1
        begins_anew = not (path / "experiment.toml").exists()
        words = [*whole.words, path] if begins_anew else ["run", "--resume", path]
        process = CommandProcess(words, folder)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    assert_same_run(path, whole.path)


def _describe(path: Path, code: int | None) -> str:
    if code == 0:
        return "after the end"
    records = path / "rounds.jsonl"
    is_under_way = records.exists() and records.stat().st_size
    return "between rounds" if is_under_way else "before a checkpoint"
