"""Reliability diagrams: how often a method is right when it says how sure it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpfedcl.methods import Test
from mpfedcl.report.comparison_content import Content, tests_of
from mpfedcl.report.figures import escape_math, figure_file
from mpfedcl.report.method_styles import PALETTE, style_of
from mpfedcl.report.tables import mean_and_deviation

_COLUMNS = 5


def draw_reliability(content: Content, title: str, path: Path, test: Test = "local_test") -> bool:
    """Draw a diagram per method that is judged by probabilities; tell whether there is any."""
    found: dict[str, Mapping[str, Any]] = {
        name: entry["calibration"][test]
        for name, entry in content["methods"].items()
        if entry.get("calibration", {}).get(test, {}).get("bins")
    }
    if not found:
        return False
    rows = -(-len(found) // _COLUMNS)
    columns = max(2, -(-len(found) // rows))
    size = (2.15 * columns + 0.5, 2.4 * rows + 1.1)
    layout: Any = {"figsize": size, "sharey": True, "squeeze": False}
    with figure_file(path, rows, columns, **layout) as (page, grid):
        for axes in list(grid.flat)[len(found) :]:
            axes.set_visible(False)
        for axes, (name, each) in zip(grid.flat, found.items(), strict=False):
            _draw_diagram(axes, each["bins"], PALETTE[style_of(name).color])
            error = mean_and_deviation(each["error"])
            axes.set_title(f"{escape_math(name)}\nECE {error} %", fontsize=9.5)
        page.supylabel("right answers (%)")
        page.supxlabel(
            "probability of the predicted class (%)\n"
            "dot: a bin of the test images of all seeds, larger where it holds more of them;\n"
            "dashed line: probabilities can be believed; ECE: mean(std) over seeds, ddof 1",
            fontsize=9,
        )
        page.suptitle(f"{title}, {tests_of(content)[test]}", fontsize=11)
    return True


def _draw_diagram(axes: Any, bins: Sequence[Sequence[float]], color: str) -> None:
    images = sum(count for count, _, _ in bins)
    said = [100 * probability for _, _, probability in bins]
    right = [100 * correct / count for count, correct, _ in bins]
    axes.plot([0, 100], [0, 100], color="#999999", lw=1, ls="--")
    for x, y in zip(said, right, strict=True):
        axes.plot([x, x], [x, y], color=color, lw=1, alpha=0.5)
    axes.scatter(
        said, right, s=[12 + 160 * count / images for count, _, _ in bins], color=color, alpha=0.8
    )
    axes.set(xlim=(-4, 104), ylim=(-4, 104), aspect="equal")
    axes.set(xticks=(0, 50, 100), yticks=(0, 50, 100))
