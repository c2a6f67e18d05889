"""Exported files agree with PyTorch for every predictor and kind of run."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from exported_answers import Answers, ask, operators_are_listed_once  # noqa: F401  -- a fixture
from numpy.typing import NDArray
from onnx_encoder_files import save_convolution
from PIL import Image

from command_processes import environment
from encoder_experiments import pictured
from image_sets import read_image_set
from mpfedcl import Experiment, InvalidInput, Predictor, run
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.inference.export import ExportedFile, export_run, load_check_samples
from own_models import of_tokens
from small_experiments import EXAMPLES, Say, small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("drawn_once", "own_places")]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits inside the package, far enough to be right about most of them."""
    path = tmp_path_factory.mktemp("digits") / "run"
    return run(Experiment(rounds=6).replace(train__lr=0.1, partition__alpha=1.0), path).path


@pytest.fixture(scope="module")
def digits_onnx(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportedFile:
    """Its export with default options."""
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    return export_run(Predictor.load(digits_run), path)


def digits() -> tuple[NDArray[numpy.uint8], NDArray[numpy.int64]]:
    (domain,) = read_image_set(DatasetSettings()).domains
    assert domain.test_images is not None
    assert domain.test_labels is not None
    return domain.test_images, domain.test_labels


def assert_same_labels(predictor: Predictor, images: NDArray[Any], answers: Answers) -> None:
    """Compare an export by prototype with PyTorch, except for ties."""
    for number, said in enumerate(predictor.predict(images)):
        assert said.distance is not None
        assert answers["distance"][number] == pytest.approx(said.distance, abs=1e-5)
        label = predictor.class_names[answers["label"][number]]
        assert label == said.label or (said.margin or 0) < 1e-5
        assert -answers["scores"][number].max() == answers["distance"][number]


@pytest.mark.thorough
def test_onnx_file_agrees_on_a_thousand_digits(
    digits_run: Path, digits_onnx: ExportedFile, tmp_path: Path
) -> None:
    predictor, done = Predictor.load(digits_run), digits_onnx
    images, labels = digits()
    assert len(images) == 1000
    answers, note = ask(done.path, images)
    assert_same_labels(predictor, images, answers)
    one, _ = ask(done.path, images[7:8])
    assert one["label"] == answers["label"][7]
    assert note == done.note
    assert note["classes"] == list("0123456789")
    assert note["input"]["shape"] == ["batch", 28, 28]
    assert note["unknown"]["false_alarms"] == 0.05
    assert note["checked"]["labels_differ"] == 0
    assert (note["checked"]["images"], note["checked"]["from"]) == (
        200,
        "test images of mnist-sample",
    )
    assert (answers["label"] == labels).mean() > 0.6
    # The file contains no path of this machine.
    content = done.path.read_bytes()
    for place in (str(Path.cwd()), str(done.path.parent), "site-packages", "torch/fx", "client-0"):
        assert place.encode() not in content
    again = export_run(predictor, tmp_path / "again.onnx")
    assert again.path.read_bytes() == content


def test_export_by_classifier_agrees(digits_run: Path) -> None:
    predictor = Predictor.load(digits_run, "client-3")
    images, _ = digits()
    said = predictor.predict(images[:50])
    done = export_run(predictor, rule="classifier")
    assert done.path == digits_run / "exported" / "client-3-classifier.onnx"
    answers, note = ask(done.path, images[:50])
    assert list(answers) == ["label", "scores"]
    assert note["model"] == "client-3"
    assert note["unknown"] is None
    for label, scores, each in zip(answers["label"], answers["scores"], said, strict=True):
        assert predictor.class_names[label] == each.classifier.label
        assert scores.max() == pytest.approx(each.classifier.probability, abs=1e-5)


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize(
    ("method", "changes"), [("fedproto", {}), ("fedavg", {}), ("mp-fedcl", {"dtype": "float64"})]
)
def test_exports_of_other_methods_and_precisions_agree(
    images: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    path = run(small(images, method, **changes), tmp_path / "run").path
    predictor = Predictor.load(path, "client-0")
    pixels = numpy.load(images / "stripes.npz")["x_test"]
    answers, note = ask(export_run(predictor).path, pixels)
    if method == "fedavg":
        assert note["predictor"] == "classifier"
        said = [each.classifier.label for each in predictor.predict(pixels)]
        assert [note["classes"][n] for n in answers["label"]] == said
    else:
        assert_same_labels(predictor, pixels, answers)


def export_inside(pictures: Path, path: Path, **changes: Any) -> None:
    """Compare a run's export, which includes the encoder, with PyTorch on six images."""
    experiment = pictured(pictures, rounds=1, train__lr=0.01, **changes)
    predictor = Predictor.load(run(experiment, path).path)
    paths = sorted(pictures.glob("photo/*/*"))[:6]
    brought = numpy.stack([predictor.convert(each) for each in paths])
    assert brought.shape[1:] == predictor.trained.input_format.shape
    answers, _ = ask(export_run(predictor).path, brought)
    assert_same_labels(predictor, brought, answers)


@pytest.mark.thorough
def test_resnet18_encoder_is_included(pictures: Path, tmp_path: Path) -> None:
    export_inside(pictures, tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.usefixtures("narrow_resnet")
def test_trained_encoder_is_included(pictures: Path, tmp_path: Path) -> None:
    export_inside(pictures, tmp_path / "run", encoder__train=True)


def test_random_filters_are_included_for_rectangular_color_images(tmp_path: Path) -> None:
    pixels = numpy.random.default_rng(1).integers(0, 256, (24, 30, 23, 3), dtype=numpy.uint8)
    labels = numpy.arange(24) % 3
    (tmp_path / "set").mkdir()
    numpy.savez(
        tmp_path / "set/a.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels
    )
    changes = {"encoder__name": "random-filters", "partition__kind": "iid", "clients": 2}
    path = run(pictured(tmp_path / "set", **changes), tmp_path / "run").path
    predictor = Predictor.load(path)
    answers, note = ask(export_run(predictor).path, pixels)
    assert note["input"]["shape"] == ["batch", 30, 23, 3]
    assert_same_labels(predictor, pixels, answers)


def test_file_takes_the_features_of_an_onnx_encoder(pictures: Path, tmp_path: Path) -> None:
    encoder = save_convolution(tmp_path / "encoder.onnx", "map")
    path = run(pictured(pictures, encoder__name=f"onnx:{encoder}"), tmp_path / "run").path
    predictor = Predictor.load(path)
    brought = numpy.stack([predictor.convert(each) for each in sorted(pictures.glob("*/*/*"))])
    answers, note = ask(export_run(predictor).path, predictor.trained.inputs(brought).numpy())
    assert_same_labels(predictor, brought, answers)
    assert note["input"]["shape"] == ["batch", 8]
    assert (note["input"]["encoder"], note["input"]["height"]) == ("onnx encoder.onnx", 32)
    assert note["input"]["scaling"]["mean"] == [0.0, 0.0, 0.0]


def test_run_on_token_ids_predicts_and_exports(tmp_path: Path) -> None:
    tokens = numpy.random.default_rng(0).integers(0, 20, (60, 5))
    settings: dict[str, Any] = {"rounds": 1, "clients": 2, "partition": {"kind": "iid"}}
    data, path = (tokens, tokens[:, 0] % 3), tmp_path / "run"
    predictor = run("mp-fedcl", path, model=of_tokens, data=data, **settings).predictor()
    answers, note = ask(export_run(predictor).path, tokens)
    assert note["input"]["type"] == "int64"
    assert_same_labels(predictor, tokens, answers)
    # Without the data, ids that every vocabulary has.
    trained = replace(predictor.trained, partition={**predictor.trained.partition, "network": True})
    assert load_check_samples(trained, 40)[0].max() == 1


@pytest.mark.usefixtures("small_model")
def test_file_that_disagrees_with_pytorch_is_not_written(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_faced.py").write_text(
        "import torch\n"
        "from mpfedcl.methods.mp_fedcl import MpFedCL\n"
        "class TwoFaced(MpFedCL):\n"
        "    name = 'two-faced'\n"
        "    def project(self, embeddings):\n"
        "        turn = torch.compiler.is_exporting()\n"
        "        return super().project(embeddings.flip(1) if turn else embeddings)\n"
        "class Fickle(MpFedCL):\n"
        "    name = 'fickle'\n"
        "    def project(self, embeddings):\n"
        "        return embeddings if embeddings.sum() > 0 else -embeddings\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = run(small(images, "two_faced:TwoFaced"), tmp_path / "run").path
    with pytest.raises(InvalidInput, match=r"labels differ from PyTorch's, .*nothing was written"):
        export_run(Predictor.load(path), tmp_path / "model.onnx")
    path = run(small(images, "two_faced:Fickle", validation__max_norm=1e9), tmp_path / "other").path
    with pytest.raises(InvalidInput, match="it cannot be traced"):
        export_run(Predictor.load(path), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.usefixtures("small_model")
def test_without_the_data_random_images_are_checked(
    images: Path, tmp_path: Path, said: Say
) -> None:
    shutil.copytree(images, tmp_path / "images")
    path = run(small(tmp_path / "images"), tmp_path / "run").path
    shutil.rmtree(tmp_path / "images")
    code, output, _ = said("export", path, "--json")
    told = json.loads(output)
    assert code == 0
    assert told["checked"]["from"] == "random images, because the run's data are not available"
    assert told["checked"]["images"] == 200


@pytest.mark.usefixtures("small_model")
def test_bad_input_is_rejected_in_one_line(images: Path, tmp_path: Path, said: Say) -> None:
    path = run(small(images, "fedavg"), tmp_path / "run").path
    for words, sentence in (
        (("--predictor", "prototype"), "has no prototypes; it must be 'classifier'"),
        (("--predictor", "pickle"), "--predictor is 'pickle'; it must be one of"),
        (("--out", str(tmp_path)), "must be a file, and this is a folder"),
    ):
        code, output, errors = said("export", path, *words)
        assert (code, output) == (2, "")
        assert sentence in errors
        assert len(errors.splitlines()) == 1


def test_edge_example_runs_without_torch_and_mpfedcl(
    digits_run: Path, digits_onnx: ExportedFile, tmp_path: Path
) -> None:
    predictor, model = Predictor.load(digits_run), digits_onnx.path
    images, _ = digits()
    Image.fromarray(images[0]).save(tmp_path / "gray.png")
    Image.fromarray(images[1]).convert("RGBA").resize((90, 70)).save(tmp_path / "clear.png")
    Image.fromarray(images[2]).convert("RGB").save(tmp_path / "color.jpg")
    files = [tmp_path / name for name in ("gray.png", "clear.png", "color.jpg")]
    forbid = (
        "import runpy, sys\n"
        "class Forbid:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'mpfedcl', 'onnx', 'safetensors'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Forbid())\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "assert not {'torch', 'mpfedcl'} & sys.modules.keys()\n"
    )
    example = EXAMPLES / "edge_inference.py"
    ended = subprocess.run(
        [sys.executable, "-c", forbid, str(example), str(model), *map(str, files)],
        capture_output=True, text=True, env=environment(), cwd=tmp_path, check=False, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for line, file, said in zip(
        ended.stdout.splitlines(), files, predictor.predict(files), strict=True
    ):
        unknown = " (unknown)" if said.unknown else ""
        assert line == f"{file}: {said.label}, distance {said.distance:.3f}{unknown}"
