"""Splits by class."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.data.samples import count_training, split_by_class

label_lists = st.lists(st.integers(0, 5), min_size=0, max_size=60)
fractions = st.floats(0.01, 0.99)


@pytest.mark.parametrize(
    ("num_images", "fraction", "training"),
    [
        (0, 0.5, 0),
        (1, 0.5, 1),
        (1, 0.99, 1),
        (3, 0.5, 2),  # 1.5 rounds to the even number
        (5, 0.5, 2),
        (10, 0.5, 5),
        (550, 10 / 11, 50),
        (5, 10 / 11, 1),
        (17, 10 / 11, 2),
        (200, 0.75, 50),
        (3, 0.01, 3),
    ],
)
def test_training_images_are_counted_by_fraction(
    num_images: int, fraction: float, training: int
) -> None:
    assert count_training(numpy.asarray(num_images), fraction) == training


def test_nothing_is_held_out_without_a_fraction() -> None:
    counts = numpy.array([[0, 3], [7, 1]])
    assert numpy.array_equal(count_training(counts, None), counts)


@given(labels=label_lists, fraction=fractions, seed=st.integers(0, 1000))
def test_each_class_is_split_by_the_fraction(labels: list[int], fraction: float, seed: int) -> None:
    array = numpy.asarray(labels, dtype=numpy.int64)
    train, test = split_by_class(array, fraction, numpy.random.default_rng(seed))
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(labels)))
    assert numpy.all(numpy.diff(train) > 0)
    assert numpy.all(numpy.diff(test) > 0)
    for label in set(labels):
        total = labels.count(label)
        assert numpy.sum(array[train] == label) == max(1, round(total * (1 - fraction)))


def test_splits_differ_between_generators() -> None:
    labels = numpy.zeros(100, dtype=numpy.int64)
    first, second = (split_by_class(labels, 0.5, numpy.random.default_rng(s))[0] for s in (0, 1))
    assert not numpy.array_equal(first, second)
