"""One long run, and what happens to its clients: every fault is named, and nothing waits for ever.

The tests of this file share a run and follow each other.
"""

import re
import time

import pytest

from process_federation import (
    CLIENT_APP,
    LONG,
    SERVICE,
    SUPERNODE,
    FaultLog,
    FederationRun,
    ProcessFederation,
    wait_until,
)

pytestmark = pytest.mark.federation

ROUND_TIMEOUT = 20
TIMES = ["--network.round-timeout", ROUND_TIMEOUT, "--network.patience", 30, "--method", "fedavg"]


@pytest.fixture(scope="module")
def run(shared_federation: ProcessFederation) -> FederationRun:
    """A run of fedavg that would take hours."""
    shared_federation.repair()
    run = shared_federation.begin("faults", "--rounds", 10_000, *TIMES)
    run.wait_for_training("client-1", 2)
    return run


def test_a_killed_client_service_is_started_again(
    federation: ProcessFederation, run: FederationRun, fault_log: FaultLog
) -> None:
    service = federation.find_one(SERVICE, "client-1")
    number = run.wait_for_training("client-1")
    began = time.monotonic()
    service.kill()
    wait_until(
        lambda: [each for each in federation.find(SERVICE, "client-1") if each != service],
        "a new service",
    )
    record = run.wait_for_answer("client-1", number - 1)
    seconds = time.monotonic() - began
    lost = "its answer of one round" if record["round"] > number else "nothing"
    fault_log.write("a client's service killed", "started again", seconds, lost)


def test_a_client_that_hangs_is_missing_and_comes_back(
    federation: ProcessFederation, run: FederationRun, fault_log: FaultLog
) -> None:
    service = federation.find_one(SERVICE, "client-0")
    number = run.wait_for_training("client-0")
    began = time.monotonic()
    service.suspend()
    try:
        record = run.wait_for_record(
            lambda each: "client-0" not in each["clients"]["answered"], "it hangs", number - 1
        )
    finally:
        service.resume()
    # The server's time is up first, or the client says itself that its service does not answer.
    reasons = str({**record["remarks"].get("missing", {}), **record["clients"]["rejected"]})
    assert f"within {ROUND_TIMEOUT} s" in reasons
    assert {"client-1", "client-2"} <= set(record["clients"]["answered"])
    assert record["seconds"]["train"] < ROUND_TIMEOUT + 5
    run.wait_for_answer("client-0", record["round"])
    fault_log.write(
        "a client hangs (SIGSTOP) until its round is over",
        f"missing after `network.round_timeout` ({ROUND_TIMEOUT} s)",
        time.monotonic() - began,
        "its answers while it hung",
    )


@pytest.fixture(scope="module")
def missed(shared_federation: ProcessFederation, run: FederationRun) -> dict[str, int]:
    """Rounds in which clients were missing because a process of theirs was killed.

    Two clients at once: Flower takes a minute to notice either.
    """
    victims = {
        "client-2": shared_federation.find_new(CLIENT_APP, "client-2"),
        "client-0": shared_federation.find_one(SUPERNODE, "client-0"),
    }
    number = run.status()["round"]
    for process in victims.values():
        process.kill()
    return {name: run.wait_for_missing(name, number - 1)["round"] for name in victims}


def test_killed_clients_are_missing(run: FederationRun, missed: dict[str, int]) -> None:
    records = {record["round"]: record for record in run.records()}
    for name, number in missed.items():
        assert records[number]["remarks"]["missing"][name]
        assert "client-1" in records[number]["clients"]["answered"]


def test_a_client_that_is_added_takes_part(
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
        "a client is made and joins a run under way", "takes part", time.monotonic() - began, "-"
    )
    late = federation.clients.pop("late")
    late.interrupt()
    assert late.wait() == 0
    assert "late has left" in late.output
    # One that leaves in good order is not waited for.
    run.wait_for_record(
        lambda each: each["remarks"].get("missing", {}).get("late") == "not connected",
        "it is known to have left",
        joined["round"],
    )


def test_killed_clients_come_back_by_themselves(
    federation: ProcessFederation, run: FederationRun, missed: dict[str, int], fault_log: FaultLog
) -> None:
    faults = {
        "client-0": ("a SuperNode", "restarted by its command, refused until the server notices"),
        "client-2": ("Flower's process for a message", "until its SuperNode notices"),
    }
    for name, (fault, what) in faults.items():
        back = run.wait_for_answer(name, missed[name])["round"]
        rounds = run.records()[missed[name] - 1 : back]
        seconds = sum(sum(record["seconds"].values()) for record in rounds)
        fault_log.write(f"{fault} killed", f"missing; {what}", seconds, "its answers in between")
    supervisor = federation.clients["client-0"]
    assert supervisor.is_running
    assert "its Flower process was killed (signal 9) and is started again" in supervisor.output


def test_interrupted_once_it_stops_after_the_round(
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
    # Clients evaluate a round with the message of the next.
    assert run.recorded == number - 1
    again = federation.resume(run, "--rounds", number + 1)
    again.finish()
    assert again.recorded == number + 1
    assert (run.path / "summary.json").is_file()
