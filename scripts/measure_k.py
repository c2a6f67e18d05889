"""Measure whether it pays that clients choose K themselves: K = 1, 2, 4 and auto, on three skews.

Runs that are complete are not run again. Needs office10 and its encoder's weights in the data
folder (MPFEDCL_DATA).
"""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from mpfedcl.api import RUNNER
from mpfedcl.experiment import Experiment
from mpfedcl.report.tables import TextTable, mean_and_deviation
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions

SITUATIONS: dict[str, dict[str, Any]] = {
    "mnist-sample, label": {},
    "office10, label": {"dataset__name": "office10"},
    "office10, feature": {"dataset__name": "office10", "partition__kind": "feature"},
}
NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "1": ("sp-fedcl", {}),
    "2": ("mp-fedcl", {"prototypes__per_class": 2}),
    "4": ("mp-fedcl", {"prototypes__per_class": 4}),
    "auto": ("mp-fedcl", {"prototypes__per_class": "auto"}),
}
SEEDS = (0, 1, 2)
COLUMNS = ["data", "K", "local_test", "global_test", "global model, own", "prototypes per class"]


def main(out: Path) -> None:
    """Run every number in every situation and print a table in Markdown."""
    base = Experiment().replace(evaluate_every=60)
    rows = []
    for situation, data in SITUATIONS.items():
        for number, (method, changes) in NUMBERS.items():
            folder = out / f"{situation.replace(', ', '-')}-{number}"
            experiment = base.replace(**data, **changes)
            comparison = Comparison.prepare(experiment, [method], SEEDS, folder)
            comparison.run(JobOptions(RUNNER, "auto"))
            predictors = comparison.collect()["methods"][method]["predictors"]
            rows.append(
                [
                    situation,
                    number,
                    mean_and_deviation(predictors["local_test"]["personal_prototype"], ddof=0),
                    mean_and_deviation(predictors["global_test"]["personal_prototype"], ddof=0),
                    mean_and_deviation(predictors["local_test"]["global_prototype"], ddof=0),
                    number if number != "auto" else _count_chosen(comparison),
                ]
            )
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(TextTable("", COLUMNS, rows).markdown(), end="")


def _count_chosen(comparison: Comparison) -> str:
    """Return the mean number of prototypes that the last round began with."""
    last = [RunDirectory(run.path).read_records()[-1] for run in comparison.planned_runs]
    return f"{fmean(each['remarks']['prototypes_per_class']['mean'] for each in last):.2f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/k"))
