"""Faults of clients during one long run: every fault is reported, and no fault blocks the run.

The tests of this file share a run and depend on their order.
"""

import re
import time

import pytest

from process_federation import (
    CLIENT_EXECUTOR,
    LONG,
    FaultLog,
    FederationRun,
    ProcessFederation,
    wait_until,
)

pytestmark = pytest.mark.federation

ROUND_TIMEOUT = 20
LONGEST_ROUND = 3 * ROUND_TIMEOUT
"""Seconds that a round may take on a busy machine; without its timeout it would never end."""
TIMES = ["--network.round-timeout", ROUND_TIMEOUT, "--network.patience", 30, "--method", "fedavg"]


@pytest.fixture(scope="module")
def run(shared_federation: ProcessFederation) -> FederationRun:
    """A run of fedavg that would take hours."""
    shared_federation.repair()
    run = shared_federation.begin("faults", "--rounds", 10_000, *TIMES)
    run.wait_for_training("client-1", 2)
    return run


def test_killed_client_process_is_restarted(
    federation: ProcessFederation, run: FederationRun, fault_log: FaultLog
) -> None:
    process = federation.find_one(CLIENT_EXECUTOR, "client-1")
    number = run.wait_for_training("client-1")
    began = time.monotonic()
    process.kill()
    wait_until(
        lambda: [each for each in federation.find(CLIENT_EXECUTOR, "client-1") if each != process],
        "a new process",
    )
    record = run.wait_for_answer("client-1", number)
    seconds = time.monotonic() - began
    supervisor = federation.clients["client-1"]
    assert "its process was killed (signal 9) and is restarted" in supervisor.output
    assert "refuses" not in supervisor.output
    # The client reports it after its restart, which on a busy machine may be after the round.
    between = [each for each in run.records() if number <= each["round"] < record["round"]]
    reasons = [each["clients"]["rejected"].get("client-1", "") for each in between]
    assert {*reasons} <= {"", "its process was killed during this work"}
    assert all(each["seconds"]["train"] < LONGEST_ROUND for each in between)
    fault_log.write("a client's process killed", "started again", seconds, "its answer of a round")


def test_hanging_client_is_missing_and_comes_back(
    federation: ProcessFederation, run: FederationRun, fault_log: FaultLog
) -> None:
    process = federation.find_one(CLIENT_EXECUTOR, "client-0")
    number = run.wait_for_training("client-0")
    began = time.monotonic()
    process.suspend()
    try:
        # On a busy machine other clients may be late in a round, too.
        record = run.wait_for_record(
            lambda each: each["clients"]["answered"] == ["client-1", "client-2"],
            "it hangs",
            number - 1,
        )
    finally:
        process.resume()
    reasons = [
        each["remarks"].get("missing", {}).get("client-0")
        for each in run.records()
        if number <= each["round"] <= record["round"]
    ]
    assert f"no answer within {ROUND_TIMEOUT} s" in reasons
    assert record["seconds"]["train"] < LONGEST_ROUND
    run.wait_for_answer("client-0", record["round"])
    fault_log.write(
        "a client hangs (SIGSTOP) until its round is over",
        f"missing after `network.round_timeout` ({ROUND_TIMEOUT} s)",
        time.monotonic() - began,
        "its answers while it hung",
    )


def test_killed_client_reconnects_at_once(
    federation: ProcessFederation, run: FederationRun, fault_log: FaultLog
) -> None:
    """As in a power cut: the server is not notified and takes a minute to notice."""
    process = federation.find_one(CLIENT_EXECUTOR, "client-2")
    run.wait_for_training("client-2")
    began = time.monotonic()
    # First the child process, which could disconnect properly after its parent has ended.
    process.kill()
    federation.clients["client-2"].kill()
    last = run.status()["round"]
    federation.start_clients({"client-2": ("--share", 2)})
    assert "refuses" not in federation.clients["client-2"].output
    back = run.wait_for_answer("client-2", last)
    fault_log.write(
        "a client with all its processes killed and started again",
        "reconnects under the same node number",
        time.monotonic() - began,
        "its answers in between",
    )
    between = [each for each in run.records() if last <= each["round"] < back["round"]]
    assert all(each["seconds"]["train"] < LONGEST_ROUND for each in between)


def test_client_ends_if_its_command_is_killed(
    federation: ProcessFederation, run: FederationRun, fault_log: FaultLog
) -> None:
    last = run.wait_for_training("client-0")
    began = time.monotonic()
    federation.clients["client-0"].kill()
    wait_until(lambda: not federation.find("", "client-0"), "its child processes end")
    # On a busy machine the round may time out before its process has left.
    missing = run.wait_for_record(
        lambda each: (
            each["remarks"].get("missing", {}).get("client-0") in ("it went away", "not connected")
        ),
        "it is known to have left",
        last - 1,
    )
    fault_log.write(
        "a client's command killed",
        "its process disconnects properly",
        time.monotonic() - began,
        "-",
    )
    federation.start_clients({"client-0": ("--share", 0)})
    run.wait_for_answer("client-0", missing["round"])


def test_added_client_takes_part_in_the_run(
    federation: ProcessFederation, run: FederationRun, fault_log: FaultLog
) -> None:
    before = run.recorded
    began = time.monotonic()
    federation.make("--names", "late")
    assert federation.server is not None
    federation.server.wait_for_output("New clients: late")
    federation.start_clients({"late": ("--share", 0)})
    joined = run.wait_for_answer("late", before)
    assert joined["round"] > 2
    fault_log.write(
        "a client is created and joins a running run", "takes part", time.monotonic() - began, "-"
    )
    late = federation.clients.pop("late")
    late.interrupt()
    assert late.wait() == 0
    assert "late has left" in late.output
    # The server does not wait for a client that has disconnected properly.
    run.wait_for_record(
        lambda each: each["remarks"].get("missing", {}).get("late") == "not connected",
        "it is known to have left",
        joined["round"],
    )


def test_first_interrupt_stops_after_the_round(
    federation: ProcessFederation, run: FederationRun
) -> None:
    before = run.wait_for_training("client-0")
    run.program.interrupt()
    assert run.program.wait(LONG) == 130
    stopped = re.search(r"Stopped after round (\d+) of 10000", run.program.output)
    assert stopped is not None
    number = int(stopped[1])
    # The round may have ended just before.
    assert before <= number <= before + 1
    # Clients evaluate a round with the message of the next round.
    assert run.recorded == number - 1
    again = federation.resume(run, "--rounds", number + 1)
    again.finish()
    assert again.recorded == number + 1
    assert (run.path / "summary.json").is_file()
