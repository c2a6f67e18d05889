"""Measure what a bounded pool costs: every prototype, at most M per class, or a sample per step.

    python scripts/measure_pool.py runs/pool

100 clients of the digits inside the package, Dir(0.3), five seeds. Runs that are complete are not
run again. Prints a table in Markdown: differences are paired by seed, with their 95 % interval.
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
from mpfedcl.studies.statistics import paired_difference

WAYS: dict[str, dict[str, Any]] = {
    "every prototype": {},
    "--prototypes.pool-size 40": {"prototypes__pool_size": 40},
    "--prototypes.pool-size 20": {"prototypes__pool_size": 20},
    "--prototypes.pool-size 4": {"prototypes__pool_size": 4},
    "--contrast.sample 32": {"contrast__sample": 32},
    "--contrast.sample 10": {"contrast__sample": 10},
}
SEEDS = (0, 1, 2, 3, 4)
BASE = Experiment().replace(
    clients=100,
    rounds=30,
    partition__alpha=0.3,
    partition__min_size=1,
    train__lr=0.1,
    evaluate_every=30,
    personal_models=False,
)
COLUMNS = ["pool", "own model, nearest prototype", "less", "global model", "MB down per round"]


def main(out: Path) -> None:
    """Run what is missing and print the table."""
    found = {name: _measure(out, name, changes) for name, changes in WAYS.items()}
    every = found["every prototype"]
    rows = []
    for name, (own, averaged, megabytes) in found.items():
        rows.append(
            [
                f"`{name}`" if name.startswith("--") else name,
                mean_and_deviation(own),
                _difference(every[0], own),
                mean_and_deviation(averaged),
                f"{megabytes:.0f}",
            ]
        )
    print(TextTable("", COLUMNS, rows).markdown(), end="")


def _measure(
    out: Path, name: str, changes: dict[str, Any]
) -> tuple[list[float], list[float], float]:
    """Return what the seeds reach on the test that all share, and what is sent to all clients."""
    folder = out / name.strip("-").replace(" ", "-")
    comparison = Comparison.prepare(BASE.replace(**changes), ["mp-fedcl"], SEEDS, folder)
    comparison.run(JobOptions(RUNNER, 1))
    predictors = comparison.collect()["methods"]["mp-fedcl"]["predictors"]
    records = [RunDirectory(run.path).read_records()[-1] for run in comparison.planned_runs]
    megabytes = fmean(each["bytes"]["down"] / 1e6 for each in records)
    print(name, predictors["local_test"]["personal_prototype"], file=sys.stderr, flush=True)
    return (
        predictors["local_test"]["personal_prototype"],
        predictors["global_test"]["global_classifier"],
        megabytes,
    )


def _difference(every: list[float], ours: list[float]) -> str:
    """Return how much less accurate it is than every prototype, seed by seed."""
    found = paired_difference(every, ours)
    if found is None or every == ours:
        return ""
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/pool"))
