"""Faults of the server, of a run's process and of all clients; each run is resumed."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mpfedcl import run as simulate
from mpfedcl.runs.directory import RunDirectory
from process_federation import SERVER_EXECUTOR, SUPERLINK, FaultLog, ProcessFederation, wait_until

pytestmark = pytest.mark.federation

SETTINGS = ["--method", "fedavg", "--dtype", "float64"]


def test_resume_after_two_kills_is_identical(
    federation: ProcessFederation, fault_log: FaultLog, tmp_path: Path
) -> None:
    run = federation.begin("killed", "--rounds", 3, *SETTINGS)
    run.wait_for_training("client-0", 2)
    began = time.monotonic()
    run.executor().kill()
    assert run.program.wait() == 1
    assert "--resume" in run.program.output
    run = federation.resume(run)
    run.wait_for_training("client-0", 3)
    fault_log.write(
        "the server's process of the run killed",
        "`start` reports it and how to resume; `start --resume`",
        time.monotonic() - began,
        "the round under way",
    )
    began = time.monotonic()
    federation.find_one(SUPERLINK).kill()
    assert run.program.wait() == 1
    assert federation.server is not None
    assert federation.server.wait() == 2
    assert "the server ended" in federation.server.output
    refused = federation.call("start", "lab", *SETTINGS)
    assert refused.returncode == 2
    assert "it must be running" in refused.stderr
    assert "Traceback" not in refused.stderr
    federation.start_server()
    run = federation.resume(run)
    run.finish()
    fault_log.write(
        "the server (SuperLink) killed and started again",
        "clients wait for it and come back; `start --resume`",
        time.monotonic() - began,
        "the round under way",
    )
    simulated = simulate(RunDirectory(run.path).read_experiment(), tmp_path / "simulated").path
    ours, theirs = (load_file(each / "model.safetensors") for each in (run.path, simulated))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-9)


def test_second_interrupt_stops_at_once(federation: ProcessFederation) -> None:
    run = federation.begin("twice", "--rounds", 50, *SETTINGS)
    run.wait_for_training("client-0", 2)
    second = federation.call("start", "lab", *SETTINGS)
    assert second.returncode == 2
    assert "executing a run" in second.stderr
    executor = run.executor()
    run.program.interrupt()
    run.program.wait_for_output("Ctrl-C again")
    run.program.interrupt()
    assert run.program.wait() == 130
    wait_until(lambda: not executor.is_running(), "the run's process ends")
    # A round is recorded once clients have evaluated it, with the message of the next round.
    federation.resume(run, "--rounds", run.recorded + 2).finish()


def test_server_ends_if_its_command_is_killed(federation: ProcessFederation) -> None:
    assert federation.server is not None
    federation.server.kill()
    wait_until(
        lambda: not federation.find(SUPERLINK) and not federation.find(SERVER_EXECUTOR),
        "its processes end",
    )
    federation.repair()


def test_run_without_clients_ends_with_a_message_and_can_be_resumed(
    federation: ProcessFederation, fault_log: FaultLog
) -> None:
    run = federation.begin("lonely", "--rounds", 50, "--network.patience", 20, *SETTINGS)
    run.wait_for_training("client-0", 2)
    began = time.monotonic()
    for client in federation.clients.values():
        # Without a chance to clean up: the processes that it has started must end anyway.
        client.kill()
    wait_until(lambda: not federation.find("", "client-0"), "its child processes end")
    assert run.program.wait() == 1
    message = run.program.output
    assert "fewer are left" in message or "no client was accepted" in message
    assert "--resume" in message
    fault_log.write(
        "all clients gone",
        "waits for `network.patience` (20 s), then ends with a message; `start --resume`",
        time.monotonic() - began,
        "the round under way",
    )
    federation.repair()
    federation.resume(run, "--rounds", run.recorded + 2).finish()
