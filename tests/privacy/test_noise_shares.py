"""Noise that clients add in shares: the deviation and the budget of central noise."""

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.methods.messages import Update
from mpfedcl.models import Mlp
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.secure_aggregation import least_left
from mpfedcl.privacy.secure_aggregation.layout import NoiseShares, SumLayout, fix_noise
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.runs.observer import NO_CALLBACKS, Observer
from mpfedcl.runs.simulation import run_simulation
from small_experiments import HIDDEN, read_records, read_summary, small

CLIENTS = 5


def plan(method: str, **changes: Any) -> Experiment:
    settings = {"secure_aggregation": True, "privacy__epsilon": 3.0, "encoder__name": "none"}
    experiment = Experiment(method=method).replace(**settings | changes)
    return fix_noise(experiment.resolved(find_method(method).defaults))


def setup(experiment: Experiment, input_size: int = 20) -> Assembly:
    model = Mlp((input_size, 8, 400), 10)
    return assemble(experiment, model, num_classes=10, input_size=input_size)


def total_of(assembly: Assembly, updates: list[Update], num_left: int) -> Any:
    """Return the total of the first clients of those who took part."""
    layout = SumLayout(assembly)
    numbers = numpy.zeros(layout.size, dtype=numpy.uint64)
    for update in updates[:num_left]:
        numbers += layout.encode(update, len(updates))
    names = [update.client for update in updates[:num_left]]
    return layout.total(numbers, names, len(updates), 0)


@pytest.mark.parametrize("num_left", [3, 5])
def test_sum_of_models_has_at_least_the_noise_of_the_budget(num_left: int) -> None:
    assembly = setup(plan("fedavg", rounds=4))
    noise = assembly.experiment.privacy.noise
    assert noise is not None
    # The ledger charges this multiplier: it says the same epsilon as for central noise.
    assert spent_epsilon({noise: 4}, 1e-5) == pytest.approx(3.0, rel=1e-3)
    empty = Prototypes.empty(400)
    updates = [Update(f"c{n}", 7, dict(assembly.initial), empty, 0.5) for n in range(CLIENTS)]
    total = total_of(assembly, updates, num_left)
    drawn = torch.cat(
        [
            (total.averaged[name] - num_left * value.double()).flatten()
            for name, value in assembly.initial.items()
        ]
    )
    sigma = noise * math.sqrt(num_left / least_left(CLIENTS, 0.5))
    assert float(drawn.std()) == pytest.approx(sigma, rel=0.04)
    assert float(total.noise) == pytest.approx(num_left / 3)
    # Neither samples nor losses are told.
    assert (total.weight, total.num_samples, total.loss) == (num_left, num_left, 0.0)


@pytest.mark.whole
@pytest.mark.parametrize("unit", ["record", "client"])
def test_one_shot_sums_have_the_noise_of_the_budget(unit: str) -> None:
    experiment = plan("fedncm", privacy__unit=unit, privacy__dimensions=400)
    assembly = setup(experiment, input_size=400)
    zeros = {name: torch.zeros_like(value) for name, value in assembly.sums.items()}
    empty = Prototypes.empty(400)
    updates = [Update(f"c{n}", 7, {}, empty, None, zeros) for n in range(CLIENTS)]
    total = total_of(assembly, updates, 3)
    sigma = assembly.method.private_sums.sigma  # type: ignore[attr-defined]
    assert float(total.summed["sums"].std()) == pytest.approx(sigma, rel=0.05)
    assert float(total.noise) == 1.0


def test_noise_of_a_single_client_is_too_small() -> None:
    """The control: a share is less than the budget asks for, so the test above can fail."""
    assembly = setup(plan("fedavg", rounds=4))
    shares = NoiseShares(assembly.method)
    drawn = shares.on_model(torch.zeros(20_000), CLIENTS)
    noise = assembly.experiment.privacy.noise
    assert noise is not None
    assert float(drawn.std()) == pytest.approx(noise / math.sqrt(3), rel=0.03)


def test_client_rejects_noise_that_exceeds_the_budget() -> None:
    assembly = setup(plan("fedavg", rounds=4, privacy__noise=0.3))
    with pytest.raises(
        InvalidInput, match=r"privacy.noise is 0.3; with secure_aggregation it must be"
    ):
        NoiseShares(assembly.method).check()
    NoiseShares(setup(plan("fedavg", rounds=4)).method).check()


@pytest.mark.parametrize("method", ["fedavg", "fedgauss"])
def test_runs_with_secure_aggregation_keep_the_budget(
    images: Path, tmp_path: Path, method: str
) -> None:
    experiment = small(
        images,
        method,
        clients=5,
        rounds=2,
        secure_aggregation=True,
        privacy__epsilon=20.0,
        privacy__dimensions=8,
        model__hidden=HIDDEN,
    )
    path = run_simulation(experiment, tmp_path / "run", Observer(), NO_CALLBACKS).path
    summary, records = read_summary(path), read_records(path)
    assert summary["privacy"]["epsilon"] == 20.0
    assert summary["privacy"]["spent"] == pytest.approx(20.0, rel=1e-3)
    assert records[0]["loss"] is None
    assert records[-1]["clients"]["answered"] == [f"client-{n}" for n in range(5)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"privacy__model": "local"},
            "privacy.model is 'local'; with secure_aggregation it must be",
        ),
        (
            {"method": "fedavg", "fraction": 0.8},
            "fraction is 0.8; with secure_aggregation and a privacy",
        ),
    ],
)
def test_incompatible_settings_are_rejected(
    images: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    experiment = small(images, "fedgauss", clients=5, secure_aggregation=True, privacy__epsilon=3.0)
    with pytest.raises(InvalidInput, match=words):
        run_simulation(experiment.replace(**changes), tmp_path / "run", Observer(), NO_CALLBACKS)
