"""Misplaced prototypes and outlying sums: detected, never in honest runs, with enough clients."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tampered_updates import VICTIM, TamperingEngine
from torch.nn.functional import normalize

from mpfedcl.engines import Engine
from mpfedcl.methods.messages import Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.collector import MISPLACED
from mpfedcl.rounds.validation import drop_misplaced, find_centers, find_odd_clients
from small_experiments import build_federation, save_vectors, small

CORNERS = torch.eye(3)


def make_client(seed: int, order: tuple[int, ...] = (0, 1, 2), count: int = 9) -> Prototypes:
    """Return one prototype per class, each near the corner given by `order`."""
    noise = 0.1 * torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))
    vectors = CORNERS[list(order)] + noise
    return Prototypes(vectors, torch.arange(3), torch.full((3,), count))


def make_clients(number: int) -> dict[str, Prototypes]:
    return {f"client-{seed}": make_client(seed) for seed in range(number)}


def test_center_is_the_geometric_median_of_the_holders() -> None:
    clients = make_clients(6)
    centers = find_centers(clients, 4)
    assert centers.checked.tolist() == [True, True, True, False]
    assert centers.num_holders.tolist() == [6, 6, 6, 0]
    points = torch.stack([each.vectors[0] for each in clients.values()]).double()
    best = (points - centers.vectors[0]).norm(dim=1).sum()
    for axis in range(3):
        for step in (-1e-3, 1e-3):
            moved = centers.vectors[0].clone()
            moved[axis] += step
            assert best <= (points - moved).norm(dim=1).sum() + 1e-9


def test_permuted_prototypes_are_dropped() -> None:
    clients = make_clients(6) | {"malicious": make_client(9, (1, 2, 0))}
    kept = drop_misplaced(clients, 3, 4.0)
    assert kept.dropped == {"malicious": [0, 1, 2]}
    assert len(kept.prototypes["malicious"]) == 0
    assert kept.unchecked == []
    assert all(kept.prototypes[name] is clients[name] for name in make_clients(6))


def test_single_misplaced_prototype_is_dropped() -> None:
    rows = make_client(9)
    both = Prototypes(
        torch.cat([rows.vectors, CORNERS[1:2]]),
        torch.tensor([0, 1, 2, 0]),
        torch.tensor([9, 9, 9, 1]),
    )
    kept = drop_misplaced(make_clients(6) | {"malicious": both}, 3, 4.0)
    assert kept.dropped == {"malicious": [0]}
    assert kept.prototypes["malicious"].labels.tolist() == [0, 1, 2]


def only(rows: Prototypes, *classes: int) -> Prototypes:
    """Return the prototypes of these classes."""
    kept = torch.isin(rows.labels, torch.tensor(classes))
    return Prototypes(rows.vectors[kept], rows.labels[kept], rows.counts[kept])


def test_permuted_prototypes_of_few_holders_are_dropped() -> None:
    clients = make_clients(2) | {"malicious": make_client(9, (1, 2, 0))}
    kept = drop_misplaced(clients, 3, 4.0)
    assert (kept.dropped, kept.unchecked) == ({"malicious": [0, 1, 2]}, [])


def test_classifier_is_a_witness_of_classes_without_another_holder() -> None:
    clients = {"honest": only(make_client(1), 0, 1), "lone": only(make_client(2, (0, 2, 1)), 1, 2)}
    assert drop_misplaced(clients, 3, 4.0).dropped == {}
    assert drop_misplaced(clients, 3, 4.0).unchecked == [0, 1, 2]
    found = drop_misplaced(clients, 3, 4.0, 7 * CORNERS + 3)
    assert (found.dropped, found.unchecked) == ({"lone": [1, 2]}, [])


def test_prototypes_without_a_witness_are_kept() -> None:
    clients = {"a": make_client(1), "b": make_client(2, (1, 2, 0))}
    kept = drop_misplaced(clients, 3, 4.0)
    assert (kept.dropped, kept.unchecked) == ({}, [0, 1, 2])
    one = {"a": only(make_client(1), 2)}
    assert drop_misplaced(one, 3, 4.0, CORNERS).unchecked == [2]
    assert find_odd_clients(make_clients(3) | clients, 3, 4.0).keys() <= {"b"}


FAR = torch.eye(6, 40)


def draw_client(
    seed: int, labels: Sequence[int], *, domain: float = 0.0, noise: float = 0.1
) -> Prototypes:
    """Return two unit prototypes per class; `domain` is how far off the client's images are."""
    draw = torch.Generator().manual_seed(seed)
    where = domain * torch.randn(40, generator=draw)
    chosen = torch.tensor([*labels, *labels])
    vectors = FAR[chosen] + where + noise * torch.randn(len(chosen), 40, generator=draw)
    return Prototypes(normalize(vectors, dim=1), chosen, torch.ones_like(chosen))


def permute(rows: Prototypes) -> Prototypes:
    """Return the prototypes with the labels of each class given to the next one held."""
    held = sorted(set(rows.labels.tolist()))
    following = dict(zip(held, [*held[1:], *held[:1]], strict=True))
    return replace(rows, labels=torch.tensor([following[each] for each in rows.labels.tolist()]))


HELD = st.lists(
    st.sets(st.integers(0, 5), min_size=1, max_size=6).map(sorted), min_size=1, max_size=12
)


@given(held=HELD, seed=st.integers(0, 10**6), domain=st.sampled_from([0.0, 0.2, 1.0]))
def test_honest_clients_under_any_label_and_feature_skew_are_kept(
    held: list[list[int]], seed: int, domain: float
) -> None:
    clients = {
        f"client-{number}": draw_client(seed + number, labels, domain=domain, noise=0.05)
        for number, labels in enumerate(held)
    }
    for classifier in (None, FAR):
        assert drop_misplaced(clients, 6, 4.0, classifier).dropped == {}


@given(held=HELD.filter(lambda held: len(held) > 3), seed=st.integers(0, 10**6))
def test_permuted_client_is_dropped_whatever_the_others_hold(
    held: list[list[int]], seed: int
) -> None:
    clients = {
        f"client-{number}": draw_client(seed + number, labels) for number, labels in enumerate(held)
    }
    malicious = permute(draw_client(seed - 1, range(6)))
    found = dict(drop_misplaced(clients | {"malicious": malicious}, 6, 4.0, FAR).dropped)
    assert found.pop("malicious") == [0, 1, 2, 3, 4, 5]
    # An honest client whose classes hardly any honest client shares may lose some of them.
    for name, classes in found.items():
        assert len(classes) < len(set(clients[name].labels.tolist()))


def test_permuted_half_is_dropped_alone() -> None:
    clients = {f"client-{seed}": draw_client(seed, range(6)) for seed in range(4)}
    rows = draw_client(9, range(6))
    labels = torch.tensor([1, 2, 0, 3, 4, 5] * 2)
    found = drop_misplaced(clients | {"malicious": replace(rows, labels=labels)}, 6, 4.0, FAR)
    assert found.dropped == {"malicious": [0, 1, 2]}


def test_many_clients_are_compared_with_some() -> None:
    clients = {f"client-{seed:03}": draw_client(seed, range(6)) for seed in range(100)}
    clients["client-050"] = permute(clients["client-050"])
    assert list(drop_misplaced(clients, 6, 4.0).dropped) == ["client-050"]


def test_class_that_no_model_separates_is_kept() -> None:
    # All clients have class 0 where class 1 is, so no client is an outlier.
    clients = {f"client-{seed}": make_client(seed, (1, 1, 2)) for seed in range(7)}
    assert drop_misplaced(clients, 3, 4.0).dropped.keys() <= clients.keys()
    left = drop_misplaced(clients, 3, 4.0).prototypes
    held = sum(int((each.labels == 0).sum()) for each in left.values())
    assert held >= 3


def test_prototype_with_an_extreme_norm_is_dropped() -> None:
    rows = make_client(9)
    long = replace(rows, vectors=rows.vectors * torch.tensor([[1.0], [1.0], [50.0]]))
    kept = drop_misplaced(make_clients(6) | {"malicious": long}, 3, 4.0)
    assert kept.dropped == {"malicious": [2]}


def test_no_clients_and_no_prototypes_are_accepted() -> None:
    assert drop_misplaced({}, 3, 4.0).prototypes == {}
    none = {"a": Prototypes.empty(3)}
    assert drop_misplaced(none, 3, 4.0).prototypes == none
    assert find_odd_clients({}, 3, 4.0) == {}
    same = {f"client-{n}": make_client(1) for n in range(6)}
    assert drop_misplaced(same, 3, 4.0).dropped == {}


@given(st.permutations(range(7)))
def test_order_of_clients_does_not_matter(order: list[int]) -> None:
    clients = make_clients(6) | {"client-6": make_client(9, (1, 2, 0))}
    names = list(clients)
    shuffled = {names[place]: clients[names[place]] for place in order}
    assert drop_misplaced(shuffled, 3, 4.0).dropped == {"client-6": [0, 1, 2]}


# Sums


def draw_means(counts: list[int], seed: int, shift: float = 0.0, turn: int = 0) -> Prototypes:
    """Return the class means of unit vectors around three directions, as sums give them."""
    draw = torch.Generator().manual_seed(seed)
    own = shift * torch.randn(20, generator=draw, dtype=torch.float64)
    means = []
    for label, count in enumerate(counts):
        corner = torch.zeros(20, dtype=torch.float64)
        corner[(label + turn) % 3] = 1.0
        noise = 0.3 * torch.randn(count, 20, generator=draw, dtype=torch.float64)
        means.append(normalize(corner + own + noise, dim=1).mean(0))
    return Prototypes(torch.stack(means), torch.arange(len(counts)), torch.tensor(counts))


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_honest_class_means_are_accepted(shift: float) -> None:
    clients = {
        f"client-{seed}": draw_means([1 + seed % 4, 30, 5 * seed + 1], seed, shift)
        for seed in range(12)
    }
    assert find_odd_clients(clients, 3, 4.0) == {}


def test_permuted_and_overstated_class_means_are_outliers() -> None:
    clients = {f"client-{seed}": draw_means([20, 30, 10], seed) for seed in range(8)}
    malicious = draw_means([20, 30, 10], 99, turn=1)
    boast = draw_means([2, 3, 1], 98)
    boast = replace(boast, counts=boast.counts * 1000)
    odd = find_odd_clients(clients | {"malicious": malicious, "boast": boast}, 3, 4.0)
    assert sorted(odd) == ["boast", "malicious"]
    assert odd["malicious"] > 10


def turn_sums(update: Update) -> list[Update]:
    """Report for each class the sums of another one; each is plausible by itself."""
    summed = dict(update.summed)
    turned = {**summed, "sums": summed["sums"].roll(1, 0), "counts": summed["counts"].roll(1, 0)}
    return [replace(update, summed=turned)]


@pytest.mark.parametrize("method", ["fedgauss", "fedncm"])
@pytest.mark.parametrize("bounds", ["on", "off"])
def test_client_with_outlying_sums_does_not_affect_the_model(
    tmp_path: Path, method: str, bounds: str
) -> None:
    save_vectors(tmp_path / "one.npz", num_train=240, width=12)
    changes = {"partition__kind": "iid", "clients": 8, "validation__bounds": bounds}
    experiment = small(tmp_path, method, **changes)

    def tamper(engine: Engine) -> Engine:
        return TamperingEngine(engine, turn_sums)

    def stay_away(engine: Engine) -> Engine:
        return TamperingEngine(engine, lambda _: [])

    attacked, without = (
        build_federation(experiment, tamper),
        build_federation(experiment, stay_away),
    )
    record = attacked.run_round(evaluate=False)
    without.run_round(evaluate=False)
    if bounds == "off":
        assert record.clients.rejected == {}
        return
    assert list(record.clients.rejected) == [VICTIM]
    assert "differ from the others'" in record.clients.rejected[VICTIM]
    for name, value in without.state.server.params.items():
        assert torch.equal(attacked.state.server.params[name], value)
    assert attacked.pool.names == without.pool.names


def test_misplaced_prototypes_are_recorded(images: Path) -> None:
    corners = torch.eye(4)[:3]

    def misplace(update: Update) -> list[Update]:
        vectors = corners.roll(1, 0) if update.client == VICTIM else corners
        rows = Prototypes(vectors, torch.arange(3), torch.ones(3, dtype=torch.int64))
        return [replace(update, prototypes=rows)]

    names = [f"client-{number}" for number in range(6)]
    experiment = small(images, partition__kind="iid", clients=6, validation__bounds="on")
    federation = build_federation(experiment, lambda each: TamperingEngine(each, misplace, names))
    record = federation.run_round(evaluate=False)
    assert record.processed[MISPLACED] == [VICTIM]
    assert record.remarks["prototypes_dropped"] == {VICTIM: [0, 1, 2]}
    assert record.clients.rejected == {}
    assert sorted(federation.pool.names) == [name for name in names if name != VICTIM]
    one = small(images, clients=1, min_clients=1, validation__bounds="on", share_model=False)
    alone = build_federation(one).run_round(evaluate=False)
    assert alone.remarks["prototypes_not_checked"]["classes"] == [0, 1, 2]
