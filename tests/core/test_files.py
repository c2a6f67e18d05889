"""Files: whole or not there, nowhere but where they belong, and read with a bound."""

import os
from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import read_bounded, remove_leftovers, write_atomically
from mpfedcl.core.json_files import load_json


def test_planted_symlink_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    # What an earlier version would have written to, and what this one would if it could be told.
    monkeypatch.setattr("mpfedcl.core.files.secrets.token_hex", lambda _: "00000000")
    for name in (".file.tmp", ".file.00000000.tmp"):
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"precious"
    monkeypatch.undo()
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert victim.read_bytes() == b"precious"


def test_symlink_is_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "file").symlink_to(victim)
    write_atomically(tmp_path / "file", b"new")
    assert not (tmp_path / "file").is_symlink()
    assert victim.read_bytes() == b"precious"


def test_file_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_only_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for name in (".a.json.0123abcd.tmp", ".a.tmp", "a.0123abcd.tmp", ".a.json.0123abcdef.tmp"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    remove_leftovers(tmp_path / "nowhere")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".a.json.0123abcdef.tmp", ".a.tmp", "a.0123abcd.tmp"]


def test_pipes_devices_and_large_files_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b"12345")
    assert read_bounded(tmp_path / "large", 5) == b"12345"
    with pytest.raises(InvalidInput, match=r"large has 5 bytes; at most 4 are read\.$"):
        read_bounded(tmp_path / "large", 4)
    for name in ("pipe", "zeros"):
        with pytest.raises(InvalidInput, match=f"{name} cannot be read: it is not a regular file"):
            read_bounded(tmp_path / name)
    with pytest.raises(InvalidInput, match="cannot be read: Not a directory"):
        read_bounded(tmp_path / "large" / "x")
    with pytest.raises(InvalidInput, match="it is not a regular file"):
        read_bounded(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[NaN]", "holds NaN, which is not a number"),
        ('{"a": -Infinity}', "holds -Infinity, which"),
        ("1e999", "holds 1e999, which is not a number of at most 64 bits"),
        ("1" + "0" * 400, "holds 1000"),
        ("[" * 10**5, "nested too deeply"),
        ("{", "Expecting"),
        ("\xff", "codec"),
    ],
)
def test_invalid_json_is_rejected(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load_json(text.encode("latin-1"))


def test_json_numbers_of_64_bits_are_read() -> None:
    numbers = [0, -(2**63), 2**63 - 1, 1.5, -1e308, 5e-324]
    assert load_json(str(numbers).encode()) == numbers
