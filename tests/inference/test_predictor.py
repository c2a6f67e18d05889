"""Predictions compared with plain arithmetic, for every type of method."""

import json
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from encoder_experiments import pictured
from mpfedcl import InvalidInput, Predictor, PrototypePool, Prototypes, run
from mpfedcl.core.images import Images
from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.image_files import ImageFileStore
from mpfedcl.data.sample_index import open_data_set
from small_experiments import small

pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture(scope="module")
def trained_run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small(images, rounds=4, train__lr=0.1), tmp_path_factory.mktemp("runs") / "run").path


def read_test_images(images: Path) -> Images:
    found: Images = numpy.load(images / "stripes.npz")["x_test"]
    return found


@pytest.mark.parametrize("client", [None, "client-1"])
def test_predictions_are_those_of_plain_arithmetic(
    images: Path, trained_run: Path, client: str | None
) -> None:
    predictor = Predictor.load(trained_run, client, false_alarms=0.2)
    pixels, trained = read_test_images(images), predictor.trained
    params = {n: v.double().numpy() for n, v in trained.parameters(client).items()}
    hidden = (pixels.reshape(len(pixels), -1) / 255 - 0.5) / 0.5
    for layer in ("hidden.0", "hidden.1", "hidden.2"):
        hidden = numpy.maximum(hidden @ params[f"{layer}.weight"].T + params[f"{layer}.bias"], 0)
    logits = hidden @ params["classifier.weight"].T + params["classifier.bias"]
    points = hidden / numpy.linalg.norm(hidden, axis=1, keepdims=True)
    pool = trained.pool
    assert pool is not None
    gaps = numpy.linalg.norm(points[:, None] - pool.vectors.double().numpy()[None], axis=2)
    labels = pool.labels.numpy()
    predictions = predictor.predict(pixels)
    assert len(predictions) == len(pixels)
    assert predictor.threshold is not None
    for said, gap, logit in zip(predictions, gaps, logits, strict=True):
        nearest = int(gap.argmin())
        assert said.distance is not None
        assert said.distance == pytest.approx(gap[nearest], abs=1e-5)
        others = gap[labels != labels[nearest]].min()
        assert said.margin == pytest.approx(others - gap[nearest], abs=1e-5)
        assert said.label == trained.class_names[labels[nearest]]
        assert said.nearest is not None
        assert said.nearest.client == pool.names[int(pool.owners[nearest])]
        assert said.nearest.class_name == said.label
        assert said.nearest.count == int(pool.counts[nearest])
        shares = numpy.exp(logit - logit.max()) / numpy.exp(logit - logit.max()).sum()
        assert said.classifier.label == trained.class_names[int(shares.argmax())]
        assert said.classifier.probability == pytest.approx(shares.max(), abs=1e-5)
        assert said.unknown == (said.distance > predictor.threshold.distance)
    closest = numpy.stack([gaps[:, labels == label].min(axis=1) for label in range(3)], axis=1)
    shares = numpy.exp(-(closest**2) / (2 * 0.07))
    shares /= shares.sum(axis=1, keepdims=True)
    numpy.testing.assert_allclose(predictor.probabilities(pixels), shares, atol=1e-5)
    if client is None:
        # The 30 images it was calibrated on: ⌈31 * 0.8⌉ = 25 of them are within.
        assert sum(bool(said.unknown) for said in predictions) == 5


def test_paths_pillow_images_and_arrays_agree(trained_run: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(trained_run)
    gray = numpy.random.default_rng(1).integers(0, 256, (6, 6), dtype=numpy.uint8)
    picture = Image.fromarray(gray)
    picture.save(tmp_path / "a.png")
    picture.convert("RGB").save(tmp_path / "color.png")
    kinds = [
        gray,
        gray[..., None],
        numpy.repeat(gray[..., None], 3, axis=2),
        picture,
        picture.convert("RGBA"),
        tmp_path / "a.png",
        str(tmp_path / "color.png"),
    ]
    first, *others = predictor.predict(kinds)
    assert all(each == first for each in others)
    assert predictor.predict([]) == []
    mixed = predictor.predict([numpy.zeros((40, 3), numpy.uint8), gray])
    assert mixed[1].label == first.label
    for wrong in (gray.astype(float), gray[0], numpy.zeros((0, 4), numpy.uint8), "nothing.png"):
        with pytest.raises(InvalidInput, match=r"it must be bytes|cannot be read as an image"):
            predictor.predict([wrong])


@pytest.mark.parametrize(("method", "client"), [("fedavg", None), ("local", "client-0")])
def test_classifier_predicts_without_prototypes(
    images: Path, tmp_path: Path, method: str, client: str | None
) -> None:
    predictor = Predictor.load(run(small(images, method), tmp_path / "run").path, client)
    (said,) = predictor.predict(read_test_images(images)[:1])
    assert said.label == said.classifier.label
    told = said.to_json()
    assert [told[name] for name in ("distance", "margin", "unknown", "nearest")] == [None] * 4
    assert "no prototypes" in str(predictor.remark)


def test_fedproto_compares_with_global_prototypes(images: Path, tmp_path: Path) -> None:
    path = run(small(images, "fedproto"), tmp_path / "run").path
    with pytest.raises(InvalidInput, match=r"no global model; it must be one of client-0"):
        Predictor.load(path)
    (said,) = Predictor.load(path, "client-2").predict(read_test_images(images)[:1])
    assert said.nearest is not None
    assert said.nearest.client == "global"


def test_incomplete_and_damaged_calibration_is_reported(
    images: Path, trained_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=r"false_alarms is 0\.3; it must be one of 0\.001, "):
        Predictor.load(trained_run, false_alarms=0.3)
    few = Predictor.load(trained_run, false_alarms=0.01)
    assert "30 held-out images are too few" in str(few.remark)
    assert few.predict(read_test_images(images)[:1])[0].unknown is None
    path = run(small(images), tmp_path / "run").path
    file = path / "calibration.json"
    file.write_text(json.dumps({"global": {"thresholds": 3, "images": 4}}))
    with pytest.raises(InvalidInput, match=r"calibration\.json.*global\.thresholds"):
        Predictor.load(path)
    # Runs over a network have no such file.
    file.unlink()
    predictor = Predictor.load(path)
    assert "recorded no distances" in str(predictor.remark)
    (said,) = predictor.predict(read_test_images(images)[:1])
    assert said.unknown is None
    assert said.distance is not None


@pytest.mark.usefixtures("narrow_resnet")
def test_accuracy_equals_that_of_the_run(pictures: Path, tmp_path: Path) -> None:
    """From the files on, by another way than the run's: through no cache, in other batches."""
    result = run(pictured(pictures), tmp_path / "run")
    assert result.summary is not None
    sample_index = open_data_set(result.experiment.dataset)
    test = split_among_clients(sample_index, result.experiment).test
    assert isinstance(sample_index.store, ImageFileStore)
    paths = [sample_index.store.paths[row] for row in test.rows]
    said = Predictor.load(result.path).predict(paths)
    right = [sample_index.class_names[n] for n in test.labels]
    by_prototype = numpy.mean([p.label == truth for p, truth in zip(said, right, strict=True)])
    by_classifier = numpy.mean(
        [p.classifier.label == truth for p, truth in zip(said, right, strict=True)]
    )
    predictors = result.summary["predictors"]["global_test"]
    assert 100 * by_prototype == pytest.approx(predictors["global_prototype"])
    assert 100 * by_classifier == pytest.approx(predictors["global_classifier"])


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 12), st.integers(1, 6))
def test_rows_and_classes_agree_with_the_label(
    seed: int, num_classes: int, num_prototypes: int, dimension: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (num_prototypes,), generator=draw).sort().values
    # Few distinct numbers, so that there are ties.
    vectors = torch.randint(-1, 2, (num_prototypes, dimension), generator=draw).float()
    shared = Prototypes(vectors, labels, torch.ones(num_prototypes, dtype=torch.int64))
    pool = PrototypePool.gather({"a": shared}, num_classes=num_classes)
    z = torch.randint(-1, 2, (7, dimension), generator=draw).float()
    label, distance = pool.nearest(z)
    rows, same = pool.nearest_rows(z)
    by_class = pool.distances_by_class(z)
    assert torch.equal(pool.labels[rows], label)
    assert torch.equal(same, distance)
    assert torch.equal(by_class.argmin(dim=1), label)
    assert torch.allclose(by_class.min(dim=1).values, distance)
    assert torch.equal(by_class.isfinite().any(dim=0), pool.present)
