"""Seconds to 80, 85 and 90 % on MNIST under Dir(0.05), for each method and for the peers' FedAvg.

Every method has the learning rate that was quickest on another draw of the data. How many rounds a
goal takes does not depend on the machine, and is kept in benchmarks/.runs; seconds per round are
measured anew, alone on the machine. `--curves` makes only what is kept.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measuring import RESULTS, Progress, Result, Table
from mpfedcl import Experiment, run
from mpfedcl.core.files import write_atomically
from mpfedcl.methods import PredictorName, find_method
from mpfedcl.runs.observer import Observer
from mpfedcl.runs.plan import resolve
from mpfedcl.runs.worker_count import choose_workers
from mpfedcl.studies.comparison import choose_methods

HERE = Path(__file__).parent
GOALS = (80.0, 85.0, 90.0)
TUNING_SEED = 10
UNTIMED = ("evaluate", "checkpoint")

Curve = dict[str, Any]
"""What one run had reached: `accuracy` by round, and the `megabytes` of each."""
Known = dict[str, Any]
"""Of one method: its name, learning rate, curves by seed and seconds per round."""


@dataclass(frozen=True)
class Study:
    """What is tried, and where finished runs are kept."""

    kept: Path = HERE / ".runs" / "time_to_accuracy"
    methods: tuple[str, ...] = ("all",)
    rates: tuple[float, ...] = (0.03, 0.1, 0.3)
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = 40
    timed: int = 8

    def experiment(self, method: str, rate: float, seed: int) -> Experiment:
        """Return the digits inside the package, dealt to five clients."""
        base = Experiment(method=method, rounds=self.rounds, seed=seed, evaluate_every=1)
        return base.replace(
            partition__alpha=0.05,
            train__lr=rate,
            # Methods that do not wait need clients that differ in speed; the others do not mind.
            systems__kind="lognormal",
            personal_models=False,
        )

    def curve(self, method: str, rate: float, seed: int) -> Curve:
        """Return a run's accuracies; run it, until the last goal, if that is not known yet."""
        path = self.kept / f"{method}-{rate}-{seed}.json"
        if path.exists():
            known: Curve = json.loads(path.read_text(encoding="utf-8"))
            return known
        # Accuracy is that of any number of workers; several runs may be made at the same time.
        experiment = self.experiment(method, rate, seed).replace(workers=1)
        predictor = judged_reading(experiment)
        values: list[float] = []
        sent: list[float] = []

        def look(record: Any) -> None:
            # A model that has blown up says nothing.
            values.append(record["accuracy"]["global_test"][predictor] or 0.0)
            sent.append(sum(record["bytes"].values()) / 1e6)

        watch = Observer(
            on_round=look, should_stop=lambda: bool(values) and values[-1] >= GOALS[-1]
        )
        with tempfile.TemporaryDirectory() as name:
            run(experiment, Path(name) / "run", watch)
        curve = {"accuracy": values, "megabytes": sent, "predictor": predictor}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(curve).encode())
        return curve

    def rate(self, method: str) -> float:
        """Return the learning rate that is first at the goals, the highest one before all."""
        rates = self.rates if find_method(method).trains else self.rates[:1]

        def merit(rate: float) -> tuple[float, ...]:
            curve = self.curve(method, rate, TUNING_SEED)
            late = [-rounds_to(curve, goal) for goal in reversed(GOALS)]
            return *late, curve["accuracy"][-1]

        return max(rates, key=merit)

    def seconds_per_round(self, method: str, rate: float) -> float:
        """Return the median of a few rounds by the default settings; the machine must be idle."""
        found = find_method(method)
        rounds = 1 + self.timed if found.trains else 1
        experiment = self.experiment(method, rate, self.seeds[0])
        # As many as a run of all rounds has by default.
        workers = choose_workers(resolve(experiment))
        with tempfile.TemporaryDirectory() as name:
            timed = experiment.replace(rounds=rounds, evaluate_every=rounds, workers=workers)
            records = run(timed, Path(name) / "run").history
        laps: list[float] = [
            sum(each for phase, each in record["seconds"].items() if phase not in UNTIMED)
            for record in records
        ]
        return median(laps[1:] or laps)

    def measure_methods(self, progress: Progress) -> Iterator[Known]:
        """Yield the curves of each method that fits the data."""
        base = self.experiment("fedavg", self.rates[0], self.seeds[0])
        for method in choose_methods(base, self.methods)[0]:
            progress.say(method)
            rate = self.rate(method)
            curves = [self.curve(method, rate, seed) for seed in self.seeds]
            yield {"method": method, "rate": rate, "curves": curves}

    def measure_peers(self, rate: float, progress: Progress) -> Iterator[Known]:
        """Yield the peers' FedAvg on the same clients, at the learning rate of ours."""
        sys.path.insert(0, str(HERE / "peers"))
        from contestants import PEERS, NoNumbersError, SkewedWork
        from programs import adopt_orphans, run_peer

        adopt_orphans()
        os.environ["PEERS_RATE"] = str(rate)
        works = [SkewedWork(seed) for seed in self.seeds]
        for work in works:
            work.export()
        for peer in PEERS:
            curves, laps, setting = [], list[float](), peer.settings[-1]
            for work in works:
                progress.say(f"{peer.name}: seed {work.seed}")
                try:
                    command = peer.command(work, "fedavg", self.rounds - 1, setting)
                    report = run_peer([*command, "--read"], 300)
                except NoNumbersError as error:
                    print(f"{peer.name}: {error}", file=sys.stderr, flush=True)
                    break
                curves.append({"accuracy": report["accuracies"]})
                laps += report["round_seconds"]
            if len(curves) == len(works):
                name = f"{peer.name}'s FedAvg, `{' '.join(setting)}`"
                yield {"method": name, "rate": rate, "curves": curves, "seconds": median(laps)}


QUICK = Study(HERE / ".runs" / "quick", ("fedavg", "mp-fedcl", "fedgauss"), (0.1,), (0,), 3, 2)


def judged_reading(experiment: Experiment) -> PredictorName:
    """Return the predictor of global test set that a method is judged by."""
    found = find_method(experiment.method)
    return found(experiment.resolved(found.defaults), num_classes=10).predictor_on("global_test")


def rounds_to(curve: Curve, goal: float) -> float:
    """Return the first round that has reached a goal; infinite where none has."""
    reached = (n for n, value in enumerate(curve["accuracy"], 1) if value >= goal)
    return next(reached, float("inf"))


def middle_round(known: Known, goal: float) -> float:
    """Return the median over seeds; a seed that never arrives is later than all others."""
    return sorted(rounds_to(curve, goal) for curve in known["curves"])[len(known["curves"]) // 2]


def _row(known: Known) -> list[str]:
    cells = []
    for goal in GOALS:
        middle = middle_round(known, goal)
        count = sum(rounds_to(curve, goal) <= middle for curve in known["curves"])
        there = sum(rounds_to(curve, goal) < float("inf") for curve in known["curves"])
        if middle == float("inf"):
            cells += ["-", "-"]
            continue
        missing = "" if there == len(known["curves"]) else f" ({max(there, count)} seeds)"
        cells += [f"{middle:.0f}{missing}", f"{middle * known['seconds']:.2f}"]
    last = " ".join(f"{curve['accuracy'][-1]:.0f}" for curve in known["curves"])
    return [known["method"], str(known["rate"]), f"{1000 * known['seconds']:.0f}", *cells, last]


def _late(known: Known) -> tuple[float, ...]:
    """Sort by the seconds to the first goal, then by rounds to the others."""
    return tuple(middle_round(known, goal) * known["seconds"] for goal in GOALS)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of three methods")
    parser.add_argument("--curves", action="store_true", help="only what no machine changes")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    study = QUICK if arguments.quick else Study()
    progress = Progress()
    found = list(study.measure_methods(progress))
    if arguments.curves:
        return
    for known in found:
        progress.say(f"seconds per round: {known['method']}")
        known["seconds"] = study.seconds_per_round(known["method"], known["rate"])
    ours = next(known for known in found if known["method"] == "fedavg")
    found += study.measure_peers(ours["rate"], progress)
    found.sort(key=_late)
    goals = [title for goal in GOALS for title in (f"rounds to {goal:.0f} %", "s")]
    headers = ["method", "lr", "ms per round", *goals, "% at the end"]
    result = Result("time_to_accuracy", (__doc__ or "").partition("\n")[0], arguments.quick)
    rows = list(map(_row, found))
    result.tables.append(Table("MNIST digits, Dir(0.05), 5 clients", headers, rows))
    result.data["methods"] = found
    result.notes += [
        "The digits inside the package (2,000 for training, 1,000 for tests), global test set, by "
        f"the predictor that a method is judged by, in each of up to {study.rounds} rounds; "
        "medians "
        f"of seeds {', '.join(map(str, study.seeds))}. Learning rates of "
        f"{', '.join(map(str, study.rates))}, chosen on seed {TUNING_SEED}.",
        "Seconds are rounds times the median round of the default settings, without evaluation and "
        "checkpoints; a dash: most seeds did not arrive.",
        "The peers train the same clients at the learning rate of our FedAvg, which is the same "
        "method.",
    ]
    progress.close()
    result.write(arguments.out or (RESULTS / "quick" if arguments.quick else RESULTS))


if __name__ == "__main__":
    main()
