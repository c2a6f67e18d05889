"""A run directory that somebody gives you: refused in a sentence or repaired, no traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from handwritten_runs import write_run
from mpfedcl import resume, run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import digest
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.report.run import RunRecords
from mpfedcl.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from mpfedcl.runs.directory import RunDirectory
from small_experiments import HIDDEN, Json, assert_same_results, read_records, small

DEEP = "[" * 100_000
ODD_LINES: dict[str, str] = {
    "empty": "",
    "cut off": '{"round": 2, "loss"',
    "a number": "5",
    "a list": "[1, 2]",
    "nothing": "null",
    "without a round": '{"loss": 1.0}',
    "nested without end": DEEP,
    "nested without end in a record": '{"round": 2, "remarks": ' + DEEP,
    "no text": "\xff\xfe",
    "long": '{"round": 2, "x": "' + "a" * 10**6 + '"}',
}
ODD_VALUES: dict[str, Json] = {
    "NaN": {"loss": float("nan")},
    "infinity": {"loss": float("inf")},
    "infinity elsewhere": {"remarks": {"a": [float("-inf")]}},
    "a round without end": {"round": 10**400},
    "a round that is none": {"round": "2"},
    "round 0": {"round": 0},
    "seconds without end": {"seconds": {"train": 10**400}},
    "bytes below 0": {"bytes": {"up": -1}},
    "clients as a list": {"clients": []},
    "accuracy as a text": {"accuracy": "high"},
    "accuracy beyond 100 %": {"accuracy": {"local_test": {"global_classifier": 1e6}}},
    "accuracy of no client": {"accuracy_per_client": [1.0]},
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", [*ODD_LINES, *ODD_VALUES])
def test_invalid_record_is_skipped(tmp_path: Path, name: str, place: int) -> None:
    path = write_run(tmp_path / "run")
    file = path / "rounds.jsonl"
    lines = file.read_text().splitlines()
    changed = json.dumps({**json.loads(lines[place]), **ODD_VALUES.get(name, {})})
    lines[place] = ODD_LINES.get(name, changed)
    file.write_bytes("\n".join(lines).encode("latin-1"))
    left = [number for number in (1, 2, 3) if number != place + 1]
    assert [record["round"] for record in RunDirectory(path).read_records()] == left
    assert [record.round for record in RunRecords.read(path).rounds] == left


def test_repeated_round_is_skipped(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    file = path / "rounds.jsonl"
    first, second, third = file.read_text().splitlines()
    file.write_text("\n".join([second, first, second, third]))
    assert [record["round"] for record in RunDirectory(path).read_records()] == [2, 3]


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds that has ended."""
    return run(small(images, model__hidden=HIDDEN), tmp_path_factory.mktemp("runs") / "run").path


@pytest.fixture
def path(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_invalid_records_do_not_prevent_a_resume(path: Path, trained: Path) -> None:
    odd = [*ODD_LINES.values(), '{"round": NaN}', '{"round": 1e999}', '{"round": 1}']
    with (path / "rounds.jsonl").open("a", encoding="latin-1") as file:
        file.write("\n".join(odd))
    resume(path, rounds=3)
    assert [record["round"] for record in read_records(path)] == [1, 2, 3]


ODD_PARTITIONS: dict[str, Any] = {
    "a list": [],
    "a number": 5,
    "empty": {},
    "classes as a text": {"classes": "ab"},
    "classes as numbers": {"classes": [0, 1, 2]},
    "no class": {"classes": None},
    "clients as a list": {"clients": []},
    "a client as a number": {"clients": {"client-0": 5}},
    "too few counts": {"clients": {"client-0": {"train": [1], "test": 0}}},
    "counts below 0": {"clients": {"client-0": {"train": [-1, 0, 0], "test": 0}}},
    "counts without end": {"clients": {"client-0": {"train": [10**400, 0, 0], "test": 0}}},
    "a shape as a text": {"input_shape": "large"},
    "an encoder as a list": {"encoder": ["a"]},
    "columns as a number": {"columns": 3},
}


@pytest.mark.parametrize("name", ODD_PARTITIONS)
def test_invalid_partition_is_a_one_line_error(path: Path, name: str) -> None:
    file, odd = path / "partition.json", ODD_PARTITIONS[name]
    changed = {**json.loads(file.read_bytes()), **odd} if isinstance(odd, dict) and odd else odd
    file.write_text(json.dumps(changed))
    for use in (load_trained_run, RunRecords.read, lambda path: resume(path, rounds=3)):
        with pytest.raises(InvalidInput, match=r"partition\.json is not (as mpfedcl|valid JSON)"):
            use(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", "[]"),
        ("summary.json", '{"accuracy": "high"}'),
        ("summary.json", '{"accuracy": NaN}'),
        ("summary.json", DEEP),
        ("federation.json", '{"run": 5}'),
        ("federation.json", '{"run": "a", "input_size": 0, "encoder": ""}'),
    ],
)
def test_invalid_json_files_are_a_one_line_error(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=rf"{name} is not (as mpfedcl|valid JSON)"):
        RunDirectory(tmp_path).read_json(name)


# Checkpoints of another model


def forge_state(path: Path, change: Callable[[Checkpoint], None]) -> None:
    found, _ = load_checkpoint(path / "checkpoint")
    assert found is not None
    change(found)
    save_checkpoint(found, path / "checkpoint")


@pytest.mark.parametrize("part", ["server.params", "prototypes", "nothing"])
def test_checkpoint_of_another_model_is_rejected(path: Path, part: str, trained: Path) -> None:
    def change(found: Checkpoint) -> None:
        if part == "server.params":
            found.state.server.params["hidden.0.weight"] = torch.zeros(3)
        elif part == "prototypes":
            for name, (received, rows) in [*found.state.prototypes.items()]:
                wide = torch.zeros(len(rows), rows.dimension + 1)
                wider = type(rows)(wide, rows.labels, rows.counts)
                found.state.prototypes[name] = (received, wider)

    forge_state(path, change)
    if part == "nothing":
        resume(path)
        assert_same_results(path, trained)
    else:
        with pytest.raises(InvalidInput, match="checkpoint does not fit the experiment; it must"):
            resume(path, rounds=3)


# Nothing is written elsewhere


@pytest.mark.parametrize("name", ["checkpoint", "models", "rounds.jsonl", ".change", "x"])
def test_links_in_a_run_directory_are_rejected(path: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    if (path / name).exists():
        (path / name).rename(elsewhere)
    else:
        elsewhere.mkdir()
    (path / name).symlink_to(elsewhere)
    before = {each: each.stat().st_mtime_ns for each in (elsewhere, *elsewhere.glob("*"))}
    with pytest.raises(InvalidInput, match=rf"{name} is a link; a run that is written to must"):
        resume(path, rounds=3)
    assert before == {each: each.stat().st_mtime_ns for each in (elsewhere, *elsewhere.glob("*"))}


def test_temporary_files_of_a_killed_process_are_removed(path: Path, trained: Path) -> None:
    for folder in (path, path / "checkpoint", path / "models"):
        (folder / f".x.json.{digest(b'')[:8]}.tmp").write_text("half")
    resume(path)
    assert not list(path.rglob("*.tmp"))
    assert_same_results(path, trained)
