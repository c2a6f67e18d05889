"""A client uses the model that it has trained: from its own folder, without server or data."""

from operator import eq
from pathlib import Path

import numpy
import pytest
from federations import LoopbackFederation, float64_experiment, folder_experiment
from PIL import Image

from mpfedcl import Predictor
from mpfedcl.data.client_split import split_own_samples
from mpfedcl.data.own_samples import open_own_samples
from mpfedcl.network.setup.folders import make_federation
from small_experiments import Json, Say, read_summary

pytestmark = pytest.mark.whole
CLIENTS = ("client-0", "client-1")


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """The folder of a federation with two clients."""
    make_federation(tmp_path / "lab", CLIENTS, None, 9800)
    return tmp_path / "lab"


def save_faint_pictures(folder: Path, seed: int) -> Path:
    """Write pictures that are hard to tell apart, so that models differ in what they say."""
    random = numpy.random.default_rng(seed)
    for place, name in enumerate(("cat", "dog", "eel")):
        (folder / name).mkdir(parents=True)
        for number in range(24):
            pixels = random.integers(0, 200, (6, 6), dtype=numpy.uint8)
            pixels[place] += 45
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def serve(lab: Path, method: str, **changes: object) -> Json:
    """Run a federation whose clients have pictures and folders of their own; return its summary."""
    federation = LoopbackFederation(folder_experiment(method, train__lr=0.5, **changes), lab, count=0)
    for number, name in enumerate(CLIENTS):
        data = save_faint_pictures(lab / "pictures" / name, seed=number)
        federation.bring(number + 1, name, data, memory=str(lab / "clients" / name / "memory"))
    federation.serve()
    return read_summary(federation.path)


def read_own_tests(lab: Path, name: str, predictor: Predictor) -> float:
    """Return how many of the client's held-out pictures are right, in percent."""
    trained = predictor.trained
    index = open_own_samples(lab / "pictures" / name, trained.class_names)
    _, test = split_own_samples(index, name, trained.experiment)
    images = index.store.load(test.rows, trained.input_format)
    truth = [trained.class_names[label] for label in test.labels]
    said = [each.label for each in predictor.predict(images)]
    return 100 * sum(map(eq, said, truth)) / len(truth)


@pytest.mark.parametrize(
    "method", ["mp-fedcl", "fedavg", "fedproto", "fedper", "fedpcl", "fedgauss", "local", "mpfed"]
)
def test_its_model_answers_as_it_was_judged(lab: Path, method: str) -> None:
    changes = {"encoder__name": "none"} if method == "fedgauss" else {}
    summary = serve(lab, method, **changes)
    for name in CLIENTS:
        predictor = Predictor.load(lab / "clients" / name)
        assert predictor.client == (None if method == "fedavg" else name)
        found = read_own_tests(lab, name, predictor)
        assert found == pytest.approx(summary["accuracy_per_client"][name])
