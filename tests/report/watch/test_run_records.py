"""Records of a run that goes on: complete lines, each once; what no run writes is counted."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mpfedcl.report.watch.files import read_records


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


def rounds_in(path: Path, content: bytes) -> tuple[list[int], int]:
    """Return the rounds in a file, and the number of damaged lines."""
    path.write_bytes(content)
    found, damaged = read_records(path)
    return [each.round for each in found], damaged


def test_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    content = line_of(1) + b"\n" + line_of(2) + b"\n"
    complete = [len(line_of(1)) + 1, len(content)]
    for size in range(0, len(content) + 1, 7):
        rounds = [number for number, end in enumerate(complete, 1) if end <= size]
        assert rounds_in(tmp_path / "rounds.jsonl", content[:size]) == (rounds, 0)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"nonsense",
        b"[]",
        b"\xff\xfe",
        b"null",
        b'{"round": 1}',
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
    content = line + b"\n" + line_of(2) + b"\n"
    assert rounds_in(tmp_path / "rounds.jsonl", content) == ([2], 1)


def test_repeated_round_counts_as_damaged(tmp_path: Path) -> None:
    content = b"".join(line_of(number) + b"\n" for number in (1, 2, 2, 1, 3))
    assert rounds_in(tmp_path / "rounds.jsonl", content) == ([1, 2, 3], 2)
