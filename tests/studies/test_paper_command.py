"""`mpfedcl paper` as a person uses it, on the data inside the package."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from command_processes import CommandProcess, call
from small_experiments import HIDDEN

pytestmark = pytest.mark.whole


WORDS = ["paper", "run", "sent", "k", "partitions", "--quick", "--jobs", 1]


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An empty data folder: the sample inside the package stands in for MNIST."""
    return {"MPFEDCL_DATA": str(tmp_path_factory.mktemp("data"))}


@pytest.fixture(scope="module")
def quick(
    tmp_path_factory: pytest.TempPathFactory, nowhere: dict[str, str]
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Where three tables were made quickly with a small model, and what the command said."""
    folder = tmp_path_factory.mktemp("quick")
    return folder, call(*WORDS, cwd=folder, variables=nowhere, small_model=True, figures=True)


def read_result(tmp_path: Path, item: str) -> dict[str, Any]:
    path = tmp_path / "runs" / "paper" / "quick" / "tables" / item / "result.json"
    result: dict[str, Any] = json.loads(path.read_text())
    del result["seconds"]
    return result


def sent_in(tmp_path: Path) -> dict[str, Any]:
    return {c["column"]: c["values"] for c in read_result(tmp_path, "sent")["cells"]}


def test_list_and_show(tmp_path: Path, nowhere: dict[str, str]) -> None:
    listed = call("paper", "list", cwd=tmp_path, variables=nowhere)
    assert listed.returncode == 0, listed.stderr
    assert "Label skew, Dir(0.05)" in listed.stdout
    assert "DomainNet is not in the data folder as a whole; it is left out." in listed.stderr
    assert max(len(line) for line in listed.stdout.splitlines()) <= 100
    shown = call("paper", "show", "k", cwd=tmp_path, variables=nowhere)
    assert "not run yet: 6 experiments per seed" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "tables"], "'tables' is not a table of the paper; it must be all, or one or"),
        (["run", "k", "--seeds", "1", "1"], "seeds is [1, 1]; it must name each once."),
        (["run", "k", "--jobs", "-1"], "jobs is -1; it must be auto, or 1 or more"),
        (
            ["run", "k", "--seeds", "100"],
            "it must be without 100, 101, 102, the seeds that settings are chosen",
        ),
        (["show", "tables"], "'tables' is not a table of the paper"),
        (["show", "all"], "id is 'all'; it must be one of sent, label"),
        (["draw"], "'paper draw' is not a command"),
        (["run"], "no table is named; it must be all, or one or more of sent, label"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, nowhere: dict[str, str], words: list[str], said: str
) -> None:
    ended = call("paper", *words, cwd=tmp_path, variables=nowhere)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_a_quick_run_writes_tables_figures_and_shares_runs(
    tmp_path: Path, nowhere: dict[str, str], quick: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    made, ended = quick
    shutil.copytree(made / "runs", tmp_path / "runs")
    assert ended.returncode == 0, ended.stderr
    assert max(len(line) for line in ended.stdout.splitlines()) <= 100
    folder = tmp_path / "runs" / "paper" / "quick"
    first, last = HIDDEN
    parameters = 784 * first + first + first * last + last + last * 10 + 10
    assert sent_in(tmp_path) == {"parameters": [parameters], "prototypes": [20 * last]}
    for name in ("k/k.png", "k/table.md", "partitions/partitions-label.png"):
        assert (folder / "tables" / name).stat().st_size > 100
    # Six values of K and one IID run; the same command has nothing left to do.
    runs = sorted((folder / "runs").iterdir())
    assert len(runs) == 7
    before = {path: (path / "rounds.jsonl").stat().st_mtime_ns for path in runs}
    again = call(*WORDS, cwd=tmp_path, variables=nowhere, small_model=True)
    assert again.returncode == 0, again.stderr
    assert {path: (path / "rounds.jsonl").stat().st_mtime_ns for path in runs} == before
    assert again.stdout == ended.stdout
    assert "Quick: a few rounds and one seed" in ended.stdout
    # Less does not take the place of more, nor other data the place of these.
    fewer = call(*WORDS, "--seeds", 1, cwd=tmp_path, variables=nowhere)
    assert fewer.returncode == 2
    assert "seeds is [1]; runs/paper/quick/tables/sent holds a result over [0]" in fewer.stderr
    (tmp_path / "other").mkdir()
    moved = call(*WORDS, cwd=tmp_path, variables={"MPFEDCL_DATA": str(tmp_path / "other")})
    assert moved.returncode == 2
    assert "its runs are on the data in" in moved.stderr
    shown = call("paper", "show", "k", cwd=tmp_path, variables=nowhere)
    assert "a quick one: mpfedcl paper show k --out runs/paper/quick" in shown.stdout
    # A record that was damaged is not read over: the command says what to do.
    damaged = next(path for path in runs if "label" in path.name) / "rounds.jsonl"
    damaged.write_bytes(damaged.read_bytes().replace(b'"round": 2', b'"round": x'))
    broken = call(*WORDS, cwd=tmp_path, variables=nowhere)
    assert (broken.returncode, "records are damaged" in broken.stderr) == (2, True)


def test_the_paper_s_model_in_the_table_of_what_is_sent(
    tmp_path: Path, nowhere: dict[str, str]
) -> None:
    ended = call("paper", "run", "sent", "--quick", "--jobs", 1, cwd=tmp_path, variables=nowhere)
    assert ended.returncode == 0, ended.stderr
    assert sent_in(tmp_path) == {"parameters": [798_474], "prototypes": [5_120]}


def test_a_kill_costs_at_most_the_round_under_way(
    tmp_path: Path, nowhere: dict[str, str], quick: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    words = ["paper", "run", "k", "--quick", "--jobs", 1]
    process = CommandProcess(words, tmp_path, nowhere, small_model=True)
    records = tmp_path / "runs" / "paper" / "quick" / "runs"
    for _ in range(6000):
        done = sum(path.read_bytes().count(b"\n") for path in records.glob("*/rounds.jsonl"))
        if done >= 4:
            break
        time.sleep(0.004)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    kept = {path: path.read_bytes() for path in records.glob("*/rounds.jsonl")}
    assert sum(each.count(b"\n") for each in kept.values()) >= 4
    assert call(*words, cwd=tmp_path, variables=nowhere, small_model=True).returncode == 0
    # What was on record before is on record still.
    assert all(path.read_bytes().startswith(each) for path, each in kept.items())
    assert read_result(tmp_path, "k") == read_result(quick[0], "k")
