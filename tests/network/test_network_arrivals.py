"""Asynchronous methods over a network: late, lost and malicious clients."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from federations import (
    LoopbackFederation,
    assert_like_simulation,
    assert_same_run,
    float64_experiment,
    folder_experiment,
    is_training,
    rewrite,
    stop_after,
)
from flwr.app import Error
from flwr.app import Message as FlowerMessage
from loopback import PacedGrid
from safetensors.torch import load_file

from mpfedcl import run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from opened_records import from_records
from small_experiments import Json, VirtualTime, read_records

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

EQUAL = {"systems__spread": 0.0, "systems__jitter": 0.0, "systems__seconds_a_sample": 1e-6}
"""In a simulation: all are back within a tick."""
ANY_TIME: dict[str, Any] = {"clients": 3, "systems__most_per_minute": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "fedasync": {},
    "aso-fed": {},
    "fedat": {"fedat__tiers": 1},
    "sageflow": {"systems__tick": 2.0, "public__size": 4},
    "async-share": {"systems__tick": 2.0},
}
SLOW = {"client-0": 1.0, "client-1": 4.0, "client-2": 9.0}


def arriving(images: Path, method: str = "fedasync", **changes: Any) -> Experiment:
    return float64_experiment(images, method, **ANY_TIME | METHODS[method] | changes)


def count_arrivals(records: list[Json]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        for name, count in record["arrivals"]["by_client"].items():
            counts[name] = counts.get(name, 0) + count
    return counts


# Equivalence with a simulation


@pytest.mark.parametrize("method", METHODS)
def test_one_client_at_a_time_equals_simulation(images: Path, tmp_path: Path, method: str) -> None:
    experiment = arriving(images, method, systems__concurrency=1)
    found = LoopbackFederation(experiment, tmp_path).serve()
    wanted = run(experiment.replace(**EQUAL), tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    ours, theirs = read_records(found.path), read_records(wanted.path)
    assert [each["arrivals"] for each in ours] == [each["arrivals"] for each in theirs]
    assert all("virtual_seconds" not in each for each in ours)


@pytest.mark.parametrize("method", ["aso-fed", "async-share"])
def test_resumed_run_with_one_client_at_a_time_is_identical(
    images: Path, tmp_path: Path, method: str
) -> None:
    experiment = arriving(images, method, systems__concurrency=1)
    whole = LoopbackFederation(experiment, tmp_path / "whole").serve()
    federation = LoopbackFederation(experiment, tmp_path / "parts")
    federation.serve(stop_after(2))
    federation.resume()
    assert_same_run(federation.path, whole.path)


# Many at a time


def test_versions_and_arrivals_add_up(
    images: Path, tmp_path: Path, quick_network: VirtualTime
) -> None:
    grid = PacedGrid(quick_network, SLOW)
    found = LoopbackFederation(arriving(images, rounds=4), tmp_path, grid=grid).serve()
    records = read_records(found.path)
    reported = [each["arrivals"] for each in records]
    assert [each["version"] for each in reported] == [3, 6, 9, 12]
    assert [each["under_way"] for each in reported] == [2, 2, 2, 2]
    counts = count_arrivals(records)
    assert sum(counts.values()) == 12
    assert counts["client-0"] > counts["client-1"] > counts["client-2"] >= 1
    assert max(each["staleness"]["largest"] for each in reported) >= 4
    elapsed = [each["elapsed_seconds"] for each in records]
    assert elapsed == sorted(elapsed)
    assert elapsed[-1] >= 9
    # Clients evaluate the versions that they were sent.
    first, last = records[1]["remarks"]["read_versions"]
    assert 1 <= first <= last < 9
    assert "read_versions" not in records[-1]["remarks"]
    assert records[-1]["accuracy"]["local_test"]["global_classifier"] is not None
    down = [each["bytes"]["down"] for each in records]
    assert sum(down) / records[0]["bytes"]["down"] * 5 == 12 + 2


def test_concurrency_limit_holds(images: Path, tmp_path: Path, quick_network: VirtualTime) -> None:
    grid = PacedGrid(quick_network, SLOW)
    experiment = arriving(images, systems__concurrency=2)
    found = LoopbackFederation(experiment, tmp_path, grid=grid).serve()
    assert [each["arrivals"]["under_way"] for each in read_records(found.path)] == [1, 1, 1]
    assert [moment for moment, _ in grid.sent].count(0.0) == 2


def test_fast_client_does_not_dominate_the_model(
    images: Path, tmp_path: Path, quick_network: VirtualTime
) -> None:
    grid = PacedGrid(quick_network, {"client-1": 20.0, "client-2": 20.0})
    experiment = arriving(images, rounds=6, systems__most_per_minute=6.0)
    LoopbackFederation(experiment, tmp_path, grid=grid).serve()
    moments = [moment for moment, name in grid.sent if name == "client-0"]
    assert len(moments) > 3
    assert all(b - a >= 10 for a, b in pairwise(moments))


def test_tiers_group_clients_by_time(
    images: Path, tmp_path: Path, quick_network: VirtualTime
) -> None:
    seconds = {"client-0": 9.0, "client-1": 1.0, "client-2": 8.0, "client-3": 2.0}
    grid = PacedGrid(quick_network, seconds)
    experiment = arriving(images, "fedat", fedat__tiers=2, clients=4, rounds=4)
    federation = LoopbackFederation(experiment, tmp_path, grid=grid)
    federation.serve(stop_after(2))
    federation.resume()
    state = load_file(federation.path / "checkpoint/round-000004.safetensors")
    fast, slow = state["private/rounds"].tolist()
    # Both began with 1, and have done their first round when all had come the first time.
    assert fast > slow >= 2
    counts = count_arrivals(read_records(federation.path))
    assert counts["client-1"] == counts["client-3"] == fast - 1
    assert counts["client-0"] == counts["client-2"] == slow - 1


def test_tick_is_a_tenth_of_the_timeout(
    images: Path, tmp_path: Path, quick_network: VirtualTime
) -> None:
    grid = PacedGrid(quick_network, SLOW)
    changes = {"systems__tick": None, "network__round_timeout": 40.0}
    experiment = arriving(images, "async-share", **changes)
    found = LoopbackFederation(experiment, tmp_path, grid=grid).serve()
    moments = sorted({moment for moment, _ in grid.sent})
    assert moments[:3] == [0.0, 4.0, 8.0]
    stale = [each["arrivals"]["staleness"]["largest"] for each in read_records(found.path)]
    assert max(stale) >= 1


def test_resume_loses_at_most_answers_in_flight(
    images: Path, tmp_path: Path, quick_network: VirtualTime
) -> None:
    grid = PacedGrid(quick_network, SLOW)
    federation = LoopbackFederation(arriving(images, "aso-fed"), tmp_path, grid=grid)
    federation.serve(stop_after(2))
    federation.resume()
    records = read_records(federation.path)
    assert [each["arrivals"]["version"] for each in records] == [3, 6, 9]
    elapsed = [each["elapsed_seconds"] for each in records]
    assert elapsed == sorted(elapsed)
    assert sum(count_arrivals(records).values()) == 9


# Clients that disconnect, reconnect or send bad answers


def test_vanished_client_costs_only_its_own_answers(
    images: Path, tmp_path: Path, quick_network: VirtualTime
) -> None:
    def vanish(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage | None:
        return None if client == "client-1" and is_training(request) else reply

    grid = PacedGrid(quick_network, {"client-0": 2.0, "client-2": 2.0}, vanish)
    experiment = arriving(images, rounds=5, network__round_timeout=3.0)
    records = read_records(LoopbackFederation(experiment, tmp_path, grid=grid).serve().path)
    assert count_arrivals(records).keys() == {"client-0", "client-2"}
    missing = [each["remarks"].get("missing", {}).get("client-1", "") for each in records]
    assert missing[0] == "no answer within 3 s"
    # It is asked again in the record after, and less and less often.
    assert any(each.startswith("silent 2 times in a row") for each in missing), missing
    assert records[-1]["arrivals"]["version"] == sum(count_arrivals(records).values())


def test_disconnected_client_frees_its_slot(images: Path, tmp_path: Path) -> None:
    def go(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if client == "client-1" and is_training(request):
            return FlowerMessage(Error(5, "gone"), reply_to=request)
        return reply

    found = LoopbackFederation(arriving(images, systems__concurrency=1), tmp_path, go).serve()
    records = read_records(found.path)
    assert count_arrivals(records).keys() == {"client-0", "client-2"}
    assert any("client-1" in each["clients"]["missing"] for each in records)


def test_client_joins_during_an_asynchronous_run(
    images: Path, tmp_path: Path, quick_network: VirtualTime
) -> None:
    def bring_another(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if is_training(request) and len(grid.sent) == 4:
            federation.join(2)
        return reply

    seconds = {"client-0": 2.0, "client-1": 20.0, "client-2": 2.0}
    grid = PacedGrid(quick_network, seconds, bring_another)
    # Two of the three clients are connected at first.
    experiment = arriving(images, rounds=5, network__patience=0.1)
    federation = LoopbackFederation(experiment, tmp_path, grid=grid, count=2)
    records = read_records(federation.serve().path)
    counts = count_arrivals(records)
    assert counts["client-2"] >= 3


def old(values: Json) -> Json:
    return {**values, "dispatch": values["dispatch"] - 1}


def odd(values: Json) -> Json:
    return {**values, "version": values["version"] + 1}


def blow_up(name: str, array: Any) -> Any:
    return array * float("nan") if name.startswith("averaged") else array


def forgetful(values: Json) -> Json:
    return {name: value for name, value in values.items() if name != "dispatch"}


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (old, "its answer cannot be read: dispatch is "),
        (odd, "its answer cannot be read: version is "),
        (forgetful, "its answer cannot be read: dispatch is None; it must be of type int"),
        (None, "a tensor holds values that are not finite"),
    ],
)
def test_bad_asynchronous_answer_affects_only_its_client(
    images: Path, tmp_path: Path, lie: Any, reason: str
) -> None:
    def meddle(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if client != "client-1" or not is_training(request):
            return reply
        if lie is not None:
            return rewrite(reply, request, values=lie)
        return rewrite(reply, request, arrays=lambda each: {n: blow_up(n, each[n]) for n in each})

    found = LoopbackFederation(arriving(images, rounds=1), tmp_path, meddle).serve()
    records = read_records(found.path)
    assert count_arrivals(records).keys() == {"client-0", "client-2"}
    reasons = [each["clients"]["rejected"].get("client-1", "") for each in records]
    assert any(each.startswith(reason) for each in reasons), reasons
    assert all(
        value.isfinite().all() for value in load_file(found.path / "model.safetensors").values()
    )


def test_repeated_answer_counts_once(images: Path, tmp_path: Path) -> None:
    def repeat(client: str, request: FlowerMessage, reply: FlowerMessage) -> list[FlowerMessage]:
        return [reply, rewrite(reply, request)] if is_training(request) else [reply]

    found = LoopbackFederation(arriving(images, rounds=2), tmp_path, repeat).serve()
    records = read_records(found.path)
    assert [each["arrivals"]["version"] for each in records] == [3, 6]


def test_asynchronous_messages_carry_dispatch_version_and_delay(
    images: Path, tmp_path: Path
) -> None:
    federation = LoopbackFederation(arriving(images, "aso-fed"), tmp_path)
    federation.serve()
    asked: dict[str, list[Json]] = {}
    for name, request in federation.grid.requests:
        if is_training(request):
            asked.setdefault(name, []).append(from_records(request.content).values)
    for messages in asked.values():
        numbers = [each["dispatch"] for each in messages]
        assert numbers == sorted(set(numbers))
        # The last dispatch that counted, and where what was trained then is kept.
        assert [each["settled"] for each in messages] == [0, *numbers[:-1]]
        assert messages[0]["delay"] == 0.0
    for share in range(3):
        names = {each.name for each in federation.state_folder(share).glob("*/round-*")}
        numbers = [each["dispatch"] for each in asked[f"client-{share}"]]
        assert f"round-{numbers[-1]:06d}-after-{numbers[-2]:06d}.safetensors" in names


def test_public_images_must_have_the_format_of_the_clients(images: Path, tmp_path: Path) -> None:
    """The server's are digits of 28 x 28, the clients have stripes of their own."""
    named = {"dataset__name": "mnist-sample", "dataset__classes": tuple("0123456789")}
    experiment = folder_experiment("sageflow", clients=1, **named)
    federation = LoopbackFederation(experiment, tmp_path, count=0)
    federation.bring(1, "north", images)
    with pytest.raises(InvalidInput, match=r"^dataset.name is 'mnist-sample', whose samples the s"):
        federation.serve()
