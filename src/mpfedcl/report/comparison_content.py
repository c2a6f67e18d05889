"""What figures read in comparison.json, also in one of an older version."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

from mpfedcl.methods import Test
from mpfedcl.report.number_formatting import finite_values, mean

MOST_CLIENTS = 40
"""Columns of a heat map with a client each; more clients are sorted into `PARTS`."""
PARTS = 20
_DEALT = re.compile(r"client-\d+")
"""Clients that a partition has made: with another seed, such a client is another one."""
Content = Mapping[str, Any]
"""What comparison.json holds."""
_ACCURACY: Mapping[Test, str] = {"local_test": "accuracy", "global_test": "accuracy_global"}
_TITLES: Mapping[Test, str] = {"local_test": "local test set", "global_test": "global test set"}


def tests_of(content: Content) -> dict[Test, str]:
    """Return the tests with their titles: one where all clients share it."""
    methods = content["methods"].values()
    if content.get("shared_test", all(e["accuracy"] == e["accuracy_global"] for e in methods)):
        return {"local_test": "test of all clients"}
    return dict(_TITLES)


def values_of(content: Content, test: Test) -> dict[str, list[float | None]]:
    """Return each method's accuracy per seed on a test."""
    return {name: list(entry[_ACCURACY[test]]) for name, entry in content["methods"].items()}


def diverged_seeds(content: Content, method: str) -> list[bool]:
    """Tell for each seed whether it diverged; older files know only that a number is missing."""
    entry = content["methods"][method]
    told = set(entry.get("diverged", ()))
    return [
        seed in told or value is None
        for seed, value in zip(content["seeds"], entry["accuracy"], strict=True)
    ]


@dataclass(frozen=True)
class ClientGrid:
    """Accuracies of a heat map: a row for each method, NaN for what is not known."""

    rows: dict[str, list[float]]
    columns: list[str]
    about: str
    """What the columns are."""


def client_grid(content: Content) -> ClientGrid:
    """Return accuracy per client, a row per method, the worst served first.

    A client is a column where it is the same one for every seed. Where clients are dealt anew for
    each seed, or are too many, those of each run are sorted from worst to best, put into at most
    `PARTS` parts of equal size, and these are averaged over seeds.
    """
    by_method = {
        name: {client: list(values) for client, values in entry["accuracy_per_client"].items()}
        for name, entry in content["methods"].items()
    }
    clients = list(dict.fromkeys(client for row in by_method.values() for client in row))
    seeds = max((len(each) for row in by_method.values() for each in row.values()), default=0)
    dealt = all(_DEALT.fullmatch(client) for client in clients)
    if len(clients) <= MOST_CLIENTS and (seeds < 2 or not dealt):
        return _grid_of_clients(by_method, clients)
    parts = min(PARTS, len(clients))
    rows = {
        name: _mean_columns([sorted_parts(list(run), parts) for run in zip_longest(*row.values())])
        for name, row in by_method.items()
    }
    if len(clients) <= PARTS:
        columns = ["worst", *(str(place) for place in range(2, parts)), "best"][-parts:]
        return ClientGrid(rows, columns, "each run's clients from worst to best, mean over seeds")
    step = 100 // parts
    columns = [f"{step * part}-{step * (part + 1)} %" for part in range(parts)]
    about = f"each run's clients from worst to best in {parts} equal parts, mean over seeds"
    return ClientGrid(rows, columns, about)


def _grid_of_clients(
    by_method: Mapping[str, Mapping[str, Sequence[float | None]]], clients: Sequence[str]
) -> ClientGrid:
    means = {
        name: {client: _mean_or_nan(values) for client, values in row.items()}
        for name, row in by_method.items()
    }
    served = {c: _mean_or_nan([row.get(c) for row in means.values()]) for c in clients}
    ordered = sorted(clients, key=lambda client: (math.isnan(served[client]), served[client]))
    rows = {name: [row.get(each, math.nan) for each in ordered] for name, row in means.items()}
    return ClientGrid(
        rows, ordered, "clients from worst to best by the mean over methods and seeds"
    )


def sorted_parts(values: Sequence[float | None], parts: int = PARTS) -> list[float]:
    """Return the means of equal parts of the sorted numbers, from the lowest; NaN of none."""
    known = sorted(finite_values(values))
    ends = [len(known) * part // parts for part in range(parts + 1)]
    return [_mean_or_nan(known[start:end]) for start, end in pairwise(ends)]


def _mean_columns(rows: Sequence[Sequence[float]]) -> list[float]:
    return [_mean_or_nan(column) for column in zip(*rows, strict=True)]


def _mean_or_nan(values: Sequence[float | None]) -> float:
    found = mean(finite_values(values))
    return math.nan if found is None else found
