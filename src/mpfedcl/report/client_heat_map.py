"""Who is served worst: accuracy per client as a heat map, a row per method."""

from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes

from mpfedcl.report.comparison_content import Content, client_grid
from mpfedcl.report.figures import escape_math, figure_file


def draw_clients(content: Content, title: str, path: Path) -> None:
    """Draw accuracy per client as a heat map, a row per method, the worst served on the left."""
    found = client_grid(content)
    size = (3.0 + 0.42 * max(8, len(found.columns)), 2.0 + 0.34 * len(found.rows))
    with figure_file(path, lines=False, figsize=size) as (page, axes):
        grid = numpy.ma.masked_invalid(numpy.array(list(found.rows.values()), dtype=float))
        axes.set_facecolor("#bbbbbb")
        image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        if grid.size <= 1000:
            _write_values(axes, grid)
        names = [escape_math(name) for name in found.columns]
        turned = {"rotation": 45, "ha": "right"} if max(map(len, names)) > 5 else {}
        axes.set_xticks(range(len(names)), names, **turned)
        axes.set_yticks(range(len(found.rows)), [escape_math(name) for name in found.rows])
        axes.spines[:].set_visible(False)
        axes.set_xlabel(found.about)
        page.colorbar(image, ax=axes, label="accuracy (%)", pad=0.02)
        page.suptitle(f"{title}\naccuracy of clients on their local test sets", fontsize=11)


def _write_values(axes: Axes, grid: Any) -> None:
    for (row, column), value in numpy.ndenumerate(grid.filled(numpy.nan)):
        # What is not known is gray, and has no number.
        if numpy.isnan(value):
            continue
        color = "#000000" if value > 55 else "#ffffff"
        text = f"{value:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
