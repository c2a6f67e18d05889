"""The grid of a method's search_space, and which of its settings are tried."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment

LEARNING_RATE = "train__lr"

Knobs = dict[str, tuple[Any, ...]]
"""The values of each setting that is searched."""
KnobValues = dict[str, Any]
"""One value for each hyperparameter."""


def build_grid(
    search_space: Mapping[str, Sequence[Any]], base: Experiment, budget: int
) -> tuple[Knobs, KnobValues]:
    """Return the values to search and the base's own, which are always among them.

    A grid with fewer settings than the budget gets learning rates between those it has: who has
    few search_space is tried as often as who has many.
    """
    try:
        defaults = {name: base.setting(name) for name in search_space}
    except AttributeError:
        raise InvalidInput(
            f"the search_space of {base.method} are {', '.join(search_space)}; each must name a setting, such as "
            f"{LEARNING_RATE}."
        ) from None
    grid = {
        name: tuple(values) if defaults[name] in values else (defaults[name], *values)
        for name, values in search_space.items()
    }
    if LEARNING_RATE in grid:
        grid[LEARNING_RATE] = tuple(sorted(grid[LEARNING_RATE]))
    while LEARNING_RATE in grid and count_settings(grid) < budget:
        finer = _insert_midpoints(grid[LEARNING_RATE])
        if finer == grid[LEARNING_RATE]:
            break
        grid[LEARNING_RATE] = finer
    return grid, defaults


def count_settings(grid: Mapping[str, Sequence[Any]]) -> int:
    """Return how many settings a grid has."""
    return math.prod(len(values) for values in grid.values())


def draw_settings(
    grid: Knobs, defaults: KnobValues, budget: int, generator: numpy.random.Generator
) -> list[KnobValues]:
    """Draw `budget` different settings, or all there are.

    The defaults come first, then the defaults at each other learning rate, then what is drawn. Each
    learning rate is tried as often as the others, give or take one.
    """
    rates = grid.get(LEARNING_RATE, (None,))
    others = {name: values for name, values in grid.items() if name != LEARNING_RATE}
    shape = [len(values) for values in others.values()]
    size = math.prod(shape)
    at_default = [values.index(defaults[name]) for name, values in others.items()]
    default_rate = rates.index(defaults.get(LEARNING_RATE))
    default_number = int(numpy.ravel_multi_index(at_default, shape)) if shape else 0
    remaining = []
    for index in range(len(rates)):
        # Numbers in place of settings: a grid of many search_space is never written out.
        drawn = [int(each) for each in generator.choice(size, min(size, budget + 1), replace=False)]
        first = [] if index == default_rate else [default_number]
        remaining.append([*first, *(number for number in drawn if number != default_number)])
    order = [int(each) for each in generator.permutation(len(rates))]
    tried = [int(index == default_rate) for index in range(len(rates))]
    chosen = [dict(defaults)]
    while len(chosen) < budget and any(remaining):
        index = min((each for each in order if remaining[each]), key=lambda each: tried[each])
        number = remaining[index].pop(0)
        indices = numpy.unravel_index(number, shape) if shape else ()
        tried[index] += 1
        values = {
            name: choices[int(at)]
            for (name, choices), at in zip(others.items(), indices, strict=True)
        }
        if LEARNING_RATE in grid:
            values[LEARNING_RATE] = rates[index]
        chosen.append({name: values[name] for name in grid})
    return chosen


def _insert_midpoints(rates: Sequence[float]) -> tuple[float, ...]:
    """Return learning rates with the geometric means of neighbors between them."""
    between = [float(f"{math.sqrt(a * b):.3g}") for a, b in pairwise(rates)]
    return tuple(sorted({*rates, *between}))
