"""Run studies: `python -m reproduction label feature`, `python -m reproduction all`."""

import argparse
from importlib import import_module
from pathlib import Path

from reproduction.items import ITEMS
from reproduction.paper import SEEDS, reproduce
from reproduction.runs import Runs

STUDIES = {
    "convergence": "bounds of the convergence section (docs/convergence.md)",
    "variations": "MP-FedCL with one thing changed, K, bounded pools (docs/fidelity.md)",
    "benchmark": "all methods side by side (docs/benchmark.md)",
    "closed-forms": "FedGauss next to other closed forms (docs/one-shot.md)",
    "one-shot": "one-shot methods against tuned rounds (docs/one-shot.md)",
    "join": "domains that join a finished federation (docs/join.md)",
    "arrivals": "asynchronous methods on the virtual clock (docs/asynchronous.md)",
    "messages": "accuracy against megabytes (docs/performance.md)",
    "out-of-distribution": "images flagged as unknown (docs/deployment.md)",
    "privacy": "the cost of a privacy budget (docs/differential-privacy.md)",
    "har": "UCI HAR, a 1-D CNN on series and FedGauss on features (docs/natural-clients.md)",
    "hospitals": "FLamby's Fed-Heart-Disease (docs/natural-clients.md)",
    "secure-aggregation": "its cost over a network (docs/secure-aggregation.md)",
}


def main() -> None:
    """Run what is asked for; finished runs are kept, so the same command continues."""
    parser = argparse.ArgumentParser(prog="python -m reproduction", description=main.__doc__)
    names = [*ITEMS, *STUDIES]
    parser.add_argument(
        "studies",
        nargs="+",
        choices=["all", "paper", *names],
        metavar="STUDY",
        help=f"all; paper: {', '.join(ITEMS)}; our own: {', '.join(STUDIES)}",
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--quick", action="store_true", help="three rounds, one seed: does it run?")
    given = parser.parse_args()
    chosen = set(given.studies)
    items = [name for name in ITEMS if {"all", "paper", name} & chosen]
    if items:
        folder = given.out / ("paper-quick" if given.quick else "paper")
        runs = Runs(folder / "runs", given.jobs, given.quick)
        reproduce(items, folder, runs, given.seeds or (SEEDS[:1] if given.quick else SEEDS))
    for name, about in STUDIES.items():
        if {"all", name} & chosen:
            print(f"{name}: {about}", flush=True)
            folder = given.out / name
            study = import_module(f"reproduction.{name.replace('-', '_')}")
            study.main(Runs(folder, given.jobs, given.quick))


if __name__ == "__main__":
    main()
