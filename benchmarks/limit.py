"""A round, phase by phase, against its flops done as one big matrix product."""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from command_runs import can_use_workers, watch_run, write_head_set
from measuring import PHASES, Progress, Result, Spread, Table, interleave, ms, parse_arguments
from mpfedcl.prototypes import ContrastTargets
from mpfedcl.rounds.loop import RoundLoop
from workloads import Workload, head_clients, mnist_clients

CONTENDERS = {
    "loop, 1 thread": ("loop", 1),
    "stacked, 1 thread": ("stacked", 1),
    "auto, 1 thread": ("auto", 1),
    "loop, 2 threads": ("loop", 2),
    "auto, 2 threads": ("auto", 2),
}
METHODS = {"fedavg": "FedAvg", "mp-fedcl": "MP-FedCL"}
WORKERS = {1: "1 process", 2: "2 workers"}
WARM_ROUNDS = 2
"""The first round has no pool to contrast with, so it is cheaper than all others."""

PATIENCE = 60.0
"""Seconds a contender: two threads beside another busy process take tens of times longer."""

Seconds = dict[str, float]


def multiply(size: int, threads: int) -> Callable[[], Seconds]:
    """Return a big product of float32 matrices, timed."""
    left, right = torch.rand(size, size), torch.rand(size, size)

    def run() -> Seconds:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        torch.mm(left, right)
        return {"round": time.perf_counter() - began}

    return run


def run_rounds(federation: RoundLoop, threads: int) -> Callable[[], Seconds]:
    """Return the next round of a federation, timed."""

    def run() -> Seconds:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        record = federation.run_round(evaluate=False)
        return {"round": time.perf_counter() - began, **record.seconds}

    return run


def contrast_flops(federation: RoundLoop, num_samples: int) -> int:
    """Return the flops of the products with the pool, forward and back."""
    targets: ContrastTargets = federation._method.prepare(federation.broadcast())
    num_vectors, dimension = targets.vectors.shape
    # Each slice's sum over its classes; a table takes more, and is faster where it is small.
    return 4 * num_samples * (num_vectors * dimension + targets.slices.numel())


def measure_workload(
    workload: Workload, repeats: int, size: int, most_threads: int, progress: Progress
) -> tuple[Table, dict[str, Any]]:
    """Measure all contenders of one process on one workload."""
    chosen = {name: each for name, each in CONTENDERS.items() if each[1] <= most_threads}
    federations = {name: workload.federation(engine=engine) for name, (engine, _) in chosen.items()}
    contenders = {
        name: run_rounds(federations[name], threads) for name, (_, threads) in chosen.items()
    }
    limits = {f"limit, {threads} threads": multiply(size, threads) for threads in (1, 2)}
    found = interleave(
        {**contenders, **limits},
        repeats,
        progress=progress,
        warm=WARM_ROUNDS,
        patience=PATIENCE,
    )
    torch.set_num_threads(1)
    rates = {
        threads: 2 * size**3 / Spread.of([s["round"] for s in found[name]]).median
        for threads, name in enumerate(limits, start=1)
    }
    flops = {
        "training": workload.training_flops,
        "embedding": workload.embedding_flops,
        "contrast": contrast_flops(federations["auto, 1 thread"], workload.num_samples),
    }
    own = {name: found[name] for name in chosen}
    table = _tabulate(workload.name, own, flops, rates)
    data = {"flops": flops, "flops_per_second": rates, "rounds": found, "matmul": size}
    return table, data


def _tabulate(
    title: str,
    found: Mapping[str, Sequence[Seconds]],
    flops: Mapping[str, int],
    rates: Mapping[int, float],
) -> Table:
    limits = {name: flops["training"] / rates[CONTENDERS[name][1]] for name in found}
    medians = {
        name: {key: Spread.of([s[key] for s in runs]).median for key in ("round", *PHASES)}
        for name, runs in found.items()
    }
    slowest = medians["loop, 1 thread"]["round"]
    rows = [
        [
            name,
            Spread.of([s["round"] for s in runs]).milliseconds(),
            *(ms(medians[name][phase]) for phase in PHASES),
            f"{medians[name]['cluster'] / medians[name]['round']:.0%}",
            f"{medians[name]['round'] / limits[name]:.2f}",
            f"{slowest / medians[name]['round']:.2f}",
        ]
        for name, runs in found.items()
    ]
    headers = ["ms", "round", *PHASES, "clustering", "x limit", "x faster than loop"]
    return Table(title, headers, rows, _describe_limit(flops, rates))


def _describe_limit(flops: Mapping[str, int], rates: Mapping[int, float]) -> str:
    training = flops["training"]
    embedded = training + flops["embedding"]
    counts = {
        "training": training,
        "with the embedding pass": embedded,
        "and with the products of the contrastive loss": embedded + flops["contrast"],
    }
    parts = [
        f"{name} {count / 1e9:.2f} GFLOP = {ms(count / rates[1])} ms with 1 thread, "
        f"{ms(count / rates[2])} ms with 2"
        for name, count in counts.items()
    ]
    speed = f"{rates[1] / 1e9:.0f} and {rates[2] / 1e9:.0f} GFLOP/s with 1 and 2 threads"
    return f"Limit: {'; '.join(parts)} (one big product: {speed})."


def measure_workers(
    cases: Mapping[str, tuple[int, int]],
    limits: Mapping[str, float],
    repeats: int,
    turns: int,
    progress: Progress,
) -> tuple[Table, dict[str, Any]]:
    """Measure the command line with one process and with two workers, in turn.

    `limits` are the seconds that the training of a case takes as one product with two threads.
    """
    rounds = WARM_ROUNDS + repeats + 1
    rows, data = [], {}
    for title, (num_clients, num_images) in cases.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            settings: dict[str, object] = {
                "clients": num_clients,
                "partition.kind": "classes",
                "rounds": rounds,
                "evaluate-every": rounds,
            }
            if title.startswith("head"):
                settings |= write_head_set(folder, num_clients * num_images)
            env = {**os.environ, "OMP_NUM_THREADS": "1", "MPFEDCL_CACHE": str(folder)}
            outs = iter(range(1000))

            def run(
                method: str,
                workers: int,
                settings: dict[str, object] = settings,
                folder: Path = folder,
                env: dict[str, str] = env,
                outs: Any = outs,
            ) -> list[Seconds]:
                chosen = {**settings, "method": method, "workers": workers}
                watched = watch_run(chosen, folder / f"{next(outs)}", env)
                # The last round is evaluated and writes models: left out.
                walls = [b - a for a, b in zip(watched.rounds, watched.rounds[1:], strict=False)]
                return [
                    {"wall": walls[number - 1], **watched.records[number]["seconds"]}
                    for number in range(WARM_ROUNDS, rounds - 1)
                ]

            contenders = {
                f"{shown}, {words}": partial(run, method, count)
                for method, shown in METHODS.items()
                for count, words in WORKERS.items()
            }
            found = interleave(contenders, turns, progress=progress, warm=0)
        data[title] = found
        pooled = {name: [s for some in runs for s in some] for name, runs in found.items()}
        for contender, runs in pooled.items():
            inside = Spread.of([sum(s[phase] for phase in PHASES) for s in runs])
            wall = Spread.of([s["wall"] for s in runs])
            phases = [ms(Spread.of([s[phase] for s in runs]).median) for phase in PHASES]
            cells = [f"{title}, {contender}", inside.milliseconds(), wall.milliseconds()]
            rows.append([*cells, *phases, f"{wall.median / limits[title]:.2f}"])
    headers = ["ms", "round", "wall, with checkpoint", *PHASES, "x limit, 2 threads"]
    note = (
        "By `mpfedcl run`, two classes a client: the phases as the run records them. The limit is "
        "that of training alone, with two threads."
    )
    return Table("auto in one process and with 2 workers", headers, rows, note), data


def main() -> None:
    """Measure and write."""
    arguments = parse_arguments(__doc__)
    progress = Progress()
    result = Result("limit", (__doc__ or "").strip(), arguments.quick)
    if arguments.quick:
        # Two threads beside other busy processes take minutes: not for a smoke run.
        repeats, size, turns, most_threads = 5, 512, 1, 1
        workloads, cases = [head_clients(5, 64)], {"head, 5 x 64": (5, 64)}
    else:
        repeats, size, turns, most_threads = 15, 2048, 3, 2
        workloads = [mnist_clients(5, 400), head_clients(5, 400)]
        workloads += [head_clients(100, 64), mnist_clients(100, 20)]
        shapes = [(len(each.data.clients), len(each.data.clients[0].labels)) for each in workloads]
        cases = {each.name: shape for each, shape in zip(workloads, shapes, strict=True)}
    limits = {}
    for workload in workloads:
        table, data = measure_workload(workload, repeats, size, most_threads, progress)
        result.tables.append(table)
        result.data[workload.name] = data
        limits[workload.name] = data["flops"]["training"] / data["flops_per_second"][2]
    if can_use_workers():
        table, result.data["workers"] = measure_workers(cases, limits, repeats, turns, progress)
        result.tables.append(table)
    else:
        result.notes.append("Workers are skipped: this version has no setting `workers`.")
    result.notes += [
        "A round of MP-FedCL, or of what is named, without evaluation, K = 2, batches of 32; "
        f"median (lowest-highest) of up to {repeats} rounds (one at least), contenders in turn in "
        "one process.",
        "Flops counted: forward, gradients of the weights, gradients of each layer's input except "
        "the first's; softmax, k-means, sums over clients and SGD itself count for nothing.",
        "`x limit` is the round over the limit of training alone with as many threads.",
        "`stacked` takes the factored trainer for clients with few rows, as `auto` does.",
    ]
    progress.close()
    result.write(arguments.out)


if __name__ == "__main__":
    main()
