"""Figures for people who would rather look than read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from mpfedcl.report.method_styles import style_of
from mpfedcl.report.number_formatting import choose_evenly
from mpfedcl.report.tables import PREDICTOR_TITLES

# Color-blind safe (Okabe and Ito), dark enough on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
    # Journals refuse Type 3 fonts, which are matplotlib's own choice.
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}

_MOST_BANDS = 12
_MOST_CLIENTS = 200
"""Whose bubbles are drawn; more would be a gray wall."""

Curve = Sequence[tuple[int, float]]
"""(round, accuracy) pairs."""


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


_kept: ContextVar[list[DrawnFigure] | None] = ContextVar("kept", default=None)
"""Where figures go while `draw_for_python` asks for one."""


@contextmanager
def figure_file(
    path: Path, *shape: int, figsize: Any = None, lines: bool = True, **layout: Any
) -> Iterator[Any]:
    """Give a figure and its axes to draw into; then write it. Without `lines` axes have no grid."""
    with rc_context({**STYLE, "axes.grid": lines}):
        figure = DrawnFigure(figsize=figsize)
        yield figure, figure.subplots(*shape, **layout)
    kept = _kept.get()
    if kept is None:
        figure.savefig(path)
    else:
        kept.append(figure)


def draw_for_python(draw: Callable[[Path], object]) -> DrawnFigure | None:
    """Return the figure that a function would write to a path; None where it draws none.

    So every function that draws into a file also serves notebooks.
    """
    kept: list[DrawnFigure] = []
    before = _kept.set(kept)
    try:
        draw(Path("unwritten"))
    finally:
        _kept.reset(before)
    return kept[0] if kept else None


def draw_run_curves(records: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw one run's predictors per round, on the clients' local test sets: those of all these rounds."""
    curves = {
        label: [
            [
                (r["round"], r["accuracy"]["local_test"].get(predictor))
                for r in records
                if r["accuracy"]
            ]
        ]
        for predictor, label in PREDICTOR_TITLES.items()
    }
    known = {
        label: several
        for label, several in curves.items()
        if several[0] and all(value is not None for _, value in several[0])
    }
    if any(len(curve) > 1 for several in known.values() for curve in several):
        draw_curves(known, title, path)
    else:
        _draw_bars({label: several[0][0][1] for label, several in known.items()}, title, path)


def _draw_bars(values: Mapping[str, float | None], title: str, path: Path) -> None:
    """Draw accuracies of one round: there is nothing to connect."""
    labels = list(values)[::-1]
    numbers = [values[label] or 0.0 for label in labels]
    with figure_file(path, figsize=(7.2, 0.9 + 0.42 * max(3, len(labels)))) as (_, axes):
        bars = axes.barh(labels, numbers, color=COLORS[0], height=0.6)
        axes.bar_label(bars, fmt="%.1f", padding=4)
        axes.set(xlabel="accuracy (%)", title=title, xlim=(0, 108))
        axes.grid(visible=False, axis="y")


def draw_curves(
    curves: Mapping[str, Sequence[Curve]],
    title: str,
    path: Path,
    methods: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Draw accuracy per round; several curves of one label become their mean with a band.

    `methods` names the method behind a label, whose color it has. A curve of one point beside
    longer ones is of one exchange: a dashed line across. A point without a number, of a seed that
    diverged, is a cross at the foot of the figure.
    """
    longest = max((curve for several in curves.values() for curve in several), key=len, default=())
    # More bands than these hide each other.
    has_bands = len(curves) <= _MOST_BANDS
    band = "; band: \u00b1 1 standard deviation (ddof 1)" if has_bands else ""
    told = dict.fromkeys(
        f"line: mean of {len(several)} seeds{band}"
        for several in curves.values()
        if len(several) > 1
    )
    with figure_file(path, figsize=(7.2, 4.8)) as (figure, axes):
        for index, (label, several) in enumerate(curves.items()):
            rounds = [each[0] for each in several[0]]
            values = numpy.array([[each[1] for each in curve] for curve in several], dtype=float)
            style = {**_curve_style(index, methods.get(label)), "ms": 4}
            if len(rounds) == 1 < len(longest):
                rounds = [longest[0][0], longest[-1][0]]
                values = values.repeat(2, axis=1)
                style |= {"linestyle": "--"}
            lost = ~numpy.isfinite(values)
            mean, deviation = _mean_and_band(values)
            if lost.any():
                told[f"✗ on the axis: {label}, a seed has no number there"] = None
                places = numpy.array(rounds)[lost.any(axis=0)]
                axes.plot(
                    places, numpy.full(len(places), 1.5), "x", color=style["color"], ms=6, mew=1.8
                )
            axes.plot(rounds, mean, label=label, markevery=max(1, len(rounds) // 10), **style)
            if len(several) > 1 and has_bands:
                axes.fill_between(
                    rounds,
                    mean - deviation,
                    mean + deviation,
                    color=style["color"],
                    alpha=0.15,
                    lw=0,
                )
        axes.set(xlabel="\n".join(["round", *told]), ylabel="accuracy (%)", title=title)
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        if curves:
            # As large as two columns of the longest label fit the page.
            fitting = 6.9 / (0.16 + 0.0144 * max(map(len, curves)))
            size = min(10.0, max(5.0, fitting))
            figure.legend(loc="outside lower center", ncols=2, fontsize=size)
            # Many methods have a long legend, which must not take the curves' room.
            figure.set_figheight(4.8 + 0.024 * size * max(0, -(-len(curves) // 2) - 5))


def _curve_style(index: int, method: str | None) -> dict[str, Any]:
    if method is not None:
        return style_of(method).line()
    return {
        "color": COLORS[index % 7],
        "marker": MARKERS[index % 7],
        # There are more predictors than colors.
        "linestyle": "-" if index < len(COLORS) else ":",
    }


def _mean_and_band(values: NDArray[numpy.float64]) -> tuple[Any, Any]:
    """Return mean and deviation (ddof 1) of each column, over the seeds that have a number."""
    known = numpy.isfinite(values)
    count = known.sum(axis=0)
    with numpy.errstate(invalid="ignore", divide="ignore"):
        mean = numpy.where(known, values, 0).sum(axis=0) / count
        squares = numpy.where(known, (values - mean) ** 2, 0).sum(axis=0)
        deviation = numpy.where(count > 1, numpy.sqrt(squares / (count - 1)), 0.0)
    return mean, deviation


def draw_over_time(
    curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]], title: str, path: Path
) -> None:
    """Draw accuracy over virtual seconds: a line for each run, as their clocks differ."""
    with figure_file(path, figsize=(7.2, 4.8)) as (figure, axes):
        for label, several in curves.items():
            for number, curve in enumerate(several):
                axes.plot(
                    [seconds for seconds, _ in curve],
                    [accuracy for _, accuracy in curve],
                    label=label if number == 0 else None,
                    **{**style_of(label).line(), "ms": 4},
                    markevery=max(1, len(curve) // 10),
                )
        axes.set(xlabel="virtual seconds", ylabel="accuracy (%)", title=title, ylim=(0, 100))
        axes.set_xlim(left=0)
        figure.legend(loc="outside lower center", ncols=2)


def draw_partition(partition: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw who holds how many training images of each class, as bubbles; of many clients some."""
    names = list(partition["clients"])
    if len(names) > _MOST_CLIENTS:
        drawn = [names[place] for place in choose_evenly(len(names), _MOST_CLIENTS)]
        clients = {name: partition["clients"][name] for name in drawn}
        partition = {**partition, "clients": clients}
        title += f"\n{len(drawn):,} of {len(names):,} clients"
    height = min(12.0, 1.8 + 0.42 * len(partition["clients"]))
    width = min(12.0, 2.6 + 0.5 * len(partition["classes"]))
    with figure_file(path, figsize=(width, height)) as (_, axes):
        draw_partition_into(axes, partition, title)


def draw_partition_into(axes: Axes, partition: Mapping[str, Any], title: str) -> None:
    """Draw a partition into axes."""
    names = list(partition["clients"])
    classes = [escape_math(name) for name in partition["classes"]]
    counts = numpy.array([partition["clients"][name]["train"] for name in names])
    client, label = numpy.nonzero(counts)
    size = counts[client, label] / max(1, counts.max())
    # The area speaks, so that twice the images look like twice as much.
    biggest = 700 * min(1.0, 10 / max(10, len(names)), 12 / max(12, len(classes)))
    axes.scatter(label, client, s=biggest * size, color=COLORS[0], alpha=0.65, lw=0)
    if counts.size <= 120:
        for i, j in zip(client, label, strict=True):
            # A number that is wider than its bubble stands above it.
            above = 0 if counts[i, j] > 0.15 * counts.max() else 8
            axes.annotate(
                str(counts[i, j]),
                (j, i),
                xytext=(0, above),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=7,
                zorder=3,
            )
    axes.set(xlabel="class", ylabel="client", title=title)
    axes.set_xticks(range(len(classes)), classes, rotation=90 if len(str(classes)) > 90 else 0)
    step = max(1, len(names) // 30)
    totals = [
        f"{escape_math(name)}  ({row.sum():,})" for name, row in zip(names, counts, strict=True)
    ]
    axes.set_yticks(range(0, len(names), step), totals[::step])
    axes.set_xlim(-0.7, len(classes) - 0.3)
    axes.set_ylim(len(names) - 0.3, -0.7)


def draw_contact_sheet(
    images: Mapping[str, Sequence[NDArray[numpy.uint8] | None]],
    classes: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Draw an image of each class (columns) in each domain (rows): what feature skew looks like."""
    size = (0.9 * len(classes) + 1.2, 0.95 * len(images) + 0.7)
    with figure_file(path, len(images), len(classes), lines=False, figsize=size, squeeze=False) as (
        figure,
        axes,
    ):
        for row, (domain, examples) in zip(axes, images.items(), strict=True):
            for axis, image in zip(row, examples, strict=True):
                axis.set(xticks=[], yticks=[])
                axis.spines[:].set_visible(False)
                if image is not None:
                    axis.imshow(image)
            row[0].set_ylabel(escape_math(domain), rotation=0, ha="right", va="center")
        for axis, name in zip(axes[0], classes, strict=True):
            axis.set_title(escape_math(name).replace("_", "\n"), fontsize=8)
        figure.suptitle(title)


def escape_math(name: str) -> str:
    """Return a name that matplotlib does not take for mathematics, nor choke on."""
    return name.replace("$", r"\$").encode("utf-8", "replace").decode()
