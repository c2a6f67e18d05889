"""Which settings are tried: the defaults, each once, learning rates in turn."""

from collections import Counter
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import built_in_methods
from mpfedcl.studies.tuning import SearchSpace, build_grid, count_settings, draw_settings

RATES = (0.01, 0.03, 0.1, 0.3)


def draw(
    grid: SearchSpace, defaults: dict[str, Any], budget: int, seed: int
) -> list[dict[str, Any]]:
    return draw_settings(grid, defaults, budget, numpy.random.default_rng(seed))


@st.composite
def grids(choose_settings: st.DrawFn) -> tuple[SearchSpace, dict[str, Any]]:
    sizes = choose_settings(st.lists(st.integers(1, 4), max_size=4))
    grid: SearchSpace = {
        f"hyperparameter-{number}": tuple(range(size)) for number, size in enumerate(sizes)
    }
    if choose_settings(st.booleans()):
        grid["train__lr"] = choose_settings(st.sampled_from([RATES, RATES[:3], RATES[:1]]))
    return grid, {name: choose_settings(st.sampled_from(values)) for name, values in grid.items()}


@settings(deadline=None)
@given(grids(), st.integers(1, 40), st.integers(0, 1000))
def test_defaults_come_first_and_points_are_distinct(
    drawn: tuple[SearchSpace, dict[str, Any]], budget: int, seed: int
) -> None:
    grid, defaults = drawn
    found = draw(grid, defaults, budget, seed)
    assert found == draw(grid, defaults, budget, seed)
    assert found[0] == defaults
    assert len(found) == min(budget, count_settings(grid))
    assert len({tuple(each.items()) for each in found}) == len(found)
    for each in found:
        assert list(each) == list(grid)
        assert all(value in grid[name] for name, value in each.items())
    if "train__lr" in grid:
        times = Counter(each["train__lr"] for each in found)
        assert len(times) == min(len(grid["train__lr"]), len(found))
        assert max(times.values()) - min(times.values()) <= 1
        # The learning rate alone is changed first.
        for each in found[: len(grid["train__lr"])]:
            assert {**each, "train__lr": None} == {**defaults, "train__lr": None}


def test_other_seeds_draw_other_points() -> None:
    grid: SearchSpace = {"train__lr": RATES, "hyperparameter": tuple(range(50))}
    defaults = {"train__lr": 0.01, "hyperparameter": 0}
    assert draw(grid, defaults, 12, 0) != draw(grid, defaults, 12, 1)


def test_large_grid_is_not_enumerated() -> None:
    grid: SearchSpace = {f"hyperparameter-{number}": tuple(range(10)) for number in range(12)}
    assert len(draw(grid, dict.fromkeys(grid, 0), 12, 0)) == 12


@pytest.mark.parametrize("budget", [1, 4, 12, 16, 30])
@pytest.mark.parametrize("method", built_in_methods().values(), ids=lambda each: each.name)
def test_every_method_gets_the_same_number_of_trials(method: Any, budget: int) -> None:
    base = Experiment(method=method.name).resolved(method.defaults)
    grid = build_grid(method.search_space, base, budget)
    defaults = {name: base.setting(name) for name in grid}
    found = draw(grid, defaults, budget, 0)
    # One-shot methods have nothing to choose.
    assert len(found) == (budget if method.search_space else 1)
    assert base.replace(**found[0]) == base
    for each in found:
        base.replace(**each)


def test_few_hyperparameters_get_more_learning_rates() -> None:
    grid = build_grid({"train__lr": RATES}, Experiment(), 12)
    assert set(RATES) <= set(grid["train__lr"])
    assert len(grid["train__lr"]) == 13
    assert grid["train__lr"][:3] == (0.01, 0.0132, 0.0173)
    # No more than are needed.
    assert build_grid({"train__lr": RATES}, Experiment(), 4)["train__lr"] == RATES
    assert len(build_grid({"train__lr": RATES}, Experiment(), 5)["train__lr"]) == 7


def test_learning_rates_are_not_refined_forever() -> None:
    grid = build_grid({"train__lr": (0.1, 0.101)}, Experiment().replace(train__lr=0.1), 9)
    assert count_settings(grid) < 9
    assert build_grid({"train__lr": (0.01,)}, Experiment(), 9) == {"train__lr": (0.01,)}


def test_defaults_are_added_to_the_grid() -> None:
    base = Experiment().replace(train__lr=0.05, contrast__weight=1, prototypes__pool_ttl=7)
    more = {"contrast__weight": (1.0, 2.0), "prototypes__pool_ttl": (1, 2)}
    grid = build_grid({"train__lr": RATES, **more}, base, 2)
    assert grid["train__lr"] == (0.01, 0.03, 0.05, 0.1, 0.3)
    assert grid["contrast__weight"] == (1.0, 2.0)
    assert grid["prototypes__pool_ttl"] == (7, 1, 2)


def test_unknown_settings_in_a_search_space_are_refused() -> None:
    with pytest.raises(InvalidInput, match="each must name a setting, such as train__lr"):
        build_grid({"train__speed": (1, 2)}, Experiment(), 2)
