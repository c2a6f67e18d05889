"""Measure one exchange against tuned rounds: the tables of docs/one-shot.md.

    python scripts/measure_one_shot.py OUT [ENCODER] [--sets mnist] [--jobs 2]

Ten seeds, both tests. Rivals have their learning rate chosen on validation images of three other
draws; one-shot methods have nothing to choose. What is there is not run again. Needs the
data folder (MPFEDCL_DATA).
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mpfedcl.api import RUNNER, tune
from mpfedcl.core.files import write_atomically
from mpfedcl.experiment import Experiment
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions
from mpfedcl.studies.statistics import paired_difference

SEEDS = tuple(range(10))
TUNING_SEEDS = (100, 101, 102)
RATES = 4
"""Learning rates tried for each rival."""
ROUNDS = 60
OWN_RIVALS = {
    "Local": ("local", "personal_classifier"),
    "FedAvg+prior": ("fedavg", "global_classifier_prior"),
    "own form": ("local-gauss", "personal_classifier_prior"),
}
UNION_RIVALS = {
    "FedAvg": ("fedavg", "global_classifier"),
    "FedLDA": ("fedlda", "global_classifier"),
}
OWN = {"FedGauss": ("fedgauss", "personal_classifier_prior")}
UNION = {"FedGauss": ("fedgauss", "global_classifier")}
METHODS = ("local", "fedavg", "local-gauss", "fedlda", "fedgauss")
TUNED = ("local", "fedavg")


@dataclass(frozen=True)
class Situation:
    """A data set, how it is divided, and the encoder before it."""

    dataset: str
    kind: str
    alpha: float
    encoder: str

    @property
    def title(self) -> str:
        """The row's name in a table."""
        return f"{self.dataset} {'feature' if self.kind == 'feature' else f'{self.alpha:g}'}"

    def base(self, method: str) -> Experiment:
        """Return the experiment before a learning rate is chosen."""
        return Experiment(method=method, rounds=ROUNDS, evaluate_every=ROUNDS).replace(
            dataset__name=self.dataset,
            partition__kind=self.kind,
            partition__alpha=self.alpha,
            encoder__name=self.encoder,
            personal_models=False,
            trail=False,
        )

    def folder(self, out: Path) -> Path:
        """Return where its runs lie."""
        return out / self.title.replace(" ", "-")


def list_situations(encoder: str, datasets: Sequence[str]) -> Iterator[Situation]:
    """Yield the settings of the tables; MNIST has one domain, and so no feature skew."""
    for kind, alpha in (("label", 0.05), ("label", 0.5), ("feature", 0.05), ("label", 0.1)):
        for dataset in datasets:
            if kind == "label" or dataset != "mnist":
                yield Situation(dataset, kind, alpha, encoder)


def measure(situation: Situation, out: Path, seeds: Sequence[int], jobs: int) -> dict[str, Any]:
    """Run what is missing; return each method's predictors, a number per seed, and its rate."""
    folder, found = situation.folder(out), {}
    for method in METHODS:
        experiment = situation.base(method)
        if method in TUNED:
            searched = situation.base(method).replace(evaluate_every=10)
            result = tune(
                searched,
                method,
                folder / "tuning" / method,
                budget=RATES,
                seeds=TUNING_SEEDS,
                jobs=jobs,
            )
            assert result is not None
            experiment = experiment.replace(**result.search_space)
        comparison = Comparison.prepare(experiment, [method], seeds, folder)
        assert comparison.run(JobOptions(RUNNER, jobs))
        entry = comparison.collect()["methods"][method]
        found[method] = {"lr": experiment.train.lr, "predictors": entry["predictors"]}
    return found


def tabulate(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table per test in Markdown, each with the verdict on the best rival."""
    own = ["local test set", *OWN_RIVALS, "FedGauss", "against the best rival"]
    union = ["global test set", *UNION_RIVALS, "FedGauss", "against FedAvg"]
    tables = ([own, ["---", *["---:"] * (len(own) - 1)]], [union, ["---"] + ["---:"] * 4])
    for title, found in rows.items():
        rivals = _predictors(found, "local_test", OWN_RIVALS)
        (ours,) = _predictors(found, "local_test", OWN).values()
        best = max(rivals, key=lambda name: fmean(rivals[name]))
        verdict = f"{describe(ours, rivals[best])} ({best})"
        tables[0].append([title, *map(show, rivals.values()), show(ours), verdict])
        rivals = _predictors(found, "global_test", UNION_RIVALS)
        (ours,) = _predictors(found, "global_test", UNION).values()
        verdict = describe(ours, rivals["FedAvg"])
        tables[1].append([title, *map(show, rivals.values()), show(ours), verdict])
    return "\n".join("".join(f"| {' | '.join(line)} |\n" for line in table) for table in tables)


def _predictors(
    found: dict[str, Any], test: str, wanted: dict[str, tuple[str, str]]
) -> dict[str, list[float]]:
    return {name: found[method]["predictors"][test][r] for name, (method, r) in wanted.items()}


def show(values: Sequence[float]) -> str:
    """Return mean(std), std with ddof = 1."""
    return f"{fmean(values):.1f}({stdev(values):.1f})" if len(values) > 1 else f"{values[0]:.1f}"


def describe(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the paired difference with its 95 % interval, and what it says."""
    found = paired_difference(ours, theirs)
    assert found is not None
    words = {"better": "win", "worse": "loss", "no clear difference": "level"}
    if found.low is None or found.high is None:
        return f"{found.mean:+.1f}"
    return f"{words[found.verdict]} {found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def main() -> None:
    """Measure and write OUT/results.json and OUT/table.md, after each situation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("encoder", nargs="?", default="resnet18")
    parser.add_argument("--sets", nargs="+", default=["office10", "sixdomain", "digit5"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    for situation in list_situations(given.encoder, given.sets):
        print(situation.title, flush=True)
        rows[situation.title] = measure(situation, given.out, SEEDS[: given.seeds], given.jobs)
        write_atomically(given.out / "results.json", json.dumps(rows, indent=1).encode())
        write_atomically(given.out / "table.md", tabulate(rows).encode())
    print(tabulate(rows))


if __name__ == "__main__":
    main()
