"""The map over rounds: the right directions, and nothing that jumps."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save
from sklearn.decomposition import PCA

from mpfedcl import PrototypePool, run
from mpfedcl.prototypes import Prototypes
from mpfedcl.report.watch.prototype_history_map import PrototypeHistoryMap
from mpfedcl.runs.prototype_history import find_rounds, save_prototypes
from small_experiments import small

Json = dict[str, Any]


def pool_of(seed: int, *, shift: float = 0.0, dimension: int = 6) -> PrototypePool:
    random = torch.Generator().manual_seed(seed)
    clients = {
        name: Prototypes(
            torch.randn(4, dimension, generator=random) + shift,
            torch.tensor([0, 0, 1, 2]),
            torch.tensor([5, 3, 2, 1]),
        )
        for name in ("b", "a")
    }
    return PrototypePool.gather(clients, num_classes=3)


def describe(map_: PrototypeHistoryMap) -> Json:
    map_.refresh(0)
    return map_.describe(["cat", "dog", "fox"])


def places(frame: Json) -> Any:
    return numpy.array([frame["x"], frame["y"]]).T


def test_one_round_lies_along_its_principal_components(tmp_path: Path) -> None:
    pool = pool_of(1)
    save_prototypes(tmp_path, 1, pool)
    found = describe(PrototypeHistoryMap(tmp_path))
    wanted = PCA(2).fit(pool.vectors.half().double().numpy())
    theirs = wanted.transform(pool.vectors.half().double().numpy())
    ours = places(found["frames"][0])
    for axis in (0, 1):
        sign = numpy.sign((ours[:, axis] * theirs[:, axis]).sum())
        assert numpy.allclose(sign * ours[:, axis], theirs[:, axis], atol=2e-3)
    assert found["shares"] == pytest.approx(wanted.explained_variance_ratio_, abs=1e-3)
    assert found["clients"] == ["a", "b"]
    assert found["frames"][0]["class"] == [0, 0, 1, 2] * 2
    assert found["frames"][0]["client"] == [0] * 4 + [1] * 4
    assert found["frames"][0]["count"] == [5, 3, 2, 1] * 2


def test_a_new_round_does_not_turn_the_map(tmp_path: Path) -> None:
    trail = PrototypeHistoryMap(tmp_path)
    fitted = []
    for number in range(1, 17):
        save_prototypes(tmp_path, number, pool_of(number))
        describe(trail)
        assert trail._axes is not None
        fitted.append(trail._axes.copy())
    anew = [n for n in range(1, 16) if not numpy.array_equal(fitted[n], fitted[n - 1])]
    assert [number + 1 for number in anew] == [2, 4, 8, 16]
    # Where they are fitted anew, nothing is mirrored.
    for number in anew:
        assert ((fitted[number] * fitted[number - 1]).sum(axis=1) >= 0).all()


def test_a_common_drift_is_movement_and_no_direction(tmp_path: Path) -> None:
    """All prototypes move far together: the axes still tell classes apart, not rounds."""
    base = pool_of(1)
    for number in range(1, 9):
        drifted = PrototypePool(
            base.vectors + 50.0 * number, base.labels, base.counts, base.owners, base.names, 3
        )
        save_prototypes(tmp_path, number, drifted)
    found = describe(PrototypeHistoryMap(tmp_path))
    spread = numpy.ptp(places(found["frames"][-1]), axis=0)
    alone = PCA(2).fit_transform(base.vectors.double().numpy())
    # Half precision at 400 keeps steps of a quarter.
    assert numpy.allclose(spread, numpy.ptp(alone, axis=0), atol=0.8)


def test_damaged_rounds_are_left_out(tmp_path: Path) -> None:
    for number in range(1, 10):
        save_prototypes(tmp_path, number, pool_of(number))
    files = find_rounds(tmp_path)
    files[1].write_bytes(b"")
    files[2].write_bytes(files[2].read_bytes()[:-7])
    files[3].write_bytes((2**62).to_bytes(8, "little") + b"{}")
    good = {"vectors": torch.ones(2, 6), "labels": torch.ones(2, dtype=torch.int32)}
    good |= {"counts": good["labels"], "owners": torch.zeros(2, dtype=torch.int32)}
    good = {name: value.clone() for name, value in good.items()}
    for number, change in {
        4: {"vectors": torch.full((2, 6), torch.nan)},
        5: {"labels": torch.tensor([1, 99], dtype=torch.int32)},
        6: {"owners": torch.tensor([0, 7], dtype=torch.int32)},
        7: {"labels": torch.tensor([-1, 1], dtype=torch.int32)},
        8: {"vectors": torch.ones(2)},
    }.items():
        files[number].write_bytes(save(good | change, metadata={"names": '["a"]'}))
    found = describe(PrototypeHistoryMap(tmp_path))
    assert [frame["round"] for frame in found["frames"]] == [9]
    assert found["notes"] == ["8 rounds are left out: the file is damaged or empty."]


def test_links_in_a_trail_are_not_read(tmp_path: Path) -> None:
    outside, run_folder = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    run_folder.mkdir()
    save_prototypes(outside, 1, pool_of(1))
    (run_folder / "trail").symlink_to(outside / "trail")
    assert "missing" in describe(PrototypeHistoryMap(run_folder))
    (run_folder / "trail").unlink()
    (run_folder / "trail").mkdir()
    (run_folder / "trail" / "round-000001.safetensors").symlink_to(find_rounds(outside)[1])
    assert "missing" in describe(PrototypeHistoryMap(run_folder))


def test_a_run_without_a_trail_shows_its_pool(images: Path, tmp_path: Path) -> None:
    result = run(small(images, trail=False), tmp_path / "run")
    assert result.pool is not None
    trail = PrototypeHistoryMap(tmp_path / "run")
    trail.refresh(2)
    found = trail.describe(["0", "1", "2"])
    assert [frame["round"] for frame in found["frames"]] == [2]
    assert found["frames"][0]["count"] == result.pool.counts.tolist()


def test_an_empty_pool_has_no_map(tmp_path: Path) -> None:
    save_prototypes(tmp_path, 1, PrototypePool.empty(3, 6))
    assert "missing" in describe(PrototypeHistoryMap(tmp_path))


def test_one_prototype_and_one_dimension(tmp_path: Path) -> None:
    save_prototypes(tmp_path, 1, pool_of(3, dimension=1))
    one = Prototypes(torch.ones(1, 1), torch.tensor([1]), torch.tensor([4]))
    save_prototypes(tmp_path, 2, PrototypePool.gather({"a": one}, num_classes=3))
    found = describe(PrototypeHistoryMap(tmp_path))
    assert len(found["frames"]) == 2
    assert found["frames"][1]["y"] == [0.0]
