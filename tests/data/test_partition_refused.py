"""Partitions that cannot be: one sentence with a way out."""

import time
from typing import Any

import numpy
import pytest
from partition_kinds import every_kind, make_labels, partition_labels

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data import partitions
from mpfedcl.data.samples import Indices

pytestmark = pytest.mark.whole


@pytest.fixture
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "MOST_DRAWS", 200)


def sentence_of(kind: str, labels: Indices, num_clients: int, **options: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        partition_labels(kind, labels, num_clients, **options)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    return sentence


@every_kind
def test_more_clients_than_images_are_rejected(kind: str) -> None:
    sentence = sentence_of(kind, make_labels(10, 3), 11)
    assert "clients is 11; it must be at most 10" in sentence


@every_kind
def test_impossible_min_size_is_rejected_without_a_draw(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "MOST_DRAWS", 0)  # no draw is even tried
    sentence = sentence_of(kind, make_labels(100, 3), 5, min_size=21)
    assert "partition.min_size is 21; it must be at most 20" in sentence
    assert "clients 5 and 100 images" in sentence


def test_min_size_impossible_with_the_test_fraction_is_rejected() -> None:
    sentence = sentence_of("iid", make_labels(1000, 2), 5, min_size=150, test_fraction=0.5)
    assert "partition.min_size is 150" in sentence
    assert "dataset.test_fraction 0.5" in sentence


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["label", "label, plain", "quantity"])
def test_failed_draws_give_an_error_with_advice(kind: str) -> None:
    labels = make_labels(600, 10)
    begin = time.process_time()
    sentence = sentence_of(kind, labels, 12, alpha=1e-6, min_size=10)
    assert time.process_time() - begin < 10
    assert "partition.min_size is 10" in sentence
    assert "20,000 draws" in sentence
    assert "partition.alpha 1e-06" in sentence
    assert "clients 12" in sentence
    assert "raise partition.alpha" in sentence


@pytest.mark.usefixtures("_few_draws")
def test_failed_draws_of_classes_give_an_error_with_advice() -> None:
    labels = numpy.repeat(numpy.arange(2), [99, 1])
    sentence = sentence_of("classes", labels, 4, min_size=10)
    assert "partition.kind classes" in sentence
    assert "lower partition.min_size or clients" in sentence


def test_more_classes_per_client_than_classes_are_rejected() -> None:
    sentence = sentence_of("classes", make_labels(100, 3), 4, classes_per_client=4)
    assert "partition.classes_per_client is 4; it must be at most 3" in sentence
