"""Tests of many crossed cases: `make test` takes some of them, `make test-all` all."""

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked `sampled(n)` take every n-th case, unless all are asked for."""
    if os.environ.get("MPFEDCL_CASES") == "all":
        return
    seen: dict[str, int] = {}
    left_out = []
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] = seen.get(test, -1) + 1
        if seen[test] % mark.args[0]:
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
