"""The control of docs/one-shot.md: FedAvg on the features that FedGauss sees, made easy for it.

    python scripts/measure_filters_control.py

MNIST behind random filters, roots of unit length as FedGauss takes them, with the mean over all
clients subtracted and scaled to deviation 1, for 60 rounds. Its learning rate is the one that does
best on the test images, by hindsight. Needs the data folder (MPFEDCL_DATA).
"""

from dataclasses import replace
from statistics import fmean, stdev

import torch

from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian import unit_features
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.round_loop import RoundLoop

RATES = (0.01, 0.03, 0.1, 0.3)
SEEDS = range(10)
ROUNDS = 60


def centre(data: FederatedData) -> FederatedData:
    """Return the data as features of length 1, less their mean, in units of their deviation."""
    features = torch.cat([unit_features(client.inputs) for client in data.clients])
    mean, deviation = features.mean(0), features.std()

    def prepare(inputs: torch.Tensor) -> torch.Tensor:
        return (unit_features(inputs) - mean) / deviation

    clients = tuple(replace(each, inputs=prepare(each.inputs)) for each in data.clients)
    return replace(data, clients=clients, test_inputs=prepare(data.test_inputs))


def measure(seed: int, rate: float) -> float:
    """Return the accuracy of the averaged classifier after the last round."""
    experiment = Experiment(method="fedavg", seed=seed, rounds=ROUNDS).replace(
        dataset__name="mnist", encoder__name="random-filters", train__lr=rate
    )
    experiment = experiment.resolved()
    data, model = load_data_and_model(experiment, torch.device("cpu"))
    data = centre(data)
    assembly = assemble(experiment, model, num_classes=data.num_classes, input_size=data.input_size)
    federation = RoundLoop(assembly, InProcessEngine(assembly, data))
    for number in range(1, ROUNDS + 1):
        record = federation.run_round(evaluate=number == ROUNDS)
    assert record.accuracy is not None
    found = record.accuracy["global_test"]["global_classifier"]
    assert found is not None
    return found


def main() -> None:
    """Print the accuracy at each learning rate."""
    torch.set_num_threads(1)
    for rate in RATES:
        found = [measure(seed, rate) for seed in SEEDS]
        print(f"lr {rate:g}: {fmean(found):.1f}({stdev(found):.1f})", flush=True)


if __name__ == "__main__":
    main()
