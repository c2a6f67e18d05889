"""Accuracy against megabytes: rounds by coding, and one-shot methods (docs/performance.md)."""

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from mpfedcl import Experiment
from reproduction.runs import Record, Runs
from reproduction.tables import COLORS, DOCS, figure_file, markdown, mean_std

PREDICTORS: dict[str, dict[str, str]] = {
    "mp-fedcl": {"local_test": "personal_prototype", "global_test": "global_prototype"},
    "fedavg": dict.fromkeys(("local_test", "global_test"), "global_classifier"),
    "fedproto": dict.fromkeys(("local_test", "global_test"), "personal_prototype"),
    "fedncm": dict.fromkeys(("local_test", "global_test"), "global_classifier"),
    "fedridge": dict.fromkeys(("local_test", "global_test"), "global_classifier"),
    "fedgauss": {"local_test": "personal_classifier_prior", "global_test": "global_classifier"},
}
TRAINED = ("mp-fedcl", "fedavg", "fedproto")
ONE_SHOT = {"fedncm": "v", "fedridge": "s", "fedgauss": "*"}
CODINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("#222222", {}),
    "half": (COLORS[0], {"update__compress": "half"}),
    "int8": (COLORS[1], {"update__compress": "int8"}),
    "topk, 5 %": (COLORS[2], {"update__compress": "topk"}),
}
SEEDS = (0, 1, 2)
BASE = Experiment().replace(
    clients=10,
    rounds=40,
    encoder__name="random-filters",
    partition__alpha=0.3,
    partition__test="matched",
    train__lr=0.05,
    evaluate_every=2,
    evaluate_predictors="all",
    personal_models=False,
)
TESTS = {"local_test": "local test sets (%)", "global_test": "global test set (%)"}


def accuracy(record: Record, test: str, method: str) -> float:
    """Return the primary metric of a method on a test set."""
    return float(record["accuracy"][test][PREDICTORS[method][test]])


def sent(records: Sequence[Record]) -> list[float]:
    """Return the megabytes that clients have sent by each round."""
    return list(accumulate(record["bytes"]["up"] / 1e6 for record in records))


def main(runs: Runs) -> None:
    """Run all methods and codings, draw the figure and print the table."""
    found = {
        (method, coding): runs.by_seed(BASE.replace(method=method, **changes), SEEDS)
        for method in PREDICTORS
        for coding, (_, changes) in CODINGS.items()
        if method in TRAINED or coding in ("full", "half")
    }
    path = runs.folder / "messages.png" if runs.quick else DOCS / "images" / "messages.png"
    shape, size = (len(TESTS), len(TRAINED)), (10.5, 6.6)
    with figure_file(path, *shape, figsize=size, sharey="row", sharex=True) as (figure, panels):
        for row, (test, label) in zip(panels, TESTS.items(), strict=True):
            for axes, method in zip(row, TRAINED, strict=True):
                for coding, (color, _) in CODINGS.items():
                    several = found[method, coding]
                    read = [n for n, record in enumerate(several[0]) if record["accuracy"]]
                    x = [fmean(sent(records)[n] for records in several) for n in read]
                    y = [fmean(accuracy(r[n], test, method) for r in several) for n in read]
                    axes.plot(x, y, color=color, label=coding)
                    axes.plot(x[-1], y[-1], "o", color=color, ms=5)
                for other, mark in ONE_SHOT.items():
                    several = found[other, "full"]
                    axes.plot(
                        fmean(sent(records)[-1] for records in several),
                        fmean(accuracy(records[-1], test, other) for records in several),
                        mark,
                        label=other,
                        ms=14 if mark == "*" else 9,
                        color=COLORS[3],
                        markeredgecolor="white",
                        zorder=5,
                    )
                axes.set(xscale="log")
            row[0].set(ylabel=label)
        for axes, method in zip(panels[0], TRAINED, strict=True):
            axes.set(title=method)
        for axes in panels[-1]:
            axes.set(xlabel="megabytes sent by all clients")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    rows = [
        [
            method,
            coding,
            f"{fmean(sent(records)[-1] for records in several):.3g}",
            *(mean_std([accuracy(r[-1], test, method) for r in several]) for test in TESTS),
        ]
        for (method, coding), several in found.items()
    ]
    print(markdown(["method", "coding", "MB sent in total", "local test", "global test"], rows))
