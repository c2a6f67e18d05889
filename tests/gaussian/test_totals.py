"""A federation known by totals alone: the same estimates as from each client's own means."""

import re
from collections.abc import Callable

import pytest
import torch
from clients_cases import Client, draw_clients, group_means
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import (
    add_statistics,
    estimate_effects,
    find_impossible_totals,
    own_statistics,
    pool_of_one,
    pooled_of_totals,
    sum_samples,
    totals_of_one,
)

_SIZES = [[9, 4, 0], [0, 12, 5], [6, 6, 6], [1, 0, 0]]


def own_pool(client: Client, num_classes: int) -> Tensors:
    sent = sum_samples(client.features, client.labels, num_classes, "within")
    return pool_of_one(own_statistics(sent), "within")


def totals(clients: list[Client], num_classes: int) -> Tensors:
    found: Tensors = {}
    for client in clients:
        found = add_statistics(
            found, totals_of_one(own_pool(client, num_classes), with_effects=True)
        )
    return found


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    sizes=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), min_size=2, max_size=5),
    shift=st.sampled_from([0.0, 0.5]),
    effect=st.sampled_from([0.0, 0.5]),
)
def test_effects_match_those_of_the_client_means(
    seed: int, sizes: list[list[int]], shift: float, effect: float
) -> None:
    sizes = [each if sum(each) else [1, *each[1:]] for each in sizes]
    clients = draw_clients(seed, sizes, shift=shift, effect=effect)
    groups, trace = group_means(clients, 3), 0.7
    summed = {name: value.double() for name, value in totals(clients, 3).items()}
    for name, value in groups.totals().items():
        torch.testing.assert_close(summed[name], value, rtol=1e-12, atol=1e-12)
    wanted = estimate_effects(groups.totals(), groups.class_means, trace)
    found = estimate_effects(summed, groups.class_means, trace)
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_totals_give_the_pooled_statistics() -> None:
    clients = draw_clients(1, _SIZES)
    summed = totals(clients, 3)
    wanted: Tensors = {}
    for client in clients:
        wanted = add_statistics(wanted, own_pool(client, 3))
    found = pooled_of_totals(summed)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    # Counts are exact in a ring of integers, however large.
    assert summed["counts_squared"].dtype == torch.int64
    assert find_impossible_totals(summed) is None


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("counts", lambda v: v - 100, "counts are negative"),
        ("groups", lambda v: v + 100, "fewer than the clients"),
        ("sums", lambda v: v * 50, "has a sum of norm"),
        ("squares", lambda v: v - 100, "squares of the clients' class sums"),
        ("moment", lambda v: v * 2, "trace"),
        (
            "within",
            lambda v: v + torch.randn(21, generator=torch.Generator().manual_seed(0)),
            "trace|semidefinite",
        ),
    ],
)
def test_impossible_totals_are_detected(
    name: str, change: Callable[[Tensor], Tensor], words: str
) -> None:
    summed = totals(draw_clients(1, _SIZES), 3)
    reason = find_impossible_totals({**summed, name: change(summed[name])})
    assert reason is not None
    assert re.search(words, reason), reason
