"""Runs on vectors: all methods, partitions, engines and workers, resumed and shown."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpfedcl import resume, run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.runs.observer import Observer
from small_experiments import METHODS, Say, assert_close_results, assert_same_run, flags, small

pytestmark = pytest.mark.whole


def on_vectors(root: Path, method: str = "mp-fedcl", **changes: Any) -> Experiment:
    return small(root, method, **{"encoder__name": None, **changes})


@pytest.mark.parametrize("method", METHODS)
def test_engines_agree_for_every_method_on_vectors(
    vectors: Path, tmp_path: Path, method: str
) -> None:
    for engine in ("loop", "stacked"):
        run(on_vectors(vectors, method, engine=engine, dtype="float64"), tmp_path / engine)
    assert_close_results(tmp_path / "loop", tmp_path / "stacked", 1e-5)


@pytest.mark.usefixtures("forked_workers")
def test_two_workers_equal_one_on_vectors(vectors: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        experiment = on_vectors(vectors, workers=workers, dtype="float64")
        run(experiment, tmp_path / f"{workers}")
    assert_close_results(tmp_path / "1", tmp_path / "2", 1e-5)


@pytest.mark.parametrize(
    ("kind", "clients"),
    [("label", 3), ("iid", 3), ("classes", 3), ("quantity", 3), ("feature", None)],
)
def test_every_partition_trains_on_vectors(
    vectors: Path, tmp_path: Path, kind: str, clients: int | None
) -> None:
    experiment = on_vectors(vectors, partition__kind=kind, partition__test=None, rounds=6)
    result = run(experiment.replace(clients=clients, train__lr=0.3), tmp_path / "run")
    assert result.experiment.encoder.name == "none"
    assert result.accuracy is not None
    assert result.accuracy > 60
    held = json.loads((result.path / "partition.json").read_text())
    assert held["input_shape"] == [5]
    assert len(held["clients"]) == clients or list(held["clients"]) == ["north", "south"]


def test_resume_of_a_stopped_run_is_bit_identical(vectors: Path, tmp_path: Path) -> None:
    experiment = on_vectors(vectors, rounds=4)
    run(experiment, tmp_path / "whole")
    rounds: list[None] = []
    stop = Observer(on_round=lambda _: rounds.append(None), should_stop=lambda: len(rounds) > 1)
    run(experiment, tmp_path / "stopped", stop)
    resume(tmp_path / "stopped")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_resume_on_other_vectors_is_rejected(tmp_path: Path) -> None:
    labels = numpy.arange(40) % 2
    for width in (3, 4):
        x = numpy.random.default_rng(0).normal(size=(40, width))
        (tmp_path / "data").mkdir(exist_ok=True)
        numpy.savez(tmp_path / "data" / "a.npz", x_train=x, y_train=labels)
        if width == 3:
            run(on_vectors(tmp_path / "data", clients=2), tmp_path / "run")
    with pytest.raises(InvalidInput, match="was started with other data"):
        resume(tmp_path / "run", rounds=3)


@pytest.mark.usefixtures("forked_jobs")
def test_commands_support_vectors(vectors: Path, tmp_path: Path, said: Say) -> None:
    words = [word for word in flags(vectors) if word not in ("--encoder.name", "none")]
    compared = ("--methods", "fedavg", "local", "--seeds", "0", "--out", tmp_path / "compared")
    assert said("compare", *words, *compared)[0] == 0
    assert said("report", tmp_path / "compared")[0] == 0
    shown = ("--dataset.root", vectors, "--clients", "3", "--out", tmp_path / "show.png")
    code, out, _ = said("data", "show", "folder", *shown)
    assert code == 0
    assert sorted(each.name for each in tmp_path.glob("*.png")) == ["show.png"]
    code, out, _ = said("data", "show", "folder", *shown, "--json")
    assert json.loads(out)["figures"] == [str(tmp_path / "show.png")]
    code, _, error = said("run", *words, "--encoder.name", "resnet18", "--out", tmp_path / "no")
    assert code == 2
    assert "encoder.name is 'resnet18', but the samples are vectors of 5 numbers" in error
    assert not (tmp_path / "no").exists()
