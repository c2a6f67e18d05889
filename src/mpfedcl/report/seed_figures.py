"""Every seed of a comparison: as it is, and as differences to one of the methods."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes

from mpfedcl.report.comparison_content import Content, diverged_seeds, tests_of, values_of
from mpfedcl.report.figures import escape_math, figure_file
from mpfedcl.report.method_styles import style_of
from mpfedcl.report.number_formatting import deviation, finite_values, mean
from mpfedcl.studies.statistics import Values, paired_difference

_GUTTER = 3.5
"""Points of accuracy between two seeds that have none."""


def draw_seeds(content: Content, title: str, path: Path) -> None:
    """Draw every seed of every method as a dot, with the mean and its deviation."""
    tests, count = tests_of(content), len(content["methods"])
    several = len(content["seeds"]) > 1
    size = (1.6 + 4.2 * len(tests), 2.0 + 0.3 * count)
    with figure_file(path, 1, len(tests), figsize=size, sharey=True, squeeze=False) as (page, grid):
        for axes, (test, name) in zip(grid[0], tests.items(), strict=True):
            for row, (method, values) in enumerate(values_of(content, test).items()):
                _draw_seed_row(axes, row, method, values, diverged_seeds(content, method))
            _name_rows(axes, list(content["methods"]))
            axes.set(title=name, xlabel="accuracy (%) after the last round")
            _leave_gutter(axes, max(each.count(None) for each in values_of(content, test).values()))
        bars = (
            "; | mean, bar: \u00b1 1 standard deviation over seeds (ddof\u00a01)" if several else ""
        )
        _caption(page, title, f"small mark: one seed{bars}", content)


def _draw_seed_row(
    axes: Axes, row: int, method: str, values: Values, diverged: Sequence[bool]
) -> None:
    known, style = finite_values(values), style_of(method).dot()
    spread = deviation(known)
    middle = mean(known)
    if middle is not None:
        axes.errorbar(
            middle, row, xerr=spread, color=style["color"], elinewidth=6, alpha=0.28, capsize=0
        )
        axes.plot(middle, row, "|", color=style["color"], ms=15, mew=2)
    gone = 0
    for value, is_lost in zip(values, diverged, strict=True):
        look: Any = {"marker": "x", "color": "#333333", "mew": 1.8} if is_lost else style
        gone += value is None
        axes.plot(-_GUTTER * gone if value is None else value, row, ls="", ms=6, alpha=0.9, **look)


def _leave_gutter(axes: Axes, most_gone: int) -> None:
    """Leave room left of 0 for the seeds that have no number."""
    axes.set_xlim(-2 - _GUTTER * most_gone, 102)
    axes.set_xticks(range(0, 101, 20))
    if most_gone:
        axes.axvline(-_GUTTER / 2, color="#999999", lw=1, ls=":")


def draw_differences(content: Content, title: str, path: Path, reference: str = "") -> None:
    """Draw each method's difference to one of them, seed by seed, with the interval of the mean."""
    reference = reference or next(iter(content["methods"]))
    tests = tests_of(content)
    others = [name for name in content["methods"] if name != reference]
    level = 100 * content["differences"]["level"]
    size = (1.6 + 4.6 * len(tests), 2.0 + 0.34 * max(2, len(others)))
    with figure_file(path, 1, len(tests), figsize=size, sharey=True, squeeze=False) as (page, grid):
        for axes, (test, name) in zip(grid[0], tests.items(), strict=True):
            values = values_of(content, test)
            lost = {method: diverged_seeds(content, method) for method in values}
            axes.axvline(0, color="#555555", lw=1)
            for row, method in enumerate(others):
                either = [a or b for a, b in zip(lost[method], lost[reference], strict=True)]
                _draw_difference(axes, row, method, (values[method], values[reference]), either)
            _name_rows(axes, others)
            axes.set(title=name, xlabel=f"points of accuracy above {escape_math(reference)}")
        bar = f"dot: one seed; bar: {level:.0f} % interval of the mean (paired t)"
        one = "dot: the one seed; one seed has no interval"
        told = bar if len(content["seeds"]) > 1 else one
        _caption(page, title, f"{told}; reference: {escape_math(reference)}", content)


def _draw_difference(
    axes: Axes, row: int, method: str, values: tuple[Values, Values], diverged: Sequence[bool]
) -> None:
    style: Any = style_of(method).dot()
    found = paired_difference(*values)
    if found is None:
        axes.plot(0, row, "x", color="#333333", ms=7, mew=1.8)
        return
    if found.low is not None and found.high is not None:
        axes.plot([found.low, found.high], [row, row], color=style["color"], lw=2.4)
        for end in (found.low, found.high):
            axes.plot(end, row, "|", color=style["color"], ms=8, mew=2)
    for a, b, is_lost in zip(*values, diverged, strict=True):
        if a is not None and b is not None:
            look: Any = {"marker": "x", "color": "#333333"} if is_lost else {"marker": "."}
            axes.plot(a - b, row + 0.24, ls="", ms=5, **{"color": style["color"], **look})
    axes.plot(found.mean, row, ls="", ms=7, mec="white", **style)
    if missing := len(diverged) - found.pairs:
        text = f"{missing} ✗ without a number"
        axes.annotate(
            text, (found.mean, row), xytext=(8, -3), textcoords="offset points", fontsize=8.5
        )


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [escape_math(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _caption(page: Any, title: str, told: str, content: Content) -> None:
    """Put the title above, and below what marks and bars are."""
    page.suptitle(title, fontsize=11)
    lost = any(any(diverged_seeds(content, method)) for method in content["methods"])
    cross = "; ✗: a seed that diverged" if lost else ""
    page.supxlabel(fill(told + cross, int(13 * page.get_figwidth())), fontsize=9)
