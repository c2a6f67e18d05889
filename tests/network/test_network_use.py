"""A run over a network is an ordinary run: what it has learnt can be used."""

from pathlib import Path

import numpy
import pytest
from federations import LoopbackFederation, float64_experiment

from mpfedcl import Predictor, run
from mpfedcl.deployment.trained_run import load_trained_run
from small_experiments import Say


@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg"])
def test_it_predicts_what_the_simulation_does(images: Path, tmp_path: Path, method: str) -> None:
    experiment = float64_experiment(images, method, clients=3)
    federation = LoopbackFederation(experiment, tmp_path)
    federation.serve()
    run(experiment, tmp_path / "simulated")
    form = load_trained_run(federation.path).input_format
    asked = numpy.random.default_rng(0).integers(0, 256, (20, *form.shape)).astype(numpy.uint8)
    ours, theirs = (
        Predictor.load(path).predict(asked) for path in (federation.path, tmp_path / "simulated")
    )
    assert [each.label for each in ours] == [each.label for each in theirs]
    # Clients keep their test images, so there is no threshold, and nothing is called unknown.
    assert {each.unknown for each in ours} == {None}


def test_nothing_is_said_of_data_that_clients_do_not_have(
    images: Path, tmp_path: Path, said: Say
) -> None:
    federation = LoopbackFederation(float64_experiment(images, rounds=1, clients=3), tmp_path)
    federation.serve()
    card = (federation.path / "CARD.md").read_text(encoding="utf-8")
    assert "Each client's own images" in card
    assert "Dir(" not in card.split("## How to make it again")[0]
    code, _, _ = said("report", federation.path)
    assert code == 0
    assert "over a network" in (federation.path / "report.html").read_text(encoding="utf-8")
