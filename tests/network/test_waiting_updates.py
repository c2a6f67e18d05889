"""Updates that wait in files: the same numbers, no file that is left, and the same result."""

from pathlib import Path

import pytest
import torch
from federations import LoopbackFederation, assert_like_simulation, float64_experiment

from mpfedcl import run
from mpfedcl.methods.messages import Update
from mpfedcl.network.server.waiting_updates import LEAST_BYTES, keep_in_file
from mpfedcl.prototypes import Prototypes

LARGE = LEAST_BYTES // 8


def update_of(averaged: dict[str, torch.Tensor] | None) -> Update:
    return Update("a", 5, averaged, Prototypes.empty(3), 0.5)


def mapped(folder: Path) -> int:
    """Return how many files of a folder are mapped that have no name any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-2] for line in lines if str(folder) in line and "deleted" in line})


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_large_update_is_pages_of_a_file_that_is_gone_with_it(tmp_path: Path) -> None:
    tensors = {
        "whole": torch.arange(LARGE, dtype=torch.float64).reshape(2, -1),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "half": torch.ones(3, dtype=torch.float16),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(7),
    }
    kept = keep_in_file(update_of(tensors), tmp_path)
    assert isinstance(kept.averaged, dict)
    assert (kept.client, kept.num_samples, kept.loss) == ("a", 5, 0.5)
    assert kept.averaged.keys() == tensors.keys()
    for name, value in tensors.items():
        assert kept.averaged[name].dtype == value.dtype
        assert torch.equal(kept.averaged[name], value)
    assert list(tmp_path.iterdir()) == []
    assert mapped(tmp_path) == 1
    # They may be written to, as others may.
    kept.averaged["whole"].add_(1)
    assert kept.averaged["whole"][0, 0] == 1
    del kept
    assert mapped(tmp_path) == 0


def test_many_take_no_more_open_files(tmp_path: Path) -> None:
    before = count_open_files()
    tensors = {"x": torch.zeros(LARGE, dtype=torch.float64)}
    kept = [keep_in_file(update_of(tensors), tmp_path) for _ in range(5)]
    assert mapped(tmp_path) == len(kept)
    assert count_open_files() == before


def test_what_is_small_or_nothing_stays_where_it_is(tmp_path: Path) -> None:
    large = {"x": torch.zeros(LARGE, dtype=torch.float64)}
    small = {"x": torch.zeros(LARGE - 1, dtype=torch.float64)}
    for update, folder in (
        (update_of(None), tmp_path),
        (update_of(small), tmp_path),
        (update_of(large), None),
        # As on a full disk: no file can be made.
        (update_of(large), tmp_path / "not there"),
    ):
        assert keep_in_file(update, folder) is update


@pytest.mark.whole
@pytest.mark.usefixtures("quick_network")
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_a_run_comes_to_the_same(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr("mpfedcl.network.server.waiting_updates.LEAST_BYTES", 0)
    experiment = float64_experiment(
        images, rounds=2, validation__bounds="on", aggregation__rule=rule
    )
    found = LoopbackFederation(experiment, tmp_path).serve()
    assert_like_simulation(found.path, run(experiment, tmp_path / "simulation").path, experiment)
    assert not list(found.path.glob(".update-*"))
