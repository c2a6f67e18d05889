"""MP-FedCL with one thing changed: docs/fidelity.md, the numbers of prototypes, a bounded pool."""

from statistics import fmean
from typing import Any

from mpfedcl import Experiment
from reproduction.runs import Record, Runs
from reproduction.tables import markdown, mean_std, paired_difference

PREDICTORS = ("personal_classifier", "personal_prototype", "global_classifier", "global_prototype")
FIDELITY: dict[str, dict[str, Any]] = {
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
    "pixels in 0 to 1": {"dataset__standardize": "none"},
    "plain Dirichlet": {"partition__balanced": False},
}
OFFICE = {"dataset__name": "office10"}
SITUATIONS: dict[str, dict[str, Any]] = {
    "mnist-sample, label": {},
    "office10, label": OFFICE,
    "office10, feature": {**OFFICE, "partition__kind": "feature"},
}
NUMBERS: dict[str, dict[str, Any]] = {
    "1": {"method": "sp-fedcl"},
    "2": {"prototypes__per_class": 2},
    "4": {"prototypes__per_class": 4},
    "auto": {"prototypes__per_class": "auto"},
}
POOLS: dict[str, dict[str, Any]] = {
    "every prototype": {},
    "`--prototypes.pool-size 40`": {"prototypes__pool_size": 40},
    "`--prototypes.pool-size 20`": {"prototypes__pool_size": 20},
    "`--prototypes.pool-size 4`": {"prototypes__pool_size": 4},
}
FEW, MANY = (0, 1, 2), (0, 1, 2, 3, 4)
BASE = Experiment(evaluate_every=60, evaluate_predictors="all", personal_models=False)


def last(runs: list[list[Record]], test: str, predictor: str) -> list[float | None]:
    """Return the accuracy of the last round, a value per seed."""
    return [records[-1]["accuracy"][test][predictor] for records in runs]


def fidelity(runs: Runs) -> None:
    """Print the value of each point that the paper leaves open, on MNIST under Dir(0.05)."""
    rows = []
    for name, changes in FIDELITY.items():
        found = runs.by_seed(BASE.replace(dataset__name="mnist", **changes), FEW)
        values = (last(found, "local_test", each) for each in PREDICTORS)
        rows.append([name, *(mean_std(each, ddof=0) for each in values)])
    print(markdown(["changed", *(each.replace("_", " ") for each in PREDICTORS)], rows))


def numbers(runs: Runs) -> None:
    """Print K = 1, 2, 4 and a K that clients choose themselves, on three skews."""
    rows = []
    for situation, data in SITUATIONS.items():
        for number, changes in NUMBERS.items():
            found = runs.by_seed(BASE.replace(**data, **changes), FEW)
            values = [
                last(found, "local_test", "personal_prototype"),
                last(found, "global_test", "personal_prototype"),
                last(found, "local_test", "global_prototype"),
            ]
            chosen = number
            if number == "auto":
                held = (r[-1]["remarks"]["prototypes_per_class"]["mean"] for r in found)
                chosen = f"{fmean(held):.2f}"
            rows.append([situation, number, *(mean_std(v, ddof=0) for v in values), chosen])
    columns = ["local test", "global test", "global model, local test", "prototypes per class"]
    print(markdown(["data", "K", *columns], rows))


def pool(runs: Runs) -> None:
    """Print the cost of a bounded pool: 100 clients of the embedded digits, Dir(0.3)."""
    base = BASE.replace(
        clients=100,
        rounds=30,
        partition__alpha=0.3,
        partition__min_size=1,
        train__lr=0.1,
        evaluate_every=30,
    )
    rows, every = [], None
    for name, changes in POOLS.items():
        found = runs.by_seed(base.replace(**changes), MANY)
        own = last(found, "local_test", "personal_prototype")
        every = every or own
        difference = "" if own is every else str(paired_difference(every, own))
        overall = mean_std(last(found, "global_test", "global_classifier"))
        megabytes = fmean(records[-1]["bytes"]["down"] / 1e6 for records in found)
        rows.append([name, mean_std(own), difference, overall, f"{megabytes:.0f}"])
    columns = ["personal model, nearest prototype", "less", "global model", "MB down per round"]
    print(markdown(["pool", *columns], rows))


def main(runs: Runs) -> None:
    """Run all three."""
    fidelity(runs)
    numbers(runs)
    pool(runs)
