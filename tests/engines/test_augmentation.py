"""Random crops and flips: all shifts and both directions occur, and draws depend on keys only."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tasks import draw

from equivalent_runs import assert_close_tensors
from mpfedcl import Experiment, InvalidInput, resume, run
from mpfedcl.data.loading import load_federated_data
from mpfedcl.engines.trainers.augmentation import PADDING, Augmentation
from mpfedcl.inference.membership import join
from mpfedcl.runs.observer import Observer
from small_experiments import assert_same_tensors, save_images, save_vectors, small

PLAIN = Augmentation((5, 7), -1.5, seed=3, crops=False, flips=False)


def list_versions(image: Any, *, crops: bool, flips: bool, black: float) -> dict[bytes, Any]:
    """Return all crops and mirror images of an image [height, width, ...] by their bytes."""
    border = [(PADDING, PADDING)] * 2 + [(0, 0)] * (image.ndim - 2)
    padded = numpy.pad(image, border, constant_values=black)
    shifts = range(2 * PADDING + 1) if crops else [PADDING]
    height, width = image.shape[:2]
    found = {}
    for y in shifts:
        for x in shifts:
            cut = padded[y : y + height, x : x + width]
            for is_flipped in (False, True) if flips else (False,):
                seen = cut[:, ::-1] if is_flipped else cut
                found[numpy.ascontiguousarray(seen).tobytes()] = (y, x, is_flipped)
    return found


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
@pytest.mark.parametrize(("crops", "flips"), [(True, False), (False, True), (True, True)])
def test_each_crop_and_direction_occurs_equally_often(
    shape: tuple[int, ...], crops: bool, flips: bool
) -> None:
    image, count = draw(1, *shape), 8000
    augment = Augmentation(shape, -1.5, seed=3, crops=crops, flips=flips)
    found = augment(image.flatten().expand(count, -1), 1, "client", 0)
    assert found.shape == (count, image.numel())
    versions = list_versions(image.numpy(), crops=crops, flips=flips, black=-1.5)
    assert len(versions) == (81 if crops else 1) * (2 if flips else 1)
    drawn = [versions[each.numpy().tobytes()] for each in found.reshape(count, *shape)]
    for values, chance in ((range(9), 1 / 9), ((False, True), 1 / 2)):
        for axis in (0, 1) if chance < 1 / 2 else (2,):
            if crops if axis < 2 else flips:
                for value in values:
                    share = sum(each[axis] == value for each in drawn) / count
                    assert abs(share - chance) < 5 * (chance * (1 - chance) / count) ** 0.5


def test_without_crops_and_flips_images_stay_as_they_are() -> None:
    images = draw(0, 6, 35)
    assert torch.equal(PLAIN(images, 1), images)


@given(st.integers(1, 12), st.integers(0, 99))
def test_inputs_may_be_flat_or_images(count: int, seed: int) -> None:
    augment = replace(PLAIN, seed=seed, crops=True, flips=True)
    images = draw(seed, count, 5, 7)
    found = augment(images, 2, "client", 4)
    assert torch.equal(found.flatten(1), augment(images.flatten(1), 2, "client", 4))


@pytest.mark.parametrize("key", [(2, "client", 4), (1, "other", 4), (1, "client", 5)])
def test_draws_depend_on_round_client_and_step(key: tuple[Any, ...]) -> None:
    augment, images = replace(PLAIN, crops=True, flips=True), draw(0, 9, 35)
    first = augment(images, 1, "client", 4)
    assert torch.equal(first, augment(images, 1, "client", 4))
    assert not torch.equal(first, augment(images, *key))
    assert not torch.equal(first, replace(augment, seed=4)(images, 1, "client", 4))


@pytest.mark.parametrize("standardize", [True, False])
def test_padding_is_what_a_black_pixel_becomes(tmp_path: Path, standardize: bool) -> None:
    pixels = numpy.zeros((4, 6, 6), dtype=numpy.uint8)
    labels = numpy.arange(4) % 2
    numpy.savez(
        tmp_path / "black.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels
    )
    changes = {"train__augment": "crop", "dataset__standardize": standardize, "clients": 1}
    experiment = small(tmp_path, "fedavg", **changes).resolved()
    data = load_federated_data(experiment)
    augment = Augmentation.of(experiment, data)
    assert augment is not None
    inputs = data.clients[0].inputs
    assert torch.equal(augment(inputs, 1), inputs)
    assert augment.black == (-1 if standardize else 0)


def changed(images: Path, **changes: Any) -> Experiment:
    return small(images, "mp-fedcl", train__augment="crop-flip", rounds=3, **changes)


@pytest.mark.whole
def test_resumed_run_is_identical(images: Path, tmp_path: Path) -> None:
    run(changed(images), tmp_path / "whole")
    done: list[object] = []
    stop = Observer(on_round=done.append, should_stop=lambda: len(done) == 1)
    run(changed(images), tmp_path / "stopped", stop)
    resume(tmp_path / "stopped")
    run(small(images, "mp-fedcl", rounds=3), tmp_path / "plain")
    found, wanted, plain = (
        load_file(tmp_path / name / "model.safetensors") for name in ("stopped", "whole", "plain")
    )
    assert_same_tensors(found, wanted)
    assert not torch.equal(plain["classifier.weight"], wanted["classifier.weight"])


@pytest.mark.whole
@pytest.mark.usefixtures("forked_workers")
def test_two_workers_equal_one_process(images: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        run(changed(images, workers=workers, dtype="float64"), tmp_path / str(workers))
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in "21")
    assert_close_tensors(found, wanted, 1e-12)


@pytest.mark.whole
def test_new_client_of_an_augmented_run_is_augmented(images: Path, tmp_path: Path) -> None:
    save_images(tmp_path / "late.npz", num_train=12, num_test=6)
    runs = {"augmented": changed(images), "plain": small(images, "mp-fedcl", rounds=3)}
    path = run(runs["augmented"], tmp_path / "run").path
    augmented = join(path, tmp_path / "late.npz", "late", epochs=1).outcome.params
    text = (path / "experiment.toml").read_text()
    (path / "experiment.toml").write_text(text.replace('"crop-flip"', '"none"'))
    plain = join(path, tmp_path / "late.npz", "late", epochs=1).outcome.params
    assert not torch.equal(augmented["classifier.weight"], plain["classifier.weight"])


def use_vectors(root: Path) -> Experiment:
    save_vectors(root / "vectors.npz")
    return small(root, "fedavg", train__augment="flip")


def use_encoder(root: Path) -> Experiment:
    save_images(root / "images.npz")
    encoder = {"encoder__name": "random-filters"}
    return small(root, "fedavg", train__augment="flip").replace(**encoder)


def use_table(root: Path) -> Experiment:
    (root / "people.csv").write_text("age,sick\n30,yes\n40,no\n")
    table = {"dataset__name": "table", "dataset__root": root, "dataset__label": "sick"}
    return small(root, "fedavg", train__augment="flip").replace(**table)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (use_vectors, "it must be none, because the samples are arrays"),
        (use_encoder, "with encoder.name 'random-filters' it must be none"),
        (use_table, "with data set 'table' it must be none"),
    ],
)
def test_samples_that_are_no_images_are_rejected(
    tmp_path: Path, make: Callable[[Path], Experiment], reason: str
) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(InvalidInput) as refusal:
        run(make(tmp_path / "data"), tmp_path / "run")
    assert str(refusal.value) == f"train.augment is 'flip', which takes images; {reason}."
