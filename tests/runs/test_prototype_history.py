"""The trail: small, the same after an interruption, and what the pool was."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load

from mpfedcl import Experiment, PrototypePool, resume, run
from mpfedcl.prototypes import Prototypes
from mpfedcl.runs.prototype_history import (
    MOST_PROTOTYPES,
    MOST_ROUNDS,
    find_rounds,
    kept_rounds,
    save_prototypes,
)
from small_experiments import small, trail_of
from worker_processes import run_together


def pool_of(num_clients: int, per_client: int, *, size: float = 1.0) -> PrototypePool:
    labels = torch.arange(per_client) % 7
    vectors = size * torch.rand(per_client, 5, generator=torch.Generator().manual_seed(3))
    own = Prototypes(vectors, labels.sort().values, torch.arange(per_client) + 1)
    clients = {f"client-{number:05}": own for number in range(num_clients)}
    return PrototypePool.gather(clients, num_classes=7)


@given(st.integers(1, 5000))
def test_the_rounds_that_are_kept(newest: int) -> None:
    kept = kept_rounds(newest)
    assert kept[0] == 1
    assert kept[-1] == newest
    assert len(kept) <= MOST_ROUNDS + 1
    assert len(kept) > min(newest, MOST_ROUNDS) / 2
    steps = {later - earlier for earlier, later in pairwise(kept[:-1])}
    assert len(steps) <= 1
    # What is kept later is kept now too: nothing has to be brought back.
    assert set(kept_rounds(newest + 1)) - {newest + 1} <= set(kept)


def test_files_are_thinned_as_rounds_go_by(tmp_path: Path) -> None:
    pool = pool_of(2, 3)
    for number in range(1, 71):
        save_prototypes(tmp_path, number, pool)
        assert list(find_rounds(tmp_path)) == kept_rounds(number)


def test_a_run_leaves_its_pool_in_half_precision(images: Path, tmp_path: Path) -> None:
    result = run(small(images, rounds=3), tmp_path / "run")
    assert result.pool is not None
    files = find_rounds(result.path)
    assert list(files) == [1, 2, 3]
    with safe_open(files[3], "pt") as file:
        names = json.loads(file.metadata()["names"])
    last = load(files[3].read_bytes())
    assert torch.equal(last["vectors"], result.pool.vectors.half())
    assert torch.equal(last["labels"].long(), result.pool.labels)
    assert torch.equal(last["counts"].long(), result.pool.counts)
    assert [names[each] for each in last["owners"].tolist()] == [
        result.pool.names[each] for each in result.pool.owners.tolist()
    ]


@pytest.mark.parametrize("changes", [{"trail": False}, {"method": "fedavg"}])
def test_no_trail(images: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    result = run(small(images).replace(**changes), tmp_path / "run")
    assert not (result.path / "trail").exists()


def test_more_rounds_leave_the_same_trail(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=4), tmp_path / "whole")
    run(small(images, rounds=2), tmp_path / "parts")
    resume(tmp_path / "parts", rounds=4)
    assert trail_of(tmp_path / "parts") == trail_of(tmp_path / "whole")
    assert len(trail_of(tmp_path / "whole")) == 4


def test_rounds_that_are_run_again_are_dropped_first(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=2), tmp_path / "run")
    before = trail_of(tmp_path / "run")
    save_prototypes(tmp_path / "run", 9, pool_of(2, 3))
    resume(tmp_path / "run")
    assert trail_of(tmp_path / "run") == before


@pytest.mark.usefixtures("small_model")
@pytest.mark.whole
def test_two_processes_leave_a_trail_too(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=2), tmp_path / "one")
    (tmp_path / "settings.toml").write_text(small(images, rounds=2).to_toml())
    run_together(["run", "settings.toml", "--out", "two"], tmp_path, 2, small_model=True)
    one, two = trail_of(tmp_path / "one"), trail_of(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, content in one.items():
        torch.testing.assert_close(
            load(content)["vectors"], load(two[name])["vectors"], rtol=1e-2, atol=1e-3
        )


@pytest.mark.parametrize(("num_clients", "per_client"), [(1000, 20), (3, 100), (1, 700), (40, 6)])
def test_large_pools_are_thinned_by_client(
    tmp_path: Path, num_clients: int, per_client: int
) -> None:
    pool = pool_of(num_clients, per_client)
    save_prototypes(tmp_path, 1, pool)
    kept = load(find_rounds(tmp_path)[1].read_bytes())
    assert MOST_PROTOTYPES / 3 < len(kept["vectors"]) <= MOST_PROTOTYPES
    counts = kept["owners"].bincount()
    # A client is there with all its prototypes or not at all; in part where it alone has too many.
    assert set(counts.tolist()) == {min(per_client, MOST_PROTOTYPES)}


def test_long_vectors_and_an_empty_pool(tmp_path: Path) -> None:
    save_prototypes(tmp_path, 1, pool_of(2, 3, size=1e6))
    assert load(find_rounds(tmp_path)[1].read_bytes())["vectors"].dtype == torch.float32
    save_prototypes(tmp_path, 2, PrototypePool.empty(7, 5))
    assert load(find_rounds(tmp_path)[2].read_bytes())["vectors"].shape == (0, 5)


def test_an_old_file_of_settings_is_complete(tmp_path: Path) -> None:
    text = Experiment().resolved().to_toml().replace("trail = true\n", "")
    (tmp_path / "experiment.toml").write_text(text)
    assert Experiment.from_toml(tmp_path / "experiment.toml", complete=True).trail
