"""Assignment of clients to processes: each client once, and about the same work for all."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.engines.worker_group import assign_clients

WORK = st.dictionaries(st.text(min_size=1, max_size=4), st.integers(1, 100), max_size=30)


@given(WORK, st.integers(1, 5))
@settings(deadline=None, max_examples=100)
def test_each_client_is_assigned_once_and_evenly(work: dict[str, int], size: int) -> None:
    shares = assign_clients(work, size)
    assert sorted(name for share in shares for name in share) == sorted(work)
    assert all(share == sorted(share) for share in shares)
    loads = [sum(work[name] for name in share) for share in shares]
    # With the largest first, two processes differ by at most one client.
    assert max(loads) - min(loads) <= max(work.values(), default=0)


def test_assignment_does_not_depend_on_the_order_of_names() -> None:
    work = {"b": 3, "a": 3, "c": 3, "d": 1}
    assert assign_clients(work, 2) == assign_clients(dict(reversed(work.items())), 2)
    # The leader has the lighter share.
    assert assign_clients(work, 2) == [["b", "d"], ["a", "c"]]
