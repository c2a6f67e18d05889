"""Measure what each open point of the paper is worth: the numbers of docs/fidelity.md.

Each row is MP-FedCL on MNIST under Dir(0.05) with one thing changed. Runs that are complete are not
run again. Needs the full MNIST in the data folder (MPFEDCL_DATA).
"""

import sys
from pathlib import Path
from typing import Any

from mpfedcl.api import RUNNER
from mpfedcl.experiment import Experiment
from mpfedcl.report.tables import PREDICTOR_TITLES, READING_GROUPS, TextTable, mean_and_deviation
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions

VARIATIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "raw embeddings": {"prototypes__normalize": False},
    "literal loss": {"contrast__form": "literal"},
    "pooled loss": {"contrast__form": "pooled"},
    "no contrastive loss": {"contrast__weight": 0.0},
    "padding: fill": {"prototypes__padding": "fill"},
    "models stay at home": {"share_model": False},
    "K = 1": {"prototypes__per_class": 1},
    "K = 3": {"prototypes__per_class": 3},
    "K = 4": {"prototypes__per_class": 4},
    "random k-means start": {"prototypes__init": "random"},
    "no singleton prototypes": {"prototypes__min_cluster_size": 2},
    "pixels in 0 to 1": {"dataset__standardize": False},
    "plain Dirichlet": {"partition__balanced": False},
}
SEEDS = (0, 1, 2)
_READINGS = READING_GROUPS["without a label prior"]


def main(out: Path) -> None:
    """Run every variation and print a table in Markdown."""
    base = Experiment().replace(dataset__name="mnist", evaluate_every=60)
    rows = []
    for name, changes in VARIATIONS.items():
        folder = out / "".join(letter if letter.isalnum() else "-" for letter in name)
        comparison = Comparison.prepare(base.replace(**changes), ["mp-fedcl"], SEEDS, folder)
        comparison.run(JobOptions(RUNNER, "auto"))
        predictors = comparison.collect()["methods"]["mp-fedcl"]["predictors"]["local_test"]
        rows.append(
            [name, *(mean_and_deviation(predictors[predictor], ddof=0) for predictor in _READINGS)]
        )
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(
        TextTable("", ["changed", *(PREDICTOR_TITLES[r] for r in _READINGS)], rows).markdown(),
        end="",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/fidelity"))
