"""The small file that says what a federation is doing, and how it is asked to stop."""

import os
from pathlib import Path

import pytest
from federations import LoopbackFederation, float64_experiment, is_training
from flwr.app import Message as FlowerMessage

from mpfedcl.core.errors import RunCutShort
from mpfedcl.network.server.status import Status, read_status, stop_file
from small_experiments import read_records


def test_it_says_what_is_done_and_by_whom(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    Status(path).write("training", round=3, waiting=["a"])
    said = read_status(path)
    assert said == {"what": "training", "pid": os.getpid(), "round": 3, "waiting": ["a"]}


def test_the_same_is_not_written_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status = Status(path)
    status.write("training", round=1)
    written = path.stat().st_ino
    for number in range(50):
        status.write("training", round=1, answered=number)
    assert path.stat().st_ino == written
    # Something else is worth a word at once.
    status.write("done")
    assert read_status(path)["what"] == "done"


def test_nowhere_to_write_ends_nothing(tmp_path: Path) -> None:
    Status(None).write("training")
    Status(tmp_path / "missing" / "status.json").write("training")
    assert not Status(None).stop_requested()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_file_that_says_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) == {}
    path.write_bytes(content)
    assert read_status(path) == {}


@pytest.mark.usefixtures("quick_network")
def test_a_run_stops_after_the_round_under_way(images: Path, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    federation = LoopbackFederation(float64_experiment(images, "fedavg"), tmp_path)

    def ask(_client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if is_training(request):
            stop_file(status).touch()
        return reply

    federation.grid._tamper = ask
    assert federation.serve(status=status).summary is None
    assert read_records(federation.path) == []
    said = read_status(status)
    assert (said["what"], said["round"], said["rounds"]) == ("training", 1, 3)


@pytest.mark.usefixtures("quick_network")
def test_a_run_that_waits_stops_at_once(images: Path, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    stop_file(status).touch()
    federation = LoopbackFederation(float64_experiment(images, "fedavg"), tmp_path, count=1)
    with pytest.raises(RunCutShort, match="stopped while it was waiting for clients"):
        federation.serve(status=status)
    assert read_status(status)["here"] == ["client-0"]
    assert read_status(status)["wanted"] == 3
