"""Secure sums over a network: a simulation's result; clients that vanish at any stage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federations import LoopbackFederation, float64_experiment, rewrite, stop_after
from flwr.app import Message as FlowerMessage
from loopback import Tamper

from equivalent_runs import assert_close_tensors, load_results
from mpfedcl.errors import InvalidInput, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.network.flower.records import from_records
from mpfedcl.runs.observer import NO_COMPANIONS, Observer
from mpfedcl.runs.simulation import run_simulation
from mpfedcl.secure_sums.fixed_point import decode
from small_experiments import assert_same_results, read_records, read_summary

STAGES = ("advertise", "share", "round", "reveal")


def experiment(root: Path, method: str = "fedavg", **changes: Any) -> Experiment:
    settings = {"clients": 4, "rounds": 2, "secure_sums": True, "network__round_timeout": 6.0}
    return float64_experiment(root, method, **settings | changes)


def stage_of(request: FlowerMessage) -> str:
    kind = str(request.metadata.message_type)
    values = from_records(request.content).values
    return str(values["stage"]) if kind == "query.secure" else {"train": "round"}.get(kind, kind)


def round_of(request: FlowerMessage) -> int:
    return int(from_records(request.content).values.get("round", 0))


def lose(stage: str, *clients: str, in_round: int = 1) -> Tamper:
    """Let clients go silent at a stage of a round, and come back in the next one."""

    def tamper(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage | None:
        order = STAGES.index(stage_of(request)) if stage_of(request) in STAGES else -1
        is_over = round_of(request) == in_round and order >= STAGES.index(stage)
        return None if name in clients and is_over else reply

    return tamper


def run_alone(plan: Experiment, path: Path) -> Path:
    return run_simulation(plan, path, Observer(), NO_COMPANIONS).path


@pytest.mark.parametrize("method", ["fedavg", "fedgauss"])
def test_same_as_the_simulation(images: Path, tmp_path: Path, method: str) -> None:
    plan = experiment(images, method, encoder__name="none")
    federation = LoopbackFederation(plan, tmp_path)
    federation.serve()
    alone = run_alone(plan, tmp_path / "alone")
    ours, theirs = load_results(federation.path), load_results(alone)
    for name in ours.keys() & theirs.keys():
        # Sums in a ring do not depend on who adds them up, nor in which order.
        assert_close_tensors(ours[name], theirs[name], 1e-12, name)
    for left, right in zip(read_records(federation.path), read_records(alone), strict=True):
        assert left["clients"] == right["clients"]
        assert left["loss"] == right["loss"]
        assert left["bytes"]["down"] == right["bytes"]["down"]
    assert read_summary(federation.path)["accuracy"] == read_summary(alone)["accuracy"]


def test_server_sees_no_update_and_no_count(images: Path, tmp_path: Path) -> None:
    federation = LoopbackFederation(experiment(images), tmp_path)
    federation.serve()
    for _, reply in federation.grid.replies:
        message = from_records(reply.content)
        assert not {"num_samples", "loss", "processed"} & message.values.keys()
        assert set(message.arrays) <= {"masked"}
        assert message.values.get("train", []) == []
    masked = [
        from_records(r.content).arrays["masked"]
        for n, r in federation.grid.replies
        if n == "client-0" and "masked" in from_records(r.content).arrays
    ]
    # Masks change from round to round, and look like nothing.
    assert abs(decode(masked[0])).mean() > 2**36
    assert not (masked[0] == masked[1]).any()


@pytest.mark.parametrize("stage", STAGES)
def test_client_that_dies_at_a_stage_costs_itself_alone(
    images: Path, tmp_path: Path, stage: str
) -> None:
    federation = LoopbackFederation(experiment(images), tmp_path, lose(stage, "client-2"))
    federation.serve()
    first, second = read_records(federation.path)
    assert first["clients"]["missing"] == ([] if stage == "reveal" else ["client-2"])
    assert not first["unchanged"]
    assert second["clients"]["missing"] == []


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_the_round_is_lost_and_said(
    images: Path, tmp_path: Path, stage: str
) -> None:
    tamper = lose(stage, "client-1", "client-2")
    federation = LoopbackFederation(experiment(images), tmp_path, tamper)
    federation.serve()
    first, second = read_records(federation.path)
    assert first["unchanged"]
    assert "its secure sum was not opened" in first["remarks"]["warnings"][0]
    assert second["clients"]["answered"] == [f"client-{number}" for number in range(4)]


def test_lost_last_round_can_be_resumed(images: Path, tmp_path: Path) -> None:
    plan = experiment(images, "fedgauss", encoder__name="none")
    lost: list[Tamper] = [lose("share", "client-0", "client-1")]
    federation = LoopbackFederation(plan, tmp_path, lambda *given: lost[0](*given))
    with pytest.raises(RunCutShort, match="Round 1: its secure sum was not opened, because 2 of 4"):
        federation.serve()
    lost[0] = lambda _client, _request, reply: reply
    federation.resume()
    assert read_summary(federation.path)["accuracy"] is not None


def test_stopped_run_resumes_with_the_same_bits(images: Path, tmp_path: Path) -> None:
    plan = experiment(images, rounds=3)
    whole = LoopbackFederation(plan, tmp_path / "whole")
    whole.serve()
    parts = LoopbackFederation(plan, tmp_path / "parts")
    parts.serve(stop_after(2))
    parts.resume()
    assert_same_results(parts.path, whole.path)


def test_opened_round_is_not_opened_for_others(images: Path, tmp_path: Path) -> None:
    """A server that runs a round again without one client could tell that client's update."""
    plan = experiment(images, rounds=2)
    federation = LoopbackFederation(plan, tmp_path)
    federation.serve(stop_after(1))
    # The server forgets the round that was opened, and one client is away.
    for each in (federation.path / "checkpoint").glob("*"):
        each.unlink()
    (federation.path / "rounds.jsonl").unlink(missing_ok=True)
    del federation.grid.nodes[4]
    federation.resume()
    first = read_records(federation.path)[0]
    assert first["unchanged"]
    assert "0 clients have revealed a share of client-0's" in first["remarks"]["warnings"][0]


def change(
    stage: str,
    client: str,
    values: Callable[[dict[str, Any]], dict[str, Any]],
    arrays: Callable[[dict[str, Any]], dict[str, Any]] = lambda arrays: arrays,
) -> Tamper:
    def tamper(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if name != client or stage_of(request) != stage or round_of(request) != 1:
            return reply
        return rewrite(reply, request, values, arrays)

    return tamper


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (change("advertise", "client-1", lambda _: {"advert": {}}), "channel must be hexadecimal"),
        (change("advertise", "client-1", lambda _: {}), "advert is None"),
        (change("share", "client-1", lambda _: {"sealed": {"client-0": "00"}}), "each of the oth"),
        (change("share", "client-1", lambda _: {"sealed": []}), "sealed is"),
        (change("round", "client-1", lambda v: v, lambda _: {}), "masked numbers are missing"),
        (
            change("round", "client-1", lambda v: v, lambda a: {"masked": a["masked"][:5]}),
            r"its masked numbers are \[5\]",
        ),
    ],
)
def test_bad_answer_costs_its_client_alone(
    images: Path, tmp_path: Path, tamper: Tamper, words: str
) -> None:
    federation = LoopbackFederation(experiment(images), tmp_path, tamper)
    federation.serve()
    first, second = read_records(federation.path)
    assert list(first["clients"]["rejected"]) == ["client-1"]
    pytest.importorskip("re")
    assert words.replace("\\", "") in first["clients"]["rejected"]["client-1"]
    assert len(first["clients"]["answered"]) == 3
    assert len(second["clients"]["answered"]) == 4


def test_replayed_and_reordered_answers_are_refused(images: Path, tmp_path: Path) -> None:
    """Masked numbers of the round before open nothing in this one, and say nothing wrong either."""
    kept: dict[str, FlowerMessage] = {}

    def replay(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if name == "client-1" and stage_of(request) == "share":
            if round_of(request) == 2:
                old = from_records(kept["share"].content).values
                return rewrite(reply, request, lambda _: old)
            kept["share"] = reply
        return reply

    federation = LoopbackFederation(experiment(images, rounds=3), tmp_path, replay)
    federation.serve()
    # The others cannot open its old shares; they have enough without, as it does not vanish.
    records = read_records(federation.path)
    assert [record["unchanged"] for record in records] == [False, True, False]
    assert "client-1's" in records[1]["remarks"]["warnings"][0]


def test_client_takes_part_with_secure_sums_alone(images: Path, tmp_path: Path) -> None:
    plan = experiment(images, secure_sums=False, network__patience=1.0)
    federation = LoopbackFederation(plan, tmp_path, **{"secure-sums": True})
    with pytest.raises(RunCutShort, match="secure_sums is False; this client takes part with"):
        federation.serve()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "mp-fedcl"}, "with secure_sums it must be one of"),
        ({"aggregation__rule": "median"}, "with secure_sums it must be 'mean'"),
    ],
)
def test_refused_before_anybody_is_asked(
    images: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    federation = LoopbackFederation(experiment(images).replace(**changes), tmp_path)
    with pytest.raises(InvalidInput, match=words):
        federation.serve()
    assert federation.grid.requests == []
