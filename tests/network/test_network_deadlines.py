"""No client delays the others: not within a round, and not in every round again."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from federations import (
    LoopbackFederation,
    assert_same_run,
    before_rounds,
    float64_experiment,
    is_training,
    stop_after,
)
from flwr.app import Message as FlowerMessage
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from hypothesis import given
from hypothesis import strategies as st
from loopback import Objects

from mpfedcl.network.server.registry import SilentClients
from small_experiments import Json, VirtualTime, read_records

pytestmark = pytest.mark.whole

TIMEOUT = 8.0
BUSY = 30.0
"""Seconds that a busy machine may take in addition; a call that hangs would never end."""
STUCK = tuple(f"client-{number}" for number in range(10))
HONEST = ("client-10", "client-11")


# Within a round


@pytest.fixture
def crowd(many_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackFederation:
    """Twelve clients, ten of which will be stuck."""
    monkeypatch.setattr("mpfedcl.network.flower.transport.OPEN_SECONDS", 0.1)
    monkeypatch.setattr("mpfedcl.network.server.registry.POLL_SECONDS", 0.01)
    experiment = float64_experiment(
        many_images,
        "fedavg",
        rounds=1,
        clients=12,
        partition__kind="iid",
        network__round_timeout=TIMEOUT,
    )
    return LoopbackFederation(experiment, tmp_path)


def serve_and_measure(federation: LoopbackFederation) -> tuple[Json, float]:
    """Return the record of the only round, and how long it took with its closing evaluation."""
    began: list[float] = []
    observer = before_rounds({1: lambda: began.append(time.monotonic())})
    (record,) = federation.serve(observer).history
    return record, time.monotonic() - began[0]


@pytest.mark.thorough
def test_incomplete_answers_end_with_the_round(crowd: LoopbackFederation) -> None:
    """Ten clients were killed during their upload: their announced answers never complete."""

    def withhold(client: str, _: FlowerMessage, objects: Objects) -> Objects:
        large = b"ArrayRecord"
        is_stuck = client in STUCK and len(objects) > 4
        return {n: b"" if is_stuck and large in c[:20] else c for n, c in objects.items()}

    crowd.grid.tamper_objects = withhold
    record, seconds = serve_and_measure(crowd)
    assert record["clients"]["answered"] == list(HONEST)
    assert record["remarks"]["missing"] == dict.fromkeys(STUCK, f"no answer within {TIMEOUT:g} s")
    assert seconds < TIMEOUT + BUSY


def test_hanging_calls_end_with_the_round(
    crowd: LoopbackFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls for ten clients' answers do not return at all."""
    pull = crowd.grid.PullObject
    is_over: list[bool] = []

    def hang(request: PullObjectRequest) -> PullObjectResponse:
        ours = {
            root for root, held in list(crowd.grid.objects.items()) if request.object_id in held
        }
        training = {r.metadata.message_id: n for n, r in crowd.grid.replies if is_training(r)}
        if ours and all(training.get(root) in STUCK for root in ours):
            while not is_over:
                time.sleep(0.05)
        return pull(request)

    monkeypatch.setattr(crowd.grid, "PullObject", hang)
    record, seconds = serve_and_measure(crowd)
    is_over.append(True)
    assert record["clients"]["answered"] == list(HONEST)
    assert record["clients"]["missing"] == list(STUCK)
    assert seconds < TIMEOUT + BUSY


@pytest.mark.thorough
def test_unsendable_message_ends_with_the_round(
    crowd: LoopbackFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = crowd.grid.push_messages
    is_over: list[bool] = []

    def hang(messages: list[FlowerMessage]) -> list[str]:
        (message,) = messages
        while is_training(message) and message.metadata.dst_node_id == 7 and not is_over:
            time.sleep(0.05)
        return push(messages)

    monkeypatch.setattr(crowd.grid, "push_messages", hang)
    began: list[float] = []
    ended: list[float] = []
    crowd.experiment = crowd.experiment.replace(rounds=2)

    def release() -> None:
        ended.append(time.monotonic())
        is_over.append(True)

    actions: dict[int, Callable[[], object]] = {
        1: lambda: began.append(time.monotonic()),
        2: release,
    }
    crowd.serve(before_rounds(actions))
    assert ended[0] - began[0] < TIMEOUT + BUSY
    missing = read_records(crowd.path)[0]["remarks"]["missing"]
    assert missing["client-6"] == "the message could not be sent"


# Over several rounds


def say_nothing(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage | None:
    return None if client == "client-2" and is_training(request) else reply


@pytest.fixture
def federation(
    quick_network: VirtualTime, images: Path, tmp_path: Path
) -> Callable[[str], LoopbackFederation]:
    """Three clients, one of which never answers in a round."""
    changes = {"rounds": 10, "network__round_timeout": 20.0}
    experiment = float64_experiment(images, "fedavg", **changes)
    return lambda name: LoopbackFederation(experiment, tmp_path / name, say_nothing)


def why_missing(path: Path) -> list[str]:
    return [each["remarks"].get("missing", {}).get("client-2", "") for each in read_records(path)]


SILENT = "no answer within 20 s"


def left_out(times: int, until: int) -> str:
    return f"silent {times} times in a row; asked again in round {until}"


def test_silent_client_is_skipped_and_asked_again(
    federation: Callable[[str], LoopbackFederation], quick_network: VirtualTime
) -> None:
    run = federation("whole").serve()
    waited = quick_network.now
    expected = [
        *[SILENT] * 2,
        *[left_out(2, 5)] * 2,
        SILENT,
        *[left_out(3, 10)] * 4,
        SILENT,
    ]
    assert why_missing(run.path) == expected
    assert all(each["clients"]["missing"] == ["client-2"] for each in read_records(run.path))
    # Four rounds are waited for in vain and not ten; the closing evaluation leaves it out too.
    assert 80 <= waited < 100
    closing = read_records(run.path)[-1]["remarks"]["closing"]["missing"]
    assert closing == {"client-2": left_out(4, 19)}
    # A run that was stopped in between continues identically.
    parts = federation("parts")
    parts.serve(stop_after(3))
    assert_same_run(parts.resume().path, run.path)


def test_silent_client_that_reconnects_is_asked_at_once(
    federation: Callable[[str], LoopbackFederation],
) -> None:
    found = federation("back")
    gone = found.grid.nodes[3]

    def return_mended() -> None:
        found.grid.nodes[3] = gone
        found.grid._tamper = lambda _client, _request, reply: reply

    found.experiment = found.experiment.replace(rounds=5)
    run = found.serve(before_rounds({3: lambda: found.grid.nodes.pop(3), 4: return_mended}))
    assert why_missing(run.path) == [SILENT, SILENT, "not connected", "", ""]


def test_no_client_is_skipped_below_min_clients(
    federation: Callable[[str], LoopbackFederation],
) -> None:
    found = federation("few")
    found.experiment = found.experiment.replace(min_clients=3, rounds=4)
    assert why_missing(found.serve().path) == [SILENT] * 4


@given(st.lists(st.booleans(), min_size=1, max_size=80))
def test_skipped_rounds_double_until_an_answer(answers: list[bool]) -> None:
    """Compare with a plain count of the rounds that a client is skipped."""
    silent, in_a_row, rests = SilentClients(), 0, 0
    for number, is_answered in enumerate(answers, start=1):
        is_left_out = "x" in silent.resting(number)
        assert is_left_out == (rests > 0)
        if rests:
            rests -= 1
            continue
        if is_answered:
            silent.note_answers(["x"])
            in_a_row = 0
        else:
            silent.note_silence(["x"], number)
            in_a_row += 1
            rests = min(64, 2 ** (in_a_row - 1)) if in_a_row > 1 else 0
        again = SilentClients()
        again.restore({**silent.state(), "settled/x": torch.tensor(1)})
        assert again.resting(number + 1) == silent.resting(number + 1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_no_client_is_skipped_if_that_saves_no_time(answers: list[tuple[bool, bool]]) -> None:
    """After a round that timed out because of another client than before, all are asked."""
    silent, in_a_row = SilentClients(), {"x": 0, "y": 0}
    for number, answered in enumerate(answers, start=1):
        asked = in_a_row.keys() - silent.resting(number).keys()
        mute = [name for name, has_answered in zip("xy", answered, strict=True) if not has_answered]
        waited_for = [name for name in mute if name in asked]
        silent.note_answers(asked - set(mute))
        in_a_row |= dict.fromkeys(asked - set(mute), 0)
        silent.note_silence(waited_for, number)
        for name in waited_for:
            in_a_row[name] += 1
        left_out = silent.resting(number + 1).keys()
        if any(in_a_row[name] == 1 for name in waited_for):
            assert not left_out
        else:
            # A rest begins with the second silence, and not before.
            assert {name for name in waited_for if in_a_row[name] > 1} <= left_out
            assert all(in_a_row[name] > 1 for name in left_out)
