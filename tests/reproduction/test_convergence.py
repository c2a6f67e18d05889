"""The bounds of the convergence section, on values that can be checked by hand, and on runs."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mpfedcl import Experiment, run
from reproduction.convergence import (
    BOUNDS,
    Constants,
    Measurement,
    Round,
    find_bounds,
    judge,
    read_rounds,
    summarize,
)

NUMBERS = st.floats(0.001, 1000)


def measure(**changes: float) -> Measurement:
    """Return a client whose loss fell from 3 by 1 and rose by 0.25 with the new pool."""
    plain = Measurement(
        num_samples=10,
        objective_before=3.0,
        objective_after_one_step=2.9,
        objective_after_training=2.0,
        objective_after_pool=2.25,
        objective_after_aggregation=2.5,
        gradient_norm=2.0,
        stochastic_gradient_norm=2.5,
        step=0.5,
        smoothness=4.0,
        slope=2.0,
        embedding_slope=0.25,
        embedding_length=1.0,
    )
    return replace(plain, **changes)


def measure_round(
    *clients: Measurement, rate: float = 0.1, factor: float = 2.0, gradient: float = 1.0
) -> Round:
    named = {f"client-{number}": client for number, client in enumerate(clients)}
    return Round(rate, factor, gradient, named)


def measure_quadratics(point: float, distance: float, rate: float) -> Round:
    """Return one plain step of two clients, L = (w - distance)²/2 and L = (w + distance)²/2.

    Both are convex and 1-smooth, all samples are alike, and there is no pool.
    """
    clients = []
    for centre in (distance, -distance):
        gap = point - centre
        before, after = gap**2 / 2, ((1 - rate) * gap) ** 2 / 2
        # The average has moved by rate * point, since the clients' pulls to either side cancel.
        averaged = ((1 - rate) * point - centre) ** 2 / 2
        clients.append(
            measure(
                objective_before=before,
                objective_after_one_step=after,
                objective_after_training=after,
                objective_after_pool=after,
                objective_after_aggregation=averaged,
                gradient_norm=abs(gap),
                stochastic_gradient_norm=abs(gap),
                step=rate * abs(gap),
                smoothness=1.0,
                slope=(1 - rate / 2) * abs(gap),
            )
        )
    return measure_round(*clients, rate=rate, factor=0.0, gradient=abs(point))


def test_the_formulas_by_hand() -> None:
    measured = measure_round(measure(), rate=0.1, factor=2.0, gradient=0.5)
    constants = Constants(4.0, 2.0, 16.0, 2.5, 0.25)
    bounds = find_bounds(measured, measure(), constants)
    # η - L1 η²/2 = 0.1 - 4 * 0.01 / 2 = 0.08, and δ² |∇L|² = 16 * 0.25 = 4.
    assert bounds.decrease == pytest.approx(0.32)
    assert bounds.own_decrease == pytest.approx(0.08 * 4)
    # 2 * 0.25 * 2.5 * 1 = 1.25, times η.
    assert bounds.increase == pytest.approx(0.125)
    assert bounds.largest_learning_rate == pytest.approx(2 / 4 - 2 * 1.25 / (4 * 4))
    assert judge(measured, measure(), constants) == {
        "lemma_1": True,  # 2 <= 3 - 0.32
        "lemma_2": False,  # 2.25 <= 2 + 0.125
        "theorem_1": True,  # 2.25 <= 3 - 0.32 + 0.125
        "corollary_1": True,  # 0.1 <= 0.34
        "lemma_1_one_step": False,  # 2.9 <= 2.68
        "descent_one_step": False,
        "falls_in_training": True,
        "falls_over_round": True,
        "falls_to_average": True,
    }


def test_lemma_1_fails_where_all_its_assumptions_hold() -> None:
    """Assumption 2 bounds E|∇L_i|² from above; the lemma uses it as if from below."""
    far, near = measure_quadratics(2.0, 1.0, 0.5), measure_quadratics(1.0, 1.0, 0.5)
    assert far.dissimilarity == pytest.approx(5 / 4)
    assert near.dissimilarity == pytest.approx(2.0)
    constants = Constants().raised(far).raised(near)
    assert constants.smoothness == 1.0
    right, left = far.clients.values()
    # η - η²/2 = 3/8: the lemma promises 3/8 * 2 * 4 = 3 to each client; the squares of their own
    # gradients are 1 and 9.
    assert find_bounds(far, right, constants).decrease == pytest.approx(3.0)
    assert right.objective_before - right.objective_after_training == pytest.approx(3 / 8)
    assert judge(far, right, constants)["lemma_1"] is False
    assert judge(far, left, constants)["lemma_1"] is True
    # On average over clients it falls short as well: 3/8 * 5 is less than 3.
    assert judge(far, far.mean, constants)["lemma_1"] is False
    # The textbook's bound, by each client's own gradient, is met with equality.
    for client in (right, left):
        own = find_bounds(far, client, constants).own_decrease
        assert client.objective_before - client.objective_after_one_step == pytest.approx(own)


@given(
    point=st.floats(0.1, 10), distance=st.floats(0.1, 10), rate=st.floats(0.05, 1), other=NUMBERS
)
def test_two_quadratics_anywhere(point: float, distance: float, rate: float, other: float) -> None:
    assume(abs(point - distance) > 0.01)
    measured = measure_quadratics(point, distance, rate)
    assert measured.dissimilarity == pytest.approx(1 + (distance / point) ** 2)
    constants = Constants().raised(measured)
    right, _ = measured.clients.values()
    # The client whose optimum lies on the side of w moves less than the clients' mean square says.
    assert judge(measured, right, constants)["lemma_1"] is False
    # The more the clients differ, the larger the decrease that the lemma promises.
    wider = replace(constants, dissimilarity=constants.dissimilarity + other)
    promised = [find_bounds(measured, right, each).decrease for each in (constants, wider)]
    assert promised[0] < promised[1]


@given(rate=NUMBERS, factor=NUMBERS, gradient=NUMBERS, numbers=st.lists(NUMBERS, min_size=5))
def test_corollary_1_is_where_theorem_1_allows_no_rise(
    rate: float, factor: float, gradient: float, numbers: list[float]
) -> None:
    measured = measure_round(measure(), rate=rate, factor=factor, gradient=gradient)
    constants = Constants(*numbers[:5])
    bounds = find_bounds(measured, measure(), constants)
    assume(not math.isclose(bounds.decrease, bounds.increase, rel_tol=1e-6))
    assume(not math.isclose(rate, bounds.largest_learning_rate, rel_tol=1e-6))
    met = judge(measured, measure(), constants)["corollary_1"]
    assert met is (bounds.increase <= bounds.decrease)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(-9, 9), st.floats(-9, 9)), min_size=1))
def test_clients_are_never_less_than_dissimilar(gradients: list[tuple[int, float, float]]) -> None:
    weight = sum(size for size, *_ in gradients)
    mean = [sum(size * each[axis] for size, *each in gradients) / weight for axis in (0, 1)]
    assume(math.hypot(*mean) > 1e-3)
    clients = [measure(num_samples=n, gradient_norm=math.hypot(x, y)) for n, x, y in gradients]
    measured = measure_round(*clients, gradient=math.hypot(*mean))
    assert measured.dissimilarity >= 1 - 1e-9
    square = sum(n * (x * x + y * y) for n, x, y in gradients) / weight
    assert measured.dissimilarity == pytest.approx(square / math.hypot(*mean) ** 2)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_judged(broken: float) -> None:
    client = measure(objective_after_pool=broken, smoothness=broken)
    measured = measure_round(client)
    constants = Constants().raised(measured)
    assert constants.smoothness == 0
    holds = judge(measured, client, constants)
    assert holds["lemma_2"] is holds["theorem_1"] is holds["falls_over_round"] is None
    assert holds["falls_in_training"] is True


def test_huge_numbers_are_no_error() -> None:
    client = measure(gradient_norm=1e200)
    measured = measure_round(client, gradient=1e200)
    holds = judge(measured, client, Constants().raised(measured))
    assert holds["descent_one_step"] is None
    assert holds["falls_in_training"] is True


def test_a_loss_without_prototypes_is_not_moved_by_the_pool() -> None:
    client = measure(objective_after_pool=2.0, embedding_length=math.nan)
    measured = measure_round(client, factor=0.0)
    constants = Constants().raised(measured)
    bounds = find_bounds(measured, client, constants)
    assert bounds.increase == 0
    assert bounds.largest_learning_rate == pytest.approx(2 / 4)
    assert judge(measured, client, constants)["lemma_2"] is True


def test_where_lemma_2_says_nothing() -> None:
    measured = measure_round(measure(), factor=math.nan)
    holds = judge(measured, measure(), Constants().raised(measured))
    names = ("lemma_2", "theorem_1", "corollary_1")
    assert [holds[name] for name in names] == [None] * 3
    assert holds["lemma_1"] is not None


def test_the_summary_counts_by_constants_so_far_and_by_the_final_ones() -> None:
    # With L1 = 4 training must win 0.32, with L1 = 19 no more than 0.02 of it is left.
    weak = measure(objective_after_training=2.9, objective_after_pool=2.9)
    first = measure_round(weak, gradient=0.5)
    second = measure_round(measure(smoothness=19.0), measure(smoothness=1.0), gradient=2.0)
    found = summarize([first, second])
    assert found["held"].keys() == BOUNDS.keys()
    assert found["held"]["lemma_1"] == {"so far": (2, 3), "final": (3, 3), "mean": (2, 2)}
    sizes = found["sizes"]
    constants = [sizes[name] for name in ("L_1", "ζ", "δ²", "G", "L_2")]
    assert constants == [19.0, 2.0, 16.0, 2.5, 0.25]
    assert sizes["fall of L in training, measured"] == pytest.approx((0.1 + 1 + 1) / 3)
    assert sizes["rise by the new pool, measured"] == pytest.approx((0 + 0.25 + 0.25) / 3)
    # Steps of 0.5 with η |∇L_i| = 0.2: as far as two and a half plain steps.
    assert sizes["number of plain steps as long as one training"] == pytest.approx(2.5)


@pytest.mark.whole
def test_a_measured_run_against_its_own_records(tmp_path: Path) -> None:
    """One plain step per round: what is measured must be what training did."""
    settings = {
        "clients": 2,
        "rounds": 3,
        "engine": "loop",
        "dtype": "float64",
        "model__hidden": (16, 8),
        "train__batch_size": 10_000,
        "train__momentum": 0.0,
    }
    for method in ("MeasuredMpFedCL", "MeasuredFedAvg"):
        experiment = Experiment(method=f"reproduction.convergence:{method}").replace(**settings)
        records = run(experiment, tmp_path / method).history
        first, second = read_rounds(records)
        assert first.learning_rate == experiment.train.lr
        sees_pool = method == "MeasuredMpFedCL"
        # Round 1 begins without a pool, so that Lemma 2 says nothing of it.
        assert math.isnan(first.pool_factor) is sees_pool
        assert second.pool_factor == (pytest.approx(9 / 0.07) if sees_pool else 0)
        for name, client in first.clients.items():
            assert client.objective_after_one_step == pytest.approx(client.objective_after_training)
            assert client.step == pytest.approx(first.learning_rate * client.gradient_norm)
            assert client.stochastic_gradient_norm == pytest.approx(client.gradient_norm)
            changed = client.objective_after_pool != client.objective_after_training
            assert changed is sees_pool
            assert second.clients[name].objective_before == client.objective_after_aggregation
        # The records have the loss at the start of each client's only step.
        losses = sorted(records[0]["loss_per_client"].values())
        before = sorted(each.objective_before for each in first.clients.values())
        assert before == pytest.approx(losses)


@pytest.mark.whole
def test_measuring_does_not_change_training(tmp_path: Path) -> None:
    settings = {"clients": 2, "rounds": 2, "engine": "loop", "model__hidden": (16, 8)}
    plain = run(Experiment(method="mp-fedcl").replace(**settings), tmp_path / "plain")
    name = "reproduction.convergence:MeasuredMpFedCL"
    measured = run(Experiment(method=name).replace(**settings), tmp_path / "measured")
    for left, right in zip(plain.history, measured.history, strict=True):
        assert left["loss"] == right["loss"]
        assert left["accuracy"] == right["accuracy"]
