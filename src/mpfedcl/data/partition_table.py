"""Who holds what, in plain values for partition.json: by client, or, of many, in a few lists."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpfedcl.data.train_test_split import Indices

MOST_NAMED = 1000
"""Clients up to which each has an entry of its own; of more there are lists, which are quick to
write and to read."""
_DIGITS = 7
"""Of a mean in such a list: more than two machines agree on."""


def describe_clients(names: Sequence[str], counts: Indices, tests: Indices) -> dict[str, Any]:
    """Return training images by class [clients, classes], and the number of test images."""
    train, test = counts.tolist(), tests.tolist()
    if len(names) > MOST_NAMED:
        return {"table": {"names": list(names), "train": train, "test": test}}
    parts = zip(names, train, test, strict=True)
    return {"clients": {name: {"train": own, "test": tested} for name, own, tested in parts}}


def with_input_means(partition: Mapping[str, Any], means: Sequence[float]) -> dict[str, Any]:
    """Return a description that also has the mean of each client's inputs, in their order."""
    if (table := partition.get("table")) is None:
        by_name = zip(partition["clients"], means, strict=True)
        return {**partition, "input_means": dict(by_name)}
    rounded = [float(f"{mean:.{_DIGITS}g}") for mean in means]
    return {**partition, "table": {**table, "input_means": rounded}}


def expand_table(partition: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description with an entry for each client, whichever form it has."""
    rest = {name: value for name, value in partition.items() if name != "table"}
    if (table := partition.get("table")) is None:
        return rest
    names = table["names"]
    parts = zip(names, table["train"], table["test"], strict=True)
    clients = {name: {"train": own, "test": tested} for name, own, tested in parts}
    means = dict(zip(names, table.get("input_means", ()), strict=False))
    return {**rest, "clients": clients, "input_means": means}


def compact_table(partition: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description as the file has it: lists where there are many clients."""
    clients, means = partition.get("clients", {}), partition.get("input_means", {})
    # A list has a number for each of them, or there is none.
    if len(clients) <= MOST_NAMED or (means and means.keys() != clients.keys()):
        return dict(partition)
    table = {
        "names": list(clients),
        "train": [each["train"] for each in clients.values()],
        "test": [each["test"] for each in clients.values()],
        **({"input_means": [means[name] for name in clients]} if means else {}),
    }
    own = ("clients", "input_means")
    return {**{n: value for n, value in partition.items() if n not in own}, "table": table}


def is_same_partition(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether two descriptions are of the same partition, up to rounding in the inputs."""
    before, now = expand_table(before), expand_table(now)
    if before == now:
        return True
    # Older runs have neither a shape nor all means on record.
    means = {**now["input_means"], **before.get("input_means", {})}
    return _is_close({"input_shape": now.get("input_shape"), **before, "input_means": means}, now)


def _is_close(before: Any, now: Any) -> bool:
    if isinstance(before, dict) and isinstance(now, dict):
        names = before.keys()
        return names == now.keys() and all(_is_close(before[each], now[each]) for each in names)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_is_close, before, now))
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=1e-4, abs_tol=1e-6)
    return bool(before == now)
