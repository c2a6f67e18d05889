"""Records in one file: what comes back is what was written, or one clear sentence."""

import json
import os
from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.engines.slot_file import SlotFile


@pytest.fixture
def slots(tmp_path: Path) -> SlotFile:
    return SlotFile.create(tmp_path / "run" / "clients.slots", 100)


def test_records_of_any_length_that_fits(slots: SlotFile) -> None:
    contents = [b"", b"a", bytes(range(256)), os.urandom(slots.capacity)]
    for slot, content in reversed([*enumerate(contents)]):
        slots.write(slot, slot + 7, content)
    assert [slots.read(slot, slot + 7) for slot in range(4)] == contents
    assert slots.num_slots == 4


def test_whoever_comes_second_opens_what_is_there(slots: SlotFile, tmp_path: Path) -> None:
    slots.write(0, 1, b"mine")
    slots.sync()
    other = SlotFile.create(tmp_path / "run" / "clients.slots", 10**6)
    assert (other.capacity, other.read(0, 1)) == (slots.capacity, b"mine")
    slots.close()


@pytest.mark.parametrize("place", [0, 8, 16, 24, 40])
def test_a_record_with_one_bit_changed_is_refused(
    slots: SlotFile, tmp_path: Path, place: int
) -> None:
    slots.write(1, 5, b"x" * 20)
    path = tmp_path / "run" / "clients.slots"
    content = bytearray(path.read_bytes())
    content[2 * 4096 + place] ^= 4
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="is damaged at record 1; it must be"):
        SlotFile(path).read(1, 5)


def test_what_is_anothers_or_not_there_is_refused(slots: SlotFile) -> None:
    slots.write(1, 5, b"x" * 20)
    for slot, owner in ((1, 6), (0, 5), (2, 5), (10**9, 5)):
        with pytest.raises(InvalidInput, match="is damaged at record"):
            slots.read(slot, owner)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 4096,
        b"[" * 4096,
        b"[]",
        b"null",
        json.dumps({"format": 2, "slot_bytes": 4096}).encode(),
        json.dumps({"format": 1, "slot_bytes": 100}).encode(),
        json.dumps({"format": 1, "slot_bytes": 4096.0}).encode(),
        json.dumps({"format": 1, "slot_bytes": 2**50}).encode(),
    ],
)
def test_a_strange_file_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "strange").write_bytes(header)
    with pytest.raises(InvalidInput, match="is no file of clients' states"):
        SlotFile(tmp_path / "strange")


def test_a_huge_slot_of_a_stranger_takes_no_memory(tmp_path: Path) -> None:
    header = json.dumps({"format": 1, "slot_bytes": 2**40}).encode()
    (tmp_path / "huge").write_bytes(header.ljust(5000))
    with pytest.raises(InvalidInput, match="is damaged"):
        SlotFile(tmp_path / "huge").read(0, 0)


def test_links_pipes_and_nothing_are_refused(slots: SlotFile, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run" / "clients.slots")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "absent"):
        with pytest.raises(InvalidInput, match=name):
            SlotFile(tmp_path / name)
    slots.close()
