"""The downloader: whole files, parts that it goes on with, checksums, kills."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from download_cases import BODY, OTHER, PAGE, bring, original, refusal

from download_server import BrokenServer, answer_range, serve, stall
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import lock_folder
from mpfedcl.data.public.download import fetch_file, fetch_source
from mpfedcl.data.public.sources import PublicFile, PublicSource

pytestmark = pytest.mark.usefixtures("no_proxy")


def test_file_is_downloaded_with_progress(tmp_path: Path, server: BrokenServer) -> None:
    reported: list[int] = []
    path = fetch_file(
        original(server.answer("/file", serve(BODY))),
        tmp_path / "new" / "folder",
        PAGE,
        lambda _original, on_disk: reported.append(on_disk),
    )
    assert path.read_bytes() == BODY
    assert server.requests == [("/file", None)]
    assert (reported[0], reported[-1]) == (0, len(BODY))
    assert reported == sorted(reported)


def test_correct_file_is_not_downloaded_again(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin").write_bytes(BODY)
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)))) == BODY
    assert server.requests == []


@pytest.mark.parametrize("there", [OTHER, BODY[:-1], b""])
def test_wrong_file_is_replaced(tmp_path: Path, server: BrokenServer, there: bytes) -> None:
    (tmp_path / "file.bin").write_bytes(there)
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)))) == BODY


def test_download_resumes_an_earlier_part(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)))) == BODY
    assert server.ranges == ["bytes=1000-"]


def test_download_resumes_after_a_dropped_connection(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", serve(BODY, cut=7000), serve(BODY, cut=500), serve(BODY))
    assert bring(tmp_path, original(address)) == BODY
    assert server.ranges == [None, "bytes=7000-", "bytes=7500-"]


def test_download_restarts_if_ranges_are_ignored(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", serve(BODY, cut=7000), serve(BODY, ranges=False))
    assert bring(tmp_path, original(address)) == BODY
    assert server.ranges == [None, "bytes=7000-"]


@pytest.mark.parametrize(
    "claim",
    [
        f"bytes 0-{len(BODY) - 1}/{len(BODY)}",
        f"bytes 999-{len(BODY) - 1}/{len(BODY)}",
        "nonsense",
        "",
    ],
)
def test_download_restarts_after_a_wrong_range(
    tmp_path: Path, server: BrokenServer, claim: str
) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    address = server.answer("/file", answer_range(BODY[:1000], claim), serve(BODY))
    assert bring(tmp_path, original(address)) == BODY
    assert server.ranges == ["bytes=1000-", None]


def test_wrong_bytes_are_deleted_and_downloaded_again(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", serve(OTHER), serve(BODY))
    assert bring(tmp_path, original(address)) == BODY
    assert server.ranges == [None, None]


def test_part_with_wrong_bytes_is_not_resumed(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin.part").write_bytes(OTHER[:1000])
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)))) == BODY
    assert server.ranges == ["bytes=1000-", None]


def test_persistent_wrong_checksum_is_reported(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", serve(OTHER))
    sentence = refusal(tmp_path, original(address))
    assert len(server.requests) == 3
    assert address in sentence
    assert f"SHA256 {hashlib.sha256(BODY).hexdigest()}" in sentence
    assert f"sent {len(OTHER):,} bytes that are not the file" in sentence
    assert list(tmp_path.iterdir()) == []


def test_complete_part_needs_no_request(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY)
    address = server.answer("/file", serve(BODY))
    assert bring(tmp_path, original(address, size=None)) == BODY
    assert server.requests == []


@pytest.mark.parametrize("size", [len(BODY), None])
def test_part_that_is_too_long_is_discarded(
    tmp_path: Path, server: BrokenServer, size: int | None
) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY + b"more")
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)), size=size)) == BODY


def test_full_disk_is_rejected_before_the_download(
    tmp_path: Path, server: BrokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 0, 10))
    with pytest.raises(InvalidInput, match=r"10 bytes free, but file\.bin needs 102,400 more"):
        fetch_file(original(server.answer("/file", serve(BODY))), tmp_path, PAGE)
    assert server.requests == []


def test_source_is_fetched_with_all_files(tmp_path: Path, server: BrokenServer) -> None:
    files = tuple(
        PublicFile(
            name,
            (server.answer(f"/{name}", serve(name.encode())),),
            hashlib.sha256(name.encode()).hexdigest(),
        )
        for name in ("one", "three")
    )
    paths = fetch_source(PublicSource("c", PAGE, ("d",), files), tmp_path)
    assert [path.read_text() for path in paths] == ["one", "three"]


_FETCH = """
import sys
from pathlib import Path
from mpfedcl.data.public.download import fetch_file
from mpfedcl.data.public.sources import PublicFile
address, folder, size, sha256 = sys.argv[1:]
wanted = PublicFile("file.bin", (address,), sha256, int(size))
fetch_file(wanted, Path(folder), "page")
"""


@pytest.mark.whole
def test_killed_download_is_resumed(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", stall(BODY, 50_000, seconds=5.0), serve(BODY))
    wanted = original(address)
    part = tmp_path / "file.bin.part"
    command = [sys.executable, "-c", _FETCH, address, str(tmp_path), str(len(BODY))]
    with subprocess.Popen(
        [*command, str(wanted.sha256)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as process:
        deadline = time.monotonic() + 120
        while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bin.part"]
    arrived = part.stat().st_size
    assert part.read_bytes() == BODY[:arrived]
    assert bring(tmp_path, wanted) == BODY
    assert server.ranges == [None, f"bytes={arrived}-"]


def test_folder_lock_is_exclusive(tmp_path: Path) -> None:
    folder = tmp_path / "originals"
    for _ in range(2):
        with (
            lock_folder(folder),
            pytest.raises(InvalidInput, match="already in use by another"),
            lock_folder(folder),
        ):
            pass


_HOLD = """
import sys, time
from pathlib import Path
from mpfedcl.core.files import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    folder = tmp_path / "originals"
    command = [sys.executable, "-c", _HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InvalidInput, match="already in use"), lock_folder(folder):
            pass
        process.send_signal(signal.SIGKILL)
    with lock_folder(folder):
        # The lock lies beside the folder, hidden.
        assert list(folder.iterdir()) == []
        assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == ["originals"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_file_system_without_locks_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_handle: int, _operation: int) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    for wait in (False, True):
        with lock_folder(tmp_path / "originals", wait=wait):
            assert (tmp_path / "originals").is_dir()
