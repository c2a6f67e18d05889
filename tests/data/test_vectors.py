"""Vectors in npz files: what is read, and the sentence for each fault."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model, load_federated_data
from mpfedcl.data.sample_index import open_data_set, open_own_samples
from mpfedcl.data.samples import ArrayFormat, SampleIndex
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import DatasetSettings
from small_experiments import save_images, save_vectors

ARRAYS: dict[str, NDArray[Any]] = {
    "x_train": numpy.arange(12, dtype=numpy.float32).reshape(6, 2),
    "y_train": numpy.arange(6) % 3,
    "x_test": numpy.arange(8, dtype=numpy.float32).reshape(4, 2),
    "y_test": numpy.arange(4) % 3,
}


DTYPES = ("f2", "f4", "f8", "g", "i1", "i4", "i8", "u1", "u8", "?", "c8", "U3", "M8[s]")
"""Every kind that numpy writes without a pickle."""


def save(path: Path, **changes: NDArray[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    contents: dict[str, Any] = {**ARRAYS, **changes}
    numpy.savez(path, **contents)
    return path


def open_folder(root: Path, **settings: Any) -> SampleIndex:
    return open_data_set(DatasetSettings(name="folder", root=root, **settings))


def load_folder(root: Path, **changes: Any) -> FederatedData:
    base = Experiment(clients=2).replace(
        dataset__name="folder", dataset__root=root, partition__kind="iid"
    )
    return load_federated_data(base.replace(**changes))


def refusal(root: Path, **changes: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_folder(root, **changes)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_vectors_are_indexed_like_images(tmp_path: Path) -> None:
    save(tmp_path / "b.npz")
    save(tmp_path / "a.npz")
    found = open_folder(tmp_path)
    assert found.array_format == ArrayFormat((2,))
    assert (found.class_names, len(found.store)) == (("0", "1", "2"), 20)
    assert [domain.name for domain in found.domains] == ["a", "b"]
    assert found.store.inspect() == {ArrayFormat((2,))}


@settings(deadline=None, max_examples=40)
@given(
    x=arrays(
        st.sampled_from([numpy.dtype(kind) for kind in ("<f4", ">f4", "<f8", ">f8")]),
        st.tuples(st.integers(1, 12), st.integers(1, 6)),
        elements=st.floats(-(2.0**99), 2.0**99, width=32),
    ),
    order=st.sampled_from("CF"),
    seed=st.integers(0, 99),
)
def test_rows_are_read_unchanged(
    tmp_path_factory: pytest.TempPathFactory, x: NDArray[Any], order: Any, seed: int
) -> None:
    labels = numpy.zeros(len(x), dtype=int)
    root = tmp_path_factory.mktemp("vectors")
    numpy.savez(root / "a.npz", x_train=numpy.asarray(x, order=order), y_train=labels)
    found = open_folder(root)
    rows = numpy.random.default_rng(seed).integers(0, len(x), 8)
    for dtype in ("float32", "float64"):
        loaded = found.store.load(rows, ArrayFormat(x.shape[1:], dtype))
        assert loaded.dtype == numpy.dtype(dtype)
        assert numpy.array_equal(loaded, x[rows])


@settings(deadline=None, max_examples=120)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=5).map(tuple),
)
def test_dtype_and_rank_determine_the_kind_of_samples(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: tuple[int, ...]
) -> None:
    """Floats are arrays of any rank, integers of rank 2 token ids, bytes of rank 3 or 4 images; all
    else gets its sentence."""
    root = tmp_path_factory.mktemp("arrays")
    x = numpy.zeros(shape, dtype=dtype)
    labels = numpy.zeros(shape[0] if shape else 0, dtype=int)
    numpy.savez(root / "a.npz", x_train=x, y_train=labels)
    are_tokens = dtype in ("i4", "i8") and len(shape) == 2
    are_arrays = are_tokens or (dtype in ("f2", "f4", "f8") and len(shape) >= 2)
    are_images = dtype == "u1" and (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)))
    if (are_arrays or are_images) and 0 not in shape:
        expected = ArrayFormat(shape[1:], "int64" if are_tokens else "float32")
        assert open_folder(root).array_format == (expected if are_arrays else None)
        return
    with pytest.raises(InvalidInput) as caught:
        open_folder(root)
    assert "a.npz: x_train" in str(caught.value)
    assert "must" in str(caught.value)


@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (numpy.zeros((6, 2), "i2"), "x_train has dtype int16 and shape (6, 2); it must be float16"),
        (
            numpy.zeros((6, 2), bool),
            "x_train has dtype bool and shape (6, 2); it must be float16, ",
        ),
        (numpy.zeros((6, 2, 2), int), "x_train has dtype int64 and shape (6, 2, 2); it must be "),
        (numpy.zeros((6, 2), int), "x_train has sequences of 2 token ids; a set must have only"),
        (numpy.zeros((6, 2), "c8"), "x_train has dtype complex64 and shape (6, 2)"),
        (numpy.full((6, 2), None), "x_train has dtype object and shape (6, 2)"),
        (numpy.zeros(6), "x_train has dtype float64 and shape (6,); it must be float16"),
        (
            numpy.zeros((6, 2, 2)),
            "x_train has arrays of 2 x 2 numbers; a set must have only images",
        ),
        (numpy.zeros((0, 2)), "x_train has 0 vectors; it must have at least 1"),
        (numpy.zeros((6, 0)), "x_train has shape (6, 0); vectors must have at least 1 number"),
        (numpy.zeros((5, 2)), "x_train has 5 vectors and y_train 6 labels; they must be equally"),
        (numpy.zeros((6, 3)), "x_test has vectors of 2 numbers, and "),
        (
            numpy.zeros((6, 2, 2), "u1"),
            "x_train has images; a set must have only images, or only arr",
        ),
    ],
)
def test_other_arrays_are_rejected(tmp_path: Path, x: NDArray[Any], complaint: str) -> None:
    sentence = refusal(tmp_path, dataset__root=save(tmp_path / "a.npz", x_train=x).parent)
    assert str(tmp_path / "a.npz") in sentence
    assert complaint in sentence


@pytest.mark.parametrize("key", ["x_train", "x_test"])
@pytest.mark.parametrize(
    ("value", "shown"), [(numpy.nan, "nan"), (-numpy.inf, "-inf"), (1e39, "1e+39")]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_that_are_not_finite_are_rejected(
    tmp_path: Path, key: str, value: float, shown: str, dtype: str
) -> None:
    """Whoever gets them, and in whatever precision the run is."""
    x = ARRAYS[key].astype(numpy.float64)
    x[3, 1] = value
    save(tmp_path / "a.npz", **{key: x})
    sentence = refusal(tmp_path, dtype=dtype, partition__test="shared")
    assert f"a.npz: {key} has {shown} at [3, 1]; vectors must be finite numbers" in sentence


def test_position_of_a_late_invalid_value_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpfedcl.data.npz_archive._BYTES_AT_ONCE", 64)
    x = numpy.zeros((40, 3))
    x[37, 2] = numpy.nan
    save(tmp_path / "a.npz", x_train=x, y_train=numpy.arange(40) % 3, x_test=x[:4])
    assert "x_train has nan at [37, 2]" in refusal(tmp_path)


def test_labels_out_of_range_are_rejected(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", y_train=numpy.array([0, 1, 2, 0, -1, 2]))
    assert "a.npz: y_train has the label -1; labels must be 0 to 65,535" in refusal(tmp_path)


def test_inconsistent_domains_are_rejected(tmp_path: Path) -> None:
    save_vectors(tmp_path / "a.npz", width=5)
    save_vectors(tmp_path / "b.npz", width=4)
    sentence = refusal(tmp_path)
    assert "b.npz: x_train has vectors of 4 numbers, and " in sentence
    assert "a.npz: x_train has vectors of 5 numbers; a set must have only images" in sentence
    assert load_folder(tmp_path, dataset__domains=("b",)).input_size == 4
    save_images(tmp_path / "b.npz")
    assert "b.npz: x_train has images, and " in refusal(tmp_path)


def test_vectors_in_a_named_image_set_are_rejected(tmp_path: Path) -> None:
    save(tmp_path / "mnist" / "mnist.npz")
    with pytest.raises(InvalidInput, match="mnist must have images, uint8"):
        open_data_set(DatasetSettings(name="mnist", root=tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clients_get_unscaled_vectors(tmp_path: Path, dtype: str) -> None:
    """Not standardized by constants that are for pixels; the width is on record."""
    save_vectors(tmp_path / "a.npz", dtype="float64")
    data = load_folder(tmp_path, dtype=dtype, partition__test="shared")
    assert data.holds_arrays
    assert data.partition["input_shape"] == [5]
    file = numpy.load(tmp_path / "a.npz")
    got = torch.cat([client.inputs for client in data.clients])
    assert got.dtype == getattr(torch, dtype)
    wanted = torch.from_numpy(file["x_train"].astype(dtype))
    assert sorted(got.tolist()) == sorted(wanted.tolist())
    assert torch.equal(data.test_inputs, torch.from_numpy(file["x_test"].astype(dtype)))


def test_model_for_vectors_is_that_for_encoder_features(tmp_path: Path) -> None:
    save_vectors(tmp_path / "a.npz")
    experiment = Experiment(clients=2).replace(dataset__name="folder", dataset__root=tmp_path)
    data, model = load_data_and_model(experiment.resolved(), torch.device("cpu"))
    params = model.init(torch.Generator(), torch.float32)
    shapes = {name: tuple(value.shape) for name, value in params.items()}
    assert shapes == {
        "hidden.0.weight": (256, 5),
        "hidden.0.bias": (256,),
        "classifier.weight": (3, 256),
        "classifier.bias": (3,),
    }
    assert data.num_classes == 3


@pytest.mark.parametrize("name", ["resnet18", "random-resnet18", "onnx:absent.onnx"])
def test_encoder_for_vectors_is_rejected(tmp_path: Path, name: str) -> None:
    save(tmp_path / "a.npz")
    experiment = Experiment(clients=2).replace(
        dataset__name="folder", dataset__root=tmp_path, encoder__name=name
    )
    with pytest.raises(InvalidInput) as caught:
        load_data_and_model(experiment.resolved(), torch.device("cpu"))
    assert str(caught.value) == (
        f"encoder.name is {name!r}, but the samples are vectors of 2 numbers; it must be none or "
        "left out, because encoders take images."
    )


def test_image_size_for_vectors_is_rejected(tmp_path: Path) -> None:
    save_vectors(tmp_path / "a.npz")
    sentence = refusal(tmp_path, dataset__image_size=8)
    assert "dataset.image_size is 8; it must be left out, because the samples are" in sentence


def test_vectors_of_one_client_are_read(tmp_path: Path) -> None:
    file = save(tmp_path / "mine" / "a.npz")
    for place in (file, file.parent):
        found = open_own_samples(place, ("x", "y", "z"))
        assert (found.class_names, found.array_format) == (("x", "y", "z"), ArrayFormat((2,)))
    with pytest.raises(InvalidInput, match="labels must be 0 to 1"):
        open_own_samples(file, ("x", "y"))
