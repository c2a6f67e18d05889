"""Inputs that are made once: reused by the next run, mapped by other processes, never mistaken."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from mpfedcl import Experiment, run
from mpfedcl.data import kept_inputs
from mpfedcl.data.client_data import FederatedData, load_federated_data
from mpfedcl.data.kept_inputs import (
    among_others,
    begin_reuse,
    describe_kept_inputs,
    end_reuse,
    inputs_folder,
    keep_inputs,
)
from small_experiments import assert_same_run, save_images, small

Maker = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MPFEDCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_inputs, "MAPPED_AMONG_OTHERS_FROM", 1)
    yield
    end_reuse()


def counting(made: list[int], value: float = 1.0) -> Maker:
    def make() -> Tensor:
        made.append(1)
        return torch.full((4, 3), value)

    return make


def samples_of(data: FederatedData) -> list[Tensor]:
    return [*(client.inputs for client in data.clients), data.test_inputs]


def test_a_process_alone_keeps_nothing_small() -> None:
    made: list[int] = []
    for _ in range(2):
        keep_inputs(lambda: "same", 48, counting(made))
    assert len(made) == 2
    assert not inputs_folder().exists()


def test_the_next_run_reuses_and_older_inputs_are_let_go() -> None:
    made: list[int] = []
    begin_reuse()
    first = keep_inputs(lambda: "first", 48, counting(made))
    assert keep_inputs(lambda: "first", 48, counting(made)) is first
    for name in ("second", "third", "fourth", "fifth"):
        keep_inputs(lambda name=name: name, 48, counting(made))  # type: ignore[misc]
    assert keep_inputs(lambda: "first", 48, counting(made)) is not first
    assert len(made) == 6


def test_among_others_inputs_are_a_file_that_is_mapped() -> None:
    made: list[int] = []
    with among_others():
        first = keep_inputs(lambda: "same", None, counting(made, 2.5))
        second = keep_inputs(lambda: "same", 48, counting(made))
    assert len(made) == 1
    assert torch.equal(first, torch.full((4, 3), 2.5))
    # Whoever writes gets a page of its own.
    second.zero_()
    assert torch.equal(first, torch.full((4, 3), 2.5))
    (file,) = inputs_folder().glob("*.npy")
    assert numpy.array_equal(numpy.load(file), first.numpy())
    assert describe_kept_inputs() == (1, file.stat().st_size)
    assert list(inputs_folder().iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"not an array", None])
def test_a_damaged_file_is_made_again(content: bytes | None) -> None:
    made: list[int] = []
    with among_others():
        keep_inputs(lambda: "same", 48, counting(made))
        (file,) = inputs_folder().glob("*.npy")
        file.write_bytes(file.read_bytes()[:-4] if content is None else content)
        again = keep_inputs(lambda: "same", 48, counting(made, 7.0))
    assert len(made) == 2
    assert torch.equal(again, torch.full((4, 3), 7.0))


def test_a_folder_that_cannot_be_written_costs_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with among_others():
        made = keep_inputs(lambda: "same", 48, counting([]))
    assert torch.equal(made, torch.ones(4, 3))
    said = capsys.readouterr().err
    assert said.startswith("Inputs of 0 MiB cannot be kept in ")
    assert said.count("\n") == 1


def test_the_files_used_longest_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with among_others():
        for number in range(3):
            keep_inputs(lambda number=number: str(number), 48, counting([]))  # type: ignore[misc]
            for file in inputs_folder().glob("*.npy"):
                os.utime(file, (time.time() - 100, file.stat().st_mtime - 1))
        keep_inputs(lambda: "1", 48, counting([]))
        size = file.stat().st_size
        monkeypatch.setenv("MPFEDCL_CACHE_SIZE", str(2 * size))
        keep_inputs(lambda: "new", 48, counting([]))
        made: list[int] = []
        for name in ("1", "new"):
            keep_inputs(lambda name=name: name, 48, counting(made))  # type: ignore[misc]
    assert made == []
    assert describe_kept_inputs() == (2, 2 * size)


def test_of_those_who_come_at_once_one_makes_them() -> None:
    made: list[int] = []

    def make() -> Tensor:
        time.sleep(0.1)
        return counting(made)()

    found: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: found.append(keep_inputs(lambda: "same", 48, make)))
        for _ in range(3)
    ]
    with among_others():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1
    assert all(torch.equal(each, torch.ones(4, 3)) for each in found)
    assert len(found) == 3


def test_a_changed_file_or_split_is_never_mistaken(tmp_path: Path) -> None:
    root = tmp_path / "data"
    save_images(root / "a.npz")
    experiments: list[Experiment] = [
        small(root).replace(**changes).resolved()
        for changes in ({}, {"seed": 1}, {"dtype": "float64"}, {"dataset__image_size": 8})
    ]
    plain = [load_federated_data(each) for each in experiments]
    begin_reuse(among_others=True)
    for _ in range(2):
        for experiment, expected in zip(experiments, plain, strict=True):
            found = samples_of(load_federated_data(experiment))
            assert all(map(torch.equal, found, samples_of(expected)))
    save_images(root / "a.npz", num_train=60)
    with numpy.load(root / "a.npz") as archive:
        arrays = dict(archive)
    numpy.savez(root / "a.npz", **{**arrays, "x_train": 255 - arrays["x_train"]})
    changed = samples_of(load_federated_data(experiments[0]))
    assert not torch.equal(changed[0], samples_of(plain[0])[0])
    end_reuse()
    assert all(map(torch.equal, changed, samples_of(load_federated_data(experiments[0]))))


def test_runs_on_mapped_and_reused_inputs_are_the_same_to_the_bit(
    images: Path, tmp_path: Path
) -> None:
    run(small(images), tmp_path / "plain")
    begin_reuse(among_others=True)
    for name in ("mapped", "reused"):
        run(small(images), tmp_path / name)
        assert_same_run(tmp_path / "plain", tmp_path / name)
