"""One-shot runs with modified statistics, and predictions of runs that clients have left."""

import json
import shutil
from pathlib import Path

import numpy
import pytest
from safetensors.torch import load_file

from mpfedcl import run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.inference.membership import leave
from mpfedcl.inference.predictor import Predictor
from mpfedcl.runs.file_schemas import pack_statistics
from one_shot_runs import choose, federation, save_client

pytestmark = pytest.mark.usefixtures("own_places", "elsewhere")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation")
    for seed, name in enumerate("abc"):
        save_client(root / "all" / f"{name}.npz", seed, per_class=20)
    return run(federation(choose(root / "all", root / "data", "abc")), root / "run").path


@pytest.fixture
def path(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize(
    ("place", "name"),
    [("statistics/a.safetensors", "sums"), ("statistics.safetensors", "counts")],
)
def test_modified_statistics_are_not_subtracted(path: Path, place: str, name: str) -> None:
    tensors = load_file(path / place)
    tensors[name] *= 2
    encoder = json.loads((path / "partition.json").read_text()).get("encoder")
    (path / place).write_bytes(pack_statistics(tensors, encoder))
    model = (path / "model.safetensors").read_bytes()
    with pytest.raises(InvalidInput, match="has counts or sums that no samples"):
        leave(path, "a")
    assert (path / "model.safetensors").read_bytes() == model


def test_label_counts_of_another_number_of_classes_are_rejected(path: Path) -> None:
    partition = json.loads((path / "partition.json").read_text())
    partition["clients"]["a"]["train"] = [1]
    (path / "partition.json").write_text(json.dumps(partition))
    with pytest.raises(InvalidInput, match="a client does not have one number per class"):
        Predictor.load(path, "a")


def test_drift_is_not_evaluated_after_a_client_left(path: Path) -> None:
    far = numpy.full((20, 7), -1.0)
    before = Predictor.load(path)
    drift = before.detect_drift(before.predict(far))
    assert drift is not None
    assert drift.is_drift
    leave(path, "a")
    after = Predictor.load(path)
    assert after.detect_drift(after.predict(far)) is None
    assert after.remark is not None
    assert "Clients have joined or left since" in after.remark
