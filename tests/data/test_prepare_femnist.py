"""`data prepare`: FEMNIST as LEAF writes it, one client a writer, and each fault's sentence."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from original_files import FEMNIST_COUNTS, leaf_bytes, random_pixels, write_femnist, write_file
from prepared_sets import prepare, refusal

from mpfedcl import InvalidInput
from mpfedcl.data.loading import load_federated_data
from mpfedcl.data.sources import open_data_set
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import DatasetSettings

TRAIN = "train/all_data_0_niid_05_keep_0_train_9.json"
ONE = random_pixels(1, 28, 28)


def natural(data: Path, **changes: Any) -> Experiment:
    values = {"dataset__name": "femnist", "dataset__root": data, "partition__kind": "natural"}
    return Experiment(method="fedavg").replace(**values | changes).resolved()


def test_each_writer_is_a_client(source: Path, data: Path) -> None:
    images = write_femnist(source / "data")
    outcome = prepare(source, data, "femnist")
    told = "9 training and 3 test images by 3 writers, 28 x 28 gray"
    assert outcome.prepared == {"femnist": told}
    experiment = natural(data, dataset__standardize=False, dtype="float64")
    assert (experiment.model.name, experiment.encoder.name) == ("cnn", "none")
    found = load_federated_data(experiment)
    assert found.names == tuple(sorted(FEMNIST_COUNTS))
    assert (len(found.class_names), found.class_names[10], found.class_names[36]) == (62, "A", "a")
    for name, (train, test) in FEMNIST_COUNTS.items():
        client = found.client(name)
        pixels = images[name].reshape(-1, 784) / 255
        assert numpy.allclose(client.inputs.numpy(), pixels[:train], atol=1e-12)
        assert client.labels.tolist() == [61, 0, 10, 36][:train]
        assert numpy.allclose(found.test_inputs[client.test].numpy(), pixels[train:], atol=1e-12)
        assert found.test_labels[client.test].tolist() == [5, 6][:test]


def test_writers_without_an_official_split_are_split(source: Path, data: Path) -> None:
    writers = {n: (random_pixels(6, 28, 28), [0, 0, 1, 1, 2, 2]) for n in ("b", "a")}
    write_file(source / "all_data" / "all_data_0.json", leaf_bytes(writers))
    outcome = prepare(source, data, "femnist")
    assert outcome.prepared == {"femnist": "12 images by 2 writers, 28 x 28 gray"}
    found = load_federated_data(natural(data))
    assert found.names == ("a", "b")
    for client in found.clients:
        assert (client.labels.tolist(), len(client.test)) == ([0, 1, 2], 3)


def test_prepared_set_is_kept_unless_replaced(source: Path, data: Path) -> None:
    write_femnist(source)
    prepare(source, data, "femnist")
    assert prepare(source, data, "femnist").kept == ["femnist"]
    write_file(source / TRAIN, leaf_bytes({"new": (ONE, [3])}))
    (source / "test").rename(source / "other")
    write_file(source / "test" / "x.json", leaf_bytes({"new": (ONE, [3])}))
    prepare(source, data, "femnist", replace=True)
    names = [
        each.name for each in open_data_set(DatasetSettings(name="femnist", root=data)).domains
    ]
    assert names == ["f0000_14", "f0002_03", "new"]


def test_missing_test_folder_is_rejected(source: Path, data: Path) -> None:
    write_femnist(source)
    (source / "test").rename(source / "elsewhere")
    assert "has no folder test with *.json; both train and test" in refusal(source, data, "femnist")


def damaged(**changes: Any) -> bytes:
    """Return a file of one writer that has other things in it than LEAF writes."""
    content = json.loads(leaf_bytes({"f1": (ONE, [3])}))
    content["user_data"]["f1"] |= changes
    return json.dumps(content).encode()


PIXELS = [0.5] * 784


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read (Expecting value"),
        (leaf_bytes({"f1": (ONE, [3])})[:-9], "cannot be read"),
        (b"[]", "cannot be read (list indices"),
        (b'{"users": ["f1"], "user_data": {}}', "cannot be read ('f1'); it must be a whole file"),
        (b'{"users": ["f1"], "user_data": {"f1": {"y": [1]}}}', "cannot be read ('x')"),
        (b'{"users": [], "num_samples": [], "user_data": {}}', "has no writers"),
        (damaged(y=[62]), "has the label 62; labels in it must be 0 to 61"),
        (damaged(y=[0.5]), "labels of type float64; they must be whole numbers"),
        (damaged(y=[1, 2]), "has 1 images and"),
        (damaged(y={"a": 1}), "labels of type object"),
        (damaged(x=[PIXELS[:-1]]), "has shape (1, 783); it must be [images, 784] numbers"),
        (damaged(x=[PIXELS, PIXELS[:-1]], y=[1, 2]), "it must be [images, 784] numbers"),
        (damaged(x=[[*PIXELS[:-1], 255]]), "has pixels from 0.5 to 255; they must be from 0 to 1"),
        (damaged(x=[[*PIXELS[:-1], float("nan")]]), "has pixels from nan to nan"),
        (damaged(x=[["a"] * 784]), "it must be [images, 784] numbers"),
    ],
)
def test_faults(source: Path, data: Path, content: bytes, told: str) -> None:
    path = write_file(source / "train" / "broken.json", content)
    write_file(source / "test" / "sound.json", leaf_bytes({"f1": (ONE, [3])}))
    sentence = refusal(source, data, "femnist")
    assert told in sentence
    assert str(path if "no writers" not in told else path.parent) in sentence


def test_writers_without_training_images_are_rejected(source: Path, data: Path) -> None:
    """As LEAF splits by writers (-t user), where nobody would have an local test set."""
    write_file(source / "train" / "a.json", leaf_bytes({"f1": (ONE, [3])}))
    write_file(source / "test" / "a.json", leaf_bytes({"f2": (ONE, [3])}))
    assert "has the writer 'f2'" in refusal(source, data, "femnist")


def test_writer_in_two_files_is_rejected(source: Path, data: Path) -> None:
    write_femnist(source)
    path = write_file(source / "train" / "z.json", leaf_bytes({"f0001_41": (ONE, [3])}))
    assert f"{path} has the writer 'f0001_41' again" in refusal(source, data, "femnist")


def test_subset_of_writers_is_drawn_by_seed(source: Path, data: Path) -> None:
    writers = {f"w{number:02}": (ONE, [number]) for number in range(20)}
    for part in ("train", "test"):
        write_file(source / part / "all.json", leaf_bytes(writers))
    prepare(source, data, "femnist")
    drawn = [load_federated_data(natural(data, clients=5, seed=seed)).names for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] == tuple(sorted(drawn[0]))
    assert drawn[0] != drawn[2]
    assert len(set(drawn[0])) == 5
    assert len(load_federated_data(natural(data)).names) == 20
    with pytest.raises(InvalidInput, match=r"clients is 21; under partition.kind natural .* 20, "):
        load_federated_data(natural(data, clients=21))
    with pytest.raises(InvalidInput, match=r"\(w00, .* w11 and 8 more\), or left out"):
        load_federated_data(natural(data, clients=5, partition__kind="feature"))


def test_pooled_writers_are_split_among_ten_clients(source: Path, data: Path) -> None:
    writers = {f"w{number}": (random_pixels(40, 28, 28), [1, 2] * 20) for number in range(3)}
    for part in ("train", "test"):
        write_file(source / part / "all.json", leaf_bytes(writers))
    prepare(source, data, "femnist")
    found = load_federated_data(natural(data, partition__kind="iid"))
    assert len(found.names) == 10
    assert sum(len(client.labels) for client in found.clients) == len(found.test_labels) == 120
