"""Runs that tables share."""

from pathlib import Path

import pytest

from mpfedcl import Experiment, resume, run
from mpfedcl.studies.paper.paper_runs import RunStore, resolve_with_seed
from small_experiments import small


def test_what_makes_no_difference_makes_no_other_run(tmp_path: Path) -> None:
    store, base = RunStore(tmp_path), resolve_with_seed(Experiment(), 0)
    for change in ({"rounds": 7}, {"engine": "loop"}, {"workers": 2}, {"dataset__root": tmp_path}):
        assert store.folder(base.replace(**change)) == store.folder(base)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"method": "fedavg"}, {"partition__alpha": 0.1}, {"train__lr": 0.1},
     {"clients": 6}, {"prototypes__per_class": 3}, {"evaluate_every": 2}],
)  # fmt: skip
def test_what_makes_a_difference_makes_another(tmp_path: Path, change: dict[str, object]) -> None:
    store, base = RunStore(tmp_path), resolve_with_seed(Experiment(), 0)
    assert store.folder(base.replace(**change)) != store.folder(base)


def test_names_are_the_same_for_ever() -> None:
    """A folder of results must be found again by a later version: this name is a promise."""
    folder = RunStore(Path("x")).folder(resolve_with_seed(Experiment(), 3))
    assert folder.name == "mp-fedcl-mnist-sample-label-seed3-823248f1305b"


def test_the_longest_of_those_that_share_is_run(tmp_path: Path) -> None:
    store, base = RunStore(tmp_path), resolve_with_seed(Experiment(), 0)
    other = base.replace(seed=1)
    several = [base.replace(rounds=n) for n in (3, 9, 5)] + [other]
    assert [(e.rounds, e.seed) for e, _ in store.longest_runs(several)] == [(9, 0), (60, 1)]


def test_a_long_run_serves_a_short_one(images: Path, tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    short = small(images, rounds=2).resolved()
    long = short.replace(rounds=4)
    assert store.find_finished_run(short) is None
    run(short, store.folder(short))
    assert store.find_finished_run(long) is None
    before = store.find_finished_run(short)
    resume(store.folder(short), rounds=4)
    after, whole = store.find_finished_run(short), store.find_finished_run(long)
    assert before is not None
    assert after is not None
    assert whole is not None
    # The rounds that both have are the same, up to the time they took.
    assert [r["accuracy"] for r in after.records] == [r["accuracy"] for r in before.records]
    assert len(whole.records) == 4


def test_a_round_that_was_not_read_serves_nobody(images: Path, tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    long = small(images, rounds=4, evaluate_every=3).resolved()
    run(long, store.folder(long))
    assert store.is_run_finished(long)
    assert store.is_run_finished(long.replace(rounds=3))
    assert not store.is_run_finished(long.replace(rounds=2))
