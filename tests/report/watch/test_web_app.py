"""The server over a real socket: its answers, its refusals, and its end."""

import json
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_processes import call
from handwritten_runs import write_run
from mpfedcl.report.watch.web_app import is_local_host
from watch_server import Server, watched

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("watched")
    (root / "secret.txt").write_text("a secret")
    (root / "runs").mkdir()
    write_run(root / "runs" / "done")
    with watched(root / "runs") as found:
        yield found


def test_page_and_its_parts_are_served(server: Server) -> None:
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
    assert "If-None-Match" in script
    assert "innerHTML" not in script


def test_every_answer_has_restrictive_headers(server: Server) -> None:
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
    for path in ("/", "/run", "/runs"):
        assert server.ask(path, method)[0] == 405
    for path in ("/", "/runs"):
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
        "/run?id=%00",
        "/run?id=" + "a" * 5000,
    ],
)
def test_no_request_reads_a_file(server: Server, path: str) -> None:
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
def test_host_must_be_an_address_or_localhost(server: Server, host: str, status: int) -> None:
    assert is_local_host(host) == (status == 200)
    for path in ("/", "/runs" if status != 200 else "/watch.css"):
        assert server.ask(path, headers={"Host": host})[0] == status


def test_second_host_header_is_checked(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
        )
        first = connection.recv(4096).split(b"\r\n")[0]
    assert first.split()[1] in (b"400", b"421")


@pytest.mark.parametrize(
    "said", [b"\r\n\r\n", b"GET", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n"]
)
def test_server_survives_invalid_requests(server: Server, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(said)
    assert server.ask("/")[0] == 200


def wait_for_list(server: Server, words: str, *, is_there: bool = True) -> str:
    """Ask for the list until it has the words, or no longer has them; return it."""
    for _ in range(200):
        _, _, body = server.ask("/runs")
        if (words in body.decode()) == is_there:
            return body.decode()
        time.sleep(0.05)
    raise AssertionError(f"{words!r}: {is_there} never came true")


@pytest.mark.thorough
def test_list_follows_new_grown_and_deleted_runs(server: Server) -> None:
    assert ">done</a>" in wait_for_list(server, "done")
    path = write_run(server.folder / "new", rounds=2, finished=False)
    shown = wait_for_list(server, ">new</a>")
    assert "2 of 2" in shown
    run = re.search(r'href="#run=(\w+)" id="link-\w+">new<', shown)
    assert run is not None
    last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    with (path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(last | {"round": 3}) + "\n")
    wait_for_list(server, "3 of 2")
    status, _, body = server.ask(f"/run?id={run[1]}")
    assert (status, b'data-round="3"' in body) == (200, True)
    assert server.ask(f"/compare?id={run[1]}&id=unknown")[0] == 200
    shutil.rmtree(path)
    wait_for_list(server, ">new</a>", is_there=False)
    assert server.ask(f"/run?id={run[1]}")[0] == 404


def test_runs_are_filtered_by_words(server: Server) -> None:
    assert b">done</a>" in server.ask("/runs?words=mnist+done+finished")[2]
    for words in ("nowhere", "done+running", "%00"):
        assert b">done</a>" not in server.ask(f"/runs?words={words}")[2]


@pytest.mark.parametrize("address", ["/runs", "/run?id={id}", "/compare?id={id}"])
def test_known_answer_is_not_sent_again(server: Server, address: str) -> None:
    shown = wait_for_list(server, ">done</a>")
    run = re.search(r'href="#run=(\w+)" id="link-\w+">done<', shown)
    assert run is not None
    path = address.format(id=run[1])
    status, headers, body = server.ask(path)
    assert (status, len(body) > 100) == (200, True)
    status, _, body = server.ask(path, headers={"If-None-Match": headers["etag"]})
    assert (status, body) == (304, b"")
    status, _, body = server.ask(path, headers={"If-None-Match": '"other"'})
    assert (status, len(body) > 100) == (200, True)


def test_ctrl_c_ends_the_server_with_open_connections(tmp_path: Path) -> None:
    with watched(tmp_path) as server:
        connections = [
            socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(3)
        ]
        for each in connections:
            each.sendall(b"GET /runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert each.recv(4096).startswith(b"HTTP/1.1 200")
        assert server.interrupt() == 0
        for each in connections:
            each.close()
        assert server.process.communicate()[1] == ""


def test_taken_port_is_an_error(server: Server, tmp_path: Path) -> None:
    result = call("watch", tmp_path, "--port", server.port, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"mpfedcl: port is {server.port}; it cannot be used on 127.0.0.1 (Address already in use): "
        "give another by --port, or 0 for any that is free.\n"
    )
