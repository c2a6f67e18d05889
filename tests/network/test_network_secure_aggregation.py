"""Secure aggregation over a network: a simulation's result; clients that vanish at any stage."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from federations import LoopbackFederation, stop_after
from loopback import Tamper
from secure_federations import STAGES, lose, secure_experiment

from equivalent_runs import assert_close_tensors, load_results
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.network.client.secure_aggregation import draw_once
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.flower.records import from_records
from mpfedcl.privacy.secure_aggregation import ProtocolError
from mpfedcl.privacy.secure_aggregation.fixed_point import decode
from mpfedcl.runs.observer import NO_COMPANIONS, Observer
from mpfedcl.runs.simulation import run_simulation
from small_experiments import assert_same_results, read_records, read_summary

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]


def run_alone(plan: Experiment, path: Path) -> Path:
    return run_simulation(plan, path, Observer(), NO_COMPANIONS).path


@pytest.mark.parametrize("method", ["fedavg", "fedgauss"])
def test_same_as_the_simulation(images: Path, tmp_path: Path, method: str) -> None:
    plan = secure_experiment(images, method, encoder__name="none")
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
    federation = LoopbackFederation(secure_experiment(images), tmp_path)
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
    federation = LoopbackFederation(secure_experiment(images), tmp_path, lose(stage, "client-2"))
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
    federation = LoopbackFederation(secure_experiment(images), tmp_path, tamper)
    federation.serve()
    first, second = read_records(federation.path)
    assert first["unchanged"]
    assert "its secure sum was not opened" in first["remarks"]["warnings"][0]
    assert second["clients"]["answered"] == [f"client-{number}" for number in range(4)]


def test_lost_last_round_can_be_resumed(images: Path, tmp_path: Path) -> None:
    plan = secure_experiment(images, "fedgauss", encoder__name="none")
    lost: list[Tamper] = [lose("share", "client-0", "client-1")]
    federation = LoopbackFederation(plan, tmp_path, lambda *given: lost[0](*given))
    with pytest.raises(RunCutShort, match="Round 1: its secure sum was not opened, because 2 of 4"):
        federation.serve()
    lost[0] = lambda _client, _request, reply: reply
    federation.resume()
    assert read_summary(federation.path)["accuracy"] is not None


def test_stopped_run_resumes_with_the_same_bits(images: Path, tmp_path: Path) -> None:
    plan = secure_experiment(images, rounds=3)
    whole = LoopbackFederation(plan, tmp_path / "whole")
    whole.serve()
    parts = LoopbackFederation(plan, tmp_path / "parts")
    parts.serve(stop_after(2))
    parts.resume()
    assert_same_results(parts.path, whole.path)


def test_opened_round_is_not_opened_for_others(images: Path, tmp_path: Path) -> None:
    """A server that runs a round again without one client could tell that client's update."""
    plan = secure_experiment(images, rounds=2)
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


def test_client_takes_part_with_secure_sums_alone(images: Path, tmp_path: Path) -> None:
    plan = secure_experiment(images, secure_aggregation=False, network__patience=1.0)
    config: dict[str, Any] = {"secure-aggregation": True}
    federation = LoopbackFederation(plan, tmp_path, **config)
    with pytest.raises(
        RunCutShort, match="secure_aggregation is False; this client takes part only with"
    ):
        federation.serve()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "mp-fedcl"}, "with secure_aggregation it must be one of"),
        ({"aggregation__rule": "median"}, "with secure_aggregation it must be 'mean'"),
    ],
)
def test_refused_before_anybody_is_asked(
    images: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    federation = LoopbackFederation(secure_experiment(images).replace(**changes), tmp_path)
    with pytest.raises(InvalidInput, match=words):
        federation.serve()
    assert federation.grid.requests == []


# With a privacy budget


def test_budget_is_kept_and_noise_drawn_once(images: Path, tmp_path: Path) -> None:
    """A round that is run again gets the same noisy numbers: the same release, to the bit."""
    plan = secure_experiment(images, "fedgauss", encoder__name="none", privacy__epsilon=3.0)
    federation = LoopbackFederation(plan, tmp_path)
    federation.serve(stop_after(0))
    federation.resume()
    assert read_summary(federation.path)["privacy"]["spent"] == pytest.approx(3.0, rel=1e-3)
    first = load_results(federation.path)["statistics.safetensors"]
    for each in [*(federation.path / "checkpoint").glob("*"), federation.path / "summary.json"]:
        each.unlink()
    (federation.path / "rounds.jsonl").unlink()
    for each in (federation.path / "privacy").glob("*"):
        each.unlink()
    federation.resume()
    assert_close_tensors(load_results(federation.path)["statistics.safetensors"], first, 0)


def test_noise_for_more_clients_is_not_used_for_fewer(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, "0" * 32)
    numbers = numpy.arange(3, dtype=numpy.uint64)
    plan = Experiment(secure_aggregation=True)
    first = draw_once(store, 1, plan, lambda _: numbers, 5)
    again = draw_once(store, 1, plan, lambda _: numbers + numpy.uint64(1), 5)
    assert numpy.array_equal(first, again)
    with pytest.raises(ProtocolError, match="drawn for a sum of more clients"):
        draw_once(store, 1, plan, lambda _: numbers, 3)


def test_fewer_than_three_are_waited_for(images: Path, tmp_path: Path) -> None:
    """Rounds are not lost one after the other where no sum could be opened."""
    plan = secure_experiment(images, network__patience=1.0)
    federation = LoopbackFederation(plan, tmp_path, count=2)
    with pytest.raises(RunCutShort, match="min_clients is 3; fewer were there"):
        federation.serve()
