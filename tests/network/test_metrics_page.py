"""Health and metrics of a server: the format, and hostile requests over real sockets."""

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.audit import AuditLog, read_audit
from mpfedcl.network.server.metrics import Metric, serving_metrics, to_text
from mpfedcl.network.server.operations import RunRecorder, read_totals
from mpfedcl.runs.observer import Observer
from process_federation import free_port

METRICS: dict[str, Metric] = {
    "rounds_total": ("counter", "Rounds.", 12),
    "seconds_total": ("counter", "Seconds.", 0.1),
    "run_round": ("gauge", "Round.", None),
}
LONG = 60.0


class Monitored:
    def __init__(self, port: int) -> None:
        self.port = port
        self.is_healthy = True

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=LONG) as got:
                return got.status, got.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), LONG)


@pytest.fixture(name="monitored")
def monitored_fixture() -> Iterator[Monitored]:
    monitored = Monitored(free_port())
    with serving_metrics(
        "127.0.0.1", monitored.port, lambda: METRICS, lambda: monitored.is_healthy
    ):
        yield monitored


def test_metrics_are_in_prometheus_format(monitored: Monitored) -> None:
    code, text = monitored.get("/metrics")
    assert code == 200
    assert text == to_text(METRICS)
    lines = text.splitlines()
    assert lines[:3] == [
        "# HELP mpfedcl_rounds_total Rounds.",
        "# TYPE mpfedcl_rounds_total counter",
        "mpfedcl_rounds_total 12",
    ]
    values = [line.split() for line in lines if not line.startswith("#")]
    assert [(name, float(value)) for name, value in values] == [
        ("mpfedcl_rounds_total", 12.0),
        ("mpfedcl_seconds_total", 0.1),
    ]


def test_health_and_unknown_paths(monitored: Monitored) -> None:
    assert monitored.get("/healthz") == (200, "ok\n")
    monitored.is_healthy = False
    assert monitored.get("/healthz")[0] == 503
    assert monitored.get("/../server/control.secret")[0] == 404
    assert monitored.get("/metrics?x=1")[0] == 404


def test_used_port_is_rejected(monitored: Monitored) -> None:
    with (
        pytest.raises(InvalidInput, match=f"metrics_port is {monitored.port}, which cannot be"),
        serving_metrics("127.0.0.1", monitored.port, lambda: {}, lambda: True),
    ):
        pass


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 10**5 + b"\r\n",
        b"\x16\x03\x01\x02\x00" * 100,
    ],
)
def test_odd_requests_are_answered_or_cut(monitored: Monitored, request_bytes: bytes) -> None:
    with monitored.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(request_bytes)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        received = 0
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(2**16):
                received += len(chunk)
    assert received < 4096
    assert monitored.get("/healthz")[0] == 200


def test_slow_and_many_connections_are_cut(
    monitored: Monitored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that come one by one do not hold a connection, and no one holds all of them."""
    monkeypatch.setattr("mpfedcl.network.server.metrics._CONNECTION_SECONDS", 1.0)
    before = threading.active_count()
    slow = [monitored.connect() for _ in range(40)]
    end = time.monotonic() + LONG
    while monitored_is_busy(monitored):
        assert time.monotonic() < end
        for each in slow:
            with contextlib.suppress(OSError):
                each.sendall(b"G")
        # Of the 40, eight are served, each by a thread and a timer.
        assert threading.active_count() - before <= 2 * 8 + 2
        time.sleep(0.1)
    for each in slow:
        each.close()


def monitored_is_busy(monitored: Monitored) -> bool:
    try:
        return monitored.get("/healthz")[0] != 200
    except OSError:
        return True


def test_totals_go_on_after_a_restart(tmp_path: Path) -> None:
    log, path = AuditLog(tmp_path / "audit.jsonl"), tmp_path / "totals.json"
    seen: list[object] = []
    record = {
        "round": 1,
        "clients": {"answered": ["a"], "rejected": {"b": "too long"}, "missing": ["c", "d"]},
        "bytes": {"up": 100, "down": 200},
        "seconds": {"train": 1.5, "fold": 0.5},
    }
    for _ in range(2):
        RunRecorder(log, path).watch(Observer(on_round=seen.append)).on_round(record)
    assert seen == [record, record]
    totals = read_totals(path)
    assert (totals["rounds"], totals["rejected"], totals["missing"]) == (2, 2, 4)
    assert (totals["bytes_up"], totals["bytes_down"], totals["seconds"]) == (200, 400, 4.0)
    assert [each["rejected"] for each in read_audit(tmp_path / "audit.jsonl")] == [
        {"b": "too long"}
    ] * 2
    path.write_text('{"rounds": "many"')
    assert set(read_totals(path).values()) == {0}
