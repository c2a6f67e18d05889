"""Byzantine-robust rules against loops from the papers' formulas and malicious clients."""

import itertools
import math
from collections.abc import Sequence

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation import RuleOverAll, find_aggregator

ROBUST = (
    *("median", "trimmed-mean", "krum", "multi-krum"),
    *("geometric-median", "centered-clipping"),
)
Rows = NDArray[numpy.float64]


def combine(rule: str, rows: Rows | Sequence[Sequence[float]], **settings: object) -> Rows:
    """Return a rule's result for clients of two tensors: one value and the rest."""
    made = make(rule, rows, **settings)
    found = made.result()
    return numpy.concatenate([found["a"].numpy(), found["b"].numpy()])


def make(rule: str, rows: Rows | Sequence[Sequence[float]], **settings: object) -> RuleOverAll:
    experiment = Experiment(aggregation={"rule": rule, **settings})
    made = find_aggregator(rule)({}, experiment)
    assert isinstance(made, RuleOverAll)
    for number, row in enumerate(rows):
        values = torch.tensor(row, dtype=torch.float64)
        tensors = {"a": values[:1], "b": values[1:]}
        # Weights are claims of the clients and must not count.
        made.add(Update(f"client-{number:02}", 1, tensors, Prototypes.empty(2), 0.0), 10.0**number)
    return made


def draw(count: int, seed: int = 0) -> Rows:
    return numpy.random.default_rng(seed).normal(size=(count, 3))


@given(st.integers(3, 12), st.integers(0, 50), st.sampled_from([0.0, 0.2, 0.3]))
def test_trimmed_mean_drops_both_ends(count: int, seed: int, share: float) -> None:
    rows, wanted = draw(count, seed), []
    cut = min((count - 1) // 2, max(1, int(share * count + 1e-9)))
    for column in rows.T:
        kept = sorted(column)[cut : count - cut]
        wanted.append(sum(kept) / len(kept))
    numpy.testing.assert_allclose(combine("trimmed-mean", rows, attackers=share), wanted)


def score_by_krum(rows: Rows, attackers: int) -> list[float]:
    scores = []
    for i, one in enumerate(rows):
        away = sorted(sum((one - other) ** 2) for j, other in enumerate(rows) if j != i)
        scores.append(sum(away[: len(rows) - attackers - 2]))
    return scores


@given(st.integers(5, 12), st.integers(0, 50))
def test_krum_selects_the_update_with_the_nearest_neighbors(count: int, seed: int) -> None:
    rows = draw(count, seed)
    scores = score_by_krum(rows, max(1, int(0.2 * count + 1e-9)))
    numpy.testing.assert_allclose(combine("krum", rows), rows[scores.index(min(scores))])


@given(st.integers(5, 12), st.integers(0, 50))
def test_multi_krum_is_the_mean_of_the_best_updates(count: int, seed: int) -> None:
    rows, attackers = draw(count, seed), max(1, int(0.2 * count + 1e-9))
    scores = score_by_krum(rows, attackers)
    best = sorted(range(count), key=scores.__getitem__)[: count - attackers]
    numpy.testing.assert_allclose(combine("multi-krum", rows), rows[best].mean(0))


@given(st.integers(3, 12), st.integers(0, 50))
def test_geometric_median_minimizes_the_sum_of_distances(count: int, seed: int) -> None:
    rows = draw(count, seed)
    found = combine("geometric-median", rows)

    def total(point: Rows) -> float:
        return sum(math.dist(point, row) for row in rows)

    best = total(found)
    for step, axis, sign in itertools.product((1e-2, 1e-3), range(3), (-1, 1)):
        moved = found.copy()
        moved[axis] += sign * step
        assert best <= total(moved) + 1e-9
    assert best <= min(map(total, rows)) + 1e-4


def test_geometric_median_of_a_triangle_is_its_fermat_point() -> None:
    # The Fermat point of an equilateral triangle is its center; with an angle of 120 degrees or
    # more it is that corner.
    triangle = [[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]]
    numpy.testing.assert_allclose(
        combine("geometric-median", triangle), [0.5, math.sqrt(3) / 6], atol=1e-9
    )
    flat = [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.1]]
    numpy.testing.assert_allclose(combine("geometric-median", flat), [0.0, 0.1], atol=1e-4)


@given(st.integers(1, 12), st.integers(0, 50))
def test_centered_clipping_equals_the_loop_of_the_paper(count: int, seed: int) -> None:
    rows = draw(count, seed)
    middles = []
    for one in rows:
        away = sorted(math.dist(one, other) for other in rows)
        middles.append(away[(count - 1) // 2])
    center = rows[middles.index(min(middles))]
    for _ in range(3):
        away = [math.dist(row, center) for row in rows]
        radius = numpy.median(away)
        steps = [
            (row - center) * (min(1.0, radius / far) if far else 1.0)
            for row, far in zip(rows, away, strict=True)
        ]
        center = center + sum(steps) / count
    numpy.testing.assert_allclose(combine("centered-clipping", rows), center, atol=1e-9)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_result_of_equal_updates_is_that_update(rule: str, count: int) -> None:
    row = [0.1, -2.0, 1e5]
    numpy.testing.assert_allclose(combine(rule, [row] * count), row, rtol=1e-12)


@pytest.mark.parametrize("rule", ROBUST)
def test_result_for_two_clients_is_on_the_line_between_them(rule: str) -> None:
    found = combine(rule, [[0.0, 0.0], [2.0, 4.0]])
    numpy.testing.assert_allclose(found, [1.0, 2.0], atol=1.0 + 1e-9)
    assert found[1] == pytest.approx(2 * found[0])


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("attack", [1e6, -1e30, 3.0])
def test_result_with_a_fifth_of_malicious_clients_stays_near_the_honest_mean(
    rule: str, attack: float
) -> None:
    rows = draw(10)
    honest = rows[2:].copy()
    rows[:2] = attack
    found = combine(rule, rows)
    # The result is no farther from the honest mean than the farthest honest client.
    farthest = max(math.dist(row, honest.mean(0)) for row in honest)
    assert math.dist(found, honest.mean(0)) <= farthest


@pytest.mark.parametrize("rule", ROBUST)
def test_order_of_clients_does_not_matter(rule: str) -> None:
    rows = draw(9)
    wanted = combine(rule, rows)
    for seed in range(3):
        order = numpy.random.default_rng(seed).permutation(9)
        numpy.testing.assert_allclose(combine(rule, rows[order]), wanted, atol=1e-9)


@pytest.mark.parametrize("rule", ROBUST)
def test_ties_are_broken_by_name(rule: str) -> None:
    rows = [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.5, 0.5]]
    assert numpy.array_equal(combine(rule, rows), combine(rule, rows))
    if rule == "krum":
        assert combine(rule, rows).tolist() == [0.0, 0.0]


def test_too_few_updates_are_recorded() -> None:
    made = make("krum", draw(2))
    numpy.testing.assert_allclose(made.result()["a"].numpy(), draw(2).mean(0)[:1])
    assert made.remarks() == ["Among 2 updates the rule krum withstands 0 hostile ones."]
    made = make("median", draw(10), attackers=0.4)
    made.result()
    assert made.remarks() == []


@pytest.mark.parametrize(
    ("rule", "clients", "settings", "most"),
    [
        ("krum", 5, {"attackers": 0.4}, "2 of a round's 5 clients; it must be at most 0.2"),
        ("multi-krum", 9, {"attackers": 0.45}, "aggregation.rule multi-krum withstands 3"),
    ],
)
def test_more_attackers_than_a_rule_withstands_are_rejected(
    rule: str, clients: int, settings: dict[str, float], most: str
) -> None:
    experiment = Experiment(aggregation={"rule": rule, **settings})
    with pytest.raises(InvalidInput) as caught:
        find_aggregator(rule).check(experiment, clients)
    assert most in str(caught.value)
    find_aggregator(rule).check(experiment.replace(aggregation__attackers=0.1), clients)
