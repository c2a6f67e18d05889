"""Many clients: the same split as one client after the other, samples kept once, quick files."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.client_data import (
    ClientData,
    ClientTable,
    FederatedData,
    SubsetsByClient,
)
from mpfedcl.data.client_split import ClientSplit, is_same_partition
from mpfedcl.data.partitions import partition_classes
from mpfedcl.data.samples import Indices, Subset, count_training, draw_training
from mpfedcl.runs.directory import RunDirectory

label_lists = st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=6)


def split_slowly(labels: Indices, fraction: float, generator: numpy.random.Generator) -> list[int]:
    """One client's positions that train, class by class, as the split was first written."""
    training: list[int] = []
    for label in numpy.unique(labels):
        members = generator.permutation(numpy.flatnonzero(labels == label))
        training += members[: int(count_training(numpy.asarray(len(members)), fraction))].tolist()
    return sorted(training)


@given(own=label_lists, fraction=st.floats(0.05, 0.95), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_joint_draw_equals_draw_per_client(
    own: list[list[int]], fraction: float, seed: int
) -> None:
    labels = numpy.array([label for each in own for label in each], dtype=numpy.int64)
    sizes = numpy.array([len(each) for each in own])
    trains = draw_training(labels, sizes, fraction, lambda place: numpy_generator(seed, place))
    parts = numpy.split(trains, numpy.cumsum(sizes)[:-1])
    wanted = [
        split_slowly(numpy.array(each, dtype=numpy.int64), fraction, numpy_generator(seed, place))
        for place, each in enumerate(own)
    ]
    assert [numpy.flatnonzero(part).tolist() for part in parts] == wanted


def draw_classes_slowly(num_clients: int, held: int, num_classes: int, seed: int) -> list[set[int]]:
    """Whose classes are whose, a draw for each client, as the partition was first written."""
    generator = numpy_generator(seed, "partition", "classes")
    num_holders, found = numpy.zeros(num_classes, dtype=numpy.int64), []
    for _ in range(num_clients):
        order = numpy.argsort(num_holders + generator.random(num_classes))
        found.append(set(order[:held].tolist()))
        num_holders[order[:held]] += 1
    return found


@given(num_clients=st.integers(1, 30), held=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_class_assignment_equals_draw_per_client(num_clients: int, held: int, seed: int) -> None:
    labels = numpy.arange(600) % 5
    shares = partition_classes(labels, num_clients, seed=seed, classes_per_client=held)
    drawn = [set(labels[share].tolist()) for share in shares]
    assert drawn == draw_classes_slowly(num_clients, held, 5, seed)


def make_clients(sizes: Sequence[int]) -> list[ClientData]:
    inputs = torch.arange(2 * sum(sizes), dtype=torch.float64).view(-1, 2)
    ends = numpy.cumsum([0, *sizes]).tolist()
    return [
        ClientData(f"c{n}", inputs[a:b], torch.arange(a, b) % 3, torch.arange(n, n + n % 3))
        for n, (a, b) in enumerate(pairwise(ends))
    ]


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8), data=st.data())
@settings(max_examples=40, deadline=None)
def test_client_table_equals_its_clients(sizes: list[int], data: st.DataObject) -> None:
    clients = make_clients(sizes)
    table = ClientTable.join(clients)
    chosen = data.draw(st.sets(st.sampled_from(table.names), min_size=1))
    for several, wanted in (
        (table, clients),
        (table.select(chosen), [each for each in clients if each.name in chosen]),
    ):
        assert len(several) == len(wanted)
        for found, each in zip(several, wanted, strict=True):
            assert found.name == each.name
            assert all(
                torch.equal(getattr(found, part), getattr(each, part))
                for part in ("inputs", "labels", "test")
            )
    counts = [torch.bincount(each.labels, minlength=3).tolist() for each in clients]
    assert table.count_labels(3).tolist() == counts
    means = [float(each.inputs.mean()) for each in clients]
    assert table.input_means() == pytest.approx(means, nan_ok=True)


def test_clients_are_views_of_shared_samples() -> None:
    inputs, size = torch.rand(30_000, 4), 3000
    table = ClientTable(
        tuple(f"{number:04}" for number in range(size)),
        inputs,
        torch.zeros(30_000, dtype=torch.int64),
        numpy.full(size, 10),
        torch.arange(5),
        numpy.zeros(size, dtype=numpy.int64),
        numpy.full(size, 5),
    )
    data = FederatedData("many", ("a",), table, torch.rand(5, 4), torch.zeros(5).long(), {})
    last = data.client("2999")
    assert last.inputs.data_ptr() == inputs[29_990:].data_ptr()
    assert data.sizes["0007"] == 10
    assert data.clients[-1].name == "2999"
    assert data.label_counts_by_client()["0007"] == [10]
    # Whoever works on a part of the clients does not hold on to the others' samples.
    part = data.with_clients(["0001", "0002"])
    assert part.table.inputs.untyped_storage().nbytes() == 2 * 10 * 4 * 4
    assert part.test_inputs.data_ptr() != data.test_inputs.data_ptr()


def test_samples_by_client() -> None:
    everything = Subset(numpy.arange(10, 16), numpy.array([0, 1, 1, 0, 2, 2]))
    found = SubsetsByClient(("a", "b", "c"), everything, numpy.array([2, 0, 4]))
    assert [each.rows.tolist() for each in found.values()] == [[10, 11], [], [12, 13, 14, 15]]
    assert found.count_labels(3).tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 2]]
    kept = found.keep(everything.labels != 1)
    assert {name: each.rows.tolist() for name, each in kept.items()} == {
        "a": [10], "b": [], "c": [13, 14, 15]
    }  # fmt: skip
    split = ClientSplit(found, everything, numpy.array([0, 2, 2]), numpy.array([2, 0, 3]))
    assert [own.tolist() for own in split.local_test.values()] == [[0, 1], [], [2, 3, 4]]
    assert split.describe(["x", "y", "z"])["clients"]["c"] == {"train": [1, 1, 2], "test": 3}


def describe_many(count: int) -> dict[str, Any]:
    names = [f"client-{number:04}" for number in range(count)]
    counts = (numpy.arange(2 * count).reshape(-1, 2) % 7).tolist()
    return {
        "classes": ["a", "b"],
        "clients": {name: {"train": counts[n], "test": n} for n, name in enumerate(names)},
        "input_shape": [4],
        "input_means": {name: 1 / (n + 3) for n, name in enumerate(names)},
    }


def test_partitions_are_compared_up_to_rounding() -> None:
    described = describe_many(3)
    other = deepcopy(described)
    other["input_means"]["client-0002"] += 1e-6
    assert is_same_partition(other, described)
    other["clients"]["client-0002"]["test"] += 1
    assert not is_same_partition(other, described)


def test_partition_file_of_many_clients_is_read_back(tmp_path: Path) -> None:
    described = describe_many(1001)
    directory = RunDirectory(tmp_path)
    directory.write_partition(described)
    assert directory.read_json("partition.json") == described
    assert len((tmp_path / "partition.json").read_text().splitlines()) == 1
