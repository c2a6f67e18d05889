"""What happens to the server, to the run, and to all clients at once; each is gone on with."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from laboratory import LONG, SERVER_APP, SUPERLINK, Laboratory, Notebook, until
from mpfedcl import run
from mpfedcl.runs.directory import RunDirectory

pytestmark = pytest.mark.federation

SETTINGS = ["--method", "fedavg", "--dtype", "float64"]


def test_a_run_that_was_killed_twice_ends_as_if_it_had_not_been(
    laboratory: Laboratory, notebook: Notebook, tmp_path: Path
) -> None:
    course = laboratory.begin("killed", "--rounds", 4, *SETTINGS)
    course.until_round(1)
    laboratory.until_asked("client-0")
    began = time.monotonic()
    os.kill(laboratory.one(SERVER_APP), signal.SIGKILL)
    assert course.program.wait(LONG) == 1
    assert "--resume" in course.program.said()
    done = course.round
    course = laboratory.resume(course)
    course.until_round(done + 1)
    notebook.write(
        "the server's process of the run (ServerApp) killed",
        "`start` says so and how to go on; `start --resume`",
        time.monotonic() - began,
        "the round under way",
    )
    laboratory.until_asked("client-0")
    began = time.monotonic()
    os.kill(laboratory.one(SUPERLINK), signal.SIGKILL)
    assert course.program.wait(LONG) == 1
    assert laboratory.server is not None
    assert laboratory.server.wait(LONG) == 2
    assert "the server ended" in laboratory.server.said()
    done = course.round
    laboratory.start_server()
    course = laboratory.resume(course)
    course.until_round(done + 1)
    notebook.write(
        "the server (SuperLink) killed and started again",
        "clients wait for it and come back; `start --resume`",
        time.monotonic() - began,
        "the round under way",
    )
    assert course.program.wait(LONG) == 0, course.program.said()
    simulated = run(RunDirectory(course.path).read_experiment(), tmp_path / "simulated").path
    ours, theirs = (load_file(each / "model.safetensors") for each in (course.path, simulated))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-9)


def test_interrupted_twice_it_stops_at_once(laboratory: Laboratory) -> None:
    course = laboratory.begin("twice", "--rounds", 50, *SETTINGS)
    course.until_round(1)
    second = laboratory.call("start", "lab", *SETTINGS)
    assert second.returncode == 2
    assert "a run is under way" in second.stderr
    course.program.interrupt()
    laboratory.until_said(course.program, "Ctrl-C again")
    course.program.interrupt()
    assert course.program.wait(LONG) == 130
    until(lambda: not laboratory.find(SERVER_APP), "the run's process ends")
    # A round is on record once clients have read it, with the message of the next.
    again = laboratory.resume(course, "--rounds", course.round + 2)
    assert again.program.wait(LONG) == 0, again.program.said()


def test_without_any_client_a_run_ends_in_a_sentence_and_can_be_gone_on_with(
    laboratory: Laboratory, notebook: Notebook
) -> None:
    course = laboratory.begin("lonely", "--rounds", 50, "--network.patience", 20, *SETTINGS)
    course.until_round(1)
    laboratory.until_asked("client-0")
    began = time.monotonic()
    for name in sorted(laboratory.clients):
        # Without a chance to tidy up: what it has started must end all the same.
        laboratory.clients[name].kill()
    until(lambda: not laboratory.find("", "client-0"), "what it has started ends", 60)
    assert course.program.wait(LONG) == 1
    said = course.program.said()
    assert "fewer are left" in said or "no client was accepted" in said
    assert "--resume" in said
    seconds = time.monotonic() - began
    notebook.write(
        "all clients gone",
        "waits for `network.patience` (20 s), then ends in a sentence; `start --resume`",
        seconds,
        "the round under way",
    )
    for share in range(3):
        laboratory.start_client(f"client-{share}", "--share", share)
    again = laboratory.resume(course, "--rounds", course.round + 2)
    assert again.program.wait(LONG) == 0, again.program.said()


def test_without_a_server_a_run_is_refused(laboratory: Laboratory) -> None:
    assert laboratory.server is not None
    laboratory.server.interrupt()
    assert laboratory.server.wait(LONG) == 0
    done = laboratory.call("start", "lab", *SETTINGS)
    assert done.returncode == 2
    assert "it must be running" in done.stderr
    assert "Traceback" not in done.stderr
