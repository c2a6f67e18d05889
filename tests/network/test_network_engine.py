"""Updates spilled to disk, and size limits of answers."""

from pathlib import Path

import pytest
import torch
from federations import LoopbackFederation, assert_like_simulation, float64_experiment

from mpfedcl import run
from mpfedcl.experiment import Experiment
from mpfedcl.methods import SharesPrototypes, find_method, prototype_rule
from mpfedcl.methods.messages import Update
from mpfedcl.models import make_mlp
from mpfedcl.network.packing import pack_update
from mpfedcl.network.server.engine import SPILL_BYTES, limit_answer, spill_to_disk
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.assembly import Assembly, assemble

LARGE = SPILL_BYTES // 8


def update_of(averaged: dict[str, torch.Tensor] | None) -> Update:
    return Update("a", 5, averaged, Prototypes.empty(3), 0.5)


def mapped(folder: Path) -> int:
    """Return the number of memory-mapped files of a folder that have been unlinked."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-2] for line in lines if str(folder) in line and "deleted" in line})


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_large_update_is_spilled_to_an_unnamed_file(tmp_path: Path) -> None:
    tensors = {
        "whole": torch.arange(LARGE, dtype=torch.float64).reshape(2, -1),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "half": torch.ones(3, dtype=torch.float16),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(7),
    }
    kept = spill_to_disk(update_of(tensors), tmp_path)
    assert isinstance(kept.averaged, dict)
    assert (kept.client, kept.num_samples, kept.loss) == ("a", 5, 0.5)
    assert kept.averaged.keys() == tensors.keys()
    for name, value in tensors.items():
        assert kept.averaged[name].dtype == value.dtype
        assert torch.equal(kept.averaged[name], value)
    assert list(tmp_path.iterdir()) == []
    assert mapped(tmp_path) == 1
    # The tensors are writable, like others.
    kept.averaged["whole"].add_(1)
    assert kept.averaged["whole"][0, 0] == 1
    del kept
    assert mapped(tmp_path) == 0


def test_spilled_updates_keep_no_open_files(tmp_path: Path) -> None:
    before = count_open_files()
    tensors = {"x": torch.zeros(LARGE, dtype=torch.float64)}
    kept = [spill_to_disk(update_of(tensors), tmp_path) for _ in range(5)]
    assert mapped(tmp_path) == len(kept)
    assert count_open_files() == before


def test_small_updates_stay_in_memory(tmp_path: Path) -> None:
    large = {"x": torch.zeros(LARGE, dtype=torch.float64)}
    small = {"x": torch.zeros(LARGE - 1, dtype=torch.float64)}
    for update, folder in (
        (update_of(None), tmp_path),
        (update_of(small), tmp_path),
        (update_of(large), None),
        # As on a full disk: no file can be created.
        (update_of(large), tmp_path / "not there"),
    ):
        assert spill_to_disk(update, folder) is update


@pytest.mark.whole
@pytest.mark.usefixtures("quick_network")
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_run_with_spilled_updates_equals_simulation(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr("mpfedcl.network.server.engine.SPILL_BYTES", 0)
    experiment = float64_experiment(
        images, rounds=2, validation__bounds="on", aggregation__rule=rule
    )
    found = LoopbackFederation(experiment, tmp_path).serve()
    assert_like_simulation(found.path, run(experiment, tmp_path / "simulation").path, experiment)
    assert not list(found.path.glob(".update-*"))


def assembled(name: str) -> Assembly:
    experiment = Experiment(method=name).replace(model__hidden=(300,))
    experiment = experiment.resolved(find_method(name).defaults)
    model = make_mlp(400, 5, (300,), is_encoded=False)
    return assemble(experiment, model, num_classes=5, input_size=400)


@pytest.mark.parametrize("method", ["fedavg", "mp-fedcl", "dp-fedcl", "fedproto", "fedgauss"])
def test_answer_limit_is_close_to_the_largest_honest_answer(method: str) -> None:
    assembly = assembled(method)
    rows = 50 if isinstance(assembly.method, SharesPrototypes) else 0
    size = assembly.model.embedding_size
    most = prototype_rule(assembly.method).max_prototypes
    rows = rows if most is None else min(rows, 5 * most)
    vectors = torch.zeros(rows, size)
    labels = torch.zeros(rows, dtype=torch.int64)
    sent = pack_update(
        Update(
            "x",
            50,
            assembly.template,
            Prototypes(vectors, labels, labels + 1),
            0.0,
            assembly.sums,
        )
    )
    limit = limit_answer(assembly, 50)
    num_bytes = sum(each.nbytes for each in sent.arrays.values())
    assert num_bytes <= limit.array_bytes <= 3 * num_bytes + 2**24
    assert len(sent.arrays) <= limit.num_arrays <= 2 * len(sent.arrays) + 64
    assert limit.text_bytes < 2**23


def test_prototype_limit_grows_with_reported_samples() -> None:
    """Only if a method sets no number of prototypes; the limit is two gigabytes in any case."""
    few, many = (limit_answer(assembled("dp-fedcl"), n).array_bytes for n in (50, 50_000))
    assert many > few + 50_000 * 300 * 4
    assert limit_answer(assembled("dp-fedcl"), 10**9).array_bytes == 2**31
    same = {limit_answer(assembled("mp-fedcl"), n).array_bytes for n in (500, 10**9)}
    assert len(same) == 1
