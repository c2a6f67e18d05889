"""The seam of trackers: who is told what, and that none can harm a run."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from command_processes import call, environment
from command_results import without_progress
from mpfedcl import Experiment, InvalidInput, RunResult, Tracker, resume, run
from mpfedcl.report.tracking import Record, make_trackers, read_failures
from mpfedcl.runs.observer import Observer
from small_experiments import (
    EXAMPLES,
    Say,
    Warnings,
    assert_same_results,
    assert_same_run,
    flags,
    read_records,
    small,
    without_timings,
)
from worker_processes import run_together

pytestmark = pytest.mark.whole


class Listener(Tracker):
    """Keeps what it is told."""

    told: list[Any] = []  # noqa: RUF012  -- shared on purpose: the run makes the instance

    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        self.told[:] = [("start", experiment.method, path, [record["round"] for record in done])]

    def round(self, record: Record) -> None:
        self.told.append(("round", record["round"]))

    def finish(self, result: RunResult) -> None:
        self.told.append(("finish", result.summary is not None))


class Vandal(Tracker):
    """Does what it likes with what it is told."""

    def start(self, experiment: Experiment, path: Path, done: Sequence[Any]) -> None:
        for record in done:
            record.clear()

    def round(self, record: Any) -> None:
        record["accuracy"] = record["clients"]["answered"].clear()

    def finish(self, result: RunResult) -> None:
        result.history.clear()
        if result.pool is not None:
            result.pool.vectors.zero_()


class FailsAtStart(Tracker):
    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        raise OSError("no such place\nsecond line")


class FailsAtRound(Tracker):
    def round(self, record: Record) -> None:
        raise KeyError("lost")


class FailsAtFinish(Tracker):
    def finish(self, result: RunResult) -> None:
        raise ZeroDivisionError


class NeedsArguments(Tracker):
    def __init__(self, place: str) -> None:
        self.place = place


def own(name: str) -> str:
    return f"test_trackers:{name}"


def test_a_tracker_is_told_of_start_rounds_and_end(images: Path, tmp_path: Path) -> None:
    run(small(images, track=(own("Listener"),)), tmp_path / "run")
    path = tmp_path / "run"
    expected: list[Any] = [
        ("start", "mp-fedcl", path, []),
        ("round", 1),
        ("round", 2),
        ("finish", True),
    ]
    assert Listener.told == expected


def test_a_resumed_run_tells_its_trackers_where_it_stands(images: Path, tmp_path: Path) -> None:
    done: list[Any] = []
    stop = Observer(on_round=done.append, should_stop=lambda: len(done) == 2)
    run(small(images, rounds=4, track=(own("Listener"),)), tmp_path / "run", stop)
    assert Listener.told[-1] == ("finish", False)
    resume(tmp_path / "run")
    assert Listener.told == [
        ("start", "mp-fedcl", tmp_path / "run", [1, 2]),
        ("round", 3),
        ("round", 4),
        ("finish", True),
    ]


def test_a_resume_may_begin_or_end_tracking(images: Path, tmp_path: Path) -> None:
    run(small(images), tmp_path / "run")
    resume(tmp_path / "run", 3, track=(own("Listener"),))
    assert Listener.told[0][-1] == [1, 2]
    Listener.told.clear()
    resume(tmp_path / "run", 4, track=())
    assert Listener.told == []


def test_tracking_changes_nothing_in_a_run(images: Path, tmp_path: Path) -> None:
    run(small(images), tmp_path / "plain")
    tracked = small(images, track=(own("Vandal"), own("Listener")))
    result = run(tracked, tmp_path / "tracked")
    assert_same_results(tmp_path / "plain", tmp_path / "tracked")
    ours, theirs = read_records(tmp_path / "plain"), read_records(tmp_path / "tracked")
    assert without_timings(ours) == without_timings(theirs)
    assert result.history == theirs
    assert result.pool is not None
    assert result.pool.vectors.abs().sum() > 0


@pytest.mark.parametrize("name", ["FailsAtStart", "FailsAtRound", "FailsAtFinish"])
def test_a_tracker_that_fails_costs_one_warning(name: str, images: Path, tmp_path: Path) -> None:
    warnings = Warnings()
    experiment = small(images, track=(own(name), own("Listener")))
    result = run(experiment, tmp_path / "run", warnings.observer())
    assert result.summary is not None
    assert len(warnings) == 1
    assert warnings[0].startswith(f"Tracker {own(name)} failed (")
    assert warnings[0].endswith("); the run continues without it.")
    assert "\n" not in warnings[0]
    # The other one was told everything.
    assert [each[0] for each in Listener.told] == ["start", "round", "round", "finish"]


def test_a_resume_after_a_kill_ends_as_if_never_tracked(images: Path, tmp_path: Path) -> None:
    experiment = small(images, rounds=3, track=("tensorboard", "mlflow"))
    run(experiment, tmp_path / "whole")
    done: list[Any] = []
    stop = Observer(on_round=done.append, should_stop=lambda: len(done) == 1)
    run(experiment, tmp_path / "cut", stop)
    resume(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("track", "sentence"),
    [
        (("wandb",), "track is 'wandb'; it must be one of tensorboard, mlflow, or package.module"),
        (("tensorboard", "tensorboard"), "it must name each tracker once"),
        (("nowhere:Mine",), "must name an importable package.module:Class (ModuleNotFoundError"),
        (("test_trackers:Path",), "must name a subclass of mpfedcl.Tracker"),
        ((own("NeedsArguments"),), "it must be a class that can be made without arguments"),
    ],
)
def test_bad_trackers_are_refused_before_anything_runs(
    track: tuple[str, ...], sentence: str, images: Path, tmp_path: Path, said: Say
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        make_trackers(track)
    assert sentence in str(refusal.value)
    code, out, errors = said("run", *flags(images), "--track", *track, "--out", tmp_path / "run")
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert sentence in errors
    code, _, errors = said(
        "compare", *flags(images), "--track", *track, "--methods", "local", "--out", tmp_path / "c"
    )
    assert code == 2
    assert sentence in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_extra_is_named(
    name: str, images: Path, tmp_path: Path, said: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [each for each in sys.modules if name in each.split(".")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    code, _, errors = said("run", *flags(images), "--track", name, "--out", tmp_path / "run")
    assert code == 2
    assert errors.count("\n") == 1
    assert f"pip install 'mpfedcl[{name}]'" in errors
    assert not (tmp_path / "run").exists()


def test_help_imports_no_tracker() -> None:
    program = (
        "import contextlib, sys\n"
        "from mpfedcl.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['run', '--help'])\n"
        "print({'torch', 'mlflow', 'tensorboard'} & sys.modules.keys(), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )
    assert ended.stderr == "set()\n"
    assert "--track-to" in ended.stdout


def read_curve(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.thorough
def test_the_example_runs_as_it_stands(images: Path, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "own_tracker.py", tmp_path)
    script = Path(sys.executable).parent / "mpfedcl"

    words = ["run", "--track", "own_tracker:CsvTracker", *flags(images), "--out", "run"]
    subprocess.run(
        [script, *words], cwd=tmp_path, env=environment(), check=True, capture_output=True
    )
    # A run directory alone brings nothing of the current folder to run.
    again = ["run", "--resume", "run", "--rounds", 3]
    ended = call(*again, cwd=tmp_path)
    assert ended.returncode == 2
    assert "the current folder is searched if --track names it" in ended.stderr
    assert call(*again, "--track", "own_tracker:CsvTracker", cwd=tmp_path).returncode == 0
    lines = read_curve(tmp_path / "run" / "curve.csv")
    assert [line[0] for line in lines] == ["round", "1", "2", "3"]
    records = read_records(tmp_path / "run")
    for line, record in zip(lines[1:], records, strict=True):
        assert float(line[1]) == record["loss"]
        assert int(line[2]) == record["bytes"]["up"]
        assert float(line[5]) == min(record["accuracy_per_client"].values())
    assert len((EXAMPLES / "own_tracker.py").read_text().splitlines()) < 60


def test_only_the_leader_of_a_team_tracks(images: Path, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "own_tracker.py", tmp_path)
    words = ["--track", "own_tracker:CsvTracker", "tensorboard", "--track-to", "tracks"]
    run_together(["run", *flags(images), *words], tmp_path, 2, small_model=True)
    assert [line[0] for line in read_curve(tmp_path / "tracks" / "curve.csv")[1:]] == ["1", "2"]
    assert len(list((tmp_path / "tracks" / "tensorboard").glob("*/events.*"))) == 1


@pytest.mark.usefixtures("forked_jobs")
def test_compare_tracks_each_run(images: Path, tmp_path: Path, said: Say) -> None:
    words = ["--methods", "mp-fedcl", "local", "--seeds", 0, 1, "--out", tmp_path / "c"]
    tracks = tmp_path / "tracks"
    code, _, errors = said(
        "compare", *flags(images), *words, "--jobs", 2,
        "--track", "tensorboard", "mlflow", "--track-to", tracks,
    )  # fmt: skip
    assert (code, without_progress(errors)) == (0, "")
    folders = sorted(each.name for each in (tracks / "tensorboard").iterdir())
    assert folders == ["local-seed0", "local-seed1", "mp-fedcl-seed0", "mp-fedcl-seed1"]
    # One experiment, in MLflow's sense, though two processes found the store empty.
    groups = [each for each in (tracks / "mlflow").iterdir() if (each / "meta.yaml").is_file()]
    assert len(groups) == 1
    runs = [each for each in groups[0].iterdir() if (each / "metrics" / "loss").is_file()]
    assert len(runs) == 4
    # Each is what one process makes of it, without trackers.
    run(small(images, "mp-fedcl", seed=1), tmp_path / "alone")
    assert_same_results(tmp_path / "alone", tmp_path / "c" / "mp-fedcl-seed1")
    # The same command without trackers finds everything done.
    assert said("compare", *flags(images), *words)[0] == 0


def test_compare_says_which_trackers_failed(images: Path, tmp_path: Path, said: Say) -> None:
    (tmp_path / "mlflow").write_text("no folder")
    words = ["--methods", "local", "fedavg", "--seeds", 0, "--out", tmp_path / "c", "--jobs", 1]
    track = ["--track", "mlflow", "--track-to", tmp_path]
    code, out, errors = said("compare", *flags(images), *words, *track)
    assert code == 0
    assert "comparison.json" in out
    assert [line[:35] for line in without_progress(errors).splitlines()] == [
        "local-seed0: Tracker mlflow failed ",
        "fedavg-seed0: Tracker mlflow failed",
    ]
    # Once it works, nothing is said any more.
    (tmp_path / "mlflow").unlink()
    resume(tmp_path / "c" / "local-seed0", 3)
    assert read_failures(tmp_path / "c" / "local-seed0") == []


def test_the_notes_of_trackers_may_be_damaged(images: Path, tmp_path: Path) -> None:
    warnings = Warnings()
    experiment = small(images, track=("tensorboard", "mlflow"), track_to=tmp_path / "tracks")
    run(experiment, tmp_path / "run", warnings.observer())
    notes = tmp_path / "run" / "tracking.json"
    assert set(json.loads(notes.read_text())) == {"tensorboard", "mlflow"}
    for damage in ("{", "[]", '{"mlflow": 3}'):
        notes.write_text(damage)
        rounds = len(read_records(tmp_path / "run")) + 1
        resume(tmp_path / "run", rounds, warnings.observer())
    assert warnings == []
