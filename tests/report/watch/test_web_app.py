"""The server over a real socket: what it answers, what it refuses, and how it ends."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_processes import call
from handwritten_runs import write_run
from mpfedcl.report.watch.web_app import is_local_host
from watch_server import Events, Server, watched

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("watched")
    (root / "secret.txt").write_text("a secret")
    (root / "runs").mkdir()
    write_run(root / "runs" / "done")
    with watched(root / "runs") as found:
        yield found


@pytest.fixture
def events(server: Server) -> Iterator[Events]:
    stream = Events(server)
    yield stream
    stream.close()


def test_the_page_and_its_parts(server: Server) -> None:
    status, headers, body = server.ask("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<script src=" in body
    assert b"http" not in body.replace(b"http-equiv", b"")
    for path, kind in {"/watch.js": "javascript", "/watch.css": "css", "/icon.svg": "svg"}.items():
        status, headers, body = server.ask(path)
        assert status == 200
        assert kind in headers["content-type"]
        assert len(body) > 100
    script = server.ask("/watch.js")[2].decode()
    assert "Charts.scatter" in script
    assert "innerHTML" not in script


def test_every_answer_forbids_what_is_not_needed(server: Server) -> None:
    for path in ("/", "/watch.js", "/run?id=x", "/nowhere"):
        _, headers, _ = server.ask(path)
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NONSENSE"]
)
def test_only_reading_is_allowed(server: Server, method: str) -> None:
    for path in ("/", "/run", "/events"):
        assert server.ask(path, method)[0] == 405
    for path in ("/", "/events"):
        status, _, body = server.ask(path, "HEAD")
        assert (status, body) == (200, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "//etc/passwd",
        "/done/rounds.jsonl",
        "/watch.js/../../secret.txt",
        "/page/watch.css",
        "/run?id=../done",
        "/run?id=..%2F..%2Fsecret.txt",
        "/run?id=done",
        "/run?id=",
        "/run",
        "/map?id=%00",
        "/run?id=" + "a" * 5000,
    ],
)
def test_no_request_leads_to_a_file(server: Server, path: str) -> None:
    status, _, body = server.ask(path)
    assert status in (400, 404)
    assert b"secret" not in body
    assert len(body) < 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("127.0.0.1:8700", 200),
        ("[::1]:8700", 200),
        ("192.168.1.7", 200),
        ("evil.example", 421),
        ("evil.example:8700", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost:8700@evil.example", 421),
        ("::1", 421),
        ("", 421),
        ("2130706433", 421),
    ],
)
def test_only_addresses_may_be_asked_for(server: Server, host: str, status: int) -> None:
    assert is_local_host(host) == (status == 200)
    for path in ("/", "/events" if status != 200 else "/watch.css"):
        assert server.ask(path, headers={"Host": host})[0] == status


def test_two_hosts_are_not_played_off_against_each_other(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
        )
        first = connection.recv(4096).split(b"\r\n")[0]
    assert first.split()[1] in (b"400", b"421")


@pytest.mark.parametrize(
    "said", [b"\r\n\r\n", b"GET", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n"]
)
def test_nonsense_does_not_hurt(server: Server, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(said)
    assert server.ask("/")[0] == 200


def test_events_tell_what_there_is_and_what_changes(server: Server, events: Events) -> None:
    known = events.wait_for("runs")
    assert known["folder"] == str(server.folder)
    assert "done" in [entry["name"] for entry in known["runs"]]
    path = write_run(server.folder / "new", rounds=2, finished=False)
    (entry,) = events.wait_for("changed")
    assert (entry["name"], entry["state"], entry["round"]) == ("new", "running", 2)
    last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    with (path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(last | {"round": 3}) + "\n")
    (entry,) = events.wait_for("changed")
    assert (entry["name"], entry["round"]) == ("new", 3)
    status, _, body = server.ask(f"/run?id={entry['id']}")
    assert (status, json.loads(body)["run"]["rounds"]) == (200, 3)
    assert server.ask(f"/map?id={entry['id']}")[0] == 200
    assert server.ask(f"/compare?id={entry['id']}&id=unknown")[0] == 200
    shutil.rmtree(path)
    assert events.wait_for("gone") == [entry["id"]]


def test_every_open_page_hears_of_it(server: Server) -> None:
    streams = [Events(server) for _ in range(12)]
    for each in streams:
        each.wait_for("runs")
    streams.pop().close()
    path = write_run(server.folder / "for-all")
    assert {each.wait_for("changed")[0]["name"] for each in streams} == {"for-all"}
    shutil.rmtree(path)
    for each in streams:
        each.wait_for("gone")
        each.close()


def test_it_ends_at_ctrl_c_though_pages_are_open(tmp_path: Path) -> None:
    with watched(tmp_path) as server:
        streams = [Events(server) for _ in range(3)]
        for each in streams:
            assert each.wait_for("runs")["runs"] == []
        assert server.interrupt() == 0
        assert [each.next() for each in streams] == [("", None)] * 3
        for each in streams:
            each.close()
        assert server.process.communicate()[1] == ""


def test_a_port_that_is_taken(server: Server, tmp_path: Path) -> None:
    result = call("watch", tmp_path, "--port", server.port, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"mpfedcl: port is {server.port}; it cannot be used on 127.0.0.1 (Address already in use): "
        "give another by --port, or 0 for any that is free.\n"
    )
