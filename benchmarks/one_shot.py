"""One exchange: how long it takes, and how memory grows with the clients."""

import multiprocessing
import time
from typing import Any

import psutil
import torch

from measuring import Progress, Result, Table, parse_arguments
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.models import make_mlp
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.loop import RoundLoop

NUM_CLASSES, SAMPLES, TEST = 10, 20, 5000
CASES = {
    "5 clients x 100, 512 numbers": (5, 100, 512),
    "1,000 clients x 20, 1,024 numbers": (1000, SAMPLES, 1024),
    "10,000 clients x 20, 64 numbers": (10_000, SAMPLES, 64),
    "100,000 clients x 20, 64 numbers": (100_000, SAMPLES, 64),
}
"""Clients, samples of each, and the length of a feature."""


def draw_clients(num_clients: int, samples: int, size: int) -> FederatedData:
    """Draw clients with Gaussian classes; each is tested on two samples of its own."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(NUM_CLASSES, size, generator=generator)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
        noise = torch.randn(count, size, generator=generator)
        return noise.mul_(2).add_(means[labels]), labels

    inputs, labels = draw(num_clients * samples)
    test_inputs, test_labels = draw(TEST)
    clients = []
    for number in range(num_clients):
        own = slice(number * samples, (number + 1) * samples)
        test = torch.tensor([2 * number % TEST, (2 * number + 1) % TEST])
        clients.append(ClientData(f"client-{number:06d}", inputs[own], labels[own], test))
    names = tuple(str(number) for number in range(NUM_CLASSES))
    return FederatedData(
        "drawn", names, tuple(clients), test_inputs, test_labels, {}, holds_arrays=True
    )


def measure(case: tuple[int, int, int]) -> dict[str, Any]:
    """Run one exchange with all predictors, in a process of its own."""
    torch.set_num_threads(1)
    data = draw_clients(*case)
    experiment = Experiment(method="fedgauss", clients=case[0]).replace(
        dataset__name="folder", encoder__name="none", statistics__random_features=0
    )
    assembly = assemble(
        experiment.resolved(find_method("fedgauss").defaults),
        make_mlp(case[2], NUM_CLASSES, (8,), is_encoded=True),
        num_classes=NUM_CLASSES,
        input_size=case[2],
    )
    before = psutil.Process().memory_info().rss
    federation = RoundLoop(assembly, InProcessEngine(assembly, data))
    began = time.perf_counter()
    record = federation.run_round(evaluate=True)
    seconds = {**record.seconds, "whole": time.perf_counter() - began}
    peak = _peak_memory() - before
    return {"seconds": seconds, "memory": peak, "data": before, "accuracy": record.accuracy}


def _peak_memory() -> int:
    import resource

    # Linux says it in kilobytes.

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure each case once, one after the other."""
    arguments = parse_arguments(__doc__)
    progress, data = Progress(), {}
    cases = {n: c for n, c in CASES.items() if not arguments.quick or c[0] <= 1000}
    for name, case in cases.items():
        progress.say(name)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            data[name] = pool.apply(measure, (case,))
    progress.close()
    rows = [
        [
            name,
            f"{found['seconds']['train'] + found['seconds']['aggregate']:.2f}",
            f"{found['seconds']['evaluate']:.2f}",
            f"{found['data'] / 1e6:,.0f}",
            f"{found['memory'] / 1e6:,.0f}",
        ]
        for name, found in data.items()
    ]
    columns = ["clients", "exchange, s", "all predictors, s", "before, MB", "more at the peak, MB"]
    table = Table("fedgauss, one thread", columns, rows)
    summary = "The exchange is sums, fit and each client's own classifier."
    Result("one_shot", summary, arguments.quick, [table], [], data).write(arguments.out)


if __name__ == "__main__":
    main()
