"""Runs on vectors: training, resume, prediction, export, joining, and rejected input."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from mpfedcl import Experiment, InvalidInput, Predictor, run
from mpfedcl.data.samples import ArrayFormat
from mpfedcl.inference.export import export_run
from mpfedcl.inference.membership import join
from mpfedcl.inference.trained_run import load_trained_run
from small_experiments import Say, save_images, save_vectors, small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places")]

Digits = tuple[NDArray[numpy.float64], NDArray[numpy.int64]]


@pytest.fixture(scope="module")
def digits() -> Digits:
    """The 1,797 digits of scikit-learn, 64 numbers each, in a random order."""
    vectors, labels = load_digits(return_X_y=True)
    order = numpy.random.default_rng(0).permutation(len(vectors))
    return vectors[order] / 8 - 1, labels[order]


@pytest.fixture(scope="module")
def digits_run(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on most of them, in two domains, far enough to be right about nearly all."""
    root, (vectors, labels) = tmp_path_factory.mktemp("digits"), digits
    for name, rows in (("a", slice(0, 700)), ("b", slice(700, 1400))):
        dtype = "float32" if name == "a" else "float64"
        (root / "data").mkdir(exist_ok=True)
        numpy.savez(root / "data" / name, x_train=vectors[rows].astype(dtype), y_train=labels[rows])
    experiment = Experiment(rounds=10, clients=4).replace(
        dataset__name="folder",
        dataset__root=root / "data",
        partition__alpha=0.5,
        train__lr=0.1,
    )
    return run(experiment, root / "run").path


@pytest.fixture(scope="module")
def small_run(vectors: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds on vectors of five numbers."""
    path = tmp_path_factory.mktemp("small") / "run"
    return run(small(vectors, encoder__name=None), path).path


def right(found: list[str], labels: NDArray[numpy.int64]) -> float:
    return float(numpy.mean(numpy.array(found) == labels.astype(str)))


@pytest.mark.thorough
def test_real_vectors_from_run_to_export_and_join(
    digits_run: Path, digits: Digits, tmp_path: Path
) -> None:
    vectors, labels = digits[0][1400:], digits[1][1400:]
    predictor = Predictor.load(digits_run)
    assert predictor.trained.input_format == ArrayFormat((64,))
    assert predictor.trained.experiment.encoder.name == "none"
    labeled = [each.label for each in predictor.predict(vectors)]
    assert right(labeled, labels) > 0.9

    exported = export_run(predictor, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
    (source,) = session.get_inputs()
    assert (source.name, source.type, source.shape) == ("features", "tensor(float)", ["batch", 64])
    label, distance, _ = session.run(None, {"features": vectors.astype(numpy.float32)})
    assert [predictor.class_names[n] for n in label] == labeled
    assert numpy.isfinite(distance).all()
    assert exported.note["checked"]["from"] == "test vectors of folder"
    assert exported.note["checked"]["labels_differ"] == 0

    numpy.savez(tmp_path / "mine.npz", x_train=vectors, y_train=labels)
    joined = join(digits_run, tmp_path / "mine.npz", "late", add=True)
    assert joined.was_added
    assert joined.before["pool"] is not None
    assert joined.before["pool"] > 90
    pool = load_trained_run(digits_run).pool
    assert pool is not None
    assert "late" in pool.names


def test_run_describes_its_vectors(small_run: Path, said: Say) -> None:
    partition = json.loads((small_run / "partition.json").read_text())
    assert partition["input_shape"] == [5]
    assert "encoder" not in partition
    card = (small_run / "CARD.md").read_text(encoding="utf-8")
    assert "image" not in card.lower()
    assert "Vector classifiers" in card
    assert said("report", small_run)[0] == 0
    model = load_file(small_run / "model.safetensors")
    assert model["hidden.0.weight"].shape == (256, 5)


def test_vectors_of_any_type_are_predicted_alike(small_run: Path) -> None:
    predictor = Predictor.load(small_run)
    asked = numpy.random.default_rng(1).normal(size=(300, 5)).astype(numpy.float32)
    wanted = predictor.predict(asked)
    assert predictor.predict(asked.astype(numpy.float64)) == wanted
    assert predictor.predict(asked.astype(">f4")) == wanted
    assert predictor.predict(list(asked)) == wanted
    assert predictor.predict(asked.astype(numpy.float64).tolist()) == wanted
    assert predictor.predict(numpy.empty((0, 5))) == []


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (numpy.zeros((2, 4)), r"array float64 \[4\]; it must be float16, float32 or float64 \[5\]"),
        (numpy.zeros((2, 5), numpy.int64), r"array int64 \[5\]; it must be float16"),
        (numpy.zeros((2, 5), bool), r"array bool \[5\]"),
        (numpy.zeros((2, 6, 6), numpy.uint8), r"array uint8 \[6, 6\]; it must be float16"),
        (numpy.zeros(5), r"array float64 \[\]; it must be float16"),
        (numpy.array([[0, 1, 2, numpy.nan, 4]]), "a vector has nan at"),
        (numpy.array([[0, 1, numpy.inf, 3, 4]]), "a vector has inf at"),
        (numpy.array([[0, 1, 1e300, 3, 4]]), r"a vector has 1e\+300 at .* must be finite"),
        (numpy.full((1, 5), 3e38), "gives an embedding that is not finite"),
        (["photo.png"], "a sample is photo.png; this run takes vectors of 5 numbers"),
        ([Image.new("L", (6, 6))], "a sample is an image; this run takes vectors of 5 numbers"),
    ],
)
def test_other_samples_are_rejected(small_run: Path, asked: Any, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        Predictor.load(small_run).predict(asked)


def test_run_on_images_rejects_vectors(images: Path, tmp_path: Path, said: Say) -> None:
    path = run(small(images, clients=2), tmp_path / "run").path
    with pytest.raises(InvalidInput, match=r"an image is an array float64 \[36\]; it must be"):
        Predictor.load(path).predict(numpy.zeros((1, 36)))
    save_vectors(tmp_path / "v.npz", width=36)
    code, _, error = said("predict", path, tmp_path / "v.npz")
    assert code == 2
    assert "v.npz: x_test has vectors of 36 numbers; this run takes images." in error
    with pytest.raises(InvalidInput, match=r"holds vectors of 36 numbers; the run takes images\."):
        join(path, tmp_path / "v.npz", "late")


def test_predict_command_accepts_npz_files(small_run: Path, tmp_path: Path, said: Say) -> None:
    asked = numpy.random.default_rng(2).normal(size=(3, 5))
    numpy.savez(tmp_path / "new.npz", x=asked)
    code, out, _ = said("predict", small_run, tmp_path / "new.npz", "--json")
    assert code == 0
    answers = [json.loads(line) for line in out.splitlines()]
    names = [f"{tmp_path}/new.npz[{n}]" for n in range(3)]
    assert [each.pop("vector") for each in answers] == names
    assert answers == [each.to_json() for each in Predictor.load(small_run).predict(asked)]
    code, out, _ = said("predict", small_run, tmp_path / "new.npz")
    assert code == 0
    assert "3 vectors:" in out
    assert "image" not in out


@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (numpy.zeros((2, 4)), "x has vectors of 4 numbers; this run takes vectors of 5 numbers."),
        (numpy.array([[0, 1, 2, 3, numpy.nan]]), "x has nan at [0, 4]; vectors must be finite"),
        (numpy.zeros((2, 6, 6), numpy.uint8), "x has images; this run takes vectors of 5 numbers."),
        (
            numpy.zeros((2, 5), numpy.int16),
            "x has dtype int16 and shape (2, 5); it must be float16, ",
        ),
    ],
)
def test_unusable_files_are_named(
    small_run: Path, tmp_path: Path, said: Say, x: NDArray[Any], complaint: str
) -> None:
    """Once for the whole file, and the others are predicted."""
    numpy.savez(tmp_path / "bad.npz", x=x)
    numpy.savez(tmp_path / "good.npz", x=numpy.zeros((1, 5)))
    Image.new("L", (6, 6)).save(tmp_path / "a.png")
    words = [tmp_path / name for name in ("bad.npz", "good.npz", "a.png")]
    code, _, error = said("predict", small_run, *words)
    assert code == 3
    assert error.count(f"bad.npz: {complaint}") == 1
    assert "a.png is not an npz file; this run takes vectors of 5 numbers" in error


def test_joining_with_other_samples_is_rejected(small_run: Path, tmp_path: Path) -> None:
    save_vectors(tmp_path / "wide.npz", width=7)
    with pytest.raises(InvalidInput) as caught:
        join(small_run, tmp_path / "wide.npz", "late")
    assert "which holds vectors of 7 numbers; the run takes vectors of 5 numbers." in str(
        caught.value
    )
    save_images(tmp_path / "i.npz")
    with pytest.raises(InvalidInput, match=r"holds images; the run takes vectors of 5 numbers\."):
        join(small_run, tmp_path / "i.npz", "late")


def test_join_reports_vectors_instead_of_images(small_run: Path, tmp_path: Path, said: Say) -> None:
    save_vectors(tmp_path / "mine.npz")
    code, out, _ = said("join", small_run, "--data", tmp_path / "mine.npz", "--name", "late")
    assert code == 0
    assert "prototypes of 60 vectors of 3 classes" in out
    assert "image" not in out


def test_exported_file_takes_features(small_run: Path, tmp_path: Path) -> None:
    done = export_run(Predictor.load(small_run), tmp_path / "c.onnx", rule="classifier")
    assert list(done.note["outputs"]) == ["label", "scores"]
    assert done.note["input"] == {
        "name": "features",
        "type": "float32",
        "shape": ["batch", 5],
        "scaling": "none: values as they are",
    }


def test_predict_and_export_without_the_data(vectors: Path, tmp_path: Path) -> None:
    shutil.copytree(vectors, tmp_path / "data")
    experiment = small(tmp_path / "data", encoder__name=None, dtype="float64")
    path = run(experiment, tmp_path / "run").path
    shutil.rmtree(tmp_path / "data")
    assert load_trained_run(path).input_format == ArrayFormat((5,), "float64")
    file = export_run(Predictor.load(path), tmp_path / "m.onnx")
    assert (
        file.note["checked"]["from"] == "random vectors, because the run's data are not available"
    )
    assert file.note["checked"]["labels_differ"] == 0
