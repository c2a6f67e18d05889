"""Exported classifiers in closed form: the mixture inside, a client's label shares inside."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from exported_answers import ask, operators_are_listed_once  # noqa: F401  -- a fixture
from numpy.typing import NDArray

from encoder_experiments import pictured
from feature_maps import features_of
from mpfedcl import Experiment, Predictor, run
from mpfedcl.inference.export import export_run
from small_experiments import save_shifted_vectors

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places")]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites that differ by a shift; the last of the four classes has no training sample."""
    return save_shifted_vectors(tmp_path_factory.mktemp("sites") / "data")


@pytest.fixture(scope="module")
def mixture(sites: Path) -> Path:
    """FedGauss's run: every class is a mixture over the sites that hold it."""
    return run_method(sites, "fedgauss")


def run_method(sites: Path, method: str, **changes: Any) -> Path:
    settings = {
        "dataset__name": "folder",
        "dataset__root": sites,
        "partition__kind": "feature",
        "partition__test": "matched",
    }
    experiment = Experiment(method=method).replace(**settings | changes)
    return run(experiment, sites.parent / method).path


def vectors_of(sites: Path) -> NDArray[numpy.float32]:
    found = [numpy.load(file)["x_test"] for file in sorted(sites.glob("*.npz"))]
    # A sample of zeros has no direction, and gets an answer all the same.
    return numpy.concatenate([*found, numpy.zeros((1, found[0].shape[1]))]).astype("f4")


def mixture_scores(params: dict[str, torch.Tensor], samples: NDArray[Any]) -> NDArray[Any]:
    """Return log Σ_g exp(w_cg phi + b_cg) in float64, part by part."""
    phi = features_of(samples)
    weight, bias = (params[name].double().numpy() for name in ("weight", "bias"))
    parts = numpy.einsum("nd,cgd->ncg", phi, weight) + bias
    found: NDArray[Any] = numpy.logaddexp.reduce(parts, axis=2)
    return found


def softmax(scores: NDArray[Any]) -> NDArray[Any]:
    powers = numpy.exp(scores - scores.max(axis=1, keepdims=True))
    shares: NDArray[Any] = powers / powers.sum(axis=1, keepdims=True)
    return shares


@pytest.mark.thorough
def test_mixture_with_an_absent_class_agrees(sites: Path, mixture: Path) -> None:
    predictor, samples = Predictor.load(mixture), vectors_of(sites)
    assert predictor.params["bias"].shape == (4, 3)
    done = export_run(predictor)
    assert done.path.name == "global-classifier.onnx"
    answers, note = ask(done.path, samples)
    expected = softmax(mixture_scores(predictor.params, samples))
    numpy.testing.assert_allclose(answers["scores"], expected, atol=1e-5)
    assert answers["label"].tolist() == expected.argmax(axis=1).tolist()
    assert answers["scores"][:, 3].max() == 0
    one, _ = ask(done.path, samples[4:5])
    numpy.testing.assert_allclose(one["scores"], answers["scores"][4:5], atol=1e-6)
    assert (note["predictor"], note["prior"], note["unknown"]) == ("classifier", None, None)
    assert note["outputs"]["scores"] == "of each class: the softmax"
    assert note["checked"]["labels_differ"] == 0


def test_personal_classifier_includes_the_label_prior(sites: Path, mixture: Path) -> None:
    predictor, samples = Predictor.load(mixture, "site-1"), vectors_of(sites)
    assert predictor.params["bias"].shape == (4, 1)
    answers, note = ask(export_run(predictor).path, samples)
    shares = numpy.array([10.1, 10.1, 10.1, 0.1]) / 30.4
    assert note["prior"] == pytest.approx(shares.tolist())
    expected = softmax(mixture_scores(predictor.params, samples) + numpy.log(shares))
    numpy.testing.assert_allclose(answers["scores"], expected, atol=1e-5)
    # A client with only two classes predicts the third less often with its label prior.
    lopsided = Predictor.load(mixture, "site-0")
    answers, _ = ask(export_run(lopsided).path, samples)
    alone = softmax(mixture_scores(lopsided.params, samples))
    assert answers["scores"][:, 2].mean() < 0.8 * alone[:, 2].mean()
    assert (answers["scores"][:, 2] <= alone[:, 2] + 1e-5).all()


def test_shared_test_set_leaves_the_label_prior_out(sites: Path) -> None:
    changes = {"partition__kind": "iid", "partition__test": "shared", "clients": 2}
    predictor = Predictor.load(run_method(sites, "local-gauss", **changes), "client-0")
    samples = vectors_of(sites)
    answers, note = ask(export_run(predictor).path, samples)
    assert note["prior"] is None
    expected = softmax(mixture_scores(predictor.params, samples))
    numpy.testing.assert_allclose(answers["scores"], expected, atol=1e-5)


def test_nearest_class_mean_agrees(sites: Path, mixture: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(run_method(sites, "fedncm", dtype="float64"))
    samples = vectors_of(sites)
    answers, _ = ask(export_run(predictor).path, samples)
    expected = softmax(mixture_scores(predictor.params, samples))
    numpy.testing.assert_allclose(answers["scores"], expected, atol=1e-5)
    # By prototype if requested; a class without a prototype is infinitely far.
    done = export_run(Predictor.load(mixture), tmp_path / "p.onnx", rule="prototype")
    answers, note = ask(done.path, samples)
    assert note["checked"]["labels_differ"] == 0
    assert note["unknown"] is None
    assert numpy.isneginf(answers["scores"][:, 3]).all()


@pytest.mark.thorough
@pytest.mark.usefixtures("narrow_resnet")
def test_encoder_is_included(pictures: Path, tmp_path: Path) -> None:
    experiment = pictured(pictures, method="fedgauss", encoder__name="random-resnet18")
    predictor = Predictor.load(run(experiment, tmp_path / "run").path)
    done = export_run(predictor)
    chosen = sorted(pictures.glob("*/*/*"))[::12]
    brought = numpy.stack([predictor.convert(each) for each in chosen])
    answers, _ = ask(done.path, brought)
    features = predictor.trained.inputs(brought).numpy()
    expected = softmax(mixture_scores(predictor.params, features))
    numpy.testing.assert_allclose(answers["scores"], expected, atol=1e-4)
