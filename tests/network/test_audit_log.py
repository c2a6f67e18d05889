"""Audit logs: the hash chain, changes, crashes in the middle of a line, several writers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.audit import FIRST, AuditLog, keep_audit, read_audit
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.transport import Kind, Message

EXPERIMENT = "method = 'fedavg'\n[privacy]\nepsilon = 2.0\nmodel = 'local'\ndelta = 1e-5\n"


@pytest.fixture(scope="module", name="whole")
def whole_fixture(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A log with five entries."""
    path = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    for number in range(5):
        AuditLog(path).append("asked", round=number, clients=["a", "ä"], share=0.25)
    return path.read_bytes()


def verify(path: Path, content: bytes) -> list[str]:
    path.write_bytes(content)
    return [each["event"] for each in read_audit(path)]


def test_entries_are_chained(tmp_path: Path, whole: bytes) -> None:
    assert verify(tmp_path / "x", whole) == ["asked"] * 5
    entries = [json.loads(line) for line in whole.splitlines()]
    assert [each["number"] for each in entries] == [1, 2, 3, 4, 5]
    before = [FIRST, *(each["sha256"] for each in entries)]
    assert [each["previous"] for each in entries] == before[:-1]
    assert verify(tmp_path / "x", b"") == []


@given(st.data())
def test_any_changed_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda each: each != whole[place]))
    changed = whole[:place] + bytes([byte]) + whole[place + 1 :]
    # Spaces between values are no content.
    if json_lines(changed) == json_lines(whole):
        return
    with pytest.raises(InvalidInput, match=r"line \d"):
        verify(tmp_path_factory.getbasetemp() / "changed", changed)


def json_lines(content: bytes) -> object:
    try:
        return [json.loads(line) for line in content.split(b"\n")[:-1]]
    except ValueError:
        return content


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda lines: lines[1:], 1),
        (lambda lines: [*lines[:2], *lines[3:]], 3),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 2),
        (lambda lines: [*lines, lines[-1]], 6),
        (lambda lines: [*lines[:2], b"[]\n", *lines[3:]], 3),
        (lambda lines: [*lines[:4], b"[" * 200_000 + b"\n"], 5),
    ],
)
def test_removed_moved_and_inserted_lines_are_found(
    tmp_path: Path, whole: bytes, change: Callable[[list[bytes]], list[bytes]], number: int
) -> None:
    changed = b"".join(change(whole.splitlines(keepends=True)))
    with pytest.raises(InvalidInput, match=f"was changed: line {number} "):
        verify(tmp_path / "x", changed)


def test_line_with_a_new_hash_breaks_the_chain(tmp_path: Path, whole: bytes) -> None:
    """A forger who rewrites one entry with its own hash must rewrite all later ones."""
    lines = whole.splitlines(keepends=True)
    forged = tmp_path / "forged"
    forged.write_bytes(b"".join(lines[:2]))
    AuditLog(forged).append("asked", round=77)
    forged.write_bytes(forged.read_bytes() + b"".join(lines[3:]))
    with pytest.raises(InvalidInput, match="line 4 does not follow"):
        list(read_audit(forged))


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_crash_in_the_middle_of_a_line_is_repaired(tmp_path: Path, whole: bytes, kept: int) -> None:
    path, lines = tmp_path / "audit.jsonl", whole.splitlines(keepends=True)
    part = lines[4][:kept]
    path.write_bytes(b"".join(lines[:4]) + part)
    if part:
        with pytest.raises(InvalidInput, match="ends in the middle of line 5"):
            list(read_audit(path))
    AuditLog(path).append("start")
    repaired = ["repaired"] if part else []
    entries = list(read_audit(path))
    assert [each["event"] for each in entries] == ["asked"] * 4 + repaired + ["start"]
    if part:
        assert entries[4]["bytes"] == len(part)


def test_log_goes_on_after_a_damaged_line_which_stays_visible(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(whole + b"nonsense\n")
    AuditLog(path).append("start")
    assert b'"number": 7' in path.read_bytes()
    with pytest.raises(InvalidInput, match="line 6 is not an entry"):
        list(read_audit(path))


WRITER = """
import sys
from pathlib import Path
from mpfedcl.network.audit import AuditLog
for number in range(20):
    AuditLog(Path(sys.argv[1])).append("asked", writer=sys.argv[2], number_of_writer=number)
"""


def test_several_processes_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)])
        for number in range(3)
    ]
    assert [each.wait(240) for each in writers] == [0, 0, 0]
    entries = list(read_audit(path))
    assert len(entries) == 60
    for writer in "012":
        own = [each["number_of_writer"] for each in entries if each["writer"] == writer]
        assert own == list(range(20))


def test_hostile_values_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    values = {"reason": "x" * 10**6, "names": ["y" * 10**4] * 10**4, "loss": float("nan")}
    AuditLog(path).append("rejected", **values, large=10**400, inner={"a": object()})
    AuditLog(path).append("stop")
    assert len(list(read_audit(path))) == 2
    assert path.stat().st_size < 2**18


def test_client_records_requests_and_what_it_releases(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    def handle(kind: Kind, message: Message) -> Message:
        if kind == "close":
            raise ClientRefusal("its privacy budget is spent.")
        if kind == "hello":
            raise RuntimeError("a private file name")
        return Message({"loss": 1.0}, {"averaged/w": numpy.zeros((2, 3))})

    answer = keep_audit(handle, AuditLog(path))
    request = Message({"run": "ab", "round": 3, "experiment": EXPERIMENT})
    answer("round", request)
    for kind, error in (("close", ClientRefusal), ("hello", RuntimeError)):
        with pytest.raises(error):
            answer(kind, request)  # type: ignore[arg-type]
    entries = list(read_audit(path))
    assert [each["event"] for each in entries] == ["asked", "released", *["asked", "refused"] * 2]
    asked, released = entries[:2]
    assert (asked["run"], asked["round"], asked["epsilon"], asked["delta"]) == ("ab", 3, 2.0, 1e-5)
    assert (released["values"], released["arrays"]) == (["loss"], {"averaged/w": [2, 3]})
    assert released["array_bytes"] == 48
    assert [each["reason"] for each in entries[3::2]] == [
        "its privacy budget is spent.",
        "RuntimeError",
    ]


def test_client_sends_nothing_that_it_cannot_record(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.mkdir()
    asked: list[Kind] = []

    def handle(kind: Kind, message: Message) -> Message:
        asked.append(kind)
        return message

    with pytest.raises(IsADirectoryError):
        keep_audit(handle, AuditLog(path))("round", Message({}))
    assert asked == []
