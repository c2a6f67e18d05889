"""How a round grows: with the clients, with the pool that they contrast with, and with K."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from measuring import PHASES, Progress, Result, Spread, Table, interleave, ms, parse_arguments
from mpfedcl.core.rng import generator
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.state import RoundState
from workloads import HEAD_SIZES, NUM_CLASSES, Workload, head_clients, mnist_clients

WARM_ROUNDS = 1
Seconds = dict[str, float]


def next_round(federation: RoundLoop, state: RoundState | None = None) -> Seconds:
    """Run a round, timed; with a state, always from that one."""
    if state is not None:
        federation.state = state
    began = time.perf_counter()
    record = federation.run_round(evaluate=False)
    return {"round": time.perf_counter() - began, **record.seconds}


def rounds_of(workload: Workload, **changes: Any) -> Callable[[], Seconds]:
    """Return a federation's rounds, one a call."""
    federation = workload.federation(**changes)
    return lambda: next_round(federation)


def grow_clients(sizes: Mapping[str, list[int]]) -> dict[str, Callable[[], Seconds]]:
    """Return contenders with more and more clients of 20 images."""
    makers = {"MNIST model": mnist_clients, "head": head_clients}
    return {
        f"{name}, {count:,} clients": rounds_of(makers[name](count, 20))
        for name, counts in sizes.items()
        for count in counts
    }


def grow_pool(counts: list[int]) -> dict[str, Callable[[], Seconds]]:
    """Return 32 clients that contrast with the prototypes of more and more others."""
    workload = head_clients(32, 20)
    contenders: dict[str, Callable[[], Seconds]] = {}
    for count in counts:
        rows = {f"client-{number:05d}": (1, _draw_rows(number)) for number in range(count)}
        federation = workload.federation()
        state = RoundState(1, federation.state.server, rows)
        contenders[f"pool of {count:,} clients"] = partial(next_round, federation, state)
    return contenders


def grow_prototypes(counts: list[int]) -> dict[str, Callable[[], Seconds]]:
    """Return 20 clients of 100 images with more and more prototypes per class."""
    return {
        f"{workload.name}, K = {count}": rounds_of(workload, prototypes__per_class=count)
        for workload in (mnist_clients(20, 100), head_clients(20, 100))
        for count in counts
    }


def _draw_rows(number: int) -> Prototypes:
    """Return two prototypes for each of two or three classes, of length below 1."""
    key = generator(0, number, "rows")
    classes = torch.randperm(NUM_CLASSES, generator=key)[: 2 + number % 2].sort().values
    labels = classes.repeat_interleave(2)
    vectors = torch.rand(len(labels), HEAD_SIZES[-1], generator=key)
    vectors /= vectors.norm(dim=1, keepdim=True) * 1.01
    return Prototypes(vectors, labels, torch.full_like(labels, 3))


def main() -> None:
    """Measure and write."""
    arguments = parse_arguments(__doc__)
    torch.set_num_threads(1)
    quick = arguments.quick
    repeats, patience = (5, 2.0) if quick else (5, 30.0)
    sizes = {"MNIST model": [5, 50, 500], "head": [5, 50, 500, 5000]}
    if quick:
        sizes = {"MNIST model": [5, 20], "head": [5, 50]}
    tables: dict[str, Callable[[], dict[str, Callable[[], Seconds]]]] = {
        "Clients, 20 images each": lambda: grow_clients(sizes),
        "Pool, 32 clients training": lambda: grow_pool([5, 50] if quick else [5, 50, 500, 2000]),
        "Prototypes a class": lambda: grow_prototypes([1, 2] if quick else [1, 2, 4, 8]),
    }
    progress = Progress()
    result = Result("growth", (__doc__ or "").strip(), quick)
    for title, make in tables.items():
        found = interleave(make(), repeats, progress=progress, warm=WARM_ROUNDS, patience=patience)
        rows = []
        for name, runs in found.items():
            spread = Spread.of([s["round"] for s in runs])
            phases = [ms(Spread.of([s[phase] for s in runs]).median) for phase in PHASES]
            rows.append([name, spread.milliseconds(), *phases, str(spread.repeats)])
        result.tables.append(Table(title, ["ms", "round", *PHASES, "repeats"], rows))
        result.data[title] = found
    result.notes.append(
        "Engine auto, 1 thread, no evaluation, K = 2 if not said; the first round, without a pool, "
        "is left out. A case that has taken more than "
        f"{patience:.0f} s in all is not repeated any more."
    )
    progress.close()
    result.write(arguments.out)


if __name__ == "__main__":
    main()
