"""A client uses its trained model from its own folder, without server or data."""

import json
from pathlib import Path
from tempfile import mkdtemp

import numpy
import pytest
from federations import OWN_TESTS, LoopbackFederation, folder_experiment
from PIL import Image

from command_results import Refused
from mpfedcl import Predictor
from mpfedcl.data.sample_index import open_own_samples
from mpfedcl.data.secret_split import find_secret, split_by_secret
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
    """Write images that are hard to distinguish, so that models differ in their predictions."""
    random = numpy.random.default_rng(seed)
    for place, name in enumerate(("cat", "dog", "eel")):
        (folder / name).mkdir(parents=True)
        for number in range(24):
            pixels = random.integers(0, 200, (6, 6), dtype=numpy.uint8)
            pixels[place] += 45
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def serve(lab: Path, method: str, **changes: object) -> Json:
    """Run a federation whose clients have their own images and folders; return its summary."""
    experiment = folder_experiment(method, train__lr=0.5, **changes)
    federation = LoopbackFederation(experiment, Path(mkdtemp(dir=lab)), count=0)
    for number, name in enumerate(CLIENTS):
        data = lab / "pictures" / name
        if not data.exists():
            save_faint_pictures(data, seed=number)
        federation.bring(number + 1, name, data, state=str(lab / "clients" / name / "memory"))
    federation.serve()
    return read_summary(federation.path)


def read_own_tests(lab: Path, name: str, predictor: Predictor) -> float:
    """Return the accuracy on the client's held-out images in percent."""
    trained = predictor.trained
    index = open_own_samples(lab / "pictures" / name, trained.class_names)
    secret = find_secret(lab / "clients" / name / "memory")
    (domain,) = split_by_secret(index, secret, OWN_TESTS).domains
    test = domain.test
    assert test is not None
    images = index.store.load(test.rows, trained.input_format)
    truth = [trained.class_names[label] for label in test.labels]
    predicted = [each.label for each in predictor.predict(images)]
    right: int = sum(map(str.__eq__, predicted, truth))
    return 100 * right / len(truth)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "method", ["mp-fedcl", "fedavg", "fedproto", "fedper", "fedpcl", "fedgauss", "mpfed"]
)
def test_saved_model_reproduces_its_evaluation(lab: Path, method: str) -> None:
    changes = {"encoder__name": "none"} if method == "fedgauss" else {}
    summary = serve(lab, method, **changes)
    for name in CLIENTS:
        predictor = Predictor.load(lab / "clients" / name)
        assert predictor.client == (None if method == "fedavg" else name)
        found = read_own_tests(lab, name, predictor)
        assert found == pytest.approx(summary["accuracy_per_client"][name])


def test_saved_models_are_a_run_directory(lab: Path) -> None:
    serve(lab, "mp-fedcl")
    (final,) = (lab / "clients" / "client-0" / "memory").glob("*/final")
    assert sorted(each.name for each in final.iterdir()) == [
        "experiment.toml", "model.safetensors", "models", "partition.json", "pool.safetensors",
        "summary.json",
    ]  # fmt: skip
    assert final.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in (final / "models").iterdir()] == ["client-0.safetensors"]
    # The folder contains no information about the other client's images.
    assert list(json.loads((final / "partition.json").read_text())["clients"]) == ["client-0"]
    # Opened by its path, the run has the global model too.
    assert Predictor.load(final).client is None


@pytest.mark.thorough
def test_predict_uses_the_latest_run(lab: Path) -> None:
    serve(lab, "mp-fedcl")
    (first,) = (lab / "clients" / "client-0" / "memory").glob("*/final")
    serve(lab, "fedproto", rounds=1)
    assert Predictor.load(lab / "clients" / "client-0").trained.experiment.method == "fedproto"
    assert Predictor.load(first, "client-0").trained.experiment.method == "mp-fedcl"


def test_full_disk_costs_only_the_saved_models(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mpfedcl.network.client.state._write", fail)
    assert None not in serve(lab, "mp-fedcl")["accuracy_per_client"].values()
    memory = lab / "clients" / "client-0" / "memory"
    assert len(list(memory.glob("*/round-*"))) == 2
    assert not list(memory.glob("*/final"))


@pytest.mark.thorough
def test_ood_needs_a_data_folder(lab: Path, said: Say) -> None:
    pytest.importorskip("onnxruntime")
    serve(lab, "mp-fedcl")
    client, asked = lab / "clients" / "client-0", lab / "pictures" / "client-1"
    held_out = save_faint_pictures(lab / "held-out", seed=9)
    code, out, err = said("predict", client, asked)
    assert (code, "unknown:" in out) == (0, False)
    assert "--held-out FOLDER measures them" in err
    code, out, _ = said("predict", client, asked, "--held-out", held_out)
    assert code == 0
    assert "mp-fedcl on its clients' own data, client-0's personalized model" in out
    assert "of 72 held-out images" in out
    # The threshold is stored, and the share of flagged held-out images is as specified.
    code, out, _ = said("predict", client, held_out, "--json")
    flagged = [json.loads(line)["unknown"] for line in out.splitlines()]
    assert (code, sum(flagged), len(flagged)) == (0, 2, 72)
    code, out, _ = said("export", client, "--json")
    note = json.loads(out)
    assert (code, note["model"], note["unknown"]["images"]) == (0, "client-0", 72)
    assert note["checked"]["from"].startswith("random images")
    assert Path(note["path"]) == client / "exported" / "client-0-prototype.onnx"


def test_predict_without_saved_models_is_rejected(lab: Path, refused: Refused) -> None:
    sentence = refused("predict", lab / "clients" / "client-0", "x.png")
    assert "which has kept no run; one must have ended while this client took part" in sentence


def test_held_out_folder_without_images_is_rejected(lab: Path, refused: Refused) -> None:
    serve(lab, "fedavg", rounds=1)
    (lab / "empty").mkdir()
    words = ("predict", lab / "clients" / "client-0", lab, "--held-out", lab / "empty")
    assert "held_out is" in refused(*words)
