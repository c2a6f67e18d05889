"""Print how long methods take on the virtual clock, from a comparison in which all have one.

    mpfedcl compare --methods fedavg fedasync --systems.kind lognormal --evaluate-every 1 --out paced
    python scripts/measure_arrivals.py paced

What is to be reached is a share of what FedAvg has in its last round, of the same seed. A run that
never reaches it counts as longer than all others; "not reached" is the median of too few. "In the
same time" is when the first of the runs of a seed is over: all are under way then.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import median
from typing import Any

Records = list[dict[str, Any]]


def accuracy(record: dict[str, Any]) -> float:
    """Return the mean of the method's own reading over the clients."""
    values: list[float] = [
        value for value in record["accuracy_per_client"].values() if value is not None
    ]
    return sum(values) / len(values)


def read(folder: Path, method: str, seed: int) -> Records:
    """Return the records of a run that were evaluated."""
    lines = (folder / f"{method}-seed{seed}" / "rounds.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["accuracy"]]


def describe(runs: list[Records], goals: list[float], budgets: list[float]) -> list[str]:
    """Return the cells of one method: over seeds, medians."""
    reached, sent = [], []
    for records, goal in zip(runs, goals, strict=True):
        first = next((r for r in records if accuracy(r) >= goal), None)
        reached.append(first["virtual_seconds"] if first else math.inf)
        if first:
            before = [r for r in records if r["round"] <= first["round"]]
            sent.append(sum(r["bytes"]["up"] for r in before) / 1e6)
    by_then = [
        [math.nan, *(accuracy(r) for r in records if r["virtual_seconds"] <= budget)][-1]
        for records, budget in zip(runs, budgets, strict=True)
    ]
    time = median(reached)
    return [
        f"{sum(map(math.isfinite, reached))} of {len(runs)}",
        f"{time:.0f}" if math.isfinite(time) else "not reached",
        f"{median(sent):.1f}" if sent else "",
        f"{median(by_then):.1f}",
        f"{median(accuracy(records[-1]) for records in runs):.1f}",
        f"{median(records[-1]['virtual_seconds'] for records in runs):.0f}",
    ]


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=0.9, help="of FedAvg's last accuracy")
    arguments = parser.parse_args()
    content = json.loads((arguments.folder / "comparison.json").read_text())
    runs = {
        method: [read(arguments.folder, method, seed) for seed in content["seeds"]]
        for method in content["methods"]
    }
    goals = [arguments.share * accuracy(records[-1]) for records in runs["fedavg"]]
    ends = [[records[-1]["virtual_seconds"] for records in several] for several in runs.values()]
    budgets = [min(of_seed) for of_seed in zip(*ends, strict=True)]
    titles = (
        "method",
        "reached",
        "after s",
        "MB up",
        "in the same time",
        "at its end",
        "that is s",
    )
    print("|", " | ".join(titles), "|")
    print("|" + "---|" * len(titles))
    for method, several in runs.items():
        print("|", " | ".join([method, *describe(several, goals, budgets)]), "|")


if __name__ == "__main__":
    main()
