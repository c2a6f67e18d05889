"""Partitions: what holds for every kind, and what each kind promises."""

import hashlib
import itertools
from itertools import pairwise
from typing import Any

import numpy
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from partition_kinds import (
    KINDS,
    assert_each_image_once,
    count,
    every_kind,
    make_labels,
    partition_labels,
)

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.data import partitions
from mpfedcl.data.partitions import (
    partition_classes,
    partition_iid,
    partition_label,
    partition_quantity,
)
from mpfedcl.data.samples import Indices, count_training


@every_kind
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_image_is_assigned_to_exactly_one_client(kind: str, data: st.DataObject) -> None:
    labels = numpy.asarray(
        data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=80)), dtype=numpy.int64
    )
    num_clients = data.draw(st.integers(1, min(8, len(labels))))
    min_size = data.draw(st.integers(1, 3))
    fraction = data.draw(st.none() | st.floats(0.05, 0.95))
    options: dict[str, Any] = {"seed": data.draw(st.integers(0, 2**63 - 1))}
    if "alpha" in KINDS[kind][1]:
        options["alpha"] = data.draw(st.sampled_from([1e-6, 0.05, 1.0, 1e6]))
    if kind == "classes":
        options["classes_per_client"] = data.draw(st.integers(1, len(set(labels.tolist()))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions, "MOST_DRAWS", 200)
        try:
            shares = partition_labels(
                kind, labels, num_clients, min_size=min_size, test_fraction=fraction, **options
            )
        except InvalidInput:
            return  # a draw with so many images each is rare or impossible here
    assert len(shares) == num_clients
    counts = count(labels, shares)
    if kind == "classes":
        held = counts.sum(axis=0) > 0
        assert set(numpy.unique(numpy.concatenate(shares))) == set(
            numpy.flatnonzero(held[labels]).tolist()
        )
        assert sum(len(share) for share in shares) == held[labels].sum()
    else:
        assert_each_image_once(labels, shares)
    assert count_training(counts, fraction).sum(axis=1).min() >= min_size
    assert all(numpy.all(numpy.diff(share) > 0) for share in shares)
    assert all(share.dtype == numpy.int64 for share in shares)


@every_kind
def test_seed_determines_the_partition(kind: str) -> None:
    labels = make_labels(300, 5)
    first, again, other = (partition_labels(kind, labels, 4, seed=seed) for seed in (3, 3, 4))
    assert all(numpy.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not numpy.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        ("iid", {}, "b418d028a3eed311"),
        ("label", {"alpha": 0.05}, "ba0300a823b99935"),
        ("label, plain", {"alpha": 0.3}, "7e0e2179196a21bb"),
        ("quantity", {"alpha": 0.5}, "0fde7c0d1bf77207"),
        ("classes", {"classes_per_client": 2}, "06328e7cc752197b"),
    ],
)
def test_draws_match_earlier_versions(kind: str, options: dict[str, Any], wanted: str) -> None:
    """Old runs are resumed, and published numbers made again, on the very same images."""
    digest = hashlib.sha256()
    for seed, fraction in itertools.product((0, 1, 2**62), (None, 0.5)):
        for num_images, num_classes, num_clients in ((500, 7, 5), (3000, 10, 8)):
            labels = make_labels(num_images, num_classes)
            shares = partition_labels(
                kind, labels, num_clients, seed=seed, min_size=3, test_fraction=fraction, **options
            )
            for share in shares:
                digest.update(share.astype("<i8").tobytes() + b"|")
    assert digest.hexdigest()[:16] == wanted


@every_kind
def test_single_client_gets_all_images(kind: str) -> None:
    labels = make_labels(50, 3)
    options = {"classes_per_client": 3} if kind == "classes" else {}
    (share,) = partition_labels(kind, labels, 1, **options)
    assert numpy.array_equal(share, numpy.arange(50))


@every_kind
def test_single_class_is_shared_by_all_clients(kind: str) -> None:
    labels = numpy.full(60, 2)
    shares = partition_labels(kind, labels, 3, min_size=2)
    assert_each_image_once(labels, shares)
    assert min(len(share) for share in shares) >= 2


@pytest.mark.parametrize("kind", ["iid", "classes"])
def test_each_client_gets_one_image_if_counts_match(kind: str) -> None:
    labels = numpy.zeros(20, dtype=numpy.int64)
    shares = partition_labels(kind, labels, 20)
    assert_each_image_once(labels, shares)
    assert all(len(share) == 1 for share in shares)


def test_dirichlet_gives_one_image_each_if_counts_match() -> None:
    labels = numpy.zeros(3, dtype=numpy.int64)
    for kind in ("label", "quantity"):
        shares = partition_labels(kind, labels, 3, alpha=1e6)
        assert all(len(share) == 1 for share in shares)


@every_kind
def test_classes_without_images_are_accepted(kind: str) -> None:
    labels = make_labels(100, 3) * 4 + 2  # classes 2, 6 and 10 alone
    options = {"classes_per_client": 3} if kind == "classes" else {}
    assert_each_image_once(labels, partition_labels(kind, labels, 4, **options))


@given(num_images=st.integers(1, 200), num_clients=st.integers(1, 50), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_iid_sizes_differ_by_at_most_one(num_images: int, num_clients: int, seed: int) -> None:
    assume(num_clients <= num_images)
    labels = make_labels(num_images, 3)
    sizes = [len(share) for share in partition_iid(labels, num_clients, seed=seed)]
    assert max(sizes) - min(sizes) <= 1


def test_iid_clients_have_similar_class_counts() -> None:
    labels = numpy.repeat(numpy.arange(4), 1000)
    counts = count(labels, partition_iid(labels, 4, seed=0))
    assert abs(counts - 250).max() < 60  # about four standard deviations


@given(
    class_sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    num_clients=st.integers(1, 6),
    alpha=st.sampled_from([1e-6, 0.05, 0.5, 5.0, 1e6]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=150, deadline=None)
@example(class_sizes=[7, 7, 7], num_clients=3, alpha=1e-6, seed=0)
def test_balanced_split_skips_clients_with_a_full_share(
    class_sizes: list[int], num_clients: int, alpha: float, seed: int
) -> None:
    labels = numpy.repeat(numpy.arange(len(class_sizes)), class_sizes)
    assume(len(labels) >= num_clients)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions, "MOST_DRAWS", 200)
        try:
            shares = partition_label(labels, num_clients, seed=seed, alpha=alpha)
        except InvalidInput:
            return  # a draw with so many images each is rare or impossible here
    counts = count(labels, shares)
    before = numpy.cumsum(counts, axis=1) - counts
    is_full = before >= len(labels) / num_clients
    assert not numpy.any(is_full & (counts > 0))


def deal_slowly(
    class_sizes: list[int], num_clients: int, alpha: float, generator: numpy.random.Generator
) -> Indices:
    """Split by the balanced rule in plain Python, as METHOD states it."""
    fair = sum(class_sizes) / num_clients
    held = [0] * num_clients
    table = numpy.zeros((num_clients, len(class_sizes)), dtype=numpy.int64)
    for each, size in enumerate(class_sizes):
        mass = 0.0
        while mass == 0:
            shares = [float(p) for p in generator.dirichlet([alpha] * num_clients)]
            shares = [0.0 if held[c] >= fair else shares[c] for c in range(num_clients)]
            mass = sum(shares)
        ends, reached = [], 0.0
        for share in shares:
            reached += share
            ends.append(reached)
        cuts = [0, *(round(end / reached * size) for end in ends)]
        for client, (low, high) in enumerate(pairwise(cuts)):
            table[client, each] = high - low
            held[client] += high - low
    return table


@pytest.mark.parametrize("alpha", [1e-6, 0.05, 1.0])
def test_balanced_split_matches_a_plain_reimplementation(alpha: float) -> None:
    class_sizes = [40, 25, 31, 18, 36, 22]
    labels = numpy.repeat(numpy.arange(6), class_sizes)
    compared = 0
    for seed in range(40):
        # One draw at a time, the two consume the generator alike.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partitions, "_MOST_DRAWS_AT_ONCE", 1)
            shares = partition_label(labels, 4, seed=seed, alpha=alpha)
        generator = numpy_generator(seed, "partition", "label")
        expected = deal_slowly(class_sizes, 4, alpha, generator)
        if expected.sum(axis=1).min() >= 1:  # else the draw was refused and another one taken
            assert numpy.array_equal(count(labels, shares), expected)
            compared += 1
    assert compared >= 5


def test_plain_split_may_exceed_the_equal_share() -> None:
    labels = numpy.repeat(numpy.arange(10), 50)
    beyond = 0
    for seed in range(30):
        counts = count(labels, partition_label(labels, 4, seed=seed, alpha=0.1, balanced=False))
        before = numpy.cumsum(counts, axis=1) - counts
        beyond += int(numpy.any((before >= 125) & (counts > 0)))
    assert beyond > 20


def test_large_alpha_gives_nearly_equal_shares() -> None:
    labels = numpy.repeat(numpy.arange(3), 4000)
    for balanced in (True, False):
        shares = partition_label(labels, 4, seed=0, alpha=1e6, balanced=balanced)
        assert abs(count(labels, shares) - 1000).max() <= 12
    sizes = [len(share) for share in partition_quantity(labels, 4, seed=0, alpha=1e6)]
    assert max(abs(size - 3000) for size in sizes) <= 36


def test_shares_have_the_dirichlet_mean_and_spread() -> None:
    num_images, num_clients, alpha = 2000, 4, 2.0
    labels = numpy.zeros(num_images, dtype=numpy.int64)
    shares = numpy.array(
        [
            [len(share) / num_images for share in shares]
            for shares in (
                partition_label(labels, num_clients, seed=seed, alpha=alpha, balanced=False)
                for seed in range(400)
            )
        ]
    )
    variance = (1 / 4) * (3 / 4) / (num_clients * alpha + 1)
    assert abs(shares.mean(axis=0) - 0.25).max() < 4 * (variance / 400) ** 0.5
    assert abs(shares.var(axis=0) / variance - 1).max() < 0.35


def test_tiny_alpha_assigns_each_class_to_one_client() -> None:
    labels = numpy.repeat(numpy.arange(10), 30)
    counts = count(labels, partition_label(labels, 5, seed=0, alpha=1e-6))
    assert numpy.all((counts > 0).sum(axis=0) == 1)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_classes_and_their_images_are_spread_evenly(data: st.DataObject) -> None:
    num_classes = data.draw(st.integers(1, 8))
    per_client = data.draw(st.integers(1, num_classes))
    num_clients = data.draw(st.integers(1, 12))
    labels = numpy.repeat(numpy.arange(num_classes), 37)
    shares = partition_classes(
        labels, num_clients, seed=data.draw(st.integers(0, 999)), classes_per_client=per_client
    )
    counts = count(labels, shares)
    assert numpy.all((counts > 0).sum(axis=1) == per_client)
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for each in range(num_classes):
        shares = counts[counts[:, each] > 0, each]
        if len(shares):
            assert shares.sum() == 37
            assert shares.max() - shares.min() <= 1


def test_min_size_counts_training_images_only() -> None:
    labels = make_labels(400, 4)
    shares = partition_label(labels, 5, seed=0, alpha=0.1, min_size=20, test_fraction=0.5)
    assert count_training(count(labels, shares), 0.5).sum(axis=1).min() >= 20


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 1e6])
@pytest.mark.parametrize("num_clients", [1, 2, 300])
def test_extreme_alphas_give_valid_shares(alpha: float, num_clients: int) -> None:
    generator = numpy.random.default_rng(0)
    is_open = generator.random((50, num_clients)) < 0.5
    is_open[:, 0] = True
    shares = partitions.draw_shares(is_open, alpha, generator)
    assert numpy.isfinite(shares).all()
    cut = partitions.round_shares(shares, 1000)
    assert numpy.all(cut.sum(axis=1) == 1000)
    assert cut.min() >= 0
    assert not cut[~is_open].any()
