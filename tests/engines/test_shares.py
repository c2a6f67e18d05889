"""Who trains which clients: everybody once, and all processes done at about the same time."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.data.client_data import ClientData
from mpfedcl.engines import assign_clients, movable_work
from mpfedcl.engines.shares import LEADERS_OWN, Share
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.models import Cnn, Mlp, Model
from mpfedcl.rounds.assembly import Assembly, assemble

WORK = st.dictionaries(st.text(min_size=1, max_size=4), st.integers(1, 100), max_size=30)
SIZES = st.integers(1, 5)


def of(part: float) -> Callable[[int], float]:
    """Return the same part of clients of any size."""
    return lambda _: part


def loads(shares: list[Share], work: dict[str, int], movable: float) -> list[float]:
    """Count by hand: own clients, less what the next process takes of them, and what is begun."""
    found = []
    for rank, share in enumerate(shares):
        load = float(sum(work[name] for name in share.names))
        if share.begun is not None:
            load += share.part * movable * work[share.begun]
        if share.finished is not None:
            load -= shares[rank + 1].part * movable * work[share.finished]
        found.append(load)
    return found


@given(WORK, SIZES)
@settings(deadline=None, max_examples=100)
def test_everyone_is_dealt_out_once_and_evenly(work: dict[str, int], size: int) -> None:
    shares = [share.names for share in assign_clients(work, size)]
    assert sorted(name for share in shares for name in share) == sorted(work)
    assert all(share == sorted(share) for share in shares)
    loads = [sum(work[name] for name in share) for share in shares]
    # Taking the largest first, no process is ahead of another by more than one client.
    assert max(loads) - min(loads) <= max(work.values(), default=0)


def test_the_deal_does_not_depend_on_the_order_of_names() -> None:
    work = {"b": 3, "a": 3, "c": 3, "d": 1}
    for movable in (None, of(0.75)):
        turned = dict(reversed(work.items()))
        assert assign_clients(work, 2, movable=movable) == assign_clients(
            turned, 2, movable=movable
        )
    # The leader has the lighter share.
    assert [share.names for share in assign_clients(work, 2)] == [["b", "d"], ["a", "c"]]


@given(WORK, SIZES, st.floats(0.3, 1.0))
@settings(deadline=None, max_examples=200)
def test_parts_fit_each_other_and_the_longest_share_is_never_longer(
    work: dict[str, int], size: int, movable: float
) -> None:
    shares, whole = assign_clients(work, size, movable=of(movable)), assign_clients(work, size)
    assert sorted(name for share in shares for name in share.names) == sorted(work)
    assert shares[0].begun is None
    assert shares[-1].finished is None
    for share, following in pairwise(shares):
        assert share.finished == following.begun
        if share.finished is not None:
            assert share.finished in share.names
            assert 0 < following.part < 1
    assert max(loads(shares, work, movable)) <= max(loads(whole, work, movable)) + 1e-9


@pytest.mark.parametrize(("count", "size"), [(5, 2), (5, 4), (7, 3)])
def test_clients_of_one_size_are_split_without_a_rest(count: int, size: int) -> None:
    work = dict.fromkeys("abcdefgh"[:count], 100)
    leader, *others = loads(assign_clients(work, size, movable=of(1.0)), work, 1.0)
    assert leader == pytest.approx((1 - LEADERS_OWN) * others[0])
    assert others == pytest.approx([others[0]] * (size - 1))
    # Where nothing would be gained all stay whole.
    even = dict.fromkeys("abcd", 100)
    assert assign_clients(even, 2, movable=of(1.0)) == assign_clients(even, 2)


def test_five_clients_on_two_processes_by_hand() -> None:
    first, second = assign_clients(dict.fromkeys("abcde", 197), 2, movable=of(0.75))
    # 985 are 485 for the leader and 500: it has 91 of the third client, the other one 106.
    assert first == Share(["a", "b", "c"], finished="c")
    assert (second.names, second.begun) == (["d", "e"], "c")
    # Of its steps, which are three quarters of it.
    assert second.part == pytest.approx(106 / (0.75 * 197))


def assembly(method: str, model: Model | None = None, **changes: object) -> Assembly:
    found = find_method(method)
    experiment = Experiment(method=method).replace(**changes).resolved(found.defaults)
    return assemble(experiment, model or Mlp((36, 256, 256), 3), num_classes=3, input_size=36)


def test_steps_move_only_where_they_can_be_continued() -> None:
    client = ClientData("a", torch.rand(4, 36), torch.tensor([0, 1, 2, 0]), torch.arange(0))

    def part(given: Assembly, size: int = 1000, num_together: int = 2) -> float | None:
        movable = movable_work(given, client, num_together)
        return movable and movable(size)

    assert part(assembly("fedavg")) == 1
    assert part(assembly("mp-fedcl")) == 3 / 4
    assert part(assembly("mp-fedcl", train__epochs=2)) == 6 / 7
    # Many small clients are trained as rows, all together.
    assert part(assembly("fedavg"), 20, 50) == 0
    stays = [
        assembly("local"),
        assembly("fedgauss"),
        assembly("fedper"),
        assembly("scaffold"),
        assembly("fedavg", engine="loop"),
        assembly("fedavg", fraction=0.5),
        # Weights are used otherwise than in layers.
        assembly("fedprox"),
        assembly("fedavg", Cnn((6, 6, 1), 3)),
    ]
    assert [part(each) for each in stays] == [None] * len(stays)


def test_a_client_that_cannot_be_split_stays_whole() -> None:
    work = {"a": 60, "b": 80, "c": 60}
    assert assign_clients(work, 2, movable=of(0.0)) == assign_clients(work, 2)
