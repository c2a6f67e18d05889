"""Accuracy against what it costs: megabytes and seconds, every seed a dot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mpfedcl.report.comparison_content import Content, diverged_seeds, tests_of, values_of
from mpfedcl.report.figures import escape_math, figure_file
from mpfedcl.report.method_styles import style_of

_COSTS: Mapping[str, tuple[str, float]] = {
    "bytes": ("megabytes sent, all clients and rounds", 1e-6),
    "seconds": ("seconds of training, all rounds", 1.0),
}


def draw_costs(content: Content, title: str, path: Path) -> None:
    """Draw accuracy against megabytes and against seconds, a row per test."""
    tests, names = tests_of(content), list(content["methods"])
    lost = {name: diverged_seeds(content, name) for name in names}
    gone, columns = False, 4
    size = (10.5, 3.1 * len(tests) + 1.4 + 0.2 * -(-len(names) // columns))
    with figure_file(path, len(tests), 2, figsize=size, squeeze=False) as (page, grid):
        for row, (test, heading) in zip(grid, tests.items(), strict=True):
            values = values_of(content, test)
            gone = gone or any(None in each for each in values.values())
            for axes, (cost, (words, factor)) in zip(row, _COSTS.items(), strict=True):
                costs = {
                    name: [factor * each for each in content["methods"][name][cost]]
                    for name in names
                }
                _draw_panel(axes, costs, values, lost)
                axes.set(xlabel=words, ylim=(-3, 103))
            row[0].set_ylabel(f"accuracy (%), {heading}")
        handles = [
            Line2D([], [], ls="", ms=7, label=escape_math(name), **style_of(name).dot())
            for name in names
        ]
        page.legend(handles=handles, loc="outside lower center", ncols=columns)
        told = "small: one seed; large: mean over seeds"
        if any(any(each) for each in lost.values()):
            told += "; \u2717: a seed that diverged" + (
                ", not shown where it has no accuracy" if gone else ""
            )
        page.suptitle(f"{title}\n{told}", fontsize=11)


def _draw_panel(
    axes: Axes,
    costs: Mapping[str, Sequence[float]],
    values: Mapping[str, Sequence[float | None]],
    lost: Mapping[str, Sequence[bool]],
) -> None:
    """Draw costs on a logarithmic axis; what costs nothing stands left of it, at 0."""
    spent = [each for several in costs.values() for each in several if each > 0]
    least = min(spent, default=1.0)
    nothing = least / 4
    axes.set_xscale("log")
    for name, several in costs.items():
        seeds = zip(several, values[name], lost[name], strict=True)
        known = [(max(x, nothing), y, gone) for x, y, gone in seeds if y is not None]
        if not known:
            continue
        style: Any = style_of(name).dot()
        for x, y, gone in known:
            look: Any = {"marker": "x", "color": "#333333"} if gone else {**style, "alpha": 0.6}
            axes.plot(x, y, ls="", ms=3.5, **look)
        middle = [numpy.mean([each[place] for each in known]) for place in (0, 1)]
        axes.plot(*middle, ls="", ms=8, mec="white", **style)
    _label_axis(axes, nothing if any(x == 0 for each in costs.values() for x in each) else None)


def _label_axis(axes: Axes, nothing: float | None) -> None:
    """Write plain numbers, and 0 where something costs nothing."""
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    if nothing is not None:
        axes.annotate(
            "0", (nothing, 0), xycoords=("data", "axes fraction"), xytext=(0, -13),
            textcoords="offset points", ha="center", fontsize=10, fontweight="bold",
        )  # fmt: skip
        axes.axvline(nothing * 2, color="#bbbbbb", lw=1, ls=":")
        # The numbers begin right of that line.
        low, high = axes.get_xlim()
        shown = [each for each in axes.get_xticks() if nothing * 2 < each < high]
        axes.set_xticks(shown)
        axes.set_xlim(low, high)
