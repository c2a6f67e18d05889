"""A run over a network resumes after killed processes and lost files."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from federations import (
    LoopbackFederation,
    assert_same_run,
    float64_experiment,
    is_training,
    round_of,
    stop_after,
)
from flwr.app import Error
from flwr.app import Message as FlowerMessage
from loopback import Tamper

from mpfedcl import resume, run
from mpfedcl.core.errors import InvalidInput, RunCutShort
from small_experiments import read_records, read_summary

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

SCAFFOLD = "custom_method:Scaffold"
GONE = 5
"""Flower's error code for a disconnected node."""

Whole = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(quick_network: None, images: Path, folder: Path) -> Whole:
    """The uninterrupted run of a method, computed once."""

    def find(method: str) -> Path:
        place = folder / method.replace(":", "-")
        if not place.exists():
            LoopbackFederation(float64_experiment(images, method), place, methods=SCAFFOLD).serve()
        return place / "run"

    return find


@pytest.mark.parametrize(
    ("method", "rounds"), [("mp-fedcl", 1), ("fedproto", 1), ("fedproto", 2), (SCAFFOLD, 2)]
)
def test_resume_after_any_round_is_identical(
    images: Path, tmp_path: Path, whole: Whole, method: str, rounds: int
) -> None:
    federation = LoopbackFederation(float64_experiment(images, method), tmp_path, methods=SCAFFOLD)
    stopped = federation.serve(stop_after(rounds))
    assert stopped.summary is None
    # The last round is not evaluated yet, so its record is pending but not lost.
    assert len(read_records(federation.path)) == rounds - 1
    federation.resume()
    assert_same_run(federation.path, whole(method))


@pytest.mark.parametrize("kept", [1, 0])
def test_resume_with_damaged_newest_checkpoints_is_identical(
    images: Path, tmp_path: Path, whole: Whole, kept: int
) -> None:
    federation = LoopbackFederation(float64_experiment(images, "fedproto"), tmp_path)
    federation.serve(stop_after(2))
    for number in (2, 1)[: 2 - kept]:
        (federation.path / f"checkpoint/round-{number:06d}.safetensors").write_bytes(b"damaged")
    federation.resume()
    assert_same_run(federation.path, whole("fedproto"))


class Killed(BaseException):
    """As if the server had been killed: no part of it continues."""


@pytest.mark.parametrize("victim", ["client-0", "client-2"])
@pytest.mark.parametrize("number", [1, 3])
def test_resume_after_server_kill_is_identical(
    images: Path, tmp_path: Path, whole: Whole, victim: str, number: int
) -> None:
    is_first = True

    def kill(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        nonlocal is_first
        if is_first and client == victim and is_training(request) and round_of(request) == number:
            is_first = False
            raise Killed
        return reply

    federation = LoopbackFederation(
        float64_experiment(images, SCAFFOLD), tmp_path, kill, methods=SCAFFOLD
    )
    with pytest.raises(Killed):
        federation.serve()
    federation.resume()
    assert_same_run(federation.path, whole(SCAFFOLD))


def lose_answer(state: Path, *, has_trained: bool) -> Tamper:
    """Lose client-1's answer of the second round, after or before it has trained."""

    def lose(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if client != "client-1" or not is_training(request) or round_of(request) != 2:
            return reply
        (trained,) = state.glob("*/round-000002-after-000001.safetensors")
        if not has_trained:
            trained.unlink()
        return FlowerMessage(Error(GONE, "gone"), reply_to=request)

    return lose


@pytest.mark.parametrize("method", ["fedproto", SCAFFOLD])
def test_client_killed_between_training_and_answer_resumes(
    images: Path, tmp_path: Path, method: str
) -> None:
    """The lost training does not count: the client continues from the previous round."""
    runs = []
    for place, has_trained in ((tmp_path / "after", True), (tmp_path / "before", False)):
        lose = lose_answer(place / "memory-1", has_trained=has_trained)
        federation = LoopbackFederation(
            float64_experiment(images, method), place, lose, methods=SCAFFOLD
        )
        runs.append(federation.serve().path)
    assert_same_run(*runs)
    records = read_records(runs[0])
    assert records[1]["clients"]["missing"] == ["client-1"]
    assert records[1]["remarks"]["missing"] == {"client-1": "it went away"}
    # Its personalized model of that round does not exist, so it is not evaluated.
    read = records[1]["accuracy_per_client"]["client-1"]
    assert (read is None) == (method == "fedproto")
    assert records[2]["clients"]["answered"] == ["client-0", "client-1", "client-2"]


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_client_with_lost_state_starts_again(
    images: Path, tmp_path: Path, whole: Whole, method: str
) -> None:
    federation = LoopbackFederation(float64_experiment(images, method), tmp_path)
    federation.serve(stop_after(2))
    shutil.rmtree(federation.state_folder(1))
    federation.resume()
    records, others = read_records(federation.path), read_records(whole(method))
    assert [r["clients"] for r in records] == [r["clients"] for r in others]
    if method == "fedavg":
        # Only the evaluation of its personalized model is missing.
        assert records[2]["loss"] == others[2]["loss"]
        assert records[1]["accuracy_per_client"] == others[1]["accuracy_per_client"]
    else:
        assert records[1]["accuracy_per_client"]["client-1"] is None
        assert records[1]["accuracy_per_client"]["client-0"] is not None
        # It started again, and its next model is evaluated like the others.
        assert None not in records[2]["accuracy_per_client"].values()


def test_last_round_without_evaluation_can_be_resumed(
    images: Path, tmp_path: Path, whole: Whole
) -> None:
    is_silent = True

    def be_silent(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if is_silent and str(request.metadata.message_type) == "evaluate":
            return FlowerMessage(Error(GONE, "gone"), reply_to=request)
        return reply

    federation = LoopbackFederation(float64_experiment(images), tmp_path, be_silent)
    with pytest.raises(
        RunCutShort, match=r"no client has evaluated the last round, 3\. Resume it with --res"
    ):
        federation.serve()
    assert not (federation.path / "summary.json").exists()
    assert len(read_records(federation.path)) == 2
    is_silent = False
    federation.resume()
    assert_same_run(federation.path, whole("mp-fedcl"))


def test_finished_run_resumes_with_more_rounds(images: Path, tmp_path: Path, whole: Whole) -> None:
    federation = LoopbackFederation(float64_experiment(images, "fedproto", rounds=2), tmp_path)
    federation.serve()
    federation.resume(rounds=3)
    assert_same_run(federation.path, whole("fedproto"))
    with pytest.raises(InvalidInput, match="rounds is 2; this run has already done 3"):
        federation.resume(rounds=2)
    assert read_summary(federation.path)["rounds"] == 3


def test_resume_with_another_data_format_is_rejected(images: Path, tmp_path: Path) -> None:
    experiment = float64_experiment(images, "fedavg", network__patience=0.2)
    federation = LoopbackFederation(experiment, tmp_path)
    federation.serve(stop_after(1))
    document = (federation.path / "experiment.toml").read_text()
    (federation.path / "experiment.toml").write_text(
        document.replace("[dataset]", "[dataset]\nimage_size = 4")
    )
    with pytest.raises(RunCutShort, match="its inputs have 16 values, the others' 36"):
        federation.resume()


def test_simulation_cannot_be_resumed_as_network_run(images: Path, tmp_path: Path) -> None:
    federation = LoopbackFederation(float64_experiment(images, "fedavg"), tmp_path)
    federation.serve(stop_after(1))
    with pytest.raises(InvalidInput, match="is a run over a network"):
        resume(federation.path)
    simulated = run(float64_experiment(images, "fedavg", rounds=1), tmp_path / "simulated")
    federation.path = simulated.path
    with pytest.raises(InvalidInput, match="must be a run over a network, and this one is not"):
        federation.resume(rounds=2)
