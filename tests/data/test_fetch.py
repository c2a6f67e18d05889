"""The downloader against a real server that cuts, stalls, lies and redirects."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broken_server import (
    Answer,
    BrokenServer,
    answer_range,
    free_port,
    run_server,
    send,
    serve,
    stall,
    trickle,
)

from mpfedcl.data import fetch
from mpfedcl.data.fetch import Patience, fetch_collection, fetch_file
from mpfedcl.data.originals import Collection, Original
from mpfedcl.errors import InvalidInput
from mpfedcl.files import hold_folder

BODY = bytes(range(256)) * 400
OTHER = BODY[::-1]
PAGE = "http://example.org/where-people-find-it"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server() -> Iterator[BrokenServer]:
    with run_server() as running:
        yield running


class Naps:
    """Sleeps that are written down and not slept."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def patience(**settings: Any) -> Patience:
    return Patience(**{"attempts": 3, "timeout": 5.0, "sleep": Naps(), **settings})


def original(*addresses: str, body: bytes = BODY, **settings: Any) -> Original:
    sha256 = hashlib.sha256(body).hexdigest()
    return Original("file.bin", addresses, **{"size": len(body), "sha256": sha256, **settings})


def bring(folder: Path, wanted: Original, **settings: Any) -> bytes:
    path = fetch_file(wanted, folder, PAGE, patience(**settings))
    assert path == folder / "file.bin"
    assert [entry.name for entry in folder.iterdir()] == ["file.bin"]
    return path.read_bytes()


def refusal(folder: Path, wanted: Original, **settings: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        fetch_file(wanted, folder, PAGE, patience(**settings))
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert not (folder / "file.bin").exists()
    assert PAGE in sentence
    assert str(folder / "file.bin") in sentence
    return sentence


def test_brings_a_file(tmp_path: Path, server: BrokenServer) -> None:
    reported: list[int] = []
    path = fetch_file(
        original(server.answer("/file", serve(BODY))),
        tmp_path / "new" / "folder",
        PAGE,
        patience(),
        lambda _original, on_disk: reported.append(on_disk),
    )
    assert path.read_bytes() == BODY
    assert server.requests == [("/file", None)]
    assert (reported[0], reported[-1]) == (0, len(BODY))
    assert reported == sorted(reported)


def test_a_right_file_is_not_asked_for_again(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin").write_bytes(BODY)
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)))) == BODY
    assert server.requests == []


@pytest.mark.parametrize("there", [OTHER, BODY[:-1], b""])
def test_a_wrong_file_is_replaced(tmp_path: Path, server: BrokenServer, there: bytes) -> None:
    (tmp_path / "file.bin").write_bytes(there)
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)))) == BODY


def test_goes_on_where_an_earlier_call_ended(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)))) == BODY
    assert server.ranges == ["bytes=1000-"]


def test_goes_on_after_a_cut_connection(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", serve(BODY, cut=7000), serve(BODY, cut=500), serve(BODY))
    assert bring(tmp_path, original(address)) == BODY
    assert server.ranges == [None, "bytes=7000-", "bytes=7500-"]


def test_starts_over_where_ranges_are_ignored(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", serve(BODY, cut=7000), serve(BODY, ranges=False))
    assert bring(tmp_path, original(address)) == BODY
    assert server.ranges == [None, "bytes=7000-"]


@pytest.mark.parametrize(
    "claim",
    [
        f"bytes 0-{len(BODY) - 1}/{len(BODY)}",
        f"bytes 1000-1999/{len(BODY)}",
        f"bytes 999-{len(BODY) - 1}/{len(BODY)}",
        "bytes 1000-1999/*",
        "nonsense",
        "",
    ],
)
def test_asks_for_all_where_another_range_comes(
    tmp_path: Path, server: BrokenServer, claim: str
) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    address = server.answer("/file", answer_range(BODY[:1000], claim), serve(BODY))
    assert bring(tmp_path, original(address)) == BODY
    assert server.ranges == ["bytes=1000-", None]


def test_a_range_that_nobody_asked_for_is_trouble(tmp_path: Path, server: BrokenServer) -> None:
    whole = answer_range(BODY, f"bytes 0-{len(BODY) - 1}/{len(BODY)}")
    sentence = refusal(tmp_path, original(server.answer("/file", whole)))
    assert "although all of it was asked for" in sentence


def test_wrong_bytes_are_deleted_and_asked_for_again(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", serve(OTHER), serve(BODY))
    assert bring(tmp_path, original(address)) == BODY
    assert server.ranges == [None, None]


def test_a_part_with_wrong_bytes_is_not_built_upon(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin.part").write_bytes(OTHER[:1000])
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)))) == BODY
    assert server.ranges == ["bytes=1000-", None]


def test_wrong_bytes_to_the_end_are_told(tmp_path: Path, server: BrokenServer) -> None:
    naps = Naps()
    address = server.answer("/file", serve(OTHER))
    sentence = refusal(tmp_path, original(address), sleep=naps)
    assert len(server.requests) == 3
    assert naps.seconds == [1.0, 2.0]
    assert address in sentence
    assert f"expected: {len(BODY):,} bytes, SHA256 {hashlib.sha256(BODY).hexdigest()}" in sentence
    assert f"sent {len(OTHER):,} bytes with SHA256 {hashlib.sha256(OTHER).hexdigest()}" in sentence
    assert list(tmp_path.iterdir()) == []


def test_pauses_double_up_to_a_bound(tmp_path: Path, server: BrokenServer) -> None:
    naps = Naps()
    address = server.answer("/file", send(503, Content_Length=0))
    refusal(tmp_path, original(address), attempts=6, longest_pause=5.0, sleep=naps)
    assert naps.seconds == [1.0, 2.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_asks_again_after_a_passing_fault(
    tmp_path: Path, server: BrokenServer, status: int
) -> None:
    address = server.answer("/file", send(status, Content_Length=0), serve(BODY))
    assert bring(tmp_path, original(address)) == BODY
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [404, 403, 410])
def test_does_not_ask_again_what_was_refused(
    tmp_path: Path, server: BrokenServer, status: int
) -> None:
    naps = Naps()
    address = server.answer("/file", send(status, b"<html>", Content_Length=6))
    sentence = refusal(tmp_path, original(address), sleep=naps)
    assert f"{address} answered {status}" in sentence
    assert len(server.requests) == 1
    assert naps.seconds == []


def test_mirrors_are_tried_in_turn_and_go_on_with_one_part(
    tmp_path: Path, server: BrokenServer
) -> None:
    gone = server.answer("/gone", send(404, Content_Length=0))
    weak = server.answer("/weak", serve(BODY, cut=7000))
    good = server.answer("/good", serve(BODY))
    naps = Naps()
    assert bring(tmp_path, original(gone, weak, good), sleep=naps) == BODY
    assert server.requests == [("/gone", None), ("/weak", None), ("/good", "bytes=7000-")]
    assert naps.seconds == []


def test_the_sentence_tells_of_every_mirror(tmp_path: Path, server: BrokenServer) -> None:
    gone = server.answer("/gone", send(404, Content_Length=0))
    weak = server.answer("/weak", send(500, Content_Length=0))
    sentence = refusal(tmp_path, original(gone, weak))
    assert f"{gone} answered 404" in sentence
    assert f"{weak} answered 500" in sentence
    assert "offline" not in sentence
    assert [path for path, _ in server.requests] == ["/gone", "/weak", "/weak", "/weak"]


@pytest.mark.parametrize("announced", [len(BODY) - 1, len(BODY) + 1, 10**13])
def test_another_announced_size_is_refused_before_it_comes(
    tmp_path: Path, server: BrokenServer, announced: int
) -> None:
    wrong = send(200, BODY, Content_Length=announced)
    address = server.answer("/file", wrong, wrong, serve(BODY))
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    assert bring(tmp_path, original(address)) == BODY
    # The part outlives a mirror that has another file.
    assert server.ranges[-1] == "bytes=1000-"


def test_a_content_length_that_lies_is_noticed(tmp_path: Path, server: BrokenServer) -> None:
    wanted = original(
        server.answer("/file", send(200, BODY, Content_Length=len(BODY) + 5)), size=None
    )
    sentence = refusal(tmp_path, wanted, attempts=1)
    assert f"closed the connection after {len(BODY):,} of {len(BODY) + 5:,} bytes" in sentence
    short = server.answer("/file", send(200, BODY, Content_Length=9), serve(BODY))
    (tmp_path / "file.bin.part").unlink()
    assert bring(tmp_path, original(short, size=None)) == BODY


def test_a_body_without_a_length_ends_with_the_connection(
    tmp_path: Path, server: BrokenServer
) -> None:
    assert bring(tmp_path, original(server.answer("/file", send(200, BODY)), size=None)) == BODY
    sentence = refusal(
        tmp_path / "other", original(server.answer("/file", send(200, BODY[:99]))), attempts=1
    )
    assert "closed the connection after 99 bytes" in sentence


def test_endless_bytes_are_cut_off(
    tmp_path: Path, server: BrokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.answer("/file", send(200, BODY * 40))
    sentence = refusal(tmp_path, original(address), attempts=1)
    assert f"sent more than {len(BODY):,} bytes" in sentence
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(fetch, "MOST_BYTES", 5000)
    assert "more than 5,000 bytes" in refusal(tmp_path, original(address, size=None), attempts=1)


def test_follows_a_redirect_with_its_range(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    server.answer("/new/place", serve(BODY))
    address = server.answer("/old/place", send(302, b"moved" * 99, Location="../new/place"))
    assert bring(tmp_path, original(address)) == BODY
    assert server.requests == [("/old/place", "bytes=1000-"), ("/new/place", "bytes=1000-")]


def test_a_redirect_loop_ends(tmp_path: Path, server: BrokenServer) -> None:
    server.answer("/b", send(307, Location="/a", Content_Length=0))
    address = server.answer("/a", send(301, Location="/b", Content_Length=0))
    assert "redirects more than 5 times" in refusal(tmp_path, original(address))
    assert len(server.requests) == 6


@pytest.mark.parametrize("scheme", ["file", "ftp", "data"])
def test_follows_to_no_other_scheme(tmp_path: Path, server: BrokenServer, scheme: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(BODY)
    target = {
        "file": secret.as_uri(),
        "ftp": f"ftp://127.0.0.1:{server.server_port}/file",
        "data": "data:text/plain,hello",
    }[scheme]
    address = server.answer("/file", send(302, Location=target, Content_Length=0))
    folder = tmp_path / "folder"
    for start in (address, target):
        sentence = refusal(folder, original(start))
        assert f"leads to {target}, but only http and https are followed" in sentence


@pytest.mark.parametrize("location", ["http://[nonsense", "", "http://a b\x7f/"])
def test_a_redirect_to_nonsense_is_trouble(
    tmp_path: Path, server: BrokenServer, location: str
) -> None:
    address = server.answer("/file", send(302, Location=location, Content_Length=0))
    assert address in refusal(tmp_path, original(address), attempts=1)


def test_a_trickle_is_given_up(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", trickle(BODY, 0.02), serve(BODY))
    begin = time.monotonic()
    assert bring(tmp_path, original(address), timeout=0.3, slowest=2000.0) == BODY
    assert time.monotonic() - begin < 3
    # What trickled in was not in vain.
    assert server.ranges[0] is None
    assert server.ranges[1] is not None


def test_the_sentence_tells_of_a_trickle(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", trickle(BODY, 0.02))
    sentence = refusal(tmp_path, original(address), attempts=1, timeout=0.2, slowest=2000.0)
    assert "bytes in 0.2 seconds" in sentence


def test_a_slow_but_steady_server_is_waited_for(tmp_path: Path, server: BrokenServer) -> None:
    body = BODY[:60]
    address = server.answer("/file", trickle(body, 0.01))
    assert bring(tmp_path, original(address, body=body), timeout=0.2, slowest=20.0) == body
    assert len(server.requests) == 1


def test_silence_is_given_up(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", stall(BODY, 5000, seconds=1.0), serve(BODY))
    assert bring(tmp_path, original(address), timeout=0.2) == BODY
    assert server.ranges == [None, "bytes=5000-"]


@pytest.mark.parametrize("answer", [send(204), send(200, BODY, Content_Encoding="gzip")])
def test_answers_that_are_no_file_are_refused(
    tmp_path: Path, server: BrokenServer, answer: Answer
) -> None:
    refusal(tmp_path, original(server.answer("/file", answer)))
    assert list(tmp_path.iterdir()) == []


def test_offline_is_told_in_one_sentence(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}/file"
    naps = Naps()
    sentence = refusal(tmp_path, original(address), sleep=naps)
    assert f"{address} cannot be reached" in sentence
    assert "this computer may be offline" in sentence
    assert naps.seconds == [1.0]


def test_a_connection_that_is_lost_on_the_way_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    naps = Naps()
    refusal(tmp_path, original(f"http://127.0.0.1:{free_port()}/file"), attempts=4, sleep=naps)
    assert naps.seconds == [1.0, 2.0, 4.0]
    assert (tmp_path / "file.bin.part").read_bytes() == BODY[:1000]


def test_rounds_that_bring_a_mebibyte_are_free(tmp_path: Path, server: BrokenServer) -> None:
    body = BODY * 50
    address = server.answer("/file", serve(body, cut=2**20))
    assert bring(tmp_path, original(address, body=body), attempts=1) == body
    assert len(server.requests) == 5


def test_bytes_brought_twice_buy_no_round(tmp_path: Path, server: BrokenServer) -> None:
    body = BODY * 50
    address = server.answer("/file", serve(body, ranges=False, cut=2**21))
    sentence = refusal(tmp_path, original(address, body=body), attempts=3)
    assert f"after {2**21:,} of {len(body):,} bytes" in sentence
    assert len(server.requests) == 4


def test_a_whole_part_needs_no_request(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY)
    address = server.answer("/file", serve(BODY))
    assert bring(tmp_path, original(address, size=None)) == BODY
    assert server.requests == []


@pytest.mark.parametrize("size", [len(BODY), None])
def test_a_part_that_is_too_long_is_dropped(
    tmp_path: Path, server: BrokenServer, size: int | None
) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY + b"more")
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)), size=size)) == BODY


def test_md5_serves_where_nothing_better_is_public(tmp_path: Path, server: BrokenServer) -> None:
    md5 = hashlib.md5(BODY, usedforsecurity=False).hexdigest()
    address = server.answer("/file", serve(OTHER), serve(BODY))
    assert bring(tmp_path, original(address, sha256=None, md5=md5)) == BODY
    assert len(server.requests) == 2
    again = server.answer("/file", serve(OTHER))
    assert f"MD5 {md5}" in refusal(tmp_path / "x", original(again, sha256=None, md5=md5))


def test_without_a_checksum_nothing_is_pieced_together(
    tmp_path: Path, server: BrokenServer
) -> None:
    (tmp_path / "file.bin.part").write_bytes(OTHER[:1000])
    assert bring(tmp_path, original(server.answer("/file", serve(BODY)), sha256=None)) == BODY
    assert server.ranges == [None]
    empty = server.answer("/file", send(200, Content_Length=0))
    assert "sent 0 bytes" in refusal(tmp_path / "x", original(empty, sha256=None, size=None))


def test_refuses_a_disk_without_room(
    tmp_path: Path, server: BrokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 0, 10))
    with pytest.raises(InvalidInput, match=r"10 bytes free, but file\.bin needs 102,400 more"):
        fetch_file(original(server.answer("/file", serve(BODY))), tmp_path, PAGE, patience())
    assert server.requests == []


def test_a_collection_is_fetched_whole(tmp_path: Path, server: BrokenServer) -> None:
    files = tuple(
        Original(name, (server.answer(f"/{name}", serve(name.encode())),), len(name))
        for name in ("one", "three")
    )
    paths = fetch_collection(Collection("c", PAGE, ("d",), files), tmp_path)
    assert [path.read_text() for path in paths] == ["one", "three"]


_FETCH = """
import sys
from pathlib import Path
from mpfedcl.data.fetch import Patience, fetch_file
from mpfedcl.data.originals import Original
address, folder, size, sha256 = sys.argv[1:]
fetch_file(Original("file.bin", (address,), int(size), sha256), Path(folder), "page", Patience())
"""


def test_a_killed_download_goes_on(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", stall(BODY, 50_000, seconds=5.0), serve(BODY))
    wanted = original(address)
    part = tmp_path / "file.bin.part"
    command = [sys.executable, "-c", _FETCH, address, str(tmp_path), str(len(BODY))]
    with subprocess.Popen(
        [*command, str(wanted.sha256)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as process:
        deadline = time.monotonic() + 10
        while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bin.part"]
    arrived = part.stat().st_size
    assert part.read_bytes() == BODY[:arrived]
    assert bring(tmp_path, wanted) == BODY
    assert server.ranges == [None, f"bytes={arrived}-"]


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "originals"
    for _ in range(2):
        with (
            hold_folder(folder),
            pytest.raises(InvalidInput, match="in use by another"),
            hold_folder(folder),
        ):
            pass
