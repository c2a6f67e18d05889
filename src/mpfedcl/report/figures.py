"""Figures: one description of each, rendered into a file, a notebook or a page.

A `Drawing` says in words what a figure shows and has a function per panel that draws with
matplotlib. `Drawing.save` puts all panels into one file; `Drawing.images` returns each panel as an
image for a page.
"""

import base64
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpfedcl.report.wording import printable_name

PALETTE = (
    "#0072b2", "#d55e00", "#00845f", "#b5528d", "#2a8fc9",
    "#a87400", "#5b6470", "#6a3d9a", "#8c564b", "#17808c",
)  # fmt: skip
"""After Okabe and Ito, darker on white. Not every reader can distinguish ten colors, so methods
also differ in markers and dashes."""
INK, SOFT, GRID = "#1b2430", "#808a96", "#e2e6ea"
MARKERS = ("o", "s", "^", "D", "v", "P", "p", "<", ">", "*")
"""No cross: that is a seed that diverged."""
DASHES = ("-", (0, (7, 3)), (0, (2, 3)), (0, (9, 3, 2, 3)), (0, (12, 4)), (0, (5, 2, 1, 2, 1, 2)))
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
    # Journals reject Type 3 fonts, which are matplotlib's default.
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    # Text stays text, and equal figures are equal files.
    "svg.fonttype": "none",
    "svg.hashsalt": "mpfedcl",
}
_LONGEST_NAME = 32
_MOST_NUMBERS = 625
"""Cells of a matrix up to which each has its number."""


class DrawnFigure(Figure):
    """A figure that a notebook shows, and whose PDF has TrueType fonts.

    It is made without pyplot, so that it neither changes a user's screen nor stays in memory.
    """

    def savefig(self, *arguments: Any, **options: Any) -> None:
        """Write the figure, as matplotlib does, in the style it was drawn in."""
        with rc_context(STYLE):
            super().savefig(*arguments, **options)

    def _repr_png_(self) -> bytes:
        content = BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()


@dataclass(frozen=True)
class Panel:
    """One pair of axes, and the function that draws into it."""

    draw: Callable[[Axes], object]
    title: str = ""


@dataclass(frozen=True)
class Drawing:
    """A figure in words and panels."""

    title: str
    note: str
    """Meaning of marks, bars and bands."""
    panels: Sequence[Panel]
    size: tuple[float, float] = (5.2, 3.3)
    """Inches of a panel."""
    columns: int = 2
    """Panels in a row of a file."""
    legend: bool = False
    grid: bool = True

    def figure(self) -> DrawnFigure:
        """Return all panels in one figure, with title and note."""
        columns = min(self.columns, len(self.panels))
        rows = -(-len(self.panels) // columns)
        width, height = self.size[0] * columns, self.size[1] * rows + 0.6
        with rc_context({**STYLE, "axes.grid": self.grid}):
            drawn = DrawnFigure(figsize=(width, height))
            grid = drawn.subplots(rows, columns, squeeze=False)
            for axes, panel in zip(grid.flat, self.panels, strict=False):
                panel.draw(axes)
                axes.set_title(panel.title)
            for axes in list(grid.flat)[len(self.panels) :]:
                axes.set_visible(False)
            if self.legend:
                drawn.set_figheight(height + _add_legend(drawn))
            words = [fill(line, int(13 * width)) for line in (self.title, self.note) if line]
            drawn.suptitle("\n".join(words), fontsize=10)
        return drawn

    def save(self, path: Path) -> None:
        """Write the figure into a file, in the format that the name of the file ends in."""
        self.figure().savefig(path)

    def images(self) -> list[tuple[str, str]]:
        """Return each panel for a page: its description, and its SVG as an address."""
        return [self._image(panel) for panel in self.panels]

    def _image(self, panel: Panel) -> tuple[str, str]:
        with rc_context({**STYLE, "axes.grid": self.grid}), warnings.catch_warnings():
            # The reader's fonts have the letters that ours lack.
            warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
            drawn = DrawnFigure(figsize=self.size)
            axes = drawn.subplots()
            panel.draw(axes)
            if len(self.panels) > 1:
                axes.set_title(panel.title)
            if self.legend:
                drawn.set_figheight(self.size[1] + _add_legend(drawn))
            content = BytesIO()
            # Without a date equal figures are equal files.
            drawn.savefig(content, format="svg", transparent=True, metadata={"Date": None})
        description = ". ".join(each for each in (self.title, panel.title, self.note) if each)
        encoded = base64.b64encode(content.getvalue()).decode()
        return description, f"data:image/svg+xml;base64,{encoded}"


@contextmanager
def figure_file(
    path: Path, *shape: int, figsize: Any = None, lines: bool = True, **layout: Any
) -> Iterator[Any]:
    """Yield a figure and its axes to draw into, then write it; without `lines` there is no grid."""
    with rc_context({**STYLE, "axes.grid": lines}):
        figure = DrawnFigure(figsize=figsize)
        yield figure, figure.subplots(*shape, **layout)
    figure.savefig(path)


def _add_legend(figure: Figure) -> float:
    """Add a legend of all labels below the panels; return the inches that it needs."""
    labeled = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if not labeled:
        return 0.0
    longest, width = max(map(len, labeled)), figure.get_figwidth()
    columns = max(1, min(4, len(labeled), int(width / (0.45 + 0.085 * longest))))
    figure.legend(labeled.values(), labeled, loc="outside lower center", ncols=columns, fontsize=9)
    return 0.2 * -(-len(labeled) // columns)


# Axes


def mark_rounds(axes: Axes) -> None:
    """Mark only whole rounds."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def name_rows(axes: Axes, names: Sequence[str], counts: Sequence[int] = ()) -> None:
    """Name rows from the top down, with counts in parentheses; of many rows only some."""
    step = max(1, len(names) // 30)
    texts = [escape_math(name, 24) for name in names]
    if counts:
        texts = [f"{text}  ({count:,})" for text, count in zip(texts, counts, strict=True)]
    axes.set_yticks(range(0, len(names), step), texts[::step])
    axes.set_ylim(max(len(names), 2) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def name_columns(axes: Axes, names: Sequence[str], *, room: int = 40) -> None:
    """Name columns, slanted if the names are longer than the room; of many only some."""
    step = max(1, len(names) // 30)
    texts = [escape_math(name, 16) for name in names[::step]]
    turned: Any = {}
    if sum(map(len, texts)) > room:
        turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(0, len(names), step), texts, **turned)


def draw_matrix(
    axes: Axes,
    values: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    colors: Any,
    ink: tuple[str, str],
) -> None:
    """Draw percentages as colors, and as numbers unless there are too many; NaN stays empty.

    `ink` has the color of low and of high numbers.
    """
    cells = numpy.ma.masked_invalid(numpy.array(values, dtype=float))
    axes.imshow(cells, cmap=colors, vmin=0, vmax=100, aspect="auto", interpolation="none")
    name_columns(axes, columns)
    name_rows(axes, rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if cells.size > _MOST_NUMBERS:
        return
    for (row, column), value in numpy.ndenumerate(cells.filled(numpy.nan)):
        if numpy.isfinite(value):
            look: Any = {"color": ink[int(value > 55)], "fontsize": 8.5 if cells.size <= 200 else 6}
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", **look)


def escape_math(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return a name that matplotlib does not take for mathematics."""
    return printable_name(" ".join(name.split()), longest).replace("$", r"\$")


# The style of a method


@dataclass(frozen=True)
class MethodStyle:
    """Places in the palette, the markers and the dashes."""

    color: int
    marker: int
    dash: int

    def line(self) -> dict[str, Any]:
        """Return the style as matplotlib's arguments of a line."""
        return {**self.dot(), "linestyle": DASHES[self.dash]}

    def dot(self) -> dict[str, Any]:
        """Return the style as matplotlib's arguments of single points."""
        return {"color": PALETTE[self.color], "marker": MARKERS[self.marker]}


_FAMILIAR = ("fedgauss", "mp-fedcl", "fedavg", "fedproto", "sp-fedcl", "fedprox", "local")
"""Methods that most figures have: each has a color of its own."""


def style_of(method: str, copy: int = 0) -> MethodStyle:
    """Return the style of a method: a hash of its name decides, so that it never changes.

    `copy` counts the same method in a figure again, with other settings: its color stays.
    """
    name = method.lower()
    if name in _FAMILIAR:
        place = _FAMILIAR.index(name)
        found = MethodStyle(place, place, 0)
    else:
        digest = hashlib.sha256(name.encode("utf-8", "replace")).digest()
        number = int.from_bytes(digest[:8], "big")
        number, color = divmod(number, len(PALETTE))
        number, shift = divmod(number, len(MARKERS) - 1)
        # Neither the marker nor the solid line of the familiar method of this color.
        marker = (color + 1 + shift) % len(MARKERS)
        found = MethodStyle(color, marker, 1 + number % (len(DASHES) - 1))
    return MethodStyle(
        found.color, (found.marker + 3 * copy) % len(MARKERS), (found.dash + copy) % len(DASHES)
    )
