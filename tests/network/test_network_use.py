"""A run over a network is an ordinary run: what it has learnt can be used."""

from pathlib import Path

import numpy
import pytest
from federations import Federation, double

from mpfedcl import Predictor, run
from mpfedcl.deployment.trained import load_trained


@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg"])
def test_it_predicts_what_the_simulation_does(images: Path, tmp_path: Path, method: str) -> None:
    experiment = double(images, method, clients=3)
    federation = Federation(experiment, tmp_path)
    federation.serve()
    run(experiment, tmp_path / "simulated")
    form = load_trained(federation.path).form
    asked = numpy.random.default_rng(0).integers(0, 256, (20, *form.shape)).astype(numpy.uint8)
    ours, theirs = (
        Predictor.load(path).predict(asked) for path in (federation.path, tmp_path / "simulated")
    )
    assert [each.label for each in ours] == [each.label for each in theirs]
    # Clients keep their test images, so there is no threshold, and nothing is called unknown.
    assert {each.unknown for each in ours} == {None}
