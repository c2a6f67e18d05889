"""One round of each method that trains, each in turn with a round of FedAvg."""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from measuring import Progress, Result, Spread, Table, interleave, parse_arguments
from mpfedcl.core.errors import InvalidInput
from mpfedcl.methods import built_in_methods
from mpfedcl.rounds.loop import RoundLoop
from workloads import Workload, head_clients, mnist_clients

BASE = "fedavg"
WARM_ROUNDS = 2
"""Methods with a pool or a memory are cheaper in their first round."""
PATIENCE = 6.0
"""Seconds a method: a few steps of many clients may be a second each."""
QUICK = ("fedavg", "mp-fedcl", "pfedme", "sageflow")


def run_rounds(federation: RoundLoop) -> Callable[[], float]:
    """Return the next round of a federation, timed."""

    def run() -> float:
        began = time.perf_counter()
        federation.run_round(evaluate=False)
        return time.perf_counter() - began

    return run


def measure(
    workload: Workload, names: Sequence[str], repeats: int, progress: Progress
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the rounds of each method and of FedAvg beside it, and why others do not fit."""
    found, left_out = {}, {}
    for name in names:
        try:
            contenders = {
                "local_test": run_rounds(workload.federation(name)),
                BASE: run_rounds(workload.federation(BASE)),
            }
            found[name] = interleave(
                contenders, repeats, progress=progress, warm=WARM_ROUNDS, patience=PATIENCE
            )
        except InvalidInput as refusal:
            left_out[name] = str(refusal)
        # Some keep several models for each client.
        gc.collect()
    return found, left_out


def tabulate(
    names: Sequence[str], workloads: Sequence[str], found: dict[str, dict[str, dict[str, Any]]]
) -> Table:
    """Return a row for each method: milliseconds, and how many times FedAvg's."""
    rows = []
    for name in names:
        cells = [name]
        for workload in workloads:
            times = found[workload].get(name)
            if times is None:
                cells += ["-", "-"]
                continue
            own, base = (Spread.of(times[each]) for each in ("local_test", BASE))
            cells += [own.milliseconds(), f"{own.median / base.median:.2f}"]
        rows.append(cells)
    rows.sort(key=lambda cells: (cells[0] != BASE, cells[0]))
    headers = ["ms per round", *(head for each in workloads for head in (each, "x FedAvg"))]
    return Table("each method beside FedAvg", headers, rows)


def main() -> None:
    """Measure and write."""
    arguments = parse_arguments(__doc__)
    progress = Progress()
    torch.set_num_threads(1)
    result = Result("each_method", (__doc__ or "").strip(), arguments.quick)
    names = [name for name, method in built_in_methods().items() if method.trains]
    if arguments.quick:
        names, repeats, workloads = list(QUICK), 2, [head_clients(5, 64)]
    else:
        repeats, workloads = 7, [mnist_clients(5, 400), head_clients(100, 64)]
    refused: dict[str, str] = {}
    for workload in workloads:
        result.data[workload.name], refused = measure(workload, names, repeats, progress)
    fitting = [name for name in names if name not in refused]
    titles = [each.name for each in workloads]
    result.tables.append(tabulate(fitting, titles, result.data))
    result.notes += [
        "A round without evaluation at each method's defaults, engine auto, one thread, batches of "
        f"32; median (lowest-highest) of up to {repeats} rounds. x FedAvg: against the median of "
        "FedAvg's rounds measured in turn with them. FedAvg's own row is what chance does.",
        "Of asynchronous methods a round is a record: as many answers as there are clients.",
        "Methods that train nothing are measured by `python benchmarks/one_shot.py`.",
        *(f"Left out: {name}. {reason}" for name, reason in refused.items()),
    ]
    progress.close()
    result.write(arguments.out)


if __name__ == "__main__":
    main()
