"""Seconds, rounds and megabytes until 80 % on MNIST under Dir(0.05), method by method."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring import Progress, Result, Table, parse_arguments
from mpfedcl import Experiment, run
from mpfedcl.methods import Reading, find_method
from mpfedcl.runs.observer import Observer

METHODS = ("mp-fedcl", "sp-fedcl", "dp-fedcl", "fedavg", "fedprox", "fedproto", "local")
GOAL = 80.0
UNTIMED = ("evaluate", "checkpoint")

Record = Any


@dataclass(frozen=True)
class Arrival:
    """When a run first came to the goal by a reading; without a round it never did."""

    reading: str
    round: int | None
    seconds: float
    megabytes: float
    last: float | None

    @classmethod
    def find(cls, records: Sequence[Record], reading: Reading) -> "Arrival | None":
        """Look through a run's records; None where the method has no such reading."""
        seconds = megabytes = 0.0
        value = None
        for record in records:
            spent = record["seconds"]
            seconds += sum(each for phase, each in spent.items() if phase not in UNTIMED)
            megabytes += sum(record["bytes"].values()) / 1e6
            value = record["accuracy"]["own"][reading]
            if value is None:
                return None
            if value >= GOAL:
                return cls(reading, record["round"], seconds, megabytes, value)
        return cls(reading, None, seconds, megabytes, value)


def run_until(experiment: Experiment, readings: Sequence[Reading]) -> dict[str, Arrival]:
    """Run until every reading has come to the goal, or to the last round."""
    seen: list[Record] = []

    def arrived() -> bool:
        if not seen:
            return False
        found = [Arrival.find(seen, reading) for reading in readings]
        return all(each is None or each.round is not None for each in found)

    watch = Observer(on_round=seen.append, should_stop=arrived)
    with tempfile.TemporaryDirectory() as name:
        run(experiment, Path(name) / "run", watch)
    arrivals = {reading: Arrival.find(seen, reading) for reading in readings}
    return {reading: each for reading, each in arrivals.items() if each is not None}


def _row(method: str, reading: str, arrivals: Sequence[Arrival]) -> list[str]:
    """Return mean values of the seeds that arrived, or say plainly that they did not."""
    there = [each for each in arrivals if each.round is not None]
    last = " ".join(f"{each.last:.1f}" for each in arrivals if each.last is not None)
    if len(there) < len(arrivals):
        verdict = "not reached" if not there else f"{len(there)} of {len(arrivals)} seeds"
        return [method, reading, verdict, "-", "-", last]
    rounds = " ".join(str(each.round) for each in there)
    seconds = sum(each.seconds for each in there) / len(there)
    megabytes = sum(each.megabytes for each in there) / len(there)
    return [method, reading, rounds, f"{seconds:.2f}", f"{megabytes:,.0f}", last]


def main() -> None:
    """Measure and write."""
    arguments = parse_arguments(__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    seeds, rounds = ([0], 2) if arguments.quick else ([0, 1, 2], 60)
    rates = [0.1] if arguments.quick else [0.01, 0.1]
    dataset = "mnist-sample"
    progress = Progress()
    result = Result("time_to_accuracy", (__doc__ or "").strip(), arguments.quick)
    for rate in rates:
        found: dict[tuple[str, str], list[Arrival]] = {}
        # Seeds outside: every method gets its share of the machine's slow spells.
        for seed in seeds:
            for method in METHODS:
                progress.say(f"lr {rate}, seed {seed}: {method}")
                readings = dict.fromkeys((find_method(method).reading, "averaged_classifier"))
                experiment = Experiment(method=method, rounds=rounds, seed=seed).replace(
                    dataset__name=dataset,
                    partition__alpha=0.05,
                    train__lr=rate,
                    workers=1,
                    evaluate_every=1,
                    evaluate_readings="all",
                )
                for reading, each in run_until(experiment, list(readings)).items():
                    found.setdefault((method, reading), []).append(each)
        rows = [
            _row(method, reading, found[method, reading])
            for method in METHODS
            for reading in (find_method(method).reading, "averaged_classifier")
            if (method, reading) in found
        ]
        rows = [row for number, row in enumerate(rows) if row not in rows[:number]]
        headers = ["method", "reading", "rounds by seed", "seconds", "MB", "% by seed at the end"]
        result.tables.append(Table(f"{GOAL:.0f} % on {dataset}, lr {rate}", headers, rows))
        result.data[f"lr {rate}"] = [
            {"method": method, **asdict(each)}
            for (method, _), arrivals in found.items()
            for each in arrivals
        ]
    result.notes += [
        f"5 clients, Dir(0.05), the clients' own tests, read after each of up to {rounds} rounds; "
        f"seeds {', '.join(map(str, seeds))}; 1 thread. Seconds are means over seeds and leave "
        "out evaluation and checkpoints; MB count both directions, all clients.",
        "Means are given only where every seed arrives; `at the end` is the round of arrival, or "
        "the last round.",
    ]
    progress.close()
    result.write(arguments.out)


if __name__ == "__main__":
    main()
