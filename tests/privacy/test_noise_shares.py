"""Noise that clients add in shares: honest clients suffice, whatever the server claims."""

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
from mpfedcl.privacy.secure_aggregation.layout import NoiseShares, SumLayout, fix_noise
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.runs.observer import NO_CALLBACKS, Observer
from mpfedcl.runs.simulation import run_simulation
from small_experiments import HIDDEN, read_records, read_summary, small

CLIENTS, HONEST = 5, 3


def plan(method: str, **changes: Any) -> Experiment:
    settings = {"secure_aggregation": True, "privacy__epsilon": 3.0, "encoder__name": "none"}
    settings |= {"secure__honest_clients": HONEST}
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
    return layout.total(numbers, names, 0)


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
    sigma = noise * math.sqrt(num_left / HONEST)
    assert float(drawn.std()) == pytest.approx(sigma, rel=0.04)
    assert float(total.noise) == pytest.approx(num_left / HONEST)
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
    drawn = shares.on_model(torch.zeros(20_000))
    noise = assembly.experiment.privacy.noise
    assert noise is not None
    assert float(drawn.std()) == pytest.approx(noise / math.sqrt(HONEST), rel=0.03)


def test_client_rejects_noise_that_exceeds_the_budget() -> None:
    assembly = setup(plan("fedavg", rounds=4, privacy__noise=0.3))
    with pytest.raises(
        InvalidInput, match=r"privacy.noise is 0.3; with secure_aggregation it must be"
    ):
        NoiseShares(assembly.method).check(CLIENTS)
    NoiseShares(setup(plan("fedavg", rounds=4)).method).check(CLIENTS)


@pytest.mark.parametrize("honest", [1, 3])
@pytest.mark.parametrize("invented", [0, 2, 49])
def test_invented_clients_do_not_weaken_the_noise(honest: int, invented: int) -> None:
    """The real epsilon against a server that knows the noise of all but the honest clients.

    Before, the noise of one client was divided by the clients that the server showed: with 49
    invented ones an epsilon of 1 was 6.3.
    """
    assembly = setup(plan("fedavg", rounds=1, privacy__epsilon=1.0, secure__honest_clients=honest))
    update = Update("c0", 7, dict(assembly.initial), Prototypes.empty(400), 0.5)
    layout = SumLayout(assembly)
    clients = max(honest + 2, honest + invented)
    honest_noise = []
    for _ in range(honest):
        # What one client masks, less its model: its share of the noise.
        opened = layout.total(layout.encode(update, clients), ["c0"], 0)
        parts = [opened.averaged[n] - v.double() for n, v in assembly.initial.items()]
        honest_noise.append(torch.cat([part.flatten() for part in parts]))
    sigma = float(sum(honest_noise).std())  # type: ignore[union-attr]
    assert spent_epsilon({sigma: 1}, 1e-5) == pytest.approx(1.0, rel=0.04)


def test_more_honest_clients_than_a_sum_must_have_are_rejected() -> None:
    shares = NoiseShares(setup(plan("fedavg", rounds=4)).method)
    with pytest.raises(InvalidInput, match=r"secure\.honest_clients is 3; it must be at most 2"):
        shares.check(2)


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
