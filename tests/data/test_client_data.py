"""The clients' data: who trains and is tested on what, by seed and by protocol."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from image_sets import read_image_set
from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_federated_data
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import DatasetSettings

KINDS = ["iid", "label", "classes", "quantity"]


def save_domain(
    path: Path, num_train: int, num_test: int, num_classes: int = 3, first: int = 0
) -> None:
    """Write images that each carry a number of their own, from `first`, in their pixels."""
    numbers = first + numpy.arange(num_train + num_test)
    images = numpy.zeros((len(numbers), 2, 3), dtype=numpy.uint8)
    images[:, 0, 0], images[:, 0, 1] = numbers // 256, numbers % 256
    labels = numbers % num_classes
    arrays: dict[str, Any] = {"x_train": images[:num_train], "y_train": labels[:num_train]}
    if num_test:
        arrays |= {"x_test": images[num_train:], "y_test": labels[num_train:]}
    path.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez(path, **arrays)


def load(root: Path | None = None, **changes: Any) -> FederatedData:
    name = "mnist-sample" if root is None else "folder"
    # Plain bytes over 255, so that an image can be told by its first pixels.
    dataset = DatasetSettings(name=name, root=root, standardize="none")
    experiment = Experiment(dataset=dataset).replace(encoder__name="none").replace(**changes)
    return load_federated_data(experiment.resolved())


def numbers_of(inputs: torch.Tensor) -> list[int]:
    pixels = (inputs * 255).round().long()
    return (pixels[:, 0] * 256 + pixels[:, 1]).tolist()


def trained_on(data: FederatedData) -> list[list[int]]:
    return [numbers_of(client.inputs) for client in data.clients]


def examined_on(data: FederatedData) -> list[list[int]]:
    return [numbers_of(data.test_inputs[client.test]) for client in data.clients]


def join(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def assert_labels_follow_images(data: FederatedData) -> None:
    for client in data.clients:
        assert client.labels.tolist() == [n % 3 for n in numbers_of(client.inputs)]
    assert data.test_labels.tolist() == [n % 3 for n in numbers_of(data.test_inputs)]


def refusal(root: Path | None = None, **changes: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        load(root, **changes)
    assert str(caught.value).endswith(".")
    return str(caught.value)


def test_default_data_is_the_mnist_sample() -> None:
    data = load()
    assert data.dataset == "mnist-sample"
    assert data.names == tuple(f"client-{number}" for number in range(5))
    assert (data.num_classes, data.input_size) == (10, 784)
    assert data.class_names == tuple("0123456789")
    assert data.label_counts().sum(axis=0).tolist() == [200] * 10
    assert data.label_counts().sum(axis=1).min() >= 10
    assert data.test_inputs.shape == (1000, 784)
    for client in data.clients:
        assert torch.equal(client.test, torch.arange(1000))
        assert client.inputs.dtype == torch.float32
        assert client.labels.dtype == client.test.dtype == torch.int64
        assert client.inputs.min() >= 0
        assert client.inputs.max() == 1


def test_inputs_are_bytes_over_255() -> None:
    (domain,) = read_image_set(DatasetSettings()).domains
    data = load(dtype="float64", clients=1)
    expected = domain.train_images.reshape(2000, 784) / 255
    assert data.clients[0].inputs.dtype == torch.float64
    assert numpy.array_equal(data.clients[0].inputs.numpy(), expected)
    assert numpy.array_equal(data.clients[0].labels.numpy(), domain.train_labels)


def test_standardized_mnist_has_mean_0_and_standard_deviation_1() -> None:
    data = load(dtype="float64", clients=1, dataset__standardize="federated")
    plain = load(dtype="float64", clients=1)
    # The sample is not the whole of MNIST, whose mean and deviation the constants are.
    assert float(data.clients[0].inputs.mean()) == pytest.approx(0, abs=0.02)
    assert float(data.clients[0].inputs.std()) == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(data.test_inputs, (plain.test_inputs - 0.1307) / 0.3081)


@pytest.mark.parametrize("kind", KINDS)
def test_seed_determines_the_client_data(kind: str) -> None:
    first, again, other = (
        load(seed=seed, partition__kind=kind, partition__alpha=0.5) for seed in (1, 1, 2)
    )
    for a, b in zip(first.clients, again.clients, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.labels, b.labels)
    assert any(
        a.inputs.shape != b.inputs.shape or not torch.equal(a.inputs, b.inputs)
        for a, b in zip(first.clients, other.clients, strict=True)
    )


def test_client_names_sort_in_numeric_order() -> None:
    data = load(clients=11, partition__kind="iid")
    assert data.names[:3] == ("client-00", "client-01", "client-02")
    assert data.names[-1] == "client-10"
    assert list(data.names) == sorted(data.names)
    named, last = data.client("client-10"), data.clients[-1]
    assert named.name == last.name == "client-10"
    # Both are views of the same samples.
    assert named.inputs.data_ptr() == last.inputs.data_ptr()
    assert load(clients=10, partition__kind="iid").names[-1] == "client-9"


@pytest.mark.parametrize("kind", KINDS)
def test_shared_test_keeps_the_official_split(tmp_path: Path, kind: str) -> None:
    save_domain(tmp_path / "a.npz", num_train=90, num_test=30)
    data = load(
        tmp_path, clients=3, partition__kind=kind, partition__test="shared", partition__alpha=5.0
    )
    assert sorted(join(trained_on(data))) == list(range(90))
    assert all(tested == list(range(90, 120)) for tested in examined_on(data))
    assert_labels_follow_images(data)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_test_is_drawn_by_seed_without_an_official_split(tmp_path: Path, kind: str) -> None:
    save_domain(tmp_path / "a.npz", num_train=120, num_test=0)
    options = {"partition__kind": kind, "partition__test": "shared", "partition__alpha": 5.0}
    data = load(tmp_path, clients=3, dataset__test_fraction=0.25, **options)
    trained, tested = join(trained_on(data)), examined_on(data)
    assert len(tested[0]) == 30
    assert tested[0] == tested[1] == tested[2]
    assert sorted(trained + tested[0]) == list(range(120))
    assert torch.bincount(data.test_labels).tolist() == [10, 10, 10]
    assert_labels_follow_images(data)
    other = load(tmp_path, clients=3, dataset__test_fraction=0.25, seed=9, **options)
    assert examined_on(other)[0] != tested[0]


@pytest.mark.parametrize("kind", KINDS)
def test_matched_test_follows_the_classes_of_each_client(tmp_path: Path, kind: str) -> None:
    save_domain(tmp_path / "a.npz", num_train=200, num_test=50)
    data = load(tmp_path, clients=4, partition__kind=kind, dataset__test_fraction=0.3)
    trained, tested = trained_on(data), examined_on(data)
    # The official test images take no part.
    assert sorted(join(trained + tested)) == list(range(200))
    assert len(data.test_labels) == sum(len(client.test) for client in data.clients)
    assert torch.equal(
        torch.cat([client.test for client in data.clients]), torch.arange(len(data.test_labels))
    )
    counts = data.label_counts()
    for number, client in enumerate(data.clients):
        for label in range(3):
            held_out = int((data.test_labels[client.test] == label).sum())
            total = held_out + int(counts[number, label])
            assert counts[number, label] == (max(1, round(total * 0.7)) if total else 0)
    assert_labels_follow_images(data)


def test_client_without_test_images_is_accepted(tmp_path: Path) -> None:
    # Who has a single image keeps it for training.
    save_domain(tmp_path / "a.npz", num_train=3, num_test=0, num_classes=1)
    data = load(tmp_path, clients=2, partition__kind="iid")
    assert sorted(len(client.test) for client in data.clients) == [0, 1]
    assert all(client.test.dtype == torch.int64 for client in data.clients)


def test_data_without_any_test_image_is_rejected(tmp_path: Path) -> None:
    save_domain(tmp_path / "a.npz", num_train=3, num_test=0)
    sentence = refusal(tmp_path, clients=1)
    assert "dataset.test_fraction is 0.5" in sentence
    assert "must be larger" in sentence


def test_domains_are_pooled_unless_each_is_a_client(tmp_path: Path) -> None:
    save_domain(tmp_path / "a.npz", num_train=40, num_test=10)
    save_domain(tmp_path / "b.npz", num_train=60, num_test=0, first=100)
    data = load(tmp_path, clients=2, partition__kind="iid", partition__test="shared")
    trained, tested = join(trained_on(data)), examined_on(data)[0]
    assert sorted(trained + tested) == [*range(50), *range(100, 160)]
    assert set(range(40, 50)) <= set(tested)
    assert set(range(40)) <= set(trained)
    assert len(set(tested) & set(range(100, 160))) == 30
    only = load(tmp_path, clients=2, partition__kind="iid", dataset__domains=("b",))
    assert min(join(trained_on(only))) >= 100


def test_feature_skew_makes_each_domain_a_client(tmp_path: Path) -> None:
    save_domain(tmp_path / "zebra.npz", num_train=40, num_test=10)
    save_domain(tmp_path / "ant.npz", num_train=60, num_test=0, first=100)
    data = load(tmp_path, partition__kind="feature")
    assert data.names == ("ant", "zebra")
    ant, zebra = trained_on(data)
    assert zebra == list(range(40))
    tested_ant, tested_zebra = examined_on(data)
    assert tested_zebra == list(range(40, 50))
    assert sorted(ant + tested_ant) == list(range(100, 160))
    assert len(tested_ant) == 30
    assert len(data.test_labels) == 40
    assert_labels_follow_images(data)
    assert load(tmp_path, partition__kind="feature", clients=2).names == data.names


def test_feature_skew_with_a_shared_test(tmp_path: Path) -> None:
    save_domain(tmp_path / "a.npz", num_train=40, num_test=10)
    save_domain(tmp_path / "b.npz", num_train=40, num_test=10, first=100)
    data = load(tmp_path, partition__kind="feature", partition__test="shared")
    assert all(torch.equal(client.test, torch.arange(20)) for client in data.clients)


def test_feature_skew_rejects_a_different_number_of_clients(tmp_path: Path) -> None:
    save_domain(tmp_path / "a.npz", num_train=40, num_test=10)
    save_domain(tmp_path / "b.npz", num_train=40, num_test=10)
    sentence = refusal(tmp_path, partition__kind="feature", clients=3)
    assert "clients is 3" in sentence
    assert "must be 2, the number of domains (a, b)" in sentence


def test_feature_skew_rejects_a_domain_that_is_too_small(tmp_path: Path) -> None:
    save_domain(tmp_path / "a.npz", num_train=40, num_test=10)
    save_domain(tmp_path / "b.npz", num_train=7, num_test=10)
    sentence = refusal(tmp_path, partition__kind="feature", partition__min_size=8)
    assert "partition.min_size is 8, but the domain b has 7 training images" in sentence


def test_feature_skew_with_missing_classes(tmp_path: Path) -> None:
    for domain, classes in {"art": ("bee", "dog"), "photo": ("cat",)}.items():
        for name in classes:
            (tmp_path / domain / name).mkdir(parents=True)
            for number in range(4):
                picture = Image.new("RGB", (5, 5), (number, 0, 0))
                picture.save(tmp_path / domain / name / f"{number}.png")
    data = load(tmp_path, partition__kind="feature")
    assert data.class_names == ("bee", "cat", "dog")
    assert data.label_counts().tolist() == [[2, 0, 2], [0, 2, 0]]
    assert data.input_size == 75


@pytest.mark.parametrize("test", ["shared", "matched"])
def test_train_size_draws_images_by_seed(tmp_path: Path, test: str) -> None:
    save_domain(tmp_path / "a.npz", num_train=300, num_test=30)
    options = {"partition__kind": "iid", "partition__test": test, "dataset__train_size": 100}
    data, other = (load(tmp_path, clients=3, seed=seed, **options) for seed in (0, 1))
    drawn = set(join(trained_on(data)))
    if test == "matched":
        drawn |= set(join(examined_on(data)))
    else:
        assert examined_on(data)[0] == list(range(300, 330))
    assert len(drawn) == 100
    assert drawn <= set(range(300))
    assert drawn != set(join(trained_on(other)))


def test_train_size_counts_by_domain_under_feature_skew(tmp_path: Path) -> None:
    save_domain(tmp_path / "a.npz", num_train=40, num_test=10)
    save_domain(tmp_path / "b.npz", num_train=60, num_test=0, first=100)
    data = load(tmp_path, partition__kind="feature", dataset__train_size=15)
    assert [len(client.labels) for client in data.clients] == [15, 15]
    assert [len(client.test) for client in data.clients] == [10, 30]
    sentence = refusal(tmp_path, partition__kind="feature", dataset__train_size=31)
    assert "dataset.train_size is 31; it must be at most 30" in sentence
    assert "training images of b" in sentence


def test_train_size_beyond_the_data_set_is_rejected() -> None:
    sentence = refusal(dataset__train_size=2001)
    assert "dataset.train_size is 2,001; it must be at most 2,000" in sentence
    assert "mnist-sample" in sentence


def test_errors_of_partitions_are_passed_on() -> None:
    assert "clients is 3000" in refusal(clients=3000)
    assert "classes_per_client is 11" in refusal(
        partition__kind="classes", partition__classes_per_client=11
    )


def test_image_size_determines_the_input_size() -> None:
    assert load(dataset__image_size=7, clients=2).input_size == 49


def test_loaded_tensors_are_independent_copies() -> None:
    # Changing what one load returned must not leak into another.
    load(clients=1).clients[0].inputs.zero_()
    assert load(clients=1).clients[0].inputs.max() == 1
