"""The loop of asynchronous methods: order and staleness of arrivals, and their records."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Arrival, Asynchronous, Server, SharesPrototypes
from mpfedcl.rounds.arrivals import VirtualArrivals
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.record import RoundRecord
from small_experiments import assert_same_tensors, build_federation, save_images, small


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    save_images(root / "only.npz")
    return root


class Listening(Asynchronous):
    """Averages the arrivals and records them."""

    name = "listening"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: list[list[Arrival]] = []

    def arrive(self, server: Server, arrivals: Sequence[Arrival]) -> Server:
        self.heard.append(list(arrivals))
        params = server.params
        for each in arrivals:
            params = {name: (params[name] + value) / 2 for name, value in each.means.items()}
        return replace(server, params=params)


class InTiers(Listening):
    timing = "tiers"
    num_tiers = 2


class InTicks(Listening):
    timing = "ticks"


def listen(
    images: Path, kind: type[Listening] = Listening, rounds: int = 3, **changes: Any
) -> tuple[VirtualArrivals, Listening, list[RoundRecord]]:
    experiment = small(images, "fedasync", dtype="float64", clients=4, **changes)
    loop = build_federation(experiment, method_class=kind)
    assert isinstance(loop, VirtualArrivals)
    assert isinstance(loop._rule, Listening)
    return loop, loop._rule, [loop.run_round(evaluate=False) for _ in range(rounds)]


def test_updates_arrive_in_the_order_of_their_seconds(images: Path) -> None:
    """Compare with a slow loop that asks the system model for every dispatch in turn."""
    loop, method, records = listen(images)
    speeds, up, down = loop._speeds, loop._bytes_up, loop.broadcast().num_bytes
    version, sending = 0, 1
    back = {name: (speeds.seconds(name, 1, down, up), 0) for name in loop.engine.sizes}
    for (arrival,) in method.heard:
        name = min(back, key=lambda each: (back[each][0], each))
        due, sent_with = back.pop(name)
        assert list(arrival.names) == [name]
        assert arrival.staleness == version - sent_with
        version, sending = version + 1, sending + 1
        back[name] = (due + speeds.seconds(name, sending, down, up), version)
    assert len(method.heard) == 12 == version
    assert records[-1].virtual_seconds == pytest.approx(due)
    assert [record.arrivals and record.arrivals.version for record in records] == [4, 8, 12]


def test_record_lists_arrivals_staleness_and_bytes(images: Path) -> None:
    loop, method, records = listen(images, rounds=2)
    for record, heard in zip(records, (method.heard[:4], method.heard[4:]), strict=True):
        arrivals, recorded = [each for (each,) in heard], record.arrivals
        assert recorded is not None
        names = [name for each in arrivals for name in each.names]
        assert recorded.by_client == {name: names.count(name) for name in sorted(set(names))}
        assert record.clients.answered == sorted(set(names))
        stale = [each.staleness for each in arrivals]
        assert recorded.staleness == {"mean": sum(stale) / 4, "largest": max(stale)}
        assert record.bytes["up"] == 4 * loop._bytes_up
        assert recorded.under_way == 3
    # At first all four clients are dispatched, then each client that has arrived.
    down = loop.broadcast().num_bytes
    assert [record.bytes["down"] for record in records] == [(4 + 3) * down, 4 * down]


def test_staleness_counts_versions_since_the_dispatch(images: Path) -> None:
    """Check that one client under way is always fresh and that most of several are stale."""
    _, method, _ = listen(images, systems__concurrency=1)
    assert {each.staleness for (each,) in method.heard} == {0}
    _, method, records = listen(images)
    assert max(each.staleness for (each,) in method.heard) >= 3
    assert records[0].arrivals is not None


def test_each_tier_has_its_own_rounds(images: Path) -> None:
    loop, method, _ = listen(images, InTiers, rounds=4)
    assert [len(tier) for tier in loop._tiers] == [2, 2]
    for (arrival,) in method.heard:
        assert list(arrival.names) == loop._tiers[arrival.tier]
        assert arrival.num_tiers == 2
    tiers = [arrival.tier for (arrival,) in method.heard]
    assert tiers.count(0) >= tiers.count(1) >= 1


def test_ticks_group_arrivals_by_version(images: Path) -> None:
    loop, method, records = listen(
        images, InTicks, systems__tick=0.25, systems__seconds_a_sample=0.05
    )
    assert any(len(heard) > 1 for heard in method.heard), "no tick with two versions"
    assert [] in method.heard, "no idle tick"
    for heard in method.heard:
        stale = [each.staleness for each in heard]
        assert stale == sorted(stale, reverse=True)
        assert len(set(stale)) == len(stale)
    ticks = loop.state.arrivals and loop.state.arrivals.counts.ticks
    assert (records[-1].virtual_seconds or 0) / 0.25 == len(method.heard) == ticks


def test_ticks_as_long_as_a_round_include_all_clients(images: Path) -> None:
    """Check ticks at rounded sums of seconds: a client due at a tick has arrived."""
    speeds: dict[str, Any] = {"systems__spread": 0, "systems__jitter": 0, "partition__kind": "iid"}
    _, method, _ = listen(images, InTicks, rounds=9, **speeds)
    assert len(method.heard) == 9
    assert all([len(each.names) for each in heard] == [4] for heard in method.heard)


def test_equal_speeds_arrive_by_name_one_at_a_time(images: Path) -> None:
    speeds: dict[str, Any] = {"systems__spread": 0, "systems__jitter": 0, "partition__kind": "iid"}
    _, method, records = listen(images, rounds=2, **speeds)
    names = [name for (each,) in method.heard for name in each.names]
    assert names == [f"client-{number}" for number in range(4)] * 2
    stale = [each.staleness for (each,) in method.heard]
    assert stale == [0, 1, 2, 3, 3, 3, 3, 3]
    assert records[1].virtual_seconds == pytest.approx(2 * (records[0].virtual_seconds or 0))


@pytest.mark.parametrize("kind", [Listening, InTiers, InTicks])
def test_lost_updates_free_their_slot(images: Path, kind: type[Listening]) -> None:
    loop, method, records = listen(images, kind, rounds=5, systems__drop=0.5)
    came = sum(len(each.names) for heard in method.heard for each in heard)
    assert came >= 20
    assert any(record.clients.missing for record in records) or kind is not Listening
    sent = sum(record.bytes["down"] for record in records) // loop.broadcast().num_bytes
    away = records[-1].arrivals and records[-1].arrivals.under_way
    assert sent > came + (away or 0)


def test_rejected_update_does_not_change_the_server(images: Path) -> None:
    experiment = small(images, "fedasync", validation__max_norm=1e-9)
    loop = build_federation(experiment)
    before = loop.state.server.params
    record = loop.run_round(evaluate=False)
    assert record.unchanged
    assert len(record.clients.rejected) == 3
    assert record.arrivals is not None
    assert record.arrivals.version == 0
    assert_same_tensors(loop.state.server.params, before)


def test_only_versions_under_way_are_kept(images: Path) -> None:
    loop, _, _ = listen(images, rounds=4)
    arrivals = loop.state.arrivals
    assert arrivals is not None
    versions = {each.version for each in arrivals.counts.under_way}
    assert set(arrivals.models) == versions
    assert len(versions) <= 3


@pytest.mark.parametrize("kind", [Listening, InTiers, InTicks])
def test_loop_and_stacked_engine_agree(images: Path, kind: type[Listening]) -> None:
    ends = []
    for engine in ("loop", "stacked"):
        loop, method, records = listen(images, kind, engine=engine)
        order = [(each.names, each.staleness) for heard in method.heard for each in heard]
        ends.append((loop.state.server.params, order, [r.virtual_seconds for r in records]))
        assert set(records[0].remarks["training"]) == {engine}
    assert ends[0][1:] == ends[1][1:]
    for name, value in ends[0][0].items():
        torch.testing.assert_close(value, ends[1][0][name], rtol=1e-9, atol=1e-12)


class Restarting(Listening):
    """Counts in the client's state how often, and for how long, it was away."""

    def init_client(self, params: Tensors) -> Tensors:
        return {"times": next(iter(params.values())).new_zeros(2)}

    def finish(self, params: Tensors, context: Any, num_steps: int) -> tuple[Tensors, Tensors]:
        times = context.state["times"] + torch.tensor([1.0, 0.0])
        return dict(params), {"times": times}

    def note_delay(self, state: Tensors, seconds: float) -> Tensors:
        return {"times": state["times"] + torch.tensor([0.0, seconds])}


def test_clients_keep_their_state_and_receive_their_delay(images: Path) -> None:
    loop, method, records = listen(images, Restarting, engine="stacked")
    kept = {key: value for key, value in loop.engine.state().items() if key.startswith("own/")}
    for name in loop.engine.sizes:
        came = [each for (each,) in method.heard if list(each.names) == [name]]
        if came:
            count, seconds = kept[f"own/{name}/times"].tolist()
            assert count == len(came)
            assert seconds == pytest.approx(sum(each.seconds for each in came))
    assert len(records) == 3


def test_synchronous_round_lasts_as_long_as_its_slowest_client(images: Path) -> None:
    experiment = small(images, "fedavg", systems__kind="lognormal", dtype="float64")
    loop = build_federation(experiment)
    assert type(loop) is RoundLoop
    assert loop._systems is not None
    records = [loop.run_round(evaluate=False) for _ in range(2)]
    size = loop.broadcast().num_bytes
    slowest = [
        max(loop._systems.seconds(name, number, size, size) for name in loop.engine.sizes)
        for number in (1, 2)
    ]
    assert [r.virtual_seconds for r in records] == [slowest[0], sum(slowest)]
    plain = build_federation(small(images, "fedavg", dtype="float64"))
    recorded = [plain.run_round(evaluate=False) for _ in range(2)]
    assert "virtual_seconds" not in recorded[0].to_json()
    assert_same_tensors(plain.state.server.params, loop.state.server.params)


def test_small_messages_take_less_time(images: Path) -> None:
    speeds = {"systems__kind": "lognormal", "systems__up": 100.0, "systems__down": 100.0}
    seconds = {
        method: build_federation(small(images, method, **speeds)).run_round(evaluate=False)
        for method in ("fedproto", "fedavg")
    }
    fast, slow = (seconds[name].virtual_seconds or 0 for name in ("fedproto", "fedavg"))
    assert 0 < fast < slow / 2


def test_synchronous_round_waits_for_lost_updates(images: Path) -> None:
    speeds = {"systems__kind": "lognormal", "systems__drop": 0.5, "systems__patience": 50.0}
    loop = build_federation(small(images, "fedavg", rounds=6, clients=4, **speeds))
    records = [loop.run_round(evaluate=True) for _ in range(6)]
    missing = [len(record.clients.missing) for record in records]
    assert 0 < sum(missing) < 24
    ends = [0.0, *(record.virtual_seconds or 0 for record in records)]
    lengths = [b - a for a, b in pairwise(ends)]
    waited = [length for length, lost in zip(lengths, missing, strict=True) if lost]
    rest = [length for length, lost in zip(lengths, missing, strict=True) if not lost]
    assert not rest or min(waited) > max(rest)


def test_round_without_any_update_changes_nothing(images: Path) -> None:
    loop = build_federation(small(images, "mp-fedcl", systems__kind="tiers", systems__drop=0.999))
    before = loop.state.server.params
    record = loop.run_round(evaluate=True)
    assert record.unchanged
    assert len(record.clients.missing) == 3
    assert record.accuracy is not None
    assert_same_tensors(loop.state.server.params, before)


def test_lost_updates_with_secure_aggregation_are_rejected(images: Path) -> None:
    with pytest.raises(
        InvalidInput, match=r"^systems.drop is 0.5; with secure_aggregation it must be 0"
    ):
        build_federation(small(images, "fedavg", systems__drop=0.5, secure_aggregation=True))


REJECTED: dict[str, dict[str, Any]] = {
    "workers": {"workers": 2},
    "secure_aggregation": {"secure_aggregation": True},
    "privacy.epsilon": {"privacy__epsilon": 3.0},
    "aggregation.rule": {"aggregation__rule": "median"},
    "validation.bounds": {"validation__bounds": "on"},
    "systems.kind": {"systems__kind": "none"},
    "systems.tick": {"systems__tick": 1e-6},
}


@pytest.mark.parametrize("setting", REJECTED)
def test_incompatible_settings_are_rejected_by_name(images: Path, setting: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^{setting} is .* it must be "):
        build_federation(small(images, "fedasync", **REJECTED[setting]))


class HalfDone(SharesPrototypes, Asynchronous):
    name = "half"


def test_custom_method_of_the_wrong_type_is_rejected(images: Path) -> None:
    with pytest.raises(InvalidInput, match="it must be an mpfedcl"):
        build_federation(small(images, "fedasync"), method_class=HalfDone)


class Speechless(Asynchronous):
    name = "speechless"


def test_custom_asynchronous_method_needs_arrive(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"it must have the method arrive\(server, arrivals\)"):
        build_federation(small(images, "fedasync"), method_class=Speechless)
