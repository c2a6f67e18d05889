"""The downloader against a real server that fails, lies, redirects and dawdles."""

from pathlib import Path

import pytest
from download_cases import BODY, bring, original, refusal

from download_server import BrokenServer, free_port, send, serve, stall, trickle

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("no_proxy")]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_transient_http_errors_are_retried(
    tmp_path: Path, server: BrokenServer, status: int
) -> None:
    address = server.answer("/file", send(status, Content_Length=0), serve(BODY))
    assert bring(tmp_path, original(address)) == BODY
    assert len(server.requests) == 2


def test_mirrors_are_tried_in_turn_and_resume_one_part(
    tmp_path: Path, server: BrokenServer
) -> None:
    gone = server.answer("/gone", send(404, Content_Length=0))
    weak = server.answer("/weak", serve(BODY, cut=7000))
    good = server.answer("/good", serve(BODY))
    assert bring(tmp_path, original(gone, weak, good)) == BODY
    assert server.requests == [("/gone", None), ("/weak", None), ("/good", "bytes=7000-")]


def test_error_lists_every_mirror(tmp_path: Path, server: BrokenServer) -> None:
    gone = server.answer("/gone", send(404, Content_Length=0))
    weak = server.answer("/weak", send(500, Content_Length=0))
    sentence = refusal(tmp_path, original(gone, weak))
    assert f"{gone} (Client error '404" in sentence
    assert f"{weak} (Server error '500" in sentence
    # Only errors that may pass are asked for again.
    assert [path for path, _ in server.requests] == ["/gone", *["/weak"] * 3]


def test_wrong_content_length_is_detected(tmp_path: Path, server: BrokenServer) -> None:
    wanted = original(
        server.answer("/file", send(200, BODY, Content_Length=len(BODY) + 5)), size=None
    )
    sentence = refusal(tmp_path, wanted, attempts=1)
    assert f"received {len(BODY)} bytes, expected {len(BODY) + 5}" in sentence
    short = server.answer("/file", send(200, BODY, Content_Length=9), serve(BODY))
    (tmp_path / "file.bin.part").unlink()
    assert bring(tmp_path, original(short, size=None)) == BODY


def test_body_without_a_length_ends_with_the_connection(
    tmp_path: Path, server: BrokenServer
) -> None:
    assert bring(tmp_path, original(server.answer("/file", send(200, BODY)), size=None)) == BODY
    sentence = refusal(
        tmp_path / "other", original(server.answer("/file", send(200, BODY[:99]))), attempts=1
    )
    assert "closed the connection after 99 bytes" in sentence


def test_download_stops_at_the_size_limit(
    tmp_path: Path, server: BrokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.answer("/file", send(200, BODY * 40))
    sentence = refusal(tmp_path, original(address), attempts=1)
    assert f"sent more than {len(BODY):,} bytes" in sentence
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("mpfedcl.data.public.download.MOST_BYTES", 5000)
    assert "more than 5,000 bytes" in refusal(tmp_path, original(address, size=None), attempts=1)


def test_redirect_keeps_the_range(tmp_path: Path, server: BrokenServer) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    server.answer("/new/place", serve(BODY))
    address = server.answer("/old/place", send(302, b"moved" * 99, Location="../new/place"))
    assert bring(tmp_path, original(address)) == BODY
    assert server.requests == [("/old/place", "bytes=1000-"), ("/new/place", "bytes=1000-")]


def test_redirect_loop_is_rejected(tmp_path: Path, server: BrokenServer) -> None:
    server.answer("/b", send(307, Location="/a", Content_Length=0))
    address = server.answer("/a", send(301, Location="/b", Content_Length=0))
    assert "redirects more than 5 times" in refusal(tmp_path, original(address))
    assert len(server.requests) == 6 * 3


@pytest.mark.parametrize("scheme", ["file", "ftp", "data"])
def test_redirects_to_other_schemes_are_rejected(
    tmp_path: Path, server: BrokenServer, scheme: str
) -> None:
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
        refusal(folder, original(start))
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("location", ["http://[nonsense", "", "http://a b\x7f/"])
def test_invalid_redirect_is_an_error(tmp_path: Path, server: BrokenServer, location: str) -> None:
    address = server.answer("/file", send(302, Location=location, Content_Length=0))
    assert address in refusal(tmp_path, original(address), attempts=1)


def test_slow_but_steady_server_does_not_time_out(tmp_path: Path, server: BrokenServer) -> None:
    body = BODY[:200]
    address = server.answer("/file", trickle(body, 0.01))
    assert bring(tmp_path, original(address, body=body), timeout=1.0) == body
    assert len(server.requests) == 1


def test_stalled_connection_times_out_and_is_resumed(tmp_path: Path, server: BrokenServer) -> None:
    address = server.answer("/file", stall(BODY, 5000, seconds=3.0), serve(BODY))
    assert bring(tmp_path, original(address), timeout=1.0) == BODY
    assert server.ranges == [None, "bytes=5000-"]


def test_response_without_a_body_is_rejected(tmp_path: Path, server: BrokenServer) -> None:
    refusal(tmp_path, original(server.answer("/file", send(204))))


def test_offline_computer_gives_a_one_line_error(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}/file"
    assert f"{address} ([Errno" in refusal(tmp_path, original(address))


def test_lost_connection_is_retried_with_the_part_kept(tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    refusal(tmp_path, original(f"http://127.0.0.1:{free_port()}/file"))
    assert (tmp_path / "file.bin.part").read_bytes() == BODY[:1000]
