"""Inputs are made once, and mapped by other processes."""

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from mpfedcl import Experiment, run
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_federated_data
from mpfedcl.models import feature_cache
from mpfedcl.models.feature_cache import (
    cache_folder,
    keep_inputs,
    shared_inputs,
)
from small_experiments import assert_same_run, save_images, small

Maker = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPFEDCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(feature_cache, "SHARED_FROM", 1)


def counting(made: list[int], value: float = 1.0) -> Maker:
    def make() -> Tensor:
        made.append(1)
        return torch.full((4, 3), value)

    return make


def samples_of(data: FederatedData) -> list[Tensor]:
    return [*(client.inputs for client in data.clients), data.test_inputs]


def test_small_inputs_are_not_stored_for_a_single_process() -> None:
    made: list[int] = []
    for _ in range(2):
        keep_inputs(lambda: "same", 48, counting(made))
    assert len(made) == 2
    assert not cache_folder().exists()


def test_shared_inputs_are_mapped_from_a_file() -> None:
    made: list[int] = []
    with shared_inputs():
        first = keep_inputs(lambda: "same", None, counting(made, 2.5))
        second = keep_inputs(lambda: "same", 48, counting(made))
    assert len(made) == 1
    assert torch.equal(first, torch.full((4, 3), 2.5))
    # Copy-on-write: a write is not seen by others.
    second.zero_()
    assert torch.equal(first, torch.full((4, 3), 2.5))
    (file,) = cache_folder().glob("*.npy")
    assert numpy.array_equal(numpy.load(file), first.numpy())
    assert list(cache_folder().iterdir()) == [file]


def test_unusable_cache_folder_gives_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with shared_inputs():
        made = keep_inputs(lambda: "same", 48, counting([]))
    assert torch.equal(made, torch.ones(4, 3))
    said = capsys.readouterr().err
    assert said.startswith(f"The feature cache {tmp_path / 'cache' / 'arrays'} cannot be used")
    assert said.count("\n") == 1


def test_inputs_above_the_limit_are_mapped_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPFEDCL_CACHE_SIZE", "10")
    with shared_inputs():
        keep_inputs(lambda: "same", 48, counting([]))
        keep_inputs(lambda: "other", 48, counting([]))
    # Each evicts the other.
    assert len(list(cache_folder().glob("*.npy"))) == 1


def test_changed_file_or_split_gives_other_inputs(tmp_path: Path) -> None:
    root = tmp_path / "data"
    save_images(root / "a.npz")
    experiments: list[Experiment] = [
        small(root).replace(**changes).resolved()
        for changes in ({}, {"seed": 1}, {"dtype": "float64"}, {"dataset__image_size": 8})
    ]
    plain = [load_federated_data(each) for each in experiments]
    for _ in range(2):
        for experiment, expected in zip(experiments, plain, strict=True):
            with shared_inputs():
                found = samples_of(load_federated_data(experiment))
            assert all(map(torch.equal, found, samples_of(expected)))
    save_images(root / "a.npz", num_train=60)
    with numpy.load(root / "a.npz") as archive:
        arrays = dict(archive)
    numpy.savez(root / "a.npz", **{**arrays, "x_train": 255 - arrays["x_train"]})
    with shared_inputs():
        changed = samples_of(load_federated_data(experiments[0]))
    assert not torch.equal(changed[0], samples_of(plain[0])[0])
    assert all(map(torch.equal, changed, samples_of(load_federated_data(experiments[0]))))


@pytest.mark.whole
def test_runs_on_mapped_inputs_are_bit_identical(images: Path, tmp_path: Path) -> None:
    run(small(images), tmp_path / "plain")
    for name in ("written", "mapped"):
        with shared_inputs():
            run(small(images), tmp_path / name)
        assert_same_run(tmp_path / "plain", tmp_path / name)
