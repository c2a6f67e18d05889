"""Figures of one run and of its data: curves, clients, classes, confusion, costs, prototypes."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from mpfedcl.core.json_files import Json
from mpfedcl.inference.contribution import ClientContribution
from mpfedcl.report.figures import (
    DASHES,
    INK,
    MARKERS,
    PALETTE,
    SOFT,
    Drawing,
    MethodStyle,
    Panel,
    escape_math,
    figure_file,
)
from mpfedcl.report.formatting import choose_evenly
from mpfedcl.report.tables import PREDICTOR_TITLES

TEST_TITLES = {"local_test": "local test sets", "global_test": "global test set"}
_AXES = {
    "round": "round",
    "megabytes": "megabytes sent, all clients",
    "virtual_seconds": "virtual seconds",
}
_MOST_BANDS = 12
_MOST_BARS = 40
"""Clients or classes with a bar each; the accuracies of more are a histogram."""
_MOST_NUMBERS = 625
"""Cells of a matrix up to which each has its number."""
_MOST_CLIENTS = 200
"""Clients whose data are drawn; more would be a gray wall."""
_MOST_VECTOR_POINTS = 300
"""Points of a map that are drawn as shapes; more are pixels, which keeps a page small."""
_BLUE = LinearSegmentedColormap.from_list("blue", [(0.0, 0.45, 0.7, 0.0), (0.0, 0.45, 0.7, 1.0)])
"""From transparent, so that it suits light and dark pages."""


# Lines


def draw_lines(
    axes: Axes,
    lines: Sequence[Json],
    *,
    x: str = "round",
    y: str = "accuracy (%)",
    percent: bool = True,
) -> None:
    """Draw lines {name, x, mean, std?, lost?, style?, level?} with bands over seeds.

    A level line has one point and is drawn across all x. `lost` counts the seeds without a value,
    which diverged: a cross at the foot of the axes.
    """
    reach = [place for line in lines if not line.get("level") for place in line["x"]] or [1]
    for number, line in enumerate(lines):
        style = _line_style(number, line.get("style"))
        places, values = line["x"], numpy.array(line["mean"], dtype=float)
        spread = numpy.array(line.get("std") or [], dtype=float)
        if line.get("level"):
            places = [min(reach), max(*reach, min(reach) + 1)]
            values, spread = values.repeat(2), spread.repeat(2)
        axes.plot(
            places,
            values,
            label=escape_math(line["name"], 60),
            ms=4.5,
            lw=1.6,
            markevery=max(1, len(places) // 8),
            **style,
        )
        if len(spread) and len(lines) <= _MOST_BANDS:
            low, high = values - spread, values + spread
            axes.fill_between(places, low, high, color=style["color"], alpha=0.15, lw=0)
        lost = [at for at, count in zip(places, line.get("lost", ()), strict=False) if count]
        if lost:
            foot = numpy.full(len(lost), 0.02)
            transform = axes.get_xaxis_transform()
            axes.plot(lost, foot, "x", color=INK, ms=6, mew=1.6, transform=transform)
    axes.set(xlabel=x, ylabel=y)
    if percent:
        axes.set_ylim(0, 100)
    elif lines:
        axes.set_ylim(bottom=0)
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    else:
        axes.set_xlim(left=0)


def _line_style(number: int, style: Json | None) -> dict[str, Any]:
    if style is not None:
        return MethodStyle(**style).line()
    return {
        "color": PALETTE[number % len(PALETTE)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number // len(PALETTE) % len(DASHES)],
    }


def accuracy_drawing(groups: Sequence[Json], axis: str = "round", title: str = "") -> Drawing:
    """Return accuracy per round, or over its costs: a line per method, or per predictor of one."""
    known = [group for group in groups if group["costs_by_round"].get(axis)]
    panels = [
        Panel(partial(draw_lines, lines=_accuracy_lines(known, test, axis), x=_AXES[axis]), heading)
        for test, heading in panel_tests(groups).items()
    ]
    notes = []
    if any("std" in curve for curve in _all_curves(known)):
        notes.append("Band: one standard deviation over seeds (ddof 1).")
    if any("lost" in curve for curve in _all_curves(known)):
        notes.append("✗: a seed diverged and has no value.")
    if len(groups) > 1:
        notes.insert(0, "Each method by its primary metric.")
    over = "per round" if axis == "round" else f"by {_AXES[axis]}"
    return Drawing(title or f"Accuracy {over}", " ".join(notes), panels, legend=True)


def loss_drawing(groups: Sequence[Json]) -> Drawing | None:
    """Return the training loss per round; None if no group trains."""
    lines = [
        {"name": group["name"], "style": group["style"] if len(groups) > 1 else None}
        | group["curves"]["loss"]
        for group in groups
        if group["curves"]["loss"]
    ]
    if not lines:
        return None
    panel = Panel(partial(draw_lines, lines=lines, y="training loss", percent=False))
    note = "Mean over the clients that trained. Methods have different losses."
    return Drawing("Training loss per round", note, [panel], legend=len(groups) > 1)


def panel_tests(groups: Sequence[Json]) -> dict[str, str]:
    """Return the test sets with their titles: one if all clients share it."""
    if all(group["shared_test"] for group in groups):
        return {"local_test": "test set of all clients"}
    return dict(TEST_TITLES)


def _all_curves(groups: Sequence[Json]) -> list[Json]:
    return [
        curve
        for group in groups
        for test, curves in group["curves"]["accuracy"].items()
        for predictor, curve in curves.items()
        if len(groups) == 1 or predictor == group["judged_by"][test]
    ]


def _accuracy_lines(groups: Sequence[Json], test: str, axis: str) -> list[Json]:
    lines = []
    for group in groups:
        curves = group["curves"]["accuracy"][test]
        primary = group["judged_by"][test]
        # A predictor that was evaluated only in the last round is in the table.
        drawn = [name for name in curves if len(curves[name]["x"]) > 1] or list(curves)
        for name in drawn if len(groups) == 1 else [primary]:
            if name not in curves:
                continue
            if len(groups) > 1:
                label = f"{group['name']} (one-shot)" if group["one_shot"] else group["name"]
            else:
                label = PREDICTOR_TITLES[name] + (" (primary)" if name == primary else "")
            costs = group["costs_by_round"]
            at = dict(zip(costs["round"], costs[axis], strict=True))
            curve = curves[name] | {"x": [at[each] for each in curves[name]["x"]]}
            level = {"level": True} if len(curve["x"]) == 1 and axis == "round" else {}
            style = {"style": group["style"]} if len(groups) > 1 else {}
            lines.append({"name": label} | curve | level | style)
    return lines


# Bars and matrices


def _draw_bars(axes: Axes, rows: Sequence[Json], middle: float | None) -> None:
    """Draw accuracies {name, accuracy, note} as bars, the lowest in another color."""
    if len(rows) > _MOST_BARS:
        values = [row["accuracy"] for row in rows if row["accuracy"] is not None]
        axes.hist(values, bins=20, range=(0, 100), color=PALETTE[0])
        axes.set(xlabel="accuracy (%)", ylabel="clients", xlim=(0, 100))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        known = [row["accuracy"] for row in rows if row["accuracy"] is not None]
        lowest = min(known) if len(set(known)) > 1 else None
        colors = [PALETTE[1 if row["accuracy"] == lowest else 0] for row in rows]
        places = range(len(rows))
        bars = axes.barh(places, [row["accuracy"] or 0 for row in rows], 0.7, color=colors)
        labels = ["-" if row["accuracy"] is None else f"{row['accuracy']:.1f}" for row in rows]
        axes.bar_label(bars, labels, padding=3, fontsize=8.5)
        axes.set_yticks(places, [escape_math(row["name"], 24) for row in rows])
        axes.set(xlabel="accuracy (%)", xlim=(0, 108), ylim=(len(rows) - 0.4, -0.6))
        axes.grid(visible=False, axis="y")
    if middle is not None:
        axes.axvline(middle, color=INK, lw=1.2, ls="--")


def clients_drawing(run: Json) -> Drawing | None:
    """Return the accuracy of each client on its local test set."""
    if not any(each["accuracy"] is not None for each in run["clients"]):
        return None
    middle = run["fairness"]["mean"] if run["fairness"] else None
    listed = f"{len(run['clients']):,} of {run['population']:,} clients. "
    note = (
        (listed if len(run["clients"]) < run["population"] else "")
        + f"Local test sets, predictor {PREDICTOR_TITLES[run['predictor']]}, round "
        f"{run['read_in']}. Dashed: mean."
    )
    panel = Panel(partial(_draw_bars, rows=run["clients"], middle=middle))
    return Drawing("Accuracy per client", note, [panel], (5.2, _bars_height(run["clients"])))


def classes_drawing(run: Json) -> Drawing | None:
    """Return the accuracy of each class over all local test sets."""
    rows = [each for each in run["confusion"].get("by_class", ()) if each["tested"]]
    if not rows or len(rows) > _MOST_BARS:
        return None
    panel = Panel(partial(_draw_bars, rows=rows, middle=None))
    note = "Local test sets of all clients together."
    return Drawing("Accuracy per class", note, [panel], (5.2, _bars_height(rows)))


def _bars_height(rows: Sequence[Any]) -> float:
    return 3.0 if len(rows) > _MOST_BARS else 0.9 + 0.24 * max(3, len(rows))


def confusion_drawing(found: Json) -> Drawing:
    """Return the confusion matrix of all clients, in % of each true class."""
    counts = numpy.array(found["all"], dtype=float)
    columns = list(found["classes"])
    if any(found["unanswered"]):
        counts = numpy.column_stack([counts, found["unanswered"]])
        columns.append("none")
    size = 1.6 + 0.36 * min(len(columns), 14)
    note = "In % of each true class, local test sets of all clients together."
    if any(found["unanswered"]):
        note += " none: no prototype gave an answer."
    panel = Panel(partial(_draw_confusion, counts=counts, rows=found["classes"], columns=columns))
    return Drawing(
        "Confusion matrix", note, [panel], (max(3.6, size), max(2.6, size - 0.5)), grid=False
    )


def _draw_confusion(
    axes: Axes, counts: NDArray[numpy.float64], rows: Sequence[str], columns: Sequence[str]
) -> None:
    shares = 100 * counts / numpy.maximum(1, counts.sum(axis=1, keepdims=True))
    axes.imshow(shares, cmap=_BLUE, vmin=0, vmax=100, interpolation="none", aspect="auto")
    if counts.size <= _MOST_NUMBERS:
        small = 8.5 if counts.size <= 200 else 6
        for (row, column), value in numpy.ndenumerate(shares):
            if counts[row, column]:
                color = "#fefefe" if value > 55 else INK
                axes.text(
                    column,
                    row,
                    f"{value:.0f}",
                    ha="center",
                    va="center",
                    fontsize=small,
                    color=color,
                )
    _label_cells(axes, columns, rows)
    axes.set(xlabel="predicted class", ylabel="true class")


def _label_cells(axes: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    for names, set_ticks, longest in (
        (columns, axes.set_xticks, 16),
        (rows, axes.set_yticks, 24),
    ):
        step = max(1, len(names) // 30)
        texts = [escape_math(name, longest) for name in names][::step]
        turned: dict[str, Any] = {}
        if names is columns and sum(map(len, texts)) > 36:
            turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        set_ticks(range(0, len(names), step), texts, **turned)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def costs_drawing(groups: Sequence[Json]) -> Drawing | None:
    """Return seconds by phase and traffic by direction of a whole run, as the mean over seeds."""
    if not any(group["seconds"] for group in groups):
        return None
    panels = [
        Panel(partial(_draw_costs, groups=groups, field="seconds", factor=1.0, x="seconds")),
        Panel(partial(_draw_costs, groups=groups, field="bytes", factor=1e-6, x="megabytes sent")),
    ]
    mean = ", mean over seeds" if any(len(group["runs"]) > 1 for group in groups) else ""
    note = (
        f"All rounds and clients of a run{mean}. Evaluation and checkpoints are not part of the "
        "method. up: to the server; down: to the clients."
    )
    height = 1.0 + 0.28 * max(3, len(groups))
    return Drawing("Time and traffic", note, panels, (5.2, height + 0.3), legend=True)


def _draw_costs(axes: Axes, groups: Sequence[Json], field: str, factor: float, x: str) -> None:
    parts = dict.fromkeys(part for group in groups for part in group[field] if group[field][part])
    left = numpy.zeros(len(groups))
    for number, part in enumerate(parts):
        values = numpy.array([factor * group[field].get(part, 0) for group in groups])
        color = PALETTE[number % len(PALETTE)]
        axes.barh(range(len(groups)), values, 0.62, left=left, color=color, label=part)
        left += values
    for place, total in enumerate(left):
        axes.annotate(
            f"{total:,.3g}" if total < 1000 else f"{total:,.0f}",
            (total, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(groups)), [escape_math(group["name"], 24) for group in groups])
    axes.set(xlabel=x, xlim=(0, 1.16 * max(left.max(initial=0), 1e-9)))
    axes.set_ylim(max(len(groups), 2) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def attendance_drawing(attendance: Json) -> Drawing | None:
    """Return how many clients answered in each round; None if all did, and none was rejected."""
    if not any([*attendance["missing"], *attendance["rejected"]]):
        return None
    names = {"answered": "accepted", "rejected": "rejected", "missing": "did not answer"}
    lines = [
        {"name": name, "x": attendance["rounds"], "mean": attendance[key]}
        for key, name in names.items()
    ]
    panel = Panel(partial(draw_lines, lines=lines, y="clients", percent=False))
    return Drawing("Answers per round", "", [panel], legend=True)


def client_curves_drawing(clients: Json) -> Drawing | None:
    """Return accuracy and loss of some clients per round, or quartiles over many."""
    titles = {"accuracy": "accuracy (%)", "loss": "training loss"}
    panels = [
        Panel(
            partial(draw_lines, lines=clients[key], y=y, percent=key == "accuracy"),
            {"accuracy": "local test sets", "loss": "training"}[key],
        )
        for key, y in titles.items()
        if clients.get(key)
    ]
    if not panels:
        return None
    total, note = len(clients["names"]) + clients["left_out"], ""
    if clients["left_out"]:
        note = f"{len(clients['names'])} of {total:,} clients, evenly drawn by name."
        note = note if clients["names"] else f"Quartiles over {total:,} clients."
    return Drawing("Accuracy and loss per client", note, panels, legend=True)


# The partition


def partition_drawing(partition: Json, title: str) -> Drawing:
    """Return the training samples of each client and class; of many clients some are shown."""
    names = list(partition["clients"])
    shown = [names[place] for place in choose_evenly(len(names), _MOST_CLIENTS)]
    held = {**partition, "clients": {name: partition["clients"][name] for name in shown}}
    note = "The area of a bubble is the number of training samples."
    left_out = partition.get("left_out", 0) + len(names) - len(shown)
    if left_out:
        note += f" {len(shown):,} of {len(shown) + left_out:,} clients, evenly drawn by name."
    width = min(9.0, max(5.2, 2.0 + 0.42 * len(partition["classes"])))
    size = (width, min(9.0, 1.5 + 0.3 * len(shown)))
    panel = Panel(partial(draw_partition_into, partition=held))
    return Drawing(title, note, [panel], size)


def draw_partition(partition: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw the training samples of each client and class into a file."""
    partition_drawing(dict(partition), title).save(path)


def draw_partition_into(axes: Axes, partition: Mapping[str, Any], title: str = "") -> None:
    """Draw a partition into axes as bubbles, so that twice the samples have twice the area."""
    names = list(partition["clients"])
    classes = [escape_math(name, 16) for name in partition["classes"]]
    counts = numpy.array([partition["clients"][name]["train"] for name in names])
    client, label = numpy.nonzero(counts)
    size = counts[client, label] / max(1, counts.max())
    biggest = 420 * min(1.0, 10 / max(10, len(names)), 12 / max(12, len(classes)))
    many = len(client) > _MOST_VECTOR_POINTS
    color = PALETTE[0]
    axes.scatter(label, client, s=biggest * size, color=color, alpha=0.6, lw=0, rasterized=many)
    if counts.size <= 120:
        for i, j in zip(client, label, strict=True):
            # A number that is wider than its bubble stands above it.
            above = 0 if counts[i, j] > 0.2 * counts.max() else 8
            axes.annotate(
                str(counts[i, j]), (j, i), xytext=(0, above), textcoords="offset points",
                ha="center", va="center", fontsize=7, zorder=3,
            )  # fmt: skip
    axes.set(xlabel="class", ylabel="client", title=title)
    turned: dict[str, Any] = {}
    if sum(map(len, classes)) > 50:
        turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    every = max(1, len(classes) // 40)
    axes.set_xticks(range(0, len(classes), every), classes[::every], **turned)
    step = max(1, len(names) // 30)
    totals = [
        f"{escape_math(name, 24)}  ({row.sum():,})" for name, row in zip(names, counts, strict=True)
    ]
    axes.set_yticks(range(0, len(names), step), totals[::step])
    axes.set_xlim(-0.7, len(classes) - 0.3)
    axes.set_ylim(len(names) - 0.3, -0.7)


# The prototype map


def map_drawing(found: Json) -> Drawing:
    """Return the prototypes and some test images in two principal components."""
    share = 100 * sum(found["shares"])
    samples = found["samples"]
    count = len(found["prototypes"]["x"])
    note = (
        f"Color: class; circle: one of {count:,} prototypes, its area the number of images it "
        f"stands for. Two principal components hold {share:.0f} % of the variance."
    )
    if samples:
        note += f" Crosses: {len(samples['x']):,} test images, embedded by {found['embedded_by']}."
    note = " ".join([note, *found["notes"]])
    panel = Panel(partial(_draw_map, found=found))
    return Drawing("Prototype map", note, [panel], (7.2, 4.6), grid=False)


def _draw_map(axes: Axes, found: Json) -> None:
    prototypes, samples = found["prototypes"], found["samples"]
    many = len(prototypes["x"]) + len(samples["x"] if samples else ()) > _MOST_VECTOR_POINTS
    most = max(prototypes["count"], default=1)
    colors = [PALETTE[label % len(PALETTE)] for label in prototypes["class"]]
    if samples:
        axes.scatter(
            samples["x"],
            samples["y"],
            s=14,
            marker="x",
            lw=0.9,
            alpha=0.6,
            color=[PALETTE[label % len(PALETTE)] for label in samples["class"]],
            rasterized=many,
        )
    axes.scatter(
        prototypes["x"],
        prototypes["y"],
        s=[20 + 160 * count / most for count in prototypes["count"]],
        color=colors,
        alpha=0.65,
        edgecolors="#ffffff",
        lw=0.7,
        rasterized=many,
    )
    for label, name in enumerate(found["classes"]):
        own = [place for place, each in enumerate(prototypes["class"]) if each == label]
        if not own:
            continue
        x, y = (float(numpy.median([prototypes[axis][place] for place in own])) for axis in "xy")
        axes.text(
            x, y, escape_math(name, 16), ha="center", va="center", fontsize=9, fontweight="bold",
            bbox={"facecolor": "#ffffff", "edgecolor": PALETTE[label % len(PALETTE)], "alpha": 0.85,
                  "boxstyle": "round,pad=0.25"},
        )  # fmt: skip
    first, second = (f"{100 * share:.0f} %" for share in found["shares"])
    axes.set(xlabel=f"first component ({first})", ylabel=f"second component ({second})")
    axes.set(xticks=[], yticks=[])


# Figures of other commands


def draw_contact_sheet(
    images: Mapping[str, Sequence[NDArray[numpy.uint8] | None]],
    classes: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Draw an image of each class (columns) in each domain (rows)."""
    size = (0.9 * len(classes) + 1.2, 0.95 * len(images) + 0.7)
    shape: Any = {"figsize": size, "squeeze": False, "lines": False}
    with figure_file(path, len(images), len(classes), **shape) as (figure, axes):
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


def draw_contributions(clients: Sequence[ClientContribution], title: str, path: Path) -> None:
    """Draw the points of accuracy that the other clients gain from each client."""
    shown, note = list(clients), ""
    if len(shown) > _MOST_BARS:
        half = _MOST_BARS // 2
        shown = [*shown[:half], *shown[-half:]]
        note = f"The first and last {half} of {len(clients)} clients."
    drawing = Drawing(
        title,
        note,
        [Panel(partial(_draw_contributions, clients=shown))],
        (7.2, 1.3 + 0.42 * len(shown)),
        legend=True,
    )
    drawing.save(path)


def _draw_contributions(axes: Axes, clients: Sequence[ClientContribution]) -> None:
    places = numpy.arange(len(clients))
    for shift, color, label, values in (
        (-0.2, PALETTE[0], "global test set", [each.global_test.difference for each in clients]),
        (0.2, PALETTE[1], "local test sets", [each.local_test.difference for each in clients]),
    ):
        bars = axes.barh(places + shift, values, height=0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%+.1f", padding=3, fontsize=8)
    axes.axvline(0, color=SOFT, lw=1)
    axes.set_yticks(places, [f"{escape_math(each.client)}  ({each.images:,})" for each in clients])
    axes.set_ylim(len(clients) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="points of accuracy that the other clients gain from the client")
