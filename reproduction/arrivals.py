"""Asynchronous methods on the virtual clock: the table and the figure of docs/asynchronous.md."""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from mpfedcl import Experiment
from reproduction.runs import Record, Runs
from reproduction.tables import COLORS, DOCS, figure_file, markdown

METHODS: dict[str, tuple[str, str, float]] = {
    "fedavg": ("#222222", "--", 2.4),
    "fedasync": (COLORS[0], "-", 1.6),
    "fedat": (COLORS[1], "-", 1.6),
    "aso-fed": (COLORS[2], "-", 1.6),
    "sageflow": (COLORS[3], ":", 2.2),
    "async-share": (COLORS[4], ":", 2.2),
}
"""Color, style and width of their lines; dotted methods aggregate at ticks of the clock."""
SEEDS = (0, 1, 2)
SHARE = 0.9
"""Of FedAvg's last accuracy with the same seed: what is to be reached."""
BASE = Experiment().replace(
    clients=10,
    rounds=30,
    model__hidden=(64,),
    partition__alpha=1.0,
    train__lr=0.05,
    public__size=100,
    systems__kind="lognormal",
    systems__spread=1.2,
    personal_models=False,
    evaluate_every=1,
)
PANELS: dict[str, dict[str, Any]] = {
    "all clients equally fast": {"systems__spread": 0.0, "systems__jitter": 0.0},
    "some clients slower, at random": {},
    "slower: clients with the last classes": {"systems__follows": "label"},
}


def accuracy(record: Record) -> float:
    """Return the mean over clients by the method's primary predictor."""
    values = [value for value in record["accuracy_per_client"].values() if value is not None]
    return fmean(values)


def describe(
    runs: Sequence[Sequence[Record]], goals: Sequence[float], budgets: Sequence[float]
) -> list[str]:
    """Return the cells of one method: medians over seeds."""
    reached, sent, by_then = [], [], []
    for records, goal, budget in zip(runs, goals, budgets, strict=True):
        first = next((n for n, r in enumerate(records) if accuracy(r) >= goal), None)
        reached.append(math.inf if first is None else records[first]["virtual_seconds"])
        if first is not None:
            sent.append(sum(r["bytes"]["up"] for r in records[: first + 1]) / 1e6)
        before = [accuracy(r) for r in records if r["virtual_seconds"] <= budget]
        by_then.append([math.nan, *before][-1])
    time = median(reached)
    return [
        f"{sum(map(math.isfinite, reached))} of {len(runs)}",
        f"{time:.0f}" if math.isfinite(time) else "not reached",
        f"{median(sent):.1f}" if sent else "",
        f"{median(by_then):.1f}",
        f"{median(accuracy(records[-1]) for records in runs):.1f}",
        f"{median(records[-1]['virtual_seconds'] for records in runs):.0f}",
    ]


def main(runs: Runs) -> None:
    """Run six methods with three distributions of speeds; print tables and draw the figure."""
    path = runs.folder / "asynchronous.png" if runs.quick else DOCS / "images" / "asynchronous.png"
    size = (10.5, 4.8)
    with figure_file(path, 1, len(PANELS), figsize=size, sharey=True) as (figure, panels):
        for axes, (title, changes) in zip(panels, PANELS.items(), strict=True):
            found = {
                method: runs.by_seed(BASE.replace(method=method, **changes), SEEDS)
                for method in METHODS
            }
            print(f"{title}\n\n{tabulate(found)}")
            for method, (color, style, width) in METHODS.items():
                rounds = list(zip(*found[method], strict=True))
                seconds = [fmean(r["virtual_seconds"] for r in each) for each in rounds]
                values = [fmean(map(accuracy, each)) for each in rounds]
                axes.plot(seconds, values, color=color, ls=style, lw=width, label=method)
                axes.plot(seconds[-1], values[-1], "o", color=color, ms=6)
            axes.set(xlabel="virtual seconds", title=title)
            axes.set_xlim(left=0)
            # All methods are below 70 % in their first seconds.
            axes.set_ylim(70, 90)
        panels[0].set(ylabel="accuracy (%)", yticks=range(70, 91, 5))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS))


def tabulate(found: dict[str, list[list[Record]]]) -> str:
    """Return a table of the time to FedAvg's accuracy, and of the accuracy at the same time."""
    goals = [SHARE * accuracy(records[-1]) for records in found["fedavg"]]
    ends = [[records[-1]["virtual_seconds"] for records in each] for each in found.values()]
    budgets = [min(of_seed) for of_seed in zip(*ends, strict=True)]
    columns = ["reached", "after s", "MB up", "in the same time", "at its end", "that is s"]
    rows = [[method, *describe(each, goals, budgets)] for method, each in found.items()]
    return markdown(["method", *columns], rows)
