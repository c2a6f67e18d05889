"""The protocols of the benchmark sets: who trains and is tested on how many images of a class."""

import hashlib
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_split import ClientSplit, split_among_clients
from mpfedcl.data.image_files import ImageFileStore
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.data.samples import DomainIndex, SampleIndex, Subset
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import SPECIFICATIONS

Counts = dict[int, int]


def make_sample_index(
    name: str, domains: dict[str, list[int]], tests: dict[str, list[int]] | None = None
) -> SampleIndex:
    """Return a set that never has to be opened: images of each class by domain."""
    listed, begin = [], 0
    for domain, counts in domains.items():
        parts = []
        for sizes in (counts, tests[domain]) if tests else (counts,):
            labels = numpy.repeat(numpy.arange(len(sizes)), sizes)
            parts.append(Subset(numpy.arange(begin, begin + len(labels)), labels))
            begin += len(labels)
        listed.append(DomainIndex(domain, *parts))
    classes = SPECIFICATIONS[name].class_names or tuple("abc")
    return SampleIndex(name, classes, tuple(listed), ImageFileStore([]))


def split_images(sample_index: SampleIndex, kind: str, **changes: Any) -> ClientSplit:
    experiment = Experiment().replace(
        dataset__name=sample_index.name, partition__kind=kind, **changes
    )
    resolved = experiment.resolved()
    chosen = resolved.dataset.domains or tuple(domain.name for domain in sample_index.domains)
    kept = tuple(domain for domain in sample_index.domains if domain.name in chosen)
    return split_among_clients(
        SampleIndex(sample_index.name, sample_index.class_names, kept, sample_index.store), resolved
    )


def count(part: Subset) -> Counts:
    return dict(sorted(Counter(part.labels.tolist()).items()))


def examined(split: ClientSplit, name: str) -> Subset:
    return split.test.select(split.local_test[name])


def assert_each_once(split: ClientSplit) -> None:
    rows = numpy.concatenate([*(part.rows for part in split.training.values()), split.test.rows])
    assert len(numpy.unique(rows)) == len(rows)


def test_digit5_feature_trains_on_10_and_tests_on_at_most_200_a_class() -> None:
    sample_index = make_sample_index(
        "digit5",
        {"mnist": [700] * 10, "usps": [9] + [500] * 9},
        {"mnist": [250] * 10, "usps": [150] * 9 + [201]},
    )
    split = split_images(sample_index, "feature")
    assert count(split.training["mnist"]) == dict.fromkeys(range(10), 10)
    assert count(split.training["usps"]) == {0: 9, **dict.fromkeys(range(1, 10), 10)}
    assert count(examined(split, "mnist")) == dict.fromkeys(range(10), 200)
    assert count(examined(split, "usps")) == {**dict.fromkeys(range(9), 150), 9: 200}
    # Official training images train, official test images test.
    for domain in sample_index.domains:
        assert domain.test is not None
        assert set(split.training[domain.name].rows) <= set(domain.train.rows)
        assert set(examined(split, domain.name).rows) <= set(domain.test.rows)
    assert_each_once(split)


def test_digit5_label_is_mnist_m_at_most_550_a_class_one_in_eleven_trains() -> None:
    sample_index = make_sample_index(
        "digit5",
        {"mnist": [900] * 10, "mnist_m": [700] * 9 + [100]},
        {"mnist": [5] * 10} | {"mnist_m": [5] * 10},
    )
    split = split_images(sample_index, "label")
    assert list(split.training) == [f"client-{number}" for number in range(5)]
    rows = set(sample_index.domains[1].train.rows)
    total: Counter[int] = Counter()
    for name, part in split.training.items():
        train, test = count(part), count(examined(split, name))
        assert rows >= set(part.rows) | set(examined(split, name).rows)
        for label in train.keys() | test.keys():
            held = train.get(label, 0) + test.get(label, 0)
            assert train[label] == max(1, round(held / 11))
            total[label] += held
    assert total == {**dict.fromkeys(range(9), 550), 9: 100}
    assert_each_once(split)


@pytest.mark.parametrize("name", ["office10", "sixdomain"])
def test_sets_without_a_split_train_on_half_at_most_50_and_test_on_100_of_the_rest(
    name: str,
) -> None:
    num_classes = len(SPECIFICATIONS[name].class_names)
    sample_index = make_sample_index(
        name, {"a": [200] * num_classes, "b": [13, 60] * (num_classes // 2)}
    )
    split = split_images(sample_index, "feature")
    assert set(count(split.training["a"]).values()) == {50}
    assert set(count(examined(split, "a")).values()) == {100}
    assert list(count(split.training["b"]).values())[:2] == [6, 30]
    assert list(count(examined(split, "b")).values())[:2] == [7, 30]
    assert_each_once(split)


@pytest.mark.parametrize(
    ("name", "domain", "cap"),
    [("office10", "caltech", 150), ("sixdomain", "photo", None), ("domainnet", "real", 200)],
)
def test_label_skew_is_in_one_domain_and_matched(name: str, domain: str, cap: int | None) -> None:
    num_classes = len(SPECIFICATIONS[name].class_names)
    sample_index = make_sample_index(
        name, {"aside": [99] * num_classes, domain: [260] * num_classes}
    )
    split = split_images(sample_index, "label", partition__alpha=1.0)
    share = 0.25 if name == "domainnet" else 0.5
    total: Counter[int] = Counter()
    for client, part in split.training.items():
        train, test = count(part), count(examined(split, client))
        assert set(part.rows) <= set(sample_index.domains[1].train.rows)
        for label in train.keys() | test.keys():
            held = train[label] + test.get(label, 0)
            assert train[label] == max(1, round(held * share))
            total[label] += held
    assert total == dict.fromkeys(range(num_classes), cap or 260)
    assert_each_once(split)


def test_domainnet_feature_trains_on_105_images_and_keeps_the_test_set() -> None:
    sample_index = make_sample_index(
        "domainnet",
        {"real": [40] * 10, "sketch": [20] * 10},
        {"real": [11] * 10, "sketch": [7] * 10},
    )
    split = split_images(sample_index, "feature")
    assert [len(part.rows) for part in split.training.values()] == [105, 105]
    assert count(examined(split, "real")) == dict.fromkeys(range(10), 11)
    assert count(examined(split, "sketch")) == dict.fromkeys(range(10), 7)


def test_folder_is_split_in_half() -> None:
    sample_index = make_sample_index("folder", {"a": [10, 10, 1], "b": [4, 4, 4]})
    by_domain = split_images(sample_index, "feature")
    assert count(by_domain.training["a"]) == {0: 5, 1: 5, 2: 1}
    assert count(examined(by_domain, "a")) == {0: 5, 1: 5}
    together = split_images(sample_index, "iid", clients=1)
    assert count(together.training["client-0"]) == {0: 7, 1: 7, 2: 2}


@pytest.mark.parametrize(("kind", "drawn"), [("feature", {0: 3, 1: 3}), ("iid", {0: 2, 1: 2})])
def test_images_are_drawn_by_seed(kind: str, drawn: Counts) -> None:
    sizes = {"a": [40, 40], "b": [40, 40]}
    sample_index = make_sample_index("folder", sizes, sizes)
    changes = {"dataset__per_class": 3, "clients": 2 if kind == "feature" else 1}
    split = [split_images(sample_index, kind, seed=seed, **changes) for seed in (1, 1, 2)]
    one, same, another = (next(iter(each.training.values())) for each in split)
    assert count(one) == drawn
    assert one.rows.tolist() == same.rows.tolist() != another.rows.tolist()


def test_settings_override_the_protocol() -> None:
    sample_index = make_sample_index("office10", {"amazon": [30] * 10, "caltech": [30] * 10})
    split = split_images(
        sample_index, "label", dataset__domains=("amazon",), dataset__per_class=7, clients=2
    )
    assert sum(len(part.rows) for part in split.training.values()) + len(split.test.rows) == 70
    assert max(split.test.rows) < 300


def test_train_size_beyond_the_domain_is_rejected() -> None:
    sizes = {"real": [5] * 10, "sketch": [20] * 10}
    sample_index = make_sample_index("domainnet", sizes, sizes)
    with pytest.raises(InvalidInput, match=r"dataset\.train_size is 105; it must be at most 50"):
        split_images(sample_index, "feature")


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("iid", "d9dded4d915da0a7"),
        ("label", "4e2da7dddf5e0df4"),
        ("classes", "ea514c60dd73479b"),
        ("quantity", "a2824bcfdce85d6c"),
        ("feature", "e9f4c5a0b2829a66"),
    ],
)
def test_splits_match_earlier_versions(kind: str, wanted: str, tmp_path: Path) -> None:
    for seed, name in enumerate("abc"):
        random = numpy.random.default_rng(seed)
        labels = random.integers(0, 4, 280)
        images = random.integers(0, 255, (280, 3, 3), dtype=numpy.uint8)
        numpy.savez(
            tmp_path / f"{name}.npz",
            x_train=images[:200],
            y_train=labels[:200],
            x_test=images[200:],
            y_test=labels[200:],
        )
    variants: list[dict[str, Any]] = [
        {},
        {"dataset__per_class": 20, "dataset__train_size": 60},
        {"partition__validation": 0.25},
    ]
    digest = hashlib.sha256()
    for seed, test, changes in itertools.product((0, 5), ("shared", "matched"), variants):
        experiment = Experiment(seed=seed, clients=None if kind == "feature" else 4).replace(
            **{"dataset__name": "folder", "dataset__root": tmp_path, "partition__kind": kind},
            **{"partition__alpha": 0.3, "partition__test": test, **changes},
        )
        resolved = experiment.resolved()
        split = split_among_clients(open_data_set(resolved.dataset), resolved)
        for name in sorted(split.training):
            digest.update(name.encode())
            digest.update(split.training[name].rows.astype("<i8").tobytes())
            digest.update(split.local_test[name].astype("<i8").tobytes())
        digest.update(split.test.rows.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == wanted
