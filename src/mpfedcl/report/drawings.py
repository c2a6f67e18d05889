"""Figures of a run, of its data and of several methods.

They are drawn from the descriptions in `run` and `document`. A method has the same color and
marker in each figure.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from mpfedcl.core.json_files import Json
from mpfedcl.experiment.names import is_in_percent, metric_sign, metric_title
from mpfedcl.methods import Test
from mpfedcl.report.document import describe_heat, primary_by_seed
from mpfedcl.report.figures import (
    DASHES,
    INK,
    MARKERS,
    PALETTE,
    SOFT,
    Drawing,
    MethodStyle,
    Panel,
    draw_matrix,
    escape_math,
    mark_rounds,
    name_columns,
    name_rows,
)
from mpfedcl.report.run import RunRecords
from mpfedcl.report.wording import (
    PREDICTOR_TITLES,
    choose_evenly,
    known_values,
    percent,
    title_tests,
)
from mpfedcl.rounds.record import PHASES
from mpfedcl.studies.statistics import LEVEL, paired_difference

_AXES = {
    "round": "round",
    "megabytes": "megabytes sent, all clients",
    "virtual_seconds": "virtual seconds",
}
_MOST_BANDS = 12
_MOST_BARS = 40
"""Clients or classes with a bar each; the accuracies of more are a histogram."""
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
) -> None:
    """Draw lines {name, x, mean, std?, lost?, style?, level?} with bands over seeds.

    A level line has one point and is drawn across all x. `lost` counts the seeds without a value,
    which diverged: a cross at the foot of the axes.
    """
    reach = [place for line in lines if not line.get("level") for place in line["x"]] or [1]
    for number, line in enumerate(lines):
        look = line.get("style") or MethodStyle(
            number % len(PALETTE),
            number % len(MARKERS),
            number // len(PALETTE) % len(DASHES),
        )
        style = look.line()
        places, values = line["x"], numpy.array(line["mean"], dtype=float)
        spread = numpy.array(line.get("std") or [], dtype=float)
        if line.get("level"):
            places = [min(reach), max(*reach, min(reach) + 1)]
            values, spread = values.repeat(2), spread.repeat(2)
        label, every = escape_math(line["name"], 60), max(1, len(places) // 8)
        axes.plot(places, values, label=label, ms=4.5, lw=1.6, markevery=every, **style)
        if len(spread) and len(lines) <= _MOST_BANDS:
            low, high = values - spread, values + spread
            axes.fill_between(places, low, high, color=style["color"], alpha=0.15, lw=0)
        lost = [at for at, count in zip(places, line.get("lost", ()), strict=False) if count]
        if lost:
            cross: Any = {"color": INK, "ms": 6, "mew": 1.6}
            foot = numpy.full(len(lost), 0.02)
            axes.plot(lost, foot, "x", transform=axes.get_xaxis_transform(), **cross)
    axes.set(xlabel=x, ylabel=y)
    if "%" in y:
        axes.set_ylim(0, 100)
    elif lines and all(min(line["mean"]) >= 0 for line in lines):
        axes.set_ylim(bottom=0)
    if x == "round":
        mark_rounds(axes)
    else:
        axes.set_xlim(left=0)


def metric_drawing(
    groups: Sequence[Json], axis: str = "round", title: str = "", metric: str | None = None
) -> Drawing:
    """Return a metric per round, or over its costs: a line per method, or per predictor of one.

    By default the primary metric; accuracy if the groups have several. Only accuracy is recorded
    of all predictors.
    """
    primary = {group["metric"] for group in groups}
    metric = metric or (primary.pop() if len(primary) == 1 else "accuracy")
    known = [group for group in groups if axis == "round" or group["curves"][axis]]
    by_test = {test: _metric_lines(known, test, axis, metric) for test in title_tests(groups)}
    y = "accuracy (%)" if metric == "accuracy" else escape_math(metric_title(metric))
    panels = [
        Panel(partial(draw_lines, lines=by_test[test], x=_AXES[axis], y=y), heading)
        for test, heading in title_tests(groups).items()
    ]
    names = {key for lines in by_test.values() for line in lines for key in line}
    notes = ["Each method by its primary predictor."] if len(groups) > 1 else []
    if "std" in names:
        notes.append("Band: one standard deviation over seeds (ddof 1).")
    if "lost" in names:
        notes.append("✗: a seed diverged and has no value.")
    over = "per round" if axis == "round" else f"by {_AXES[axis]}"
    measured = metric_title(metric).removesuffix(" in %")
    measured = measured[:1].upper() + measured[1:]
    return Drawing(title or f"{measured} {over}", " ".join(notes), panels, legend=True)


def _metric_lines(groups: Sequence[Json], test: str, axis: str, metric: str) -> list[Json]:
    lines = []
    for group in groups:
        curves, primary = group["curves"]["accuracy"][test], group["judged_by"][test]
        if metric != "accuracy":
            curve = group["curves"]["metric"][test]
            curves = {primary: curve} if curve else {}
        # A predictor that was evaluated only in the last round is in the table.
        drawn = [name for name in curves if len(curves[name]["x"]) > 1] or list(curves)
        if len(groups) > 1:
            drawn = [name for name in curves if name == primary]
        for name in drawn:
            line = dict(curves[name])
            if cost := group["curves"].get(axis):
                line["x"] = numpy.interp(line["x"], cost["x"], cost["mean"]).tolist()
            if len(groups) > 1:
                line["name"] = f"{group['name']} (one-shot)" if group["one_shot"] else group["name"]
                line["style"] = group["style"]
            else:
                line["name"] = PREDICTOR_TITLES[name] + (" (primary)" if name == primary else "")
            line["level"] = len(line["x"]) == 1 and axis == "round"
            lines.append(line)
    return lines


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
    panel = Panel(partial(draw_lines, lines=lines, y="training loss"))
    note = "Mean over the clients that trained. Methods have different losses."
    return Drawing("Training loss per round", note, [panel], legend=len(groups) > 1)


# Bars and matrices


def clients_drawing(run: Json) -> Drawing | None:
    """Return the accuracy of each client on its local test set."""
    rows = run["clients"]
    if not any(each["accuracy"] is not None for each in rows):
        return None
    middle = run["fairness"]["mean"] if run["fairness"] else None
    predictor = PREDICTOR_TITLES[run["predictor"]]
    note = f"Local test sets, predictor {predictor}, round {run['read_in']}. Dashed: mean."
    if len(rows) < run["population"]:
        note = f"{len(rows):,} of {run['population']:,} clients. {note}"
    height = 3.0 if len(rows) > _MOST_BARS else 0.9 + 0.24 * max(3, len(rows))
    panel = Panel(partial(_draw_bars, rows=rows, middle=middle))
    return Drawing("Accuracy per client", note, [panel], (5.2, height))


def _draw_bars(axes: Axes, rows: Sequence[Json], middle: float | None) -> None:
    """Draw accuracies {name, accuracy} as bars, the lowest in another color; many as histogram."""
    values = [row["accuracy"] for row in rows]
    known = known_values(values)
    if len(rows) > _MOST_BARS:
        axes.hist(known, bins=20, range=(0, 100), color=PALETTE[0])
        axes.set(xlabel="accuracy (%)", ylabel="clients", xlim=(0, 100))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        lowest = min(known) if len(set(known)) > 1 else None
        colors = [PALETTE[1 if value is not None and value == lowest else 0] for value in values]
        bars = axes.barh(range(len(rows)), [value or 0 for value in values], 0.7, color=colors)
        axes.bar_label(bars, list(map(percent, values)), padding=3, fontsize=8.5)
        name_rows(axes, [row["name"] for row in rows])
        axes.set(xlabel="accuracy (%)", xlim=(0, 108))
    if middle is not None:
        axes.axvline(middle, color=INK, lw=1.2, ls="--")


def confusion_drawing(found: Json) -> Drawing:
    """Return the confusion matrix of all clients, in % of each true class."""
    counts, columns = numpy.array(found["all"], dtype=float), list(found["classes"])
    note = "In % of each true class, local test sets of all clients together."
    if any(found["unanswered"]):
        counts = numpy.column_stack([counts, found["unanswered"]])
        columns.append("none")
        note += " none: no prototype gave an answer."
    shares = 100 * counts / numpy.maximum(1, counts.sum(axis=1, keepdims=True))
    shares[counts == 0] = numpy.nan

    def draw(axes: Axes) -> None:
        draw_matrix(axes, shares, found["classes"], columns, colors=_BLUE, ink=(INK, "#fefefe"))
        axes.set(xlabel="predicted class", ylabel="true class")

    side = 1.6 + 0.36 * min(len(columns), 14)
    size = (max(3.6, side), max(2.6, side - 0.5))
    return Drawing("Confusion matrix", note, [Panel(draw)], size, grid=False)


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
    size = (5.2, 1.3 + 0.28 * max(3, len(groups)))
    return Drawing("Time and traffic", note, panels, size, legend=True)


def _draw_costs(axes: Axes, groups: Sequence[Json], field: str, factor: float, x: str) -> None:
    parts = dict.fromkeys(part for group in groups for part in group[field] if group[field][part])
    # Both panels have one legend in a file, so each part has a color of its own.
    order = list(dict.fromkeys([*PHASES, "up", "down", *parts]))
    left = numpy.zeros(len(groups))
    for part in parts:
        values = numpy.array([factor * group[field].get(part, 0) for group in groups])
        color = PALETTE[order.index(part) % len(PALETTE)]
        axes.barh(range(len(groups)), values, 0.62, left=left, color=color, label=part)
        left += values
    look: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
    for place, total in enumerate(left):
        text = f"{total:,.3g}" if total < 1000 else f"{total:,.0f}"
        axes.annotate(text, (total, place), **look)
    name_rows(axes, [group["name"] for group in groups])
    axes.set(xlabel=x, xlim=(0, 1.16 * max(left.max(initial=0), 1e-9)))


# The partition


def partition_drawing(partition: Mapping[str, Any], title: str) -> Drawing:
    """Return the training samples of each client and class; of many clients some are shown."""
    names, classes = list(partition["clients"]), partition["classes"]
    shown = [names[place] for place in choose_evenly(len(names), _MOST_CLIENTS)]
    counts = {name: numpy.array(partition["clients"][name]["train"]) for name in shown}
    note = "The area of a bubble is the number of training samples."
    if len(shown) < len(names):
        note += f" {len(shown):,} of {len(names):,} clients, evenly drawn by name."
    width = min(9.0, max(5.2, 2.0 + 0.42 * len(classes)))
    panel = Panel(partial(_draw_partition, clients=counts, classes=classes))
    return Drawing(title, note, [panel], (width, min(9.0, 1.5 + 0.3 * len(shown))))


def run_partition_drawing(run: RunRecords) -> Drawing | None:
    """Return the partition of a run; None if it is unknown, or not shown under a budget."""
    if run.partition is None or run.privacy is not None:
        return None
    return partition_drawing(run.partition.to_json(), f"Partition: {', '.join(run.data)}")


def draw_partition(partition: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw the training samples of each client and class into a file."""
    partition_drawing(partition, title).save(path)


def _draw_partition(
    axes: Axes, clients: Mapping[str, NDArray[numpy.int64]], classes: Sequence[str]
) -> None:
    """Draw bubbles of which twice the samples have twice the area."""
    counts = numpy.array(list(clients.values()))
    client, label = numpy.nonzero(counts)
    biggest = 420 * min(1.0, 10 / max(10, len(clients)), 12 / max(12, len(classes)))
    sizes = biggest * counts[client, label] / max(1, counts.max())
    many = len(client) > _MOST_VECTOR_POINTS
    axes.scatter(label, client, s=sizes, color=PALETTE[0], alpha=0.6, lw=0, rasterized=many)
    if counts.size <= 120:
        look: Any = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 7}
        for i, j in zip(client, label, strict=True):
            # A number that is wider than its bubble stands above it.
            above = 0 if counts[i, j] > 0.2 * counts.max() else 8
            axes.annotate(str(counts[i, j]), (j, i), xytext=(0, above), zorder=3, **look)
    axes.set(xlabel="class", ylabel="client", xlim=(-0.7, len(classes) - 0.3))
    name_columns(axes, classes, room=50)
    name_rows(axes, list(clients), counts.sum(axis=1).tolist())
    axes.set_ylim(len(clients) - 0.3, -0.7)
    axes.grid(visible=True, axis="y")


# The prototype map


def map_drawing(found: Json) -> Drawing:
    """Return the prototypes in two principal components."""
    share, shown, total = 100 * sum(found["shares"]), len(found["x"]), found["total"]
    note = (
        f"Color: class; circle: one of {shown:,} prototypes, its area the number of samples it "
        f"stands for. Two principal components hold {share:.0f} % of the variance."
    )
    if shown < total:
        note += f" {shown:,} of {total:,} prototypes are shown, evenly drawn."
    panel = Panel(partial(_draw_map, found=found))
    return Drawing("Prototype map", note, [panel], (7.2, 4.6), grid=False)


def _draw_map(axes: Axes, found: Json) -> None:
    labels, most = found["class"], max(found["count"])
    axes.scatter(
        found["x"],
        found["y"],
        s=[20 + 160 * count / most for count in found["count"]],
        color=[PALETTE[label % len(PALETTE)] for label in labels],
        edgecolors="#ffffff",
        lw=0.7,
        alpha=0.65,
        rasterized=len(labels) > _MOST_VECTOR_POINTS,
    )
    for label, name in enumerate(found["classes"]):
        own = [place for place, each in enumerate(labels) if each == label]
        if not own:
            continue
        x, y = (float(numpy.median([found[axis][place] for place in own])) for axis in "xy")
        box: Any = {"facecolor": "#ffffff", "alpha": 0.85, "boxstyle": "round,pad=0.25"}
        box["edgecolor"] = PALETTE[label % len(PALETTE)]
        look: Any = {"ha": "center", "va": "center", "fontsize": 9, "fontweight": "bold"}
        axes.text(x, y, escape_math(name, 16), bbox=box, **look)
    first, second = (f"{100 * share:.0f} %" for share in found["shares"])
    axes.set(xlabel=f"first component ({first})", ylabel=f"second component ({second})")
    axes.set(xticks=[], yticks=[])


# Figures of other commands


# Several groups


def comparison_drawings(groups: Sequence[Json], *, is_ranked: bool) -> dict[str, Drawing]:
    """Return the figures of several groups by name; without a ranking there are no differences."""
    found = {
        "accuracy": metric_drawing(groups),
        "differences": differences_drawing(groups) if is_ranked else None,
        "clients": client_heat_drawing(groups),
        "costs": costs_drawing(groups),
    }
    if any(group["curves"]["virtual_seconds"] for group in groups):
        found["accuracy-over-time"] = metric_drawing(groups, "virtual_seconds")
    return {name: drawing for name, drawing in found.items() if drawing}


def _panel_per_test(draw: Callable[..., None], groups: Sequence[Json]) -> list[Panel]:
    return [
        Panel(partial(draw, groups=groups, test=test), title)
        for test, title in title_tests(groups).items()
    ]


def differences_drawing(groups: Sequence[Json]) -> Drawing | None:
    """Return the differences to the first group, paired by seed, with intervals."""
    if len(groups) < 2:
        return None
    panels = _panel_per_test(_draw_differences, groups)
    bar = (
        f"bar: {100 * LEVEL:g} % interval of the mean (Student's t, paired by seed)"
        if len(groups[0]["seeds"]) > 1
        else "one seed has no interval"
    )
    measured = metric_title(groups[0]["metric"]).removesuffix(" in %")
    title = f"Difference in {measured} to {groups[0]['name']}"
    size = (5.2, 1.1 + 0.34 * max(2, len(groups) - 1))
    return Drawing(title, f"Dot: one seed; marker: mean; {bar}.", panels, size)


def _draw_differences(axes: Axes, groups: Sequence[Json], test: Test) -> None:
    reference, *others = primary_by_seed(groups, test).items()
    axes.axvline(0, color=SOFT, lw=1)
    for row, (group, (_, values)) in enumerate(zip(groups[1:], others, strict=True)):
        style = group["style"].dot()
        if (found := paired_difference(values, reference[1])) is None:
            axes.plot(0, row, "x", color=INK, ms=7, mew=1.8)
            continue
        if found.low is not None:
            ends: Any = [found.low, found.high]
            axes.plot(ends, [row, row], color=style["color"], lw=2.4, marker="|", ms=8, mew=2)
        for one, other in zip(values, reference[1], strict=True):
            if one is not None and other is not None:
                axes.plot(one - other, row + 0.24, ".", ms=5, color=style["color"])
        axes.plot(found.mean, row, ls="", ms=7, mec="#ffffff", **style)
    name_rows(axes, [name for name, _ in others])
    measured = escape_math(metric_title(groups[0]["metric"]).removesuffix(" in %"), 24)
    unit = "points of " if is_in_percent(groups[0]["metric"]) else ""
    side = "above" if metric_sign(groups[0]["metric"]) > 0 else "below"
    axes.set(xlabel=f"{unit}{measured} {side} {escape_math(reference[0], 24)}")


def client_heat_drawing(groups: Sequence[Json]) -> Drawing | None:
    """Return the accuracy per client, a row per method, the worst on the left."""
    found = describe_heat(groups)
    if found is None:
        return None
    names, columns = [group["name"] for group in groups], found["columns"]
    look: Any = {"colors": "cividis", "ink": ("#fefefe", "#10181f")}
    draw = partial(draw_matrix, values=found["values"], rows=names, columns=columns, **look)
    size = (max(5.2, 2.2 + 0.36 * len(columns)), 1.5 + 0.3 * len(groups))
    note = "In %, local test sets; the worst by the mean over methods and seeds on the left."
    return Drawing("Accuracy per client", note, [Panel(draw)], size, grid=False)
