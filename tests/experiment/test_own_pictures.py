"""One's own pictures where there are no weights of an encoder: pixels, and a line that says so."""

from pathlib import Path
from typing import Any

import pytest

from mpfedcl import Experiment, run
from mpfedcl.experiment.descriptions import describe_missing_encoder
from mpfedcl.experiment.experiment import PIXELS_PER_SIDE
from mpfedcl.runs.failure import describe_failure
from mpfedcl.runs.observer import Observer
from small_experiments import save_images, save_vectors

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    save_images(tmp_path / "mine" / "pictures" / "stripes.npz")
    return tmp_path / "mine" / "pictures"


def own(root: Path | None, **changes: Any) -> Experiment:
    base = Experiment(method="fedavg", rounds=1, clients=2, dataset={"name": "folder"})
    return base.replace(dataset__root=root, partition__kind="iid", **changes)


def test_images_without_encoder_weights_are_used_as_pixels(pictures: Path) -> None:
    experiment = own(pictures)
    found = experiment.resolved()
    assert (found.encoder.name, found.dataset.image_size) == ("none", PIXELS_PER_SIDE)
    assert found.resolved() == found
    (line,) = describe_missing_encoder(experiment)
    assert "--encoder.weights FILE" in line
    # Once it is written down, nothing is missed any more, whatever is found later.
    assert describe_missing_encoder(found) == []


def test_image_size_and_encoder_of_the_method_take_precedence(pictures: Path) -> None:
    assert own(pictures, dataset__image_size=8).resolved().dataset.image_size == 8
    defaults = {"encoder__name": "random-filters"}
    assert own(pictures).resolved(defaults).encoder.name == "random-filters"


@pytest.mark.parametrize("place", ["mine/weights", "mine/pictures/weights"])
@pytest.mark.parametrize("name", ["resnet18.safetensors", "resnet18-mine.pth"])
def test_weights_next_to_the_images_are_used(
    tmp_path: Path, pictures: Path, place: str, name: str
) -> None:
    (tmp_path / place).mkdir()
    (tmp_path / place / name).touch()
    found = own(pictures).resolved()
    assert (found.encoder.name, found.dataset.image_size) == ("resnet18", None)
    assert describe_missing_encoder(own(pictures)) == []


def test_requested_weights_are_never_replaced_by_pixels(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes in ({"encoder__weights": Path("mine.pth")}, {"encoder__train": True}):
        assert own(pictures, **changes).resolved().encoder.name == "resnet18"
    monkeypatch.setenv("MPFEDCL_WEIGHTS", "absent.safetensors")
    assert own(pictures).resolved().encoder.name == "resnet18"


def test_other_data_keep_their_image_size(tmp_path: Path, pictures: Path) -> None:
    save_vectors(tmp_path / "vectors" / "a.npz")
    untouched = [
        own(tmp_path / "vectors"),
        own(pictures, encoder__name="none"),
        own(pictures, model__name="cnn"),
        own(None),
        own(pictures).replace(dataset__name="office10"),
    ]
    for experiment in untouched:
        assert experiment.resolved().dataset.image_size is None
        assert describe_missing_encoder(experiment) == []


@pytest.mark.usefixtures("small_models")
def test_run_warns_of_missing_weights_and_records_the_image_size(
    tmp_path: Path, pictures: Path
) -> None:
    warnings: list[str] = []
    result = run(own(pictures), tmp_path / "run", Observer(on_warning=warnings.append))
    failure = describe_failure(result.path)
    assert warnings == [*describe_missing_encoder(own(pictures)), *([failure] if failure else [])]
    assert (result.experiment.encoder.name, result.experiment.dataset.image_size) == ("none", 32)
    assert "as 32 x 32 pixels" in (tmp_path / "run" / "CARD.md").read_text()
