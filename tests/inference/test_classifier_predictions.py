"""Predictions of runs with a classifier: priors, probabilities, prediction sets, metric."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from feature_maps import features_of
from mpfedcl import InvalidInput, Predictor, run
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.gaussian import unpack_symmetric
from mpfedcl.inference.calibration import COVERAGES, find_set_limits
from small_experiments import Say, read_summary, small

Json = dict[str, Any]
RANDOM = 8
"""Random features of small experiments."""


def make_vectors(root: Path) -> Path:
    """Write two domains of 160 + 120 vectors of four classes that overlap, one of them shifted."""
    random = numpy.random.default_rng(5)
    root.mkdir()
    for name, shift in (("north", 0.0), ("south", 0.7)):
        labels = random.integers(0, 4, 280)
        vectors = random.normal(1, 0.6, (280, 8))
        vectors[numpy.arange(280), labels] += 1
        vectors[:, 5] += shift
        numpy.savez(
            root / f"{name}.npz",
            x_train=vectors[:160].astype("float32"),
            y_train=labels[:160],
            x_test=vectors[160:].astype("float32"),
            y_test=labels[160:],
        )
    return root


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vectors(tmp_path_factory.mktemp("overlapping") / "set")


@pytest.fixture(scope="module")
def fedgauss(overlapping: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clients are the domains, so that their prototypes differ."""
    experiment = small(
        overlapping, "fedgauss", clients=None, partition__kind="feature", partition__test="matched"
    )
    return run(experiment, tmp_path_factory.mktemp("runs") / "run").path


@pytest.fixture(scope="module")
def skewed(overlapping: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clients have few classes each, so that their label shares matter."""
    experiment = small(
        overlapping, "fedgauss", partition__alpha=0.3, partition__test="matched", seed=1
    )
    return run(experiment, tmp_path_factory.mktemp("runs") / "run").path


def held_out_of(path: Path) -> tuple[FederatedData, numpy.ndarray[Any, Any]]:
    """Return the data of a run, and its test vectors as they are on disk."""
    data, _ = load_data_and_model(Predictor.load(path).trained.experiment, torch.device("cpu"))
    return data, data.test_inputs.numpy()


def test_accuracies_are_those_of_the_run(skewed: Path) -> None:
    """A client's label prior is used on its local test set, not on the global test set."""
    data, inputs = held_out_of(skewed)
    summary = read_summary(skewed)
    truth = [data.class_names[n] for n in data.test_labels.tolist()]
    said = [each.label for each in Predictor.load(skewed).predict(inputs)]
    right = numpy.mean([ours == theirs for ours, theirs in zip(said, truth, strict=True)])
    assert 100 * right == pytest.approx(summary["accuracy_global"])
    without = 0
    for client in data.clients:
        predictor = Predictor.load(skewed, client.name)
        found = predictor.predict(inputs[client.test])
        own = [truth[row] for row in client.test.tolist()]
        right = numpy.mean([p.label == theirs for p, theirs in zip(found, own, strict=True)])
        assert 100 * right == pytest.approx(summary["accuracy_per_client"][client.name])
        plain = torch.cat([part.scores for part in predictor.measure(inputs[client.test])])
        names = [data.class_names[n] for n in plain.argmax(1).tolist()]
        without += sum(p.label != name for p, name in zip(found, names, strict=True))
    # The shares have changed some answers.
    assert without > 0
    error = summary["calibration_error"]
    local, everywhere = error["local_test"], error["global_test"]
    line = f"{local:.1f} % on the local test set, {everywhere:.1f} % on the global test set."
    assert line in (skewed / "CARD.md").read_text()


def test_probabilities_are_the_softmax_with_the_prior(skewed: Path) -> None:
    data, inputs = held_out_of(skewed)
    held = json.loads((skewed / "partition.json").read_text())["clients"]["client-1"]["train"]
    params = load_file(skewed / "models" / "client-1.safetensors")
    weight, bias = (params[name].double().numpy() for name in ("weight", "bias"))
    phi = features_of(inputs, RANDOM)
    parts = numpy.einsum("nd,cgd->ncg", phi, weight) + bias
    scores = numpy.log(numpy.exp(parts).sum(axis=2)) + numpy.log(
        (numpy.array(held) + 0.1) / (sum(held) + 0.4)
    )
    shares = numpy.exp(scores) / numpy.exp(scores).sum(axis=1, keepdims=True)
    predictor = Predictor.load(skewed, "client-1")
    for said, share in zip(predictor.predict(inputs), shares, strict=True):
        order = share.argsort()[::-1]
        assert said.label == said.classifier.label == data.class_names[order[0]]
        assert said.probability == pytest.approx(share[order[0]], abs=1e-5)
        assert said.second is not None
        assert said.second.label == data.class_names[order[1]]
        assert said.second.probability == pytest.approx(share[order[1]], abs=1e-5)
        assert said.probabilities is not None
        assert list(said.probabilities.values()) == pytest.approx(share.tolist(), abs=1e-5)
        assert said.to_json()["set"] is None


def test_distances_are_in_the_metric_of_the_pool(fedgauss: Path) -> None:
    """(phi - m)' A (phi - m) with the inverse written out, around each client's prototypes."""
    _, inputs = held_out_of(fedgauss)
    predictor = Predictor.load(fedgauss)
    fitted = load_file(fedgauss / "metric.safetensors")
    weight, _, shift, by_class, *_ = fitted["fit"].tolist()
    assert shift + by_class > 0
    size = 8 + 1 + RANDOM
    within = unpack_symmetric(fitted["covariance"].double(), size).numpy()
    even = within.trace() / size * numpy.eye(size)
    precision = numpy.linalg.inv((1 - weight) * within + weight * even)
    pool = predictor.trained.pool
    assert pool is not None
    vectors, counts = pool.vectors.double().numpy(), pool.counts.double().numpy()
    labels, owners = pool.labels.numpy(), pool.owners.numpy()
    means = numpy.stack(
        [numpy.average(vectors[labels == c], axis=0, weights=counts[labels == c]) for c in range(4)]
    )
    away, trust = vectors - means[labels], 1 / (by_class + 1 / counts)
    prototypes = numpy.empty_like(vectors)
    for row, owner in enumerate(owners):
        own = owners == owner
        pulled = (trust[own, None] * away[own]).sum(axis=0)
        moved = shift * pulled / (1 + shift * trust[own].sum())
        prototypes[row] = means[labels[row]] + moved
        prototypes[row] += by_class * trust[row] * (away[row] - moved)
    phi = features_of(inputs, RANDOM)
    gaps = phi[:, None] - prototypes[None]
    expected = numpy.sqrt(numpy.einsum("nmd,de,nme->nm", gaps, precision, gaps))
    assert predictor.threshold is not None
    found = predictor.predict(inputs)
    for said, distances in zip(found, expected, strict=True):
        assert said.distance == pytest.approx(distances.min(), rel=1e-4)
        assert said.nearest is not None
        nearest = int(distances.argmin())
        assert said.nearest.client == pool.names[owners[nearest]]
        assert said.margin == pytest.approx(
            distances[labels != labels[nearest]].min() - distances.min(), abs=1e-3
        )
        assert said.unknown == (
            said.distance is not None and said.distance > predictor.threshold.distance
        )
    # ⌈241 * 0.95⌉ = 229 of the 240 images it was calibrated on are within.
    assert sum(bool(said.unknown) for said in found) == 11
    assert predictor.detect_drift(found) is not None
    drifted = predictor.detect_drift(predictor.predict(-inputs))
    assert drifted is not None
    assert drifted.is_drift


@pytest.mark.parametrize("method", ["fedlda", "fedcof", "fedncm", "fedridge"])
def test_one_shot_methods_predict_by_their_classifier(
    overlapping: Path, tmp_path: Path, method: str
) -> None:
    path = run(small(overlapping, method), tmp_path / "run").path
    data, inputs = held_out_of(path)
    predictor = Predictor.load(path, coverage=0.9)
    found = predictor.predict(inputs)
    right = [p.label == data.class_names[n] for p, n in zip(found, data.test_labels, strict=True)]
    assert 100 * numpy.mean(right) == pytest.approx(read_summary(path)["accuracy_global"])
    assert sum(bool(said.unknown) for said in found) == 11
    assert (path / "metric.safetensors").exists() == (method in ("fedlda", "fedcof"))
    # ⌈241 * 0.9⌉ = 217 of the 240 have their truth in the set, and a little more by ties.
    held = [
        data.class_names[n] in (p.set or ()) for p, n in zip(found, data.test_labels, strict=True)
    ]
    assert 217 <= sum(held) <= 220


@given(st.lists(st.integers(0, 50), min_size=2, max_size=120))
def test_prediction_sets_have_their_coverage(values: list[int]) -> None:
    """Each in turn is the new image: over all of them a coverage is missed by none."""
    surprises = [value / 50 for value in values]
    hits, tried = dict.fromkeys(COVERAGES, 0), dict.fromkeys(COVERAGES, 0)
    for place, value in enumerate(surprises):
        others = torch.tensor(surprises[:place] + surprises[place + 1 :], dtype=torch.float64)
        for name, limit in find_set_limits(others).items():
            tried[float(name)] += 1
            hits[float(name)] += value <= limit
    for coverage in COVERAGES:
        assert hits[coverage] >= coverage * tried[coverage] - 1e-9


def test_prediction_set_limits_in_closed_form() -> None:
    assert find_set_limits(torch.arange(9).double() / 10) == {
        "0.5": 0.4, "0.6": 0.5, "0.7": 0.6, "0.75": 0.7, "0.8": 0.7, "0.85": 0.8, "0.9": 0.8
    }  # fmt: skip


def test_prediction_sets_grow_with_the_coverage(fedgauss: Path) -> None:
    _, inputs = held_out_of(fedgauss)
    sizes = []
    for coverage in (0.5, 0.8, 0.9, 0.99):
        found = Predictor.load(fedgauss, "north", coverage=coverage).predict(inputs)
        assert all(said.set is not None and said.set[0] == said.label for said in found)
        sizes.append([len(said.set or ()) for said in found])
    for smaller, larger in pairwise(sizes):
        assert all(one <= other for one, other in zip(smaller, larger, strict=True))
    assert sum(sizes[-1]) > sum(sizes[0])
    few = Predictor.load(fedgauss, "north", coverage=0.995)
    assert "120 held-out images are too few for a coverage of 0.995" in str(few.remark)
    assert few.predict(inputs[:1])[0].set is None
    with pytest.raises(InvalidInput, match=r"coverage is 1\.5; it must be one of 0\.5, "):
        Predictor.load(fedgauss, coverage=1.5)


def test_coverage_is_rejected_for_prototype_predictors(images: Path, tmp_path: Path) -> None:
    path = run(small(images, rounds=1), tmp_path / "run").path
    with pytest.raises(InvalidInput, match="the nearest prototype decides"):
        Predictor.load(path, coverage=0.9)


def test_damaged_metric_is_rejected(overlapping: Path, tmp_path: Path) -> None:
    path = run(small(overlapping, "fedlda"), tmp_path / "run").path
    file = path / "metric.safetensors"
    for wrong in (torch.zeros(3), torch.full((36,), -1.0), torch.full((36,), torch.nan)):
        save_file({"covariance": wrong, "fit": torch.zeros(2)}, file)
        with pytest.raises(InvalidInput, match=r"metric\.safetensors must be the file"):
            Predictor.load(path)
    file.unlink()
    with pytest.raises(InvalidInput, match=r"metric\.safetensors"):
        Predictor.load(path)


def test_predict_command_with_a_classifier(
    said: Say, fedgauss: Path, overlapping: Path, tmp_path: Path
) -> None:
    code, output, _ = said("predict", fedgauss, overlapping / "north.npz", "--coverage", "0.9")
    assert code == 0
    assert "second best   90 % set" in output
    assert "prototype of" not in output
    assert "margin" not in output
    assert max(len(line) for line in output.splitlines()) <= 100
    foreign = tmp_path / "foreign.npz"
    numpy.savez(foreign, x=-numpy.load(overlapping / "north.npz")["x_test"][:20])
    code, output, errors = said("predict", fedgauss, foreign)
    assert code == 0
    assert "Drift: 20 of 20 vectors are farther from the pool" in " ".join(output.split())
    code, output, errors = said("predict", fedgauss, foreign, "--client", "south", "--json")
    found = [json.loads(line) for line in output.splitlines()]
    assert list(found[0]["probabilities"]) == ["0", "1", "2", "3"]
    assert "Drift: " in errors


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--coverage", "2"), "coverage is 2; it must be one of"),
        (("--false-alarms", "0.3"), "false_alarms is 0.3; it must be one of"),
    ],
)
def test_bad_input_is_rejected_in_one_line(
    said: Say, fedgauss: Path, words: tuple[str, ...], sentence: str
) -> None:
    code, output, errors = said("predict", fedgauss, "x.npz", *words)
    assert (code, output) == (2, "")
    assert sentence in errors
    assert len(errors.splitlines()) == 1
