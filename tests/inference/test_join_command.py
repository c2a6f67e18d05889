"""`mpfedcl join`, as a user has it."""

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest

from command_processes import call
from mpfedcl import run
from mpfedcl.experiment import Experiment
from small_experiments import Say, save_images, small

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small(images), tmp_path_factory.mktemp("runs") / "finished").path


@pytest.fixture
def path(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def late(tmp_path: Path) -> Path:
    save_images(tmp_path / "late.npz", num_train=21, num_test=15)
    return tmp_path / "late.npz"


def test_trial_join_and_leave(path: Path, late: Path, said: Say) -> None:
    code, out, _ = said("join", path, "--data", late, "--name", "late", "--epochs", 2)
    assert code == 0
    assert "after 2 epochs, lr 0.01" in out
    assert "6 prototypes of 21 images of 3 classes" in out
    assert "The run is unchanged" in out
    assert max(len(line) for line in out.splitlines()[2:]) <= 100
    code, out, _ = said("join", path, "--data", late, "--name", "late", "--add")
    assert code == 0
    assert f"remove it with: mpfedcl leave {path} --name=late" in out
    code, out, _ = said("leave", path, "--name", "late")
    assert (code, out) == (0, "late has left; the pool holds 18 prototypes of 3 clients\n")


def test_join_prints_json(path: Path, late: Path, said: Say) -> None:
    words = ("join", path, "--data", late, "--name", "late", "--add", "--json")
    _, out, _ = said(*words)
    told = json.loads(out)
    assert told["added"] is True
    assert told["rejected"] is None
    assert (told["train_images"], told["test_images"], told["prototypes"]) == (21, 15, 6)
    assert told["accuracy"].keys() == {"before", "after"}
    assert told["accuracy"]["after"].keys() == {"classifier", "pool", "own", "both"}
    record = json.loads((path / "joins.jsonl").read_text())
    assert record["client"] == "late"
    assert record["accuracy"] == told["accuracy"]
    left = json.loads(said("leave", path, "--name", "late", "--json")[1])
    assert left == {
        "left": "late",
        "pool": ["client-0", "client-1", "client-2"],
        "prototypes": 18,
    }


def test_rejected_update_is_not_added(path: Path, late: Path, said: Say) -> None:
    experiment = Experiment.from_toml(path / "experiment.toml").replace(validation__max_norm=1e-6)
    (path / "experiment.toml").write_text(experiment.to_toml())
    before = (path / "pool.safetensors").read_bytes()
    code, out, errors = said("join", path, "--data", late, "--name", "late", "--add")
    assert code == 2
    assert "after 1 epoch" in out
    assert errors.startswith(
        "mpfedcl: late was not added: update validation rejects it (the model ch"
    )
    assert (path / "pool.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--data", "LATE"), "name is missing"),
        (("--name", "late"), "data is missing"),
        (("--data", "LATE", "--name", "late", "--epochs", "-1"), "epochs is -1"),
        (("--data", "LATE", "--name", "late", "--epochs", "few"), "must be a whole number"),
        (("--data", "LATE", "--name", "late", "--lr", "0"), "lr is 0"),
        (("--data", "LATE", "--name", "late", "--lr", "nan"), "lr is nan"),
        (("--data", "LATE", "--name", "late", "--test-fraction", "1"), "test_fraction is 1"),
        (("--data", "nowhere", "--name", "late"), "which does not exist"),
        (("--data", "LATE", "--name", "late", "--weights", "x.safetensors"), "has no encoder"),
    ],
)
def test_bad_input_is_rejected_in_one_line(
    path: Path, late: Path, said: Say, words: tuple[str, ...], expected: str
) -> None:
    given = [str(late) if word == "LATE" else word for word in words]
    code, out, errors = said("join", path, *given)
    assert (code, out) == (2, "")
    assert expected in errors
    assert errors.count("\n") == 1
    assert not (path / "joins.jsonl").exists()


def test_folder_without_a_run_is_rejected(tmp_path: Path, late: Path, said: Say) -> None:
    words = ("--data", late, "--name", "x", "--add")
    code, _, errors = said("join", tmp_path / "nothing", *words)
    assert code == 2
    assert "it must be a folder that holds a run" in errors


@pytest.mark.thorough
def test_join_on_the_embedded_digits(tmp_path: Path, said: Say) -> None:
    """A federation of five skewed clients, and a newcomer that has digits of all classes."""
    run(Experiment(rounds=2, evaluate_every=2), tmp_path / "digits")
    with resources.as_file(resources.files("mpfedcl.data") / "mnist_sample.npz") as sample:
        words = ("--data", sample, "--name", "clinic-7", "--json")
        _, at_once, _ = said("join", tmp_path / "digits", *words, "--epochs", 0)
        trained = call("join", "digits", *words, "--lr", 0.1, "--add", cwd=tmp_path)
    assert (trained.returncode, trained.stderr) == (0, "")
    first = json.loads(at_once)["accuracy"]["after"]
    second = json.loads(trained.stdout)["accuracy"]["after"]
    # 2,000 digits teach a model of two skewed rounds a lot.
    assert second["classifier"] > first["classifier"] + 10
    assert first["own"] > 60
    assert said("leave", tmp_path / "digits", "--name", "clinic-7")[0] == 0
