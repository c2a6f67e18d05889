"""Standings: sketches keep cosines, liars fall and stay down, honest clients do not."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tampered_updates import VICTIM
from torch import Tensor

from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.rounds.bounded_aggregation import DIRECTION
from mpfedcl.rounds.standing import sketch, trusted, update_standings
from small_experiments import MeddledEngine, build_federation, save_images, small, tensors_of


def draw(seed: int, size: int = 20_000) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_sketch_keeps_the_cosine(share: float) -> None:
    one, other = draw(1), draw(2)
    mixed = share * one + math.sqrt(1 - share**2) * other
    wanted = float(torch.nn.functional.cosine_similarity(one, mixed, dim=0))
    found = float(sketch({"w": one}) @ sketch({"w": mixed}))
    assert found == pytest.approx(wanted, abs=5 / 64)


def test_a_sketch_has_length_one_and_depends_on_names() -> None:
    values = draw(1)
    assert float(sketch({"w": values}).norm()) == pytest.approx(1)
    assert torch.equal(sketch({"w": values}), sketch({"w": values.clone()}))
    assert abs(float(sketch({"w": values}) @ sketch({"v": values}))) < 0.2
    assert not bool(sketch({"w": torch.zeros(5)}).any())


def make_round(seed: int, liars: int = 0, clients: int = 10) -> dict[str, Tensor]:
    """Return sketches of clients that share a direction; the first ones turn their signs."""
    common = draw(1000 + seed)
    found = {}
    for number in range(clients):
        change = 0.5 * common + draw(100 * seed + number)
        found[f"client-{number}"] = sketch({"w": -change if number < liars else change})
    return found


def test_liars_lose_their_weight_and_honest_clients_do_not() -> None:
    standings: dict[str, float] = {}
    for seed in range(8):
        standings = update_standings(standings, make_round(seed, liars=2), 2.0)
        trust = {name: trusted(each, 2.0) for name, each in standings.items()}
        assert {trust["client-0"], trust["client-1"]} == {0.0}
        assert {trust[f"client-{n}"] for n in range(2, 10)} == {1.0}


def test_who_has_lost_trust_is_back_only_after_long() -> None:
    standings = update_standings({}, make_round(0, liars=1), 2.0)
    for seed in range(1, 20):
        standings = update_standings(standings, make_round(seed), 2.0)
    assert trusted(standings["client-0"], 2.0) == 0
    for seed in range(20, 150):
        standings = update_standings(standings, make_round(seed), 2.0)
    assert trusted(standings["client-0"], 2.0) == 1


@given(st.integers(0, 4))
def test_fewer_than_five_are_not_compared(clients: int) -> None:
    before = {"client-1": -1.0}
    assert update_standings(before, make_round(1, 1, clients), 2.0) == before


def test_equal_changes_and_none() -> None:
    same = dict.fromkeys("abcdef", sketch({"w": draw(1)}))
    assert set(update_standings({}, same, 2.0).values()) == {0.0}
    none = same | {"g": torch.zeros_like(same["a"])}
    assert update_standings({}, none, 2.0).keys() == same.keys()


def test_the_formula_by_hand() -> None:
    rows = {name: sketch({"w": draw(seed)}) for seed, name in enumerate("abcde")}
    before = {"b": -2.25}
    cosines = {}
    for name, own in rows.items():
        rest = sum(
            (0.5 if other == "b" else 1.0) * row for other, row in rows.items() if other != name
        )
        assert isinstance(rest, Tensor)
        cosines[name] = float(own @ rest / rest.norm())
    middle = sorted(cosines.values())[2]
    spread = 1.4826 * sorted(abs(each - middle) for each in cosines.values())[2] + 0.05
    found = update_standings(before, rows, 2.0)
    for name in "acde":
        assert found[name] == pytest.approx((cosines[name] - middle) / spread)
    now = (cosines["b"] - middle) / spread
    assert found["b"] == pytest.approx(-2.25 + 0.01 * (now + 2.25))


@pytest.mark.parametrize(
    ("standing", "part"), [(0.0, 1.0), (-2.0, 1.0), (-2.25, 0.5), (-2.5, 0.0), (-6.0, 0.0)]
)
def test_trust_falls_over_half_a_deviation(standing: float, part: float) -> None:
    assert trusted(standing, 2.0) == pytest.approx(part)


class TurningEngine(MeddledEngine):
    """An engine one of whose clients turns the sign of its change."""

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


def test_a_turned_sign_counts_for_nothing(tmp_path: Path) -> None:
    save_images(tmp_path / "one.npz", num_train=300)
    experiment = small(
        tmp_path, "fedavg", clients=8, validation__bounds="on", partition__kind="iid"
    )
    attacked = build_federation(experiment, TurningEngine)
    for _ in range(3):
        record = attacked.run_round(evaluate=False)
    assert record.processed[DIRECTION] == [VICTIM]
    assert attacked.state.standings[VICTIM] < -2
    honest = build_federation(experiment)
    for _ in range(3):
        assert DIRECTION not in honest.run_round(evaluate=False).processed
