"""An asynchronous method over Flower, TLS and processes: a killed client delays no other."""

import time

import pytest

from process_federation import CLIENT_EXECUTOR, CLIENTS, FaultLog, ProcessFederation

pytestmark = pytest.mark.federation

ROUND_TIMEOUT = 120
SETTINGS = ["--method", "fedasync", "--model.hidden", 32, "--network.round-timeout", ROUND_TIMEOUT]


def test_asynchronous_run_continues_if_a_client_is_killed(
    federation: ProcessFederation, fault_log: FaultLog
) -> None:
    federation.repair()
    run = federation.begin("arrivals", "--rounds", 10_000, *SETTINGS)
    run.wait_for_answer("client-2", 1)
    began = time.monotonic()
    executor = federation.find_one(CLIENT_EXECUTOR, "client-2")
    executor.kill()
    federation.clients["client-2"].kill()
    killed = run.recorded
    without = run.wait_for_record(
        lambda each: "client-2" not in each["clients"]["answered"], "the others go on", killed + 1
    )
    assert {"client-0", "client-1"} & set(without["clients"]["answered"])
    # The run does not wait for the killed client.
    assert without["elapsed_seconds"] - run.records()[killed]["elapsed_seconds"] < ROUND_TIMEOUT
    federation.start_clients({"client-2": ("--share", 2)})
    run.wait_for_answer("client-2", without["round"])
    fault_log.write(
        "asynchronous: a client with all its processes killed and started again",
        "the others continue",
        time.monotonic() - began,
        "its answers in between",
    )
    run.program.interrupt()
    run.program.wait()
    records = run.records()
    counted = [sum(each["arrivals"]["by_client"].values()) for each in records]
    versions = [each["arrivals"]["version"] for each in records]
    assert versions == [sum(counted[: place + 1]) for place in range(len(counted))]
    assert all(each["arrivals"]["under_way"] <= len(CLIENTS) for each in records)
    # Only messages in flight are lost when the run is stopped.
    again = federation.resume(run, "--rounds", len(records) + 3)
    again.finish()
    assert [each["round"] for each in again.records()] == list(range(1, len(records) + 4))
    assert again.records()[-1]["arrivals"]["version"] >= versions[-1] + 3
