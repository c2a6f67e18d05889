"""Records that grow while they are read: complete lines, each once, however they arrive."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.report.watch import files
from mpfedcl.report.watch.files import IncrementalRecords


def line_of(number: int, **changes: Any) -> bytes:
    record = {
        "round": number,
        "loss": 1 / number,
        "accuracy": None,
        "accuracy_per_client": {"a": 50.0},
        "seconds": {"train": 0.5},
        "bytes": {"up": 1, "down": 2},
        "clients": {"answered": ["a"], "missing": [], "rejected": {}},
    }
    return json.dumps(record | changes).encode()


DAMAGE = st.sampled_from([b"{", b"nonsense", b"[]", b"\xff\xfe", b"null", b'{"round": 1}'])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), DAMAGE), max_size=12), st.data())
def test_records_cut_anywhere_are_read_once(
    tmp_path_factory: pytest.TempPathFactory, plan: list[bytes | None], data: st.DataObject
) -> None:
    """Cut anywhere, even within a character: the same rounds, the same damage."""
    lines = [line_of(place + 1) if each is None else each for place, each in enumerate(plan)]
    content = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    path = tmp_path_factory.mktemp("records") / "rounds.jsonl"
    path.touch()
    growing, found = IncrementalRecords(path), []
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        with path.open("ab") as file:
            file.write(content[start:end])
        began, new = growing.read_new()
        assert not began
        found += new
    assert [each.round for each in found] == [
        place + 1 for place, each in enumerate(plan) if each is None
    ]
    assert growing.damaged == sum(each is not None for each in plan)
    assert growing.read_new() == (False, [])


def test_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    growing = IncrementalRecords(path)
    assert growing.read_new() == (False, [])
    path.write_bytes(line_of(1)[:40])
    assert growing.read_new() == (False, [])
    path.write_bytes(line_of(1))
    assert growing.read_new() == (False, [])
    with path.open("ab") as file:
        file.write(b"\n")
    assert [each.round for each in growing.read_new()[1]] == [1]
    assert growing.damaged == 0


@pytest.mark.parametrize("how", ["replace", "truncate"])
def test_rewound_records_start_again_from_the_first_round(tmp_path: Path, how: str) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(line_of(1) + b"\n" + line_of(2) + b"\n")
    growing = IncrementalRecords(path)
    assert len(growing.read_new()[1]) == 2
    if how == "replace":
        (tmp_path / "replacement").write_bytes(line_of(1) + b"\n" + line_of(2) + b"\n")
        (tmp_path / "replacement").replace(path)
    else:
        path.write_bytes(line_of(1) + b"\n")
    began, lines = growing.read_new()
    assert began
    assert [each.round for each in lines] == ([1, 2] if how == "replace" else [1])


def test_deleted_records_that_come_back_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(line_of(1) + b"\n")
    growing = IncrementalRecords(path)
    growing.read_new()
    path.unlink()
    assert growing.read_new() == (True, [])
    path.write_bytes(line_of(1) + b"\n")
    assert [each.round for each in growing.read_new()[1]] == [1]


def test_endless_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 5_000)
    path = tmp_path / "rounds.jsonl"
    growing, found = IncrementalRecords(path), []
    path.write_bytes(line_of(1) + b"\n" + b'{"round": "' + b"x" * 20_000)
    for _ in range(6):
        found += growing.read_new()[1]
    with path.open("ab") as file:
        file.write(b"x" * 9_000 + b'"}\n' + line_of(2) + b"\n")
    for _ in range(6):
        found += growing.read_new()[1]
    assert [each.round for each in found] == [1, 2]
    assert growing.damaged >= 1


@pytest.mark.parametrize(
    "line",
    [
        line_of(1, round=0),
        line_of(1, round=10**30),
        line_of(1, round="one"),
        line_of(1, seconds={"train": math.nan}),
        line_of(1, seconds={"train": -1.0}),
        line_of(1, bytes={"up": 10**400}),
        line_of(1, clients=[]),
        b"[" * 100_000,
        b'{"round": ' + b"9" * 5000 + b"}",
    ],
)
def test_line_that_no_run_writes_counts_as_damaged(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(line + b"\n" + line_of(2) + b"\n")
    growing = IncrementalRecords(path)
    assert [each.round for each in growing.read_new()[1]] == [2]
    assert growing.damaged == 1


def test_repeated_round_counts_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b"".join(line_of(number) + b"\n" for number in (1, 2, 2, 1, 3)))
    growing = IncrementalRecords(path)
    assert [each.round for each in growing.read_new()[1]] == [1, 2, 3]
    assert growing.damaged == 2
