"""The ledger: what is spent, and releases that are drawn once whatever happens."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian.mechanism import gaussian_multiplier
from mpfedcl.privacy.ledger import (
    FOLDER,
    BudgetSpent,
    Ledger,
    ReleaseLog,
    read_ledger,
)

DELTA = 1e-5


def ledger_for(releases: int, epsilon: float = 2.0) -> Ledger:
    """Return a ledger that covers so many releases and no more."""
    multiplier = gaussian_multiplier(epsilon, DELTA) * releases**0.5
    return Ledger(unit="client", epsilon=epsilon, delta=DELTA, multiplier=multiplier, releases={})


def draw() -> Tensors:
    return {"noisy": torch.randn(3)}


@pytest.fixture(params=["memory", "folder"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> ReleaseLog:
    found = ReleaseLog(None if request.param == "memory" else tmp_path)
    found.begin(ledger_for(2))
    return found


def test_release_is_drawn_and_charged_once(log: ReleaseLog) -> None:
    assert log.ledger is not None
    z = log.ledger.multiplier
    first = log.release(1, z, draw)
    assert log.ledger.releases == {z: 1}
    assert torch.equal(log.release(1, z, draw)["noisy"], first["noisy"])
    assert log.ledger.releases == {z: 1}


def test_release_beyond_the_budget_is_never_drawn(log: ReleaseLog) -> None:
    assert log.ledger is not None
    z = log.ledger.multiplier
    log.release(1, z, draw)
    log.release(2, z, draw)
    assert log.ledger.spent == pytest.approx(2.0, abs=1e-3)

    def make() -> Tensors:
        raise AssertionError("noise was drawn although the budget is spent")

    with pytest.raises(BudgetSpent, match=r"privacy.epsilon is 2; 2.000 is spent"):
        log.release(3, z, make)
    # What was released before may be had again.
    assert log.release(2, z, make).keys() == {"noisy"}


def test_ledger_is_started_once(log: ReleaseLog) -> None:
    begun = log.ledger
    log.begin(ledger_for(5))
    assert log.ledger == begun


def test_participants_are_drawn_once(log: ReleaseLog) -> None:
    assert log.choose(1, lambda: ["a", "b"]) == ["a", "b"]
    assert log.choose(1, lambda: ["c"]) == ["a", "b"]


def test_another_process_reads_the_same_ledger(tmp_path: Path) -> None:
    log = ReleaseLog(tmp_path)
    log.begin(ledger_for(3))
    assert log.ledger is not None
    released = log.release(1, log.ledger.multiplier, draw)
    chosen = log.choose(2, lambda: ["a"])
    again = ReleaseLog(tmp_path)
    assert again.ledger == log.ledger
    assert torch.equal(again.release(1, log.ledger.multiplier, draw)["noisy"], released["noisy"])
    assert again.choose(2, lambda: []) == chosen
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700


def test_crash_between_release_and_ledger_is_charged_afterwards(tmp_path: Path) -> None:
    log = ReleaseLog(tmp_path)
    log.begin(ledger_for(3))
    before = (tmp_path / FOLDER / "ledger.json").read_bytes()
    assert log.ledger is not None
    z = log.ledger.multiplier
    released = log.release(1, z, draw)
    (tmp_path / FOLDER / "ledger.json").write_bytes(before)
    again = ReleaseLog(tmp_path)
    assert again.ledger is not None
    assert again.ledger.num_releases == 0
    assert torch.equal(again.release(1, z, draw)["noisy"], released["noisy"])
    assert again.ledger.releases == {z: 1}


def test_repeated_round_without_its_release_is_charged_again(tmp_path: Path) -> None:
    log = ReleaseLog(tmp_path)
    log.begin(ledger_for(2))
    assert log.ledger is not None
    z = log.ledger.multiplier
    log.release(1, z, draw)
    (path,) = (tmp_path / FOLDER).glob("release-*")
    path.unlink()
    again = ReleaseLog(tmp_path)
    again.release(1, z, draw)
    assert again.ledger is not None
    assert again.ledger.releases == {z: 2}
    (path,) = (tmp_path / FOLDER).glob("release-*")
    path.unlink()
    with pytest.raises(BudgetSpent):
        ReleaseLog(tmp_path).release(1, z, draw)


def test_only_the_last_two_releases_are_kept(tmp_path: Path) -> None:
    log = ReleaseLog(tmp_path)
    log.begin(ledger_for(5))
    assert log.ledger is not None
    for number in range(1, 5):
        log.release(number, log.ledger.multiplier, draw)
        log.choose(number, lambda: [])
    names = sorted(path.name for path in (tmp_path / FOLDER).glob("release-*"))
    assert names == ["release-000003-000003.safetensors", "release-000004-000004.safetensors"]
    assert len(list((tmp_path / FOLDER).glob("chosen-*"))) == 2


def test_reported_epsilon_is_within_the_budget() -> None:
    spent = ledger_for(1).charge(ledger_for(1).multiplier)
    summary = spent.summary()
    assert summary == {"unit": "client", "epsilon": 2.0, "delta": DELTA, "spent": summary["spent"]}
    assert 1.999 <= summary["spent"] <= 2.0
    assert ledger_for(1).summary()["spent"] == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({**asdict(ledger_for(1)), "multiplier": -1.0}),
        json.dumps({**asdict(ledger_for(1)), "epsilon": 0.0}),
        json.dumps({**asdict(ledger_for(1)), "epsilon": math.inf}),
        json.dumps({**asdict(ledger_for(1)), "clients": 0}),
        json.dumps({**asdict(ledger_for(1)), "releases": {"1.0": -3}}),
        json.dumps({**asdict(ledger_for(1)), "releases": {"nan": 3}}),
        json.dumps({n: v for n, v in asdict(ledger_for(1)).items() if n != "releases"}),
        json.dumps({**asdict(ledger_for(1)), "spent": 0.0}),
    ],
)
def test_unreadable_ledger_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "ledger.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"ledger\.json cannot be read"):
        read_ledger(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chosen-000001.json", ""),
        ("chosen-000001.json", '{"a": 1}'),
        ("chosen-one.json", "[]"),
        ("release-000001.safetensors", ""),
        ("release-000001-000001.safetensors", "no tensors"),
    ],
)
def test_damaged_release_or_sample_is_rejected(tmp_path: Path, name: str, content: str) -> None:
    ReleaseLog(tmp_path).begin(ledger_for(2))
    (tmp_path / FOLDER / name).write_text(content)
    with pytest.raises(InvalidInput, match=name):
        ReleaseLog(tmp_path)


def test_ledger_with_a_zero_count_is_read(tmp_path: Path) -> None:
    kept = replace(ledger_for(1), releases={2.0: 0, 3.0: 1})
    (tmp_path / "privacy").mkdir()
    (tmp_path / "privacy" / "ledger.json").write_text(json.dumps(asdict(kept)))
    assert read_ledger(tmp_path) == kept
    assert kept.num_releases == kept.clients == 1
