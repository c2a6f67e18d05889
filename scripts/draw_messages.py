"""Draw accuracy against megabytes for methods of many rounds, by coding, and of one exchange.

    python scripts/draw_messages.py runs/messages

The digits inside the package behind random filters, 10 clients, Dir(0.3), three seeds. Writes
docs/images/messages.png and prints a table in Markdown. Runs that are complete are not run again.
"""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from mpfedcl.api import RUNNER
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Method, Test, find_method
from mpfedcl.report.figures import COLORS, figure_file
from mpfedcl.report.tables import TextTable, mean_and_deviation
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "messages.png"
TRAINED = ("mp-fedcl", "fedavg", "fedproto")
ONE_EXCHANGE = {"fedncm": "v", "fedridge": "s", "fedgauss": "*"}
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
    personal_models=False,
)
TESTS: tuple[tuple[Test, str], ...] = (
    ("local_test", "each client's local test set (%)"),
    ("global_test", "global test set (%)"),
)

Record = dict[str, Any]


def main(out: Path) -> None:
    """Run what is missing, draw, and print what the last rounds have."""
    exchanged = {name: _run(out, name, "full") for name in ONE_EXCHANGE}
    halved = {name: _run(out, name, "half") for name in ONE_EXCHANGE}
    trained = {(name, code): _run(out, name, code) for name in TRAINED for code in CODINGS}
    shape = len(TESTS), len(TRAINED)
    with figure_file(OUT, *shape, figsize=(10.5, 6.6), sharey="row", sharex=True) as (
        figure,
        panels,
    ):
        for row, (test, label) in zip(panels, TESTS, strict=True):
            for axes, name in zip(row, TRAINED, strict=True):
                for coding, (color, _) in CODINGS.items():
                    _draw_rounds(axes, test, name, coding, color, trained[name, coding])
                for other, mark in ONE_EXCHANGE.items():
                    _draw_exchange(axes, test, other, mark, exchanged[other])
                axes.set(xscale="log")
            row[0].set(ylabel=label)
        for axes, name in zip(panels[0], TRAINED, strict=True):
            axes.set(title=name)
        for axes in panels[-1]:
            axes.set(xlabel="megabytes sent by all clients")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    rows = [_row(name, coding, runs) for (name, coding), runs in trained.items()]
    for name in ONE_EXCHANGE:
        rows += [_row(name, "full", exchanged[name]), _row(name, "half", halved[name])]
    titles = ["method", "coding", "MB sent in all", "local_test", "global_test"]
    print(TextTable("", titles, rows).markdown(), end="")


def _run(out: Path, method: str, coding: str) -> list[list[Record]]:
    """Return the records of each seed."""
    folder = out / f"{method}-{coding.partition(',')[0]}"
    comparison = Comparison.prepare(BASE.replace(**CODINGS[coding][1]), [method], SEEDS, folder)
    comparison.run(JobOptions(RUNNER, 1))
    print(folder.name, file=sys.stderr, flush=True)
    return [RunDirectory(run.path).read_records() for run in comparison.planned_runs]


def _accuracy(record: Record, test: Test, method: str) -> float:
    value: float = record["accuracy"][test][_judged(method).predictor_on(test)]
    return value


@cache
def _judged(method: str) -> Method:
    """Return the method as this study sets it: it knows by which reading it is judged."""
    found = find_method(method)
    return found(BASE.replace(method=method).resolved(found.defaults), num_classes=10)


def _sent(records: Sequence[Record]) -> list[float]:
    """Return the megabytes that clients have sent by each round."""
    sent, total = [], 0.0
    for record in records:
        total += record["bytes"]["up"] / 1e6
        sent.append(total)
    return sent


def _draw_rounds(
    axes: Axes, test: Test, method: str, coding: str, color: str, runs: Sequence[list[Record]]
) -> None:
    """Draw the mean over seeds, a dot at the last round."""
    read = [n for n, record in enumerate(runs[0]) if record["accuracy"]]
    sent = [fmean(_sent(records)[n] for records in runs) for n in read]
    values = [fmean(_accuracy(records[n], test, method) for records in runs) for n in read]
    axes.plot(sent, values, color=color, label=coding)
    axes.plot(sent[-1], values[-1], "o", color=color, ms=5)


def _draw_exchange(
    axes: Axes, test: Test, method: str, mark: str, runs: Sequence[list[Record]]
) -> None:
    """Draw one exchange as one point."""
    value = fmean(_accuracy(records[-1], test, method) for records in runs)
    sent = fmean(_sent(records)[-1] for records in runs)
    look: dict[str, Any] = {"color": COLORS[3], "markeredgecolor": "white"}
    axes.plot(
        sent, value, mark, ls="none", label=method, zorder=5, ms=14 if mark == "*" else 9, **look
    )


def _row(method: str, coding: str, runs: Sequence[list[Record]]) -> list[str]:
    sent = fmean(_sent(records)[-1] for records in runs)
    by_test = ([_accuracy(r[-1], test, method) for r in runs] for test, _ in TESTS)
    return [method, coding, f"{sent:.3g}", *map(mean_and_deviation, by_test)]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/messages"))
