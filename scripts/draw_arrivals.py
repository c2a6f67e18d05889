"""Draw the picture of docs/asynchronous.md: accuracy over time, as speeds are handed out.

    python scripts/draw_arrivals.py runs/arrivals

Three comparisons of six methods, three seeds each, some five minutes on one core. Runs that are
complete are not run again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from measure_arrivals import Records, accuracy, read
from mpfedcl.api import RUNNER
from mpfedcl.experiment import Experiment
from mpfedcl.report.figures import COLORS, figure_file
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "asynchronous.png"
METHODS: dict[str, tuple[str, str, float]] = {
    "fedavg": ("#222222", "--", 2.4),
    "fedasync": (COLORS[0], "-", 1.6),
    "fedat": (COLORS[1], "-", 1.6),
    "aso-fed": (COLORS[2], "-", 1.6),
    "sageflow": (COLORS[3], ":", 2.2),
    "async-share": (COLORS[4], ":", 2.2),
}
"""Color, style and width of their lines; dotted are those that look at what has come at ticks."""
SEEDS = (0, 1, 2)
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
PANELS: dict[str, tuple[str, dict[str, Any]]] = {
    "equal": ("all clients equally fast", {"systems__spread": 0.0, "systems__jitter": 0.0}),
    "anybody": ("some slower, whoever it is", {}),
    "label": ("slower: who holds the last classes", {"systems__follows": "label"}),
}


def main(out: Path) -> None:
    """Run what is missing, then draw a panel for each comparison."""
    with figure_file(OUT, 1, len(PANELS), figsize=(10.5, 4.8), sharey=True) as (figure, panels):
        for axes, (folder, (title, changes)) in zip(panels, PANELS.items(), strict=True):
            comparison = Comparison.prepare(
                BASE.replace(**changes), list(METHODS), SEEDS, out / folder
            )
            comparison.run(JobOptions(RUNNER, 1))
            for method in METHODS:
                draw_method(axes, method, [read(out / folder, method, seed) for seed in SEEDS])
            axes.set(xlabel="virtual seconds", title=title)
            axes.set_xlim(left=0)
            # All methods are below 70 % in their first seconds, where there is nothing to tell.
            axes.set_ylim(70, 90)
        panels[0].set(ylabel="accuracy (%)", yticks=range(70, 91, 5))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS))


def draw_method(axes: Axes, method: str, runs: Sequence[Records]) -> None:
    """Draw each record at its mean time and accuracy over the seeds; a dot ends the line."""
    seconds = [fmean(r["virtual_seconds"] for r in each) for each in zip(*runs, strict=True)]
    values = [fmean(accuracy(r) for r in each) for each in zip(*runs, strict=True)]
    color, style, width = METHODS[method]
    axes.plot(seconds, values, color=color, ls=style, lw=width, label=method)
    axes.plot(seconds[-1], values[-1], "o", color=color, ms=6)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/arrivals"))
