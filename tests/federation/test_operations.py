"""A federation in operation: status, metrics, audit logs, revoked and rotated keys, certificates.

The tests of this file share a federation and depend on their order.
"""

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from certificates import replace_certificate
from mpfedcl.network.audit import read_audit
from mpfedcl.network.setup.folders import ServerFolder
from process_federation import (
    LONG,
    FaultLog,
    FederationRun,
    ProcessFederation,
    free_port,
    wait_until,
)

pytestmark = pytest.mark.federation

TIMES = ["--network.round-timeout", 30, "--network.patience", 60, "--method", "fedavg"]
REVOKED = "has revoked this client's key"
METRICS = free_port()


@pytest.fixture(scope="module", name="own")
def own_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFederation]:
    federation = ProcessFederation(tmp_path_factory.mktemp("operations"))
    try:
        federation.make("--clients", 3)
        federation.start_server("--metrics-port", METRICS, "--log-json")
        federation.start_clients({f"client-{n}": ("--share", n, "--log-json") for n in range(3)})
        yield federation
    finally:
        federation.finish()


@pytest.fixture(scope="module", name="run")
def run_fixture(own: ProcessFederation) -> FederationRun:
    return own.begin("operated", "--rounds", 10_000, *TIMES)


def status_of(federation: ProcessFederation) -> dict[str, Any]:
    done = federation.call("status", "lab", "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["running"] else 1)
    return found


def events(federation: ProcessFederation, client: str | None = None) -> list[dict[str, Any]]:
    folder = "server" if client is None else f"clients/{client}"
    return list(read_audit(federation.folder / folder / "audit.jsonl"))


def read_metrics() -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}/metrics", timeout=LONG) as answer:
        lines = answer.read().decode().splitlines()
    values = (line.split() for line in lines if not line.startswith("#"))
    return {name.removeprefix("mpfedcl_"): float(value) for name, value in values}


def test_status_and_metrics_show_the_run(own: ProcessFederation, run: FederationRun) -> None:
    run.wait_for_answer("client-1", 1)
    found = status_of(own)
    assert found["run"]["what"] == "training"
    assert found["run"]["round"] >= 2
    assert [each["connected"] for each in found["clients"]] == [True] * 3
    assert all(each["since"] and each["seen"] for each in found["clients"])
    metrics = wait_until(
        lambda: each if (each := read_metrics())["rounds_total"] >= 1 else None, "metrics"
    )
    assert metrics["clients_connected"] == metrics["clients_registered"] == 3
    assert (metrics["up"], metrics["run_active"], metrics["runs_total"]) == (1, 1, 1)
    assert metrics["received_bytes_total"] > 0
    assert metrics["certificate_expiry_seconds"] > time.time()
    assert own.server is not None
    lines = [json.loads(each) for each in own.server.file.read_text().splitlines()]
    assert {each["level"] for each in lines} == {"INFO"}
    log = (own.folder / "clients/client-0/supernode.log").read_text().splitlines()
    assert all(json.loads(line)["time"] for line in log)


def test_revoked_client_is_out_while_the_run_goes_on(
    own: ProcessFederation, run: FederationRun, fault_log: FaultLog
) -> None:
    number = run.wait_for_training("client-1")
    began = time.monotonic()
    done = own.call("revoke", "lab", "client-1")
    assert done.returncode == 0, done.stderr
    client = own.clients["client-1"]
    assert client.wait() == 2
    assert client.output.count(REVOKED) == 1
    record = run.wait_for_missing("client-1", number - 1)
    fault_log.write(
        "a client's key is revoked", "shut out; one line", time.monotonic() - began, "its answer"
    )
    reason = record["remarks"]["missing"]["client-1"]
    assert reason in ("its key was revoked", "not connected")
    after = run.wait_for_answer("client-0", record["round"])
    assert "client-1" not in after["clients"]["answered"]
    assert status_of(own)["revoked"] == ["client-1"]
    assert [each["event"] for each in events(own, "client-1")][-1] == "stop"


def test_revoked_client_stays_out_after_a_restart_of_the_server(
    own: ProcessFederation, run: FederationRun
) -> None:
    run.program.interrupt()
    assert run.program.wait() == 130
    assert own.server is not None
    own.server.interrupt()
    assert own.server.wait() == 0
    found = own.call("status", "lab", "--json")
    assert (found.returncode, json.loads(found.stdout)["running"]) == (1, False)
    # The list of revoked keys does not depend on Flower's database.
    (own.folder / "server" / "state.db").unlink()
    own.start_server("--metrics-port", METRICS)
    refused = own.call("client", "lab", "--name", "client-1", "--share", 1)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert REVOKED in refused.stderr


def test_client_comes_back_with_a_new_key(own: ProcessFederation) -> None:
    own.make("--names", "client-1")
    own.start_clients({"client-1": ("--share", 1)})
    old = own.clients["client-2"]
    assert own.call("rotate", "lab", "client-2").returncode == 0
    assert old.wait() == 2
    assert REVOKED in old.output
    own.start_clients({"client-2": ("--share", 2)})
    wait_until(
        lambda: all(each["connected"] for each in status_of(own)["clients"]),
        "all are connected again",
    )


def test_audit_logs_tell_what_happened(own: ProcessFederation, run: FederationRun) -> None:
    kinds = [each["event"] for each in events(own)]
    assert kinds.count("start") == 2
    assert {"connected", "disconnected", "run", "asked", "round", "revoked", "rotated"} < {*kinds}
    digest = next(each for each in events(own) if each["event"] == "run")["experiment_sha256"]
    theirs = events(own, "client-0")
    asked = [each for each in theirs if each["event"] == "asked" and each["kind"] == "round"]
    assert asked
    released = [each for each in theirs if each["event"] == "released"]
    assert "averaged/classifier.weight" in released[-1]["arrays"]
    assert len(digest) == 64
    done = own.call("audit", "lab", "--client", "client-0", "--contains", asked[0]["sha256"])
    assert done.returncode == 0
    assert "unbroken; the last is" in done.stdout
    assert own.call("audit", "lab", "--contains", "0" * 64).returncode == 2


def test_tampered_audit_log_is_one_line(own: ProcessFederation) -> None:
    path = own.folder / "server" / "audit.jsonl"
    kept = path.read_bytes()
    number = 1 + next(n for n, each in enumerate(events(own)) if each["event"] == "revoked")
    path.write_bytes(kept.replace(b'"event": "revoked"', b'"event": "rotated"'))
    try:
        done = own.call("audit", "lab")
    finally:
        path.write_bytes(kept)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"was changed: line {number} does not have its own hash." in done.stderr


def test_run_whose_clients_all_refuse_ends_at_once(own: ProcessFederation) -> None:
    # It is not built in, and the clients' policy allows no other methods.
    began = time.monotonic()
    run = own.begin(
        "refused", "--method", "mpfedcl.methods.fedavg:FedAvg", "--network.patience", 2 * LONG
    )
    assert run.program.wait() != 0
    assert time.monotonic() - began < LONG
    said = run.program.output
    assert "too many clients refuse or cannot take part" in said
    for name in ("client-0", "client-1", "client-2"):
        assert f"{name}: policy [allow] methods is built-in" in said


def test_certificate_is_renewed_while_the_server_runs(own: ProcessFederation) -> None:
    folder = ServerFolder.open(own.folder)
    before = read_metrics()["certificate_expiry_seconds"]
    replace_certificate(folder, days=20)
    warned = own.call("status", "lab")
    assert "server.pem expires on" in warned.stdout
    assert "in 19 days; mpfedcl federation renew lab renews it" in warned.stdout
    assert own.call("renew", "lab").returncode == 0
    log = folder.server / "superlink.log"
    wait_until(lambda: "The renewed certificate is used" in log.read_text(), "it is used")
    wait_until(lambda: read_metrics()["certificate_expiry_seconds"] > before, "metrics show it")
    run = own.begin("renewed", "--rounds", 1, *TIMES)
    run.finish()


def test_expired_certificate_is_one_line_on_both_sides(own: ProcessFederation) -> None:
    folder = ServerFolder.open(own.folder)
    replace_certificate(folder, days=-1)
    log = folder.server / "superlink.log"
    said = log.read_text().count("The renewed certificate is used")
    wait_until(
        lambda: log.read_text().count("The renewed certificate is used") > said, "it is used"
    )
    client = own.clients["client-0"]
    client.interrupt()
    assert client.wait() == 0
    refused = own.call("client", "lab", "--name", "client-0", "--share", 0)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "the server's certificate has expired" in refused.stderr
    assert own.server is not None
    own.server.interrupt()
    own.server.wait()
    refused = own.call("server", "lab")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "server.pem expired on" in refused.stderr
    assert own.call("renew", "lab").returncode == 0
    own.start_server()
    # It was connected, and has waited.
    wait_until(
        lambda: any(
            each["connected"] for each in status_of(own)["clients"] if each["client"] == "client-1"
        ),
        "client-1 is back",
    )
