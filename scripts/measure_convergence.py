"""Measure how often the paper's bounds hold: the tables of docs/convergence.md.

Each table is MP-FedCL and FedAvg over three seeds and 60 rounds. Runs that are complete are not run
again. Office-10 needs the data folder (MPFEDCL_DATA); without it that table is left out.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpfedcl.api import RUNNER
from mpfedcl.convergence import BOUNDS
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.report.tables import TextTable
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions

SETTINGS: dict[str, dict[str, Any]] = {
    "mnist-sample, label skew": {},
    "mnist-sample, label skew, one plain step a round": {
        "train__batch_size": 100_000,
        "train__momentum": 0.0,
    },
    "office10, feature skew": {"dataset__name": "office10", "partition__kind": "feature"},
}
METHODS = ("mp-fedcl", "fedavg")
SEEDS = (0, 1, 2)
CONSTANTS = {
    "smoothness": "L1",
    "slope": "ζ",
    "dissimilarity": "δ²",
    "stochastic_gradient_norm": "G",
    "embedding_slope": "L2",
}
SIZES = {
    "decrease_in_training": "fall in training, measured",
    "decrease_in_one_step": "fall in one plain step, measured",
    "decrease_claimed": "fall claimed by Lemma 1",
    "increase_by_pool": "rise by the new pool, measured",
    "increase_allowed": "rise allowed by Lemma 2",
    "single_steps_moved": "training moves as far as so many plain steps",
}


def main(out: Path) -> None:
    """Run every setting and print its tables in Markdown."""
    for title, changes in SETTINGS.items():
        base = Experiment(evaluate_every=60, diagnostics=("convergence",), personal_models=False)
        folder = out / "".join(letter if letter.isalnum() else "-" for letter in title)
        comparison = Comparison.prepare(base.replace(**changes), METHODS, SEEDS, folder)
        try:
            comparison.run(JobOptions(RUNNER, "auto"))
        except InvalidInput as error:
            print(f"{title}: {error}", file=sys.stderr)
            continue
        found: dict[str, list[Mapping[str, Any]]] = {method: [] for method in METHODS}
        for each in comparison.planned_runs:
            convergence = (each.path / "convergence.json").read_text()
            found[each.experiment.method].append(json.loads(convergence))
        print(f"### {title}\n")
        print(tabulate_bounds(found).markdown())
        print(tabulate_numbers(found).markdown())


def tabulate_bounds(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> TextTable:
    """Return the share of client-rounds, and of rounds, in which each bound held."""
    kinds = ("running", "final", "mean_over_clients")
    rows = [
        [words, *(percent(runs, name, kind) for runs in found.values() for kind in kinds)]
        for name, words in BOUNDS.items()
    ]
    heads = ("so far", "final", "mean")
    return TextTable("", ["held, %", *(f"{m}, {head}" for m in found for head in heads)], rows)


def percent(runs: Sequence[Mapping[str, Any]], name: str, kind: str) -> str:
    """Return how often a bound held in all runs together."""
    counts = [run["bounds"][name][kind] for run in runs]
    held, judged = sum(each["held"] for each in counts), sum(each["judged"] for each in counts)
    return f"{100 * held / judged:.0f}" if judged else "-"


def tabulate_numbers(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> TextTable:
    """Return constants and sizes: the mean over seeds."""
    rows = [
        [words, *(average([run[part][name] for run in runs]) for runs in found.values())]
        for part, names in (("constants", CONSTANTS), ("sizes", SIZES))
        for name, words in names.items()
    ]
    limits = (
        ("median_limit", "largest η by Corollary 1, median"),
        ("largest_limit", "largest η by Corollary 1, largest"),
    )
    rows += [
        [words, *(average([run["learning_rate"][name] for run in runs]) for runs in found.values())]
        for name, words in limits
    ]
    return TextTable("", ["mean over seeds", *found], rows)


def average(values: Sequence[float | None]) -> str:
    """Return the mean in three digits."""
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.3g}" if known else "-"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/convergence"))
