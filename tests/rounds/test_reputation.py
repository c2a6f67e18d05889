"""Bounds relative to the other clients: share, norm, and reputation."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from client_stacks import Stack
from hypothesis import given
from hypothesis import strategies as st
from tampered_updates import VICTIM, TamperingEngine, with_tensor
from torch import Tensor

from mpfedcl import resume, run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.engines import Engine
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import ValidationSettings
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.aggregation.mean import WeightedMean
from mpfedcl.rounds.engine import Members
from mpfedcl.rounds.reputation import (
    DIRECTION,
    NORM,
    SHARE,
    BoundedAggregation,
    RelativeBounds,
    compare_directions,
    score_directions,
    trusted,
    update_reputations,
)
from mpfedcl.runs.observer import Observer
from small_experiments import (
    HIDDEN,
    MeddledEngine,
    assert_same_run,
    build_federation,
    read_records,
    save_images,
    small,
    tensors_of,
)


def draw(seed: int, size: int = 20_000) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


START: Tensors = {"w": torch.zeros(4, 5000), "b": torch.ones(7)}


def make_model(change: Tensor) -> Tensors:
    """Return a model that has changed by these 20,000 values."""
    return {"w": START["w"] + change.view(4, 5000), "b": START["b"]}


def compare(changes: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
    models = {name: make_model(each) for name, each in changes.items()}
    return compare_directions(models, START, START)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_cosines_of_changes_are_exact(share: float) -> None:
    one, other = draw(1), draw(2)
    mixed = share * one + math.sqrt(1 - share**2) * other
    names, cosines = compare({"b": mixed, "a": one, "still": torch.zeros(20_000)})
    assert names == ["a", "b"]
    wanted = float(torch.nn.functional.cosine_similarity(one, mixed, dim=0))
    assert float(cosines[0, 1]) == pytest.approx(wanted, abs=1e-5)
    assert cosines.diagonal().tolist() == pytest.approx([1, 1])
    assert compare({})[0] == []
    assert bool(compare({"a": 1e25 * one, "b": one})[1].isfinite().all())


def test_parameters_that_were_not_sent_have_changed_by_their_whole_value() -> None:
    models = {"a": {"new": torch.tensor([3.0, 4.0])}, "b": {"new": torch.tensor([4.0, -3.0])}}
    names, cosines = compare_directions(models, {}, ["new"])
    assert (names, float(cosines[0, 1])) == (["a", "b"], 0.0)


class OtherProcess:
    """The peers of a process whose clients are `own`: another process has `theirs`."""

    def __init__(self, theirs: Mapping[str, Tensors]) -> None:
        self._parts = [
            pack_tensors(
                {name: (each[key] - START[key]).flatten() for name, each in theirs.items()}
            )
            for key in sorted(START)
        ]

    def gather(self, content: bytes) -> list[bytes]:
        return [content, self._parts.pop(0)]


def test_processes_with_and_without_clients_find_the_same_cosines() -> None:
    models = {name: make_model(draw(seed)) for seed, name in enumerate("abcde")}
    names, whole = compare_directions(models, START, START)
    for own in ("ace", "abcde", ""):
        theirs = {name: each for name, each in models.items() if name not in own}
        mine = {name: models[name] for name in own}
        peers: Any = OtherProcess(theirs)
        found, cosines = compare_directions(mine, START, START, peers)
        assert found == names
        assert torch.equal(cosines, whole)


def make_round(seed: int, malicious: int = 0, clients: int = 10) -> tuple[list[str], Tensor]:
    """Return the cosines of clients with a common direction; the first ones flip their signs."""
    common = draw(1000 + seed)
    found = {}
    for number in range(clients):
        change = 0.5 * common + draw(100 * seed + number)
        found[f"client-{number}"] = -change if number < malicious else change
    return compare(found)


def judge(
    before: Mapping[str, float], names: Sequence[str], cosines: Tensor
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the scores of a round and the reputations after it."""
    scores = score_directions(before, names, cosines, 1.0)
    return scores, update_reputations(before, scores, 1.0)


@pytest.mark.parametrize(("malicious", "clients"), [(1, 5), (2, 10), (3, 10)])
def test_only_malicious_clients_lose_their_weight(malicious: int, clients: int) -> None:
    reputations: dict[str, float] = {}
    for seed in range(8):
        scores, reputations = judge(reputations, *make_round(seed, malicious, clients))
        for number in range(clients):
            name = f"client-{number}"
            wanted = 0.0 if number < malicious else 1.0
            assert trusted(min(scores[name], reputations[name]), 1.0) == wanted
            # Two rounds are needed to lose trust for good.
            assert trusted(reputations[name], 1.0) == (wanted if seed else 1.0)


def hide(change: Tensor) -> Tensor:
    """Flip a change, except for what a count sketch with the old public draw sees of it."""
    key = generator(0, "w", "sketch")
    places = torch.randint(4096, (change.numel(),), generator=key)
    signs = torch.randint(2, (change.numel(),), generator=key) * 2.0 - 1
    seen = torch.zeros(4096).index_add_(0, places, signs * change)
    shown = (seen / places.bincount(minlength=4096).clamp(min=1))[places] * signs
    return 2 * shown - change


def test_no_change_hides_from_the_bound_on_direction() -> None:
    common = draw(1000)
    changes = {f"client-{n}": 0.5 * common + draw(n) for n in range(10)}
    names, cosines = compare(changes | {"client-0": hide(changes["client-0"])})
    scores = score_directions({}, names, cosines, 1.0)
    assert trusted(scores["client-0"], 1.0) == 0
    assert min(trusted(scores[name], 1.0) for name in names[1:]) == 1


def test_lost_trust_recovers_slowly() -> None:
    reputations: dict[str, float] = {}
    for seed in range(3):
        reputations = judge(reputations, *make_round(seed, malicious=1))[1]
    for seed in range(3, 15):
        reputations = judge(reputations, *make_round(seed))[1]
    assert trusted(reputations["client-0"], 1.0) == 0
    for seed in range(15, 150):
        reputations = judge(reputations, *make_round(seed))[1]
    assert trusted(reputations["client-0"], 1.0) == 1


@given(st.integers(0, 4))
def test_fewer_than_five_clients_are_not_compared(clients: int) -> None:
    before = {"client-1": -1.0}
    assert judge(before, *make_round(1, 1, clients)) == ({}, before)


def test_round_without_a_common_direction_is_not_judged() -> None:
    changes = {f"client-{n}": draw(n) for n in range(10)}
    before = {"client-1": -1.0}
    assert judge(before, *compare(changes)) == ({}, before)


def test_scores_of_equal_and_zero_changes() -> None:
    same = dict.fromkeys("abcdef", draw(1))
    found = score_directions({}, *compare(same), 1.0)
    assert list(found.values()) == pytest.approx([0] * 6, abs=1e-3)
    none = same | {"g": torch.zeros_like(same["a"])}
    assert score_directions({}, *compare(none), 1.0).keys() == same.keys()
    gone = dict.fromkeys("abcdef", -2.0)
    assert score_directions(gone, *compare(same), 1.0) == {}


def test_score_matches_a_hand_computation() -> None:
    cosines = torch.tensor(
        [
            [1.0, 0.4, 0.3, 0.2, -0.3],
            [0.4, 1.0, 0.5, 0.1, -0.2],
            [0.3, 0.5, 1.0, 0.6, -0.1],
            [0.2, 0.1, 0.6, 1.0, 0.0],
            [-0.3, -0.2, -0.1, 0.0, 1.0],
        ],
        dtype=torch.float64,
    )
    # Medians of four: 0.25, 0.25, 0.4, 0.15 and -0.15; the median of these is 0.25.
    wanted = {"a": 0.0, "b": 0.0, "c": 0.6, "d": -0.4, "e": -1.6}
    assert score_directions({}, "abcde", cosines, 1.0) == pytest.approx(wanted)
    # Without e's vote: 0.3, 0.4, 0.5, 0.2 and -0.15; the median of the trusted four is 0.35.
    wanted = {"a": -1 / 7, "b": 1 / 7, "c": 3 / 7, "d": -3 / 7, "e": -10 / 7}
    found = score_directions({"e": -2.0}, "abcde", cosines, 1.0)
    assert found == pytest.approx(wanted)
    after = update_reputations({"e": -2.0, "d": 0.1}, found, 1.0)
    assert after["d"] == pytest.approx(0.1 + 0.5 * (-3 / 7 - 0.1))
    assert after["c"] == pytest.approx(0.05 * 3 / 7)
    assert after["e"] == pytest.approx(-2 + 0.01 * (2 - 10 / 7))


@pytest.mark.parametrize(
    ("standing", "part"), [(0.0, 1.0), (-1.0, 1.0), (-1.25, 0.5), (-1.5, 0.0), (-2.0, 0.0)]
)
def test_trust_is_lost_between_no_agreement_and_half_the_opposite(
    standing: float, part: float
) -> None:
    assert trusted(standing, 1.0) == pytest.approx(part)


class TurningEngine(MeddledEngine):
    """An engine with one client that flips the sign of its change."""

    def meddle(
        self, broadcast: Broadcast, names: Sequence[str], updates: Iterable[Update]
    ) -> Iterator[Update]:
        for update in updates:
            if update.client != VICTIM:
                yield update
                continue
            own = tensors_of(update)
            turned = {name: 2 * broadcast.params[name] - each for name, each in own.items()}
            yield replace(update, averaged=turned)


def test_client_with_a_flipped_sign_is_recorded(tmp_path: Path) -> None:
    save_images(tmp_path / "one.npz", num_train=300)
    experiment = small(
        tmp_path, "fedavg", clients=8, validation__bounds="on", partition__kind="iid"
    )
    attacked = build_federation(experiment, TurningEngine)
    for _ in range(3):
        record = attacked.run_round(evaluate=False)
    assert record.processed[DIRECTION] == [VICTIM]
    assert attacked.state.reputations[VICTIM] < -1
    honest = build_federation(experiment)
    for _ in range(3):
        assert DIRECTION not in honest.run_round(evaluate=False).processed


BROADCAST = Broadcast(1, {"w": torch.zeros(1, dtype=torch.float64)}, {}, PrototypePool.empty(2, 2))


def aggregate(
    changes: dict[str, float], claimed: dict[str, int], length: float | None, **settings: object
) -> tuple[float, BoundedAggregation]:
    bounds = RelativeBounds(ValidationSettings(**settings), [*claimed.values()], length)
    rule = WeightedMean(BROADCAST.params, Experiment())
    made = BoundedAggregation(rule, BROADCAST, bounds)
    for name, change in changes.items():
        tensors = {"w": torch.tensor([change], dtype=torch.float64)}
        made.add(Update(name, claimed[name], tensors, Prototypes.empty(2), 0.0), claimed[name])
    return float(made.result()["w"]), made


def test_client_weighs_at_most_as_much_as_one_of_median_size() -> None:
    sizes = {"a": 10, "b": 20, "c": 10_000_000}
    found, made = aggregate({"a": 1.0, "b": 1.0, "c": -1.0}, sizes, 1.0)
    assert found == pytest.approx((10 + 20 - 20) / 50)
    assert made.weights == {"a": 10, "b": 20, "c": pytest.approx(20)}
    assert made.processed == {SHARE: ["c"]}
    _, made = aggregate({"a": 1.0, "b": 1.0, "c": -1.0}, sizes, 1.0, share_cap=3.0)
    assert made.weights == {"a": 10, "b": 20, "c": pytest.approx(60)}
    _, made = aggregate({"a": 1.0}, {"a": 10_000_000}, 1.0)
    assert made.weights == {"a": 10_000_000}


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.integers(1, 10**12))
def test_false_claims_of_fewer_than_half_never_outweigh_the_largest_honest_client(
    honest: list[int], claim: int
) -> None:
    malicious = [claim] * (len(honest) - 1)
    bounds = RelativeBounds(ValidationSettings(), [*malicious, *honest], None)
    assert claim * bounds.share("malicious", claim) <= max(honest) * (1 + 1e-12)


def test_one_of_two_clients_cannot_raise_its_own_bound() -> None:
    _, made = aggregate({"a": 1.0, "b": 1.0}, {"a": 10, "b": 10_000}, 1.0)
    assert made.weights["b"] == pytest.approx(10)


def test_sizes_stated_by_the_operator_override_the_bound() -> None:
    sizes = {"a": 10, "b": 20, "c": 1000}
    _, made = aggregate({"a": 1.0, "b": 1.0, "c": 1.0}, sizes, 1.0, sizes=("c:500",))
    assert made.weights["c"] == pytest.approx(500)
    _, made = aggregate({"a": 1.0, "b": 1.0, "c": 1.0}, sizes, 1.0, sizes=("c:1000",))
    assert made.weights["c"] == 1000
    assert made.processed == {}


@pytest.mark.parametrize("odd", ["c", "c:", ":5", "c:0", "c:-1", "c:1.5", "c:10000000000000"])
def test_invalid_sizes_are_rejected(odd: str) -> None:
    with pytest.raises(InvalidInput, match=r"validation\.sizes\.0 is "):
        ValidationSettings(sizes=(odd,))
    assert ValidationSettings(sizes=("a:b:12",)).stated_sizes == {"a:b": 12}


def test_large_change_is_clipped_to_the_median_of_the_last_round() -> None:
    sizes = dict.fromkeys("abc", 10)
    found, made = aggregate({"a": 1.0, "b": 2.0, "c": 90.0}, sizes, 2.0, clip_factor=1.5)
    assert found == pytest.approx((1 + 2 + 3) / 3)
    assert made.processed == {NORM: ["c"]}
    # The median is taken before clipping, or the bound would shrink from round to round.
    assert made.median_norm == 2.0


def test_bound_of_the_first_round_is_its_own_median() -> None:
    sizes = dict.fromkeys("abc", 10)
    found, made = aggregate({"a": 1.0, "b": -2.0, "c": 90.0}, sizes, None, clip_factor=1.5)
    assert found == pytest.approx((1 - 2 + 3) / 3)
    assert made.processed == {NORM: ["c"]}


def test_zero_changes_do_not_count_for_the_median_norm() -> None:
    sizes = dict.fromkeys("abcd", 10)
    found, made = aggregate({"a": 0.0, "b": 0.0, "c": 1.0, "d": 0.0}, sizes, None)
    assert found == pytest.approx(0.25)
    assert made.median_norm == 1.0
    found, made = aggregate({"a": 0.0, "b": 0.0}, sizes, None)
    assert (found, made.median_norm) == (0.0, None)


def test_clients_of_a_stack_have_the_same_bounds() -> None:
    stack = Stack(BROADCAST.params["w"], [[1.0], [2.0], [90.0]])
    for length in (None, 2.0):
        bounds = RelativeBounds(ValidationSettings(clip_factor=1.5), [10], length)
        made = BoundedAggregation(WeightedMean(BROADCAST.params, Experiment()), BROADCAST, bounds)
        for index, name in enumerate("abc"):
            member = StackMember(stack, index)
            made.add(Update(name, 10, member, Prototypes.empty(2), 0.0), 10)
        assert float(made.result()["w"]) == pytest.approx(2.0)
        assert made.processed == {NORM: ["c"]}


def noisy(engine: Engine) -> Engine:
    noise = 1e3 * torch.randn(8, 36, generator=torch.Generator().manual_seed(0))
    return TamperingEngine(engine, with_tensor("hidden.0.weight", lambda w: w + noise))


def test_bounds_keep_honest_clients_despite_a_noisy_one(images: Path) -> None:
    experiment = small(images, "fedavg", clients=5, validation__bounds="on")
    federation = build_federation(experiment, noisy)
    for _ in range(4):
        record = federation.run_round(evaluate=False)
        assert record.clients.rejected == {}
        assert VICTIM in record.processed[NORM]
        assert record.loss is not None
        assert record.loss < 5
    # Without bounds the model is useless.
    federation = build_federation(experiment.replace(validation__bounds="off"), noisy)
    federation.run_round(evaluate=False)
    record = federation.run_round(evaluate=False)
    assert record.clients.rejected or record.loss is None or record.loss > 50


def test_bounds_are_off_in_a_simulation_by_default(images: Path) -> None:
    plain = build_federation(small(images, "fedavg"))
    off = build_federation(small(images, "fedavg", validation__bounds="off"))
    tight = build_federation(
        small(images, "fedavg", validation__bounds="on", validation__clip_factor=0.5)
    )
    for federation in (plain, off, tight):
        federation.run_round(evaluate=False)
    same = [plain.state.server.params[n].equal(v) for n, v in off.state.server.params.items()]
    assert all(same)
    assert plain.state.median_norm is None
    assert tight.state.median_norm is not None
    other = [plain.state.server.params[n].equal(v) for n, v in tight.state.server.params.items()]
    assert not all(other)


@pytest.mark.whole
@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg"])
def test_resume_of_a_bounded_run_is_bit_identical(
    images: Path, tmp_path: Path, method: str
) -> None:
    changes = {"validation__bounds": "on", "validation__clip_factor": 0.8, "model__hidden": HIDDEN}
    experiment = small(images, method, rounds=4, clients=6, **changes)
    whole = run(experiment, tmp_path / "whole")
    done: list[object] = []
    stop = Observer(on_round=done.append, should_stop=lambda: len(done) == 2)
    run(experiment, tmp_path / "parts", stop)
    assert len(read_records(tmp_path / "parts")) == 2
    resume(tmp_path / "parts")
    assert_same_run(whole.path, tmp_path / "parts")
    assert any(NORM in record["processed"] for record in read_records(whole.path))


def test_unknown_norms_bound_nothing() -> None:
    bounds = RelativeBounds(ValidationSettings(), [], None)
    assert bounds.largest_norm is None
    assert bounds.norm_limit([]) is None
    assert bounds.share("a", 10**9) == 1
    assert bounds.check_claim("a", 10**9) is None
    assert math.isinf(bounds._most_samples)


def test_sums_of_too_many_samples_are_rejected_with_the_remedy() -> None:
    bounds = RelativeBounds(ValidationSettings(), [10], None)
    assert bounds.check_claim("a", 150) is None
    reason = bounds.check_claim("c", 151)
    assert reason is not None
    assert reason.endswith("--validation.sizes c:151")
    stated = RelativeBounds(ValidationSettings(sizes=("c:151",)), [10], None)
    assert stated.check_claim("c", 151) is None
    assert stated.check_claim("c", 152) is not None


def test_prototype_of_an_unannounced_class_is_rejected(images: Path) -> None:
    federation = build_federation(small(images))
    counts = {name: [size, size, size] for name, size in federation.engine.sizes.items()}
    counts[VICTIM] = [0, *counts[VICTIM][1:]]

    def announce(engine: Engine) -> Engine:
        engine.members = Members(engine.sizes, counts)
        return engine

    record = build_federation(small(images), announce).run_round(evaluate=False)
    reason = record.clients.rejected[VICTIM]
    assert reason.startswith("prototypes of class 0 stand for")
    assert reason.endswith("this client has announced 0")
    assert list(record.clients.rejected) == [VICTIM]


def test_withheld_update_passes_the_bounds(images: Path) -> None:
    federation = build_federation(small(images, "local", validation__bounds="on"))
    record = federation.run_round(evaluate=False)
    assert record.clients.rejected == {}
    assert replace(federation.state, round=9).median_norm is None
