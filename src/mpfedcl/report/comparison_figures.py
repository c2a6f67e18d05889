"""Figures of several methods: seeds, differences, clients, costs and calibration.

A method has the same color and marker in each of them. They are drawn from the groups that
`mpfedcl.report.comparison` describes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mpfedcl.core.json_files import Json
from mpfedcl.report.figures import INK, SOFT, Drawing, MethodStyle, Panel, escape_math
from mpfedcl.report.formatting import deviation, finite_values
from mpfedcl.report.run_figures import accuracy_drawing, draw_lines, panel_tests

_GUTTER = 3.5
"""Points of accuracy between two seeds that have none."""
_COSTS = {"bytes": ("megabytes sent", 1e-6), "seconds": ("seconds of training", 1.0)}
_LOST = " ✗: a seed that diverged."


def comparison_drawings(groups: Sequence[Json], section: Json) -> dict[str, Drawing]:
    """Return the figures of several groups by name; `section` has their differences and clients."""
    found: dict[str, Drawing | None] = {
        "accuracy": accuracy_drawing(groups),
        "seeds": seeds_drawing(groups),
        "differences": section["differences"] and differences_drawing(groups, section),
        "clients": section["heat"] and clients_drawing(groups, section["heat"]),
        "costs": costs_drawing(groups),
        "reliability": reliability_drawing(groups),
    }
    if any("virtual_seconds" in group["costs_by_round"] for group in groups):
        found["accuracy-over-time"] = accuracy_drawing(groups, "virtual_seconds")
    return {name: drawing for name, drawing in found.items() if drawing}


def _dot(group: Json) -> dict[str, Any]:
    return MethodStyle(**group["style"]).dot()


def _lost(groups: Sequence[Json]) -> str:
    return _LOST if any(any(group["diverged"]) for group in groups) else ""


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [escape_math(name, 24) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def seeds_drawing(groups: Sequence[Json]) -> Drawing:
    """Return the accuracy of every seed, with mean and standard deviation."""
    panels = [
        Panel(partial(_draw_seeds, groups=groups, test=test), title)
        for test, title in panel_tests(groups).items()
    ]
    note = "Small mark: one seed; |: mean; bar: one standard deviation over seeds (ddof 1)."
    size = (5.2, 1.0 + 0.3 * max(3, len(groups)))
    return Drawing("Accuracy per seed, last round", note + _lost(groups), panels, size)


def _draw_seeds(axes: Axes, groups: Sequence[Json], test: str) -> None:
    for row, group in enumerate(groups):
        values, style = group["end"][test], _dot(group)
        known = finite_values(values)
        if known:
            middle = sum(known) / len(known)
            axes.errorbar(
                middle, row, xerr=deviation(known), color=style["color"], elinewidth=6, alpha=0.28
            )
            axes.plot(middle, row, "|", color=style["color"], ms=15, mew=2)
        gone = 0
        for value, is_lost in zip(values, group["diverged"], strict=True):
            look = {"marker": "x", "color": INK, "mew": 1.8} if is_lost or value is None else style
            gone += value is None
            place = -_GUTTER * gone if value is None else value
            axes.plot(place, row, ls="", ms=6, alpha=0.9, **look)
    _name_rows(axes, [group["name"] for group in groups])
    # Seeds without a number stand left of 0.
    most_gone = max(group["end"][test].count(None) for group in groups)
    axes.set(xlabel="accuracy (%)", xlim=(-2 - _GUTTER * most_gone, 102))
    axes.set_xticks(range(0, 101, 20))
    if most_gone:
        axes.axvline(-_GUTTER / 2, color=SOFT, lw=1, ls=":")


def differences_drawing(groups: Sequence[Json], section: Json, to: str = "first") -> Drawing:
    """Return the differences to the first group or to the best, paired by seed, with intervals."""
    found = section["differences"]
    panels, names = [], []
    for test, title in panel_tests(groups).items():
        chosen = found["tests"][test].get(to) or found["tests"][test]["first"]
        names.append(groups[chosen["reference"]]["name"])
        panels.append(Panel(partial(_draw_differences, groups=groups, chosen=chosen), title))
    bar = (
        f"bar: {found['level']:g} % interval of the mean (Student's t, paired by seed)"
        if len(found["seeds"]) > 1
        else "one seed has no interval"
    )
    note = f"Dot: one seed; marker: mean; {bar}."
    if to == "best":
        note += " The reference was chosen by these numbers, which favors it."
    size = (5.2, 1.1 + 0.34 * max(2, len(groups) - 1))
    title = f"Difference in accuracy to {' and '.join(dict.fromkeys(names))}"
    return Drawing(title, note + _lost(groups), panels, size)


def _draw_differences(axes: Axes, groups: Sequence[Json], chosen: Json) -> None:
    axes.axvline(0, color=SOFT, lw=1)
    for row, each in enumerate(chosen["rows"]):
        style = _dot(groups[each["group"]])
        if each["mean"] is None:
            axes.plot(0, row, "x", color=INK, ms=7, mew=1.8)
            continue
        if each["low"] is not None:
            axes.plot([each["low"], each["high"]], [row, row], color=style["color"], lw=2.4)
            for end in (each["low"], each["high"]):
                axes.plot(end, row, "|", color=style["color"], ms=8, mew=2)
        for value, is_lost in zip(each["seeds"], each["lost"], strict=True):
            if value is not None:
                look = {"marker": "x", "color": INK} if is_lost else {"marker": "."}
                axes.plot(value, row + 0.24, ls="", ms=5, **{"color": style["color"], **look})
        axes.plot(each["mean"], row, ls="", ms=7, mec="#ffffff", **style)
        if missing := each["seeds"].count(None):
            axes.annotate(
                f"{missing} ✗ without a number", (each["mean"], row), xytext=(8, -3),
                textcoords="offset points", fontsize=8.5,
            )  # fmt: skip
    _name_rows(axes, [groups[each["group"]]["name"] for each in chosen["rows"]])
    reference = escape_math(groups[chosen["reference"]]["name"], 24)
    axes.set(xlabel=f"points of accuracy above {reference}")


def clients_drawing(groups: Sequence[Json], heat: Json) -> Drawing:
    """Return the accuracy per client, a row per method, the worst on the left."""
    draw = partial(_draw_clients, groups=groups, heat=heat)
    size = (max(5.2, 2.2 + 0.36 * len(heat["columns"])), 1.5 + 0.3 * len(groups))
    note = f"In %, local test sets: {heat['about']}."
    return Drawing("Accuracy per client", note, [Panel(draw)], size, grid=False)


def _draw_clients(axes: Axes, groups: Sequence[Json], heat: Json) -> None:
    grid = numpy.ma.masked_invalid(numpy.array(heat["values"], dtype=float))
    axes.imshow(grid, cmap="cividis", vmin=0, vmax=100, aspect="auto", interpolation="none")
    if grid.size <= 600:
        for (row, column), value in numpy.ndenumerate(grid.filled(numpy.nan)):
            if numpy.isfinite(value):
                color = "#10181f" if value > 55 else "#fefefe"
                axes.text(
                    column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color
                )
    names = [escape_math(name, 16) for name in heat["columns"]]
    turned: Any = {"rotation": 45, "ha": "right"} if sum(map(len, names)) > 40 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    axes.set_yticks(range(len(groups)), [escape_math(group["name"], 24) for group in groups])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def costs_drawing(groups: Sequence[Json]) -> Drawing:
    """Return accuracy against megabytes and seconds."""
    tests = panel_tests(groups)
    panels = [
        Panel(partial(_draw_costs, groups=groups, test=test, cost=cost), title)
        for test, title in tests.items()
        for cost in _COSTS
    ]
    note = "All rounds and clients. Small: one seed; large: mean over seeds. Logarithmic axis."
    title = "Accuracy against traffic and time"
    return Drawing(title, note + _lost(groups), panels, legend=True, shown=2)


def _draw_costs(axes: Axes, groups: Sequence[Json], test: str, cost: str) -> None:
    words, factor = _COSTS[cost]
    spent = [[factor * each[cost] for each in group["costs"]] for group in groups]
    nothing = min((each for several in spent for each in several if each > 0), default=1.0) / 4
    axes.set_xscale("log")
    for group, costs in zip(groups, spent, strict=True):
        seeds = zip(costs, group["end"][test], group["diverged"], strict=True)
        known = [(max(x, nothing), y, gone) for x, y, gone in seeds if y is not None]
        style = _dot(group)
        for x, y, gone in known:
            look = {"marker": "x", "color": INK} if gone else {**style, "alpha": 0.6}
            axes.plot(x, y, ls="", ms=3.5, **look)
        middle = [numpy.mean([each[place] for each in known]) for place in (0, 1)] if known else []
        label = escape_math(group["name"], 40)
        axes.plot(*(middle or ([], [])), ls="", ms=8, mec="#ffffff", label=label, **style)
    axes.set(xlabel=words, ylabel="accuracy (%)", ylim=(-3, 103))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    if any(x == 0 for each in spent for x in each):
        # A method without costs stands left of the axis, at 0.
        low, high = axes.get_xlim()
        shown = [each for each in axes.get_xticks() if nothing * 2 < each < high]
        axes.set_xticks([nothing, *shown], ["0", *(f"{each:,.4g}" for each in shown)])
        axes.set_xlim(low, high)
        axes.axvline(nothing * 2, color=SOFT, lw=1, ls=":")


def reliability_drawing(groups: Sequence[Json]) -> Drawing | None:
    """Return reliability diagrams of the methods whose primary predictor has probabilities."""
    panels = [
        Panel(partial(_draw_reliability, groups=groups, test=test), title)
        for test, title in panel_tests(groups).items()
        if any(group["calibration"][test] for group in groups)
    ]
    if not panels:
        return None
    note = (
        "A point is a bin of test samples of all seeds. Below the diagonal a method is "
        "overconfident. ECE: expected calibration error, 15 bins, mean(std) over seeds."
    )
    return Drawing("Reliability diagram", note, panels, (5.2, 4.0))


def _draw_reliability(axes: Axes, groups: Sequence[Json], test: str) -> None:
    axes.plot([0, 100], [0, 100], color=SOFT, lw=1, ls="--")
    lines = [
        {
            "name": f"{group['name']}: ECE {found['error']} %",
            "style": {**group["style"], "dash": 0},
            "x": [100 * probability for _, _, probability in found["bins"]],
            "mean": [100 * correct / count for count, correct, _ in found["bins"]],
        }
        for group in groups
        if (found := group["calibration"][test])
    ]
    draw_lines(axes, lines, x="predicted probability (%)", y="accuracy (%)")
    axes.set(xlim=(0, 102), ylim=(0, 102))
    # A legend per panel: calibration errors differ between test sets.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8.5)
