"""Groups of clients: all clients in order, and no group with too many inputs."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tasks import NUM_INPUTS, make_client

from mpfedcl.engines import in_process
from mpfedcl.engines.in_process import group_clients


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 5), st.integers(1, 12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_groups_are_full_and_bounded(
    monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], most: int, rows: int
) -> None:
    monkeypatch.setattr(in_process, "MOST_INPUTS", rows * NUM_INPUTS)
    clients = [make_client(size, number) for number, size in enumerate(sizes)]
    groups = list(group_clients(clients, most))
    assert [each for group in groups for each in group] == clients
    for number, group in enumerate(groups):
        held = sum(len(each.labels) for each in group)
        assert len(group) == 1 or (held <= rows and len(group) <= most)
        if number + 1 < len(groups):
            # The next client would have exceeded the limit.
            following = groups[number + 1][0]
            assert len(group) == most or held + len(following.labels) > rows
