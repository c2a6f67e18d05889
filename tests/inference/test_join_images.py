"""Joining a run behind an encoder: it is found as for runs, and must be the same."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from mpfedcl import InvalidInput, run
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.experiment import Experiment
from mpfedcl.inference.membership import join
from mpfedcl.inference.new_client import NewClient
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder

pytestmark = pytest.mark.whole

SHARED = Path(__file__).parents[3] / "shared"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPFEDCL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three domains, two classes, six images each."""
    random = numpy.random.default_rng(3)
    for number, domain in enumerate(("ink", "oil", "pen")):
        for label, name in enumerate(("ant", "bee")):
            folder = tmp_path / "pictures" / domain / name
            folder.mkdir(parents=True)
            for index in range(6):
                pixels = random.integers(0, 60, (24, 20, 3), dtype=numpy.uint8)
                pixels[label * 9 : label * 9 + 9] += numpy.uint8(100 + 40 * number)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "pictures"


def pictured(root: Path, **changes: Any) -> Experiment:
    settings = {
        "dataset__name": "folder",
        "dataset__root": root,
        "dataset__domains": ("ink", "oil"),
        "partition__kind": "feature",
        "encoder__name": "random-resnet18",
        # Trained, it would be shared by processes, which know nothing of a narrow one.
        "workers": 1,
    }
    return Experiment(rounds=1).replace(**settings | changes)


@pytest.mark.usefixtures("narrow_resnet")
def test_features_equal_those_of_the_run(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(pictured(pictures), tmp_path / "run").path
    new_client = NewClient(load_trained_run(path), pictures / "pen", "pen")
    everyone = pictured(pictures, dataset__domains=("ink", "oil", "pen"))
    data, _ = load_data_and_model(everyone.resolved(), torch.device("cpu"))
    assert torch.equal(new_client.client.inputs, data.client("pen").inputs)
    assert torch.equal(new_client.data.test_inputs, data.test_inputs[data.client("pen").test])
    assert join(path, pictures / "pen", "pen", add=True).was_added

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("an image was encoded again")

    monkeypatch.setattr(ResNetEncoder, "encode", fail)
    join(path, pictures / "pen", "pen", epochs=0, replace=True)


@pytest.mark.usefixtures("narrow_resnet")
def test_another_encoder_is_rejected(pictures: Path, tmp_path: Path) -> None:
    path = run(pictured(pictures), tmp_path / "run").path
    experiment = Experiment.from_toml(path / "experiment.toml")
    other = experiment.replace(encoder__name="random-resnet18:7")
    (path / "experiment.toml").write_text(other.to_toml())
    with pytest.raises(InvalidInput, match="trained with another one"):
        join(path, pictures / "pen", "pen")


@pytest.mark.usefixtures("narrow_resnet")
def test_join_a_run_with_a_trained_encoder(pictures: Path, tmp_path: Path) -> None:
    path = run(pictured(pictures, encoder__train=True), tmp_path / "run").path
    joined = join(path, pictures / "pen", "pen", epochs=1, add=True)
    assert (joined.train_images, joined.test_images, joined.was_added) == (6, 6, True)
    learned, params = joined.outcome.params, load_trained_run(path).parameters()
    assert any(not torch.equal(learned[name], value) for name, value in params.items())


@pytest.mark.usefixtures("narrow_resnet")
def test_several_domains_join_as_one_client(pictures: Path, tmp_path: Path) -> None:
    path = run(pictured(pictures), tmp_path / "run").path
    joined = join(path, pictures, "all of them", epochs=0)
    assert (joined.train_images, joined.test_images) == (18, 18)


@pytest.mark.thorough
def test_join_with_a_real_held_out_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (SHARED / "data" / "office10").is_dir():
        pytest.skip("needs office10 and the weights in ../shared/data")
    monkeypatch.setenv("MPFEDCL_DATA", str(SHARED / "data"))
    experiment = Experiment(rounds=5, evaluate_every=5).replace(
        dataset__name="office10",
        dataset__domains=("dslr", "amazon"),
        dataset__per_class=8,
        dataset__test_per_class=5,
        partition__kind="feature",
    )
    path = run(experiment, tmp_path / "run").path
    joined = join(path, SHARED / "data" / "office10" / "webcam", "webcam", epochs=1)
    before, after = joined.before, joined.after
    assert all(value is not None and value > 15 for value in (before["pool"], after["both"]))
    # Its own prototypes fit its images better than those of other clients.
    assert (after["own"] or 0) > (after["pool"] or 0)
