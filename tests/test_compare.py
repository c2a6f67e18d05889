"""Comparisons: mean(std) over seeds, gone on with after an interruption, the same in any order."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from mpfedcl import run
from mpfedcl.cli import main
from mpfedcl.comparison import Comparison
from mpfedcl.errors import InvalidInput
from mpfedcl.methods import READINGS
from mpfedcl.statistics import best_and_within, paired_difference
from small_runs import (
    EXAMPLES,
    Json,
    Say,
    assert_same_results,
    assert_same_run,
    command,
    environment,
    flags,
    read_summary,
    small,
)

METHODS = ("mp-fedcl", "fedavg", "local")
SEEDS = (0, 1)
RUNS = [f"{method}-seed{seed}" for method in METHODS for seed in SEEDS]


def words(images: Path, out: Path, **changes: Any) -> list[str]:
    chosen = ["--methods", *METHODS, "--seeds", *(str(seed) for seed in SEEDS)]
    return ["compare", *chosen, *flags(images, **changes), "--jobs", "1", "--out", str(out)]


@pytest.fixture(scope="module")
def compared(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three methods over two seeds."""
    path = tmp_path_factory.mktemp("comparisons") / "whole"
    with pytest.raises(SystemExit) as end:
        main(words(images, path))
    assert end.value.code == 0
    return path


def summaries(path: Path, method: str) -> list[Json]:
    return [read_summary(path / f"{method}-seed{seed}") for seed in SEEDS]


def by_hand(values: list[float | None]) -> str:
    """Return mean(std), std with ddof = 0."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.1f}({pstdev(known):.1f})" if known else "-"


def modified(path: Path) -> dict[str, int]:
    return {
        str(each.relative_to(path)): each.stat().st_mtime_ns for each in sorted(path.rglob("*"))
    }


# What it shows


def test_the_table_by_hand(images: Path, compared: Path, said: Say) -> None:
    code, out, err = said(*words(images, compared))
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 100
    assert "2 seeds" in out
    for method in METHODS:
        found = summaries(compared, method)
        reading = found[0]["reading"]
        own, union = (
            by_hand([each["readings"][test][reading] for each in found])
            for test in ("own", "union")
        )
        assert own == by_hand([each["accuracy"] for each in found])
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [method]]
        assert [own, union] == [each.lstrip("▲≈") for each in line.split()[3:5]]


def test_all_readings(images: Path, compared: Path, said: Say) -> None:
    _, out, _ = said(*words(images, compared), "--readings", "all")
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 100
    for method in METHODS:
        found = summaries(compared, method)
        wanted = [by_hand([each["readings"]["own"][name] for each in found]) for name in READINGS]
        rows = [line.replace("*", "").split()[1:] for line in out.splitlines() if method in line]
        assert wanted in rows


def test_json_and_files(images: Path, compared: Path, said: Say) -> None:
    code, out, err = said(*words(images, compared), "--json")
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert content.pop("path") == str(compared)
    assert content == json.loads((compared / "comparison.json").read_text())
    assert content["seeds"] == [*SEEDS]
    assert content["rounds"] == 2
    assert list(content["methods"]) == [*METHODS]
    for method, entry in content["methods"].items():
        found = summaries(compared, method)
        assert entry["accuracy"] == [each["accuracy"] for each in found]
        for test in ("own", "union"):
            for reading in READINGS:
                wanted = [each["readings"][test][reading] for each in found]
                assert entry["readings"][test][reading] == wanted
    assert (compared / "table.md").read_text().count("| mp-fedcl |") >= 1
    for figure in ("accuracy.png", "partition.png"):
        assert (compared / figure).read_bytes().startswith(b"\x89PNG")


def test_differences_by_seed(compared: Path) -> None:
    content = json.loads((compared / "comparison.json").read_text())["differences"]
    assert content["level"] == 0.95
    for test in ("own", "union"):
        numbers = {}
        for method in METHODS:
            found = summaries(compared, method)
            numbers[method] = [each["readings"][test][found[0]["reading"]] for each in found]
        best = max(numbers, key=lambda method: fmean(numbers[method]))
        assert (content[test]["best"], content[test]["first"]) == (best, METHODS[0])
        assert content[test]["marks"] == best_and_within(numbers)
        for other, differences in (("best", "to_best"), ("first", "to_first")):
            reference = content[test][other]
            assert {*content[test][differences], reference} == {*METHODS}
            for method, entry in content[test][differences].items():
                first, second = (
                    a - b for a, b in zip(numbers[method], numbers[reference], strict=True)
                )
                reach = 12.7062 * abs(first - second) / 2
                assert entry["mean"] == pytest.approx((first + second) / 2)
                assert entry["high"] - entry["low"] == pytest.approx(2 * reach, rel=1e-4)
                difference = paired_difference(numbers[method], numbers[reference])
                assert difference is not None
                assert entry["verdict"] == difference.verdict


def test_the_marks_and_their_legend(images: Path, compared: Path, said: Say) -> None:
    _, out, _ = said(*words(images, compared))
    marks = json.loads((compared / "comparison.json").read_text())["differences"]
    signs = {"best": "▲", "within": "≈", None: ""}
    for method in METHODS:
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [method]]
        for test, cell in zip(("own", "union"), line.split()[3:5], strict=True):
            assert re.match("[▲≈]?", cell)[0] == signs[marks[test]["marks"][method]]  # type: ignore[index]
    legend = " ".join(out.split())
    assert "▲ best mean; ≈ not clearly behind: 0 is in the 95 % interval" in legend
    assert "With 2 seeds it reaches 9.0 deviations" in legend
    assert "≈ not clearly behind" in (compared / "table.md").read_text()


def test_marks_of_one_seed_and_of_one_method(images: Path, tmp_path: Path, said: Say) -> None:
    common = [*flags(images, rounds=1), "--jobs", 1]
    chosen = ["--methods", "fedavg", "local", "--seeds", 0]
    _, out, _ = said("compare", *chosen, *common, "--out", tmp_path / "seed")
    assert "▲ best of one seed" in out
    assert "≈" not in out
    chosen = ["--methods", "fedavg", "--seeds", 0, 1]
    _, out, _ = said("compare", *chosen, *common, "--out", tmp_path / "method")
    assert "▲" not in out


def test_the_runs_are_those_of_run(images: Path, compared: Path, tmp_path: Path) -> None:
    run(small(images, "fedavg", seed=1), tmp_path / "run")
    assert_same_run(compared / "fedavg-seed1", tmp_path / "run")


def test_numbers_are_in_the_order_of_the_seeds_given(
    images: Path, tmp_path: Path, compared: Path, said: Say
) -> None:
    chosen = ["--methods", "fedavg", "--seeds", "1", "0", *flags(images), "--jobs", "1"]
    _, out, _ = said("compare", *chosen, "--out", tmp_path / "other", "--json")
    content = json.loads(out)
    wanted = [read_summary(compared / f"fedavg-seed{seed}")["accuracy"] for seed in (1, 0)]
    assert content["seeds"] == [1, 0]
    assert content["methods"]["fedavg"]["accuracy"] == wanted


def test_a_folder_is_found_if_none_is_given(
    images: Path, tmp_path: Path, said: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("comparison", "comparison-2"):
        chosen = ("--methods", "local", "--seeds", "0", "--json")
        _, out, _ = said("compare", *chosen, *flags(images, rounds=1))
        assert json.loads(out)["path"] == f"runs/{name}"


# Interrupted


def test_what_is_complete_is_not_run_again(images: Path, compared: Path, said: Say) -> None:
    before = {name: modified(compared / name) for name in RUNS}
    assert said(*words(images, compared))[0] == 0
    assert {name: modified(compared / name) for name in RUNS} == before


def test_an_interrupted_comparison_goes_on(
    images: Path, compared: Path, tmp_path: Path, said: Say
) -> None:
    path = tmp_path / "broken"
    shutil.copytree(compared, path)
    # One run was never begun, one stopped after a round, one before its summary.
    shutil.rmtree(path / "fedavg-seed1")
    for name in ("local-seed0", "mp-fedcl-seed1"):
        (path / name / "summary.json").unlink()
    for suffix in (".json", ".safetensors"):
        (path / "local-seed0" / "checkpoint" / f"round-000002{suffix}").unlink()
    whole = [name for name in RUNS if (path / name / "summary.json").exists()]
    before = {name: modified(path / name) for name in whole}
    assert len(before) == 3
    assert said(*words(images, path))[0] == 0
    for name in RUNS:
        assert_same_run(path / name, compared / name)
    assert {name: modified(path / name) for name in whole} == before


def test_stopping_between_runs(images: Path, tmp_path: Path) -> None:
    base = small(images, rounds=1)
    comparison = Comparison.prepare(base, ["fedavg", "local"], [0, 1], tmp_path / "out")
    rounds: list[int] = []
    finished = comparison.run(
        1, lambda: len(rounds) == 3, lambda: rounds.append(comparison.rounds_done())
    )
    assert not finished
    assert rounds == [1, 2, 3]
    assert comparison.run(1, lambda: False, lambda: None)
    assert comparison.rounds_done() == 4


def test_several_jobs_a_kill_and_no_orphans(images: Path, compared: Path, tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    line = command(*words(images, path))
    line[line.index("--jobs") + 1] = "2"
    with subprocess.Popen(line, env=environment(), stdout=-3, stderr=-3) as process:
        deadline = time.monotonic() + 60
        while not list(path.glob("*/rounds.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = [
            int(each)
            for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert len(children) >= 2
    deadline = time.monotonic() + 15
    while any(is_alive(child) for child in children):
        assert time.monotonic() < deadline, "a process of the comparison outlived it"
        time.sleep(0.05)

    done = subprocess.run(
        line, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in RUNS:
        assert_same_run(path / name, compared / name)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ctrl_c_stops_all_jobs_after_their_round(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "stopped"
    line = command(*words(images, path, rounds=5000, evaluate_every=100))
    line[line.index("--jobs") + 1] = "2"
    process = subprocess.Popen(
        line,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len([each for each in path.glob("*/rounds.jsonl") if each.stat().st_size]) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # As a terminal does: to every process of the group.
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert "goes on where it stopped" in " ".join(err.split())
    assert len(list(path.iterdir())) == 2


# Refused


def test_other_settings_in_the_same_folder(images: Path, compared: Path, said: Say) -> None:
    before = modified(compared)
    for changes in ({"rounds": 3}, {"train__lr": 0.5}, {"partition__kind": "iid"}):
        code, out, err = said(*words(images, compared, **changes))
        assert (code, out) == (2, "")
        assert "holds a run with other settings" in err
        assert err.count("\n") == 1
    assert modified(compared) == before


@pytest.mark.parametrize(
    ("methods", "seeds"),
    [(["local", "local"], [0]), (["local"], [3, 3]), ([], [0]), (["local"], [])],
)
def test_duplicates_and_nothing(
    images: Path, tmp_path: Path, methods: list[str], seeds: list[int]
) -> None:
    with pytest.raises(InvalidInput, match="must name at least one, and each once"):
        Comparison.prepare(small(images), methods, seeds, tmp_path / "out")


def test_bad_data_in_a_job_is_one_sentence(images: Path, tmp_path: Path, said: Say) -> None:
    line = words(images, tmp_path / "out", clients=61)
    line[line.index("--jobs") + 1] = "2"
    code, out, err = said(*line)
    assert (code, out) == (2, "")
    assert err.startswith("mpfedcl: clients is 61")
    assert err.count("\n") == 1


# Methods of one's own


MODULE = """
from mpfedcl import Method


class Mine(Method):
    name = "mine"
    reading = "{reading}"
"""


def test_classes_of_one_name_in_two_modules(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Say
) -> None:
    readings = {"first_module": "averaged_classifier", "second_module": "personal_classifier"}
    for name, reading in readings.items():
        (tmp_path / f"{name}.py").write_text(MODULE.format(reading=reading))
    monkeypatch.syspath_prepend(tmp_path)
    chosen = [f"{name}:Mine" for name in readings]
    code, out, _ = said(
        "compare", "--methods", *chosen, "--seeds", 0, *flags(images, rounds=1),
        "--jobs", 1, "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert code == 0
    found = {name: entry["reading"] for name, entry in json.loads(out)["methods"].items()}
    assert found == {f"{name}:Mine": reading for name, reading in readings.items()}


def test_the_example_beside_a_built_in_method(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Say
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    code, out, _ = said(
        "compare", "--methods", "custom_method:Scaffold", "fedavg", "--seeds", 0,
        *flags(images, rounds=1, engine="loop"), "--jobs", 1, "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    assert "Scaffold" in out
    # Its controls start at zero: after one round the model is FedAvg's.
    (path,) = (tmp_path / "out").glob("*Scaffold*")
    assert_same_results(path, tmp_path / "out" / "fedavg-seed0")
