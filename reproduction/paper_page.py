"""Tables and figures of the paper from results: docs/reproduction.md and docs/images/paper."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from sklearn.manifold import TSNE

from mpfedcl import Predictor, cluster_prototypes
from reproduction.items import METHODS, TRACKS, Item, data_file
from reproduction.runs import Runs
from reproduction.tables import (
    BEST,
    COLORS,
    DOCS,
    MARKERS,
    WITHIN,
    explain_marks,
    figure_file,
    fill_page,
    markdown,
    mean_std,
)

Json = dict[str, Any]
AS_IN_PAPER = (
    "Predicted as in the paper, on every test: the FedCL family and FedProto with each client's\n"
    "personal model and the nearest prototype."
)
QUICK = "Quick: a few rounds and one seed show that everything runs; the values mean nothing."
BARS = "(bars: ± 1 standard deviation over seeds, ddof 0)"
FOLDED = ("rounds", "reach", "alpha", "clients", "k")
"""Items with many tables, which the page shows collapsed."""
CLASS_COLORS = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
CLIENTS_SHOWN, IMAGES_SHOWN = 2, 600


# Tables


def build_tables(result: Json) -> list[tuple[str, str]]:
    """Return title and Markdown of an item's tables, the published values next to ours."""
    groups: dict[tuple[str, str, str], list[Json]] = {}
    for cell in result["cells"]:
        groups.setdefault((cell["track"], cell["panel"], cell["test"]), []).append(cell)
    several = len({track for track, _, _ in groups}) > 1
    found = []
    for (track, panel, test), cells in groups.items():
        parts = [result["title"], panel, test, TRACKS[track] if several else ""]
        title = ", ".join(part for part in parts if part)
        found.append((title, _table(result, cells, format_cell)))
        known = [cell for cell in cells if cell["published"]]
        if known and not result["quick"]:
            title = f"{title}: the paper's, and ours less the paper's"
            found.append((title, _table(result, known, format_published)))
    return [*found, _chosen_table(result)] if result["chosen"] else found


def _table(result: Json, cells: list[Json], write: Callable[[Json | None], str]) -> str:
    by_place = {(cell["row"], cell["column"]): cell for cell in cells}
    rows = [r for r in result["rows"] if any(key == r["key"] for key, _ in by_place)]
    columns = [c for c in result["columns"] if any(key == c["key"] for _, key in by_place)]
    if result["axis"]:
        # Many values, few methods: the long side goes down the page.
        rows, columns = columns, rows
        by_place = {(column, row): cell for (row, column), cell in by_place.items()}
    return markdown(
        [result["axis"], *(column["title"] for column in columns)],
        [[r["title"], *(write(by_place.get((r["key"], c["key"]))) for c in columns)] for r in rows],
    )


def _chosen_table(result: Json) -> tuple[str, str]:
    titles = {row["key"]: row["title"] for row in result["rows"]}

    def score(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    def said(changes: Mapping[str, Any]) -> str:
        parts = [f"{name.rpartition('__')[2]} {value}" for name, value in changes.items()]
        return ", ".join(parts) or "the paper's"

    rows = [
        [
            titles[each["row"]],
            each["set"],
            said(each["changes"]),
            *(score(each[name]) for name in ("score", "standard_error", "default_score")),
        ]
        for each in sorted(result["chosen"], key=lambda each: list(titles).index(each["row"]))
    ]
    title = f"{result['title']}: settings chosen on validation data, and accuracy there"
    return title, markdown(["", "set", "chosen", "score", "± error", "paper's settings"], rows)


def format_cell(cell: Json | None) -> str:
    """Return a cell's mean(std) with its mark; a dash where a seed has no value."""
    if cell is None or None in cell["values"]:
        return "-"
    if cell["unit"] == "numbers":
        return f"{fmean(cell['values']):,.0f}"
    return {"best": BEST, "within": WITHIN, None: ""}[cell["mark"]] + mean_std(
        cell["values"], ddof=0
    )


def format_published(cell: Json | None) -> str:
    """Return the published value and how much ours is above it."""
    if cell is None:
        return "-"
    paper, is_exact = cell["published"], cell["unit"] == "numbers"
    said = f"{paper['mean']:,.0f}" if is_exact else f"{paper['mean']:.1f}"
    said += "" if paper["std"] is None else f"({paper['std']:.1f})"
    if None in cell["values"]:
        return said
    difference = fmean(cell["values"]) - paper["mean"]
    return said + (f"  {difference:+,.0f}" if is_exact else f"  {difference:+.1f}")


def format_item(name: str, docs: Path) -> str:
    """Return an item's part of the page."""
    path = docs / "results" / f"{name}.json"
    if not path.is_file():
        return "Not run yet.\n"
    result: Json = json.loads(path.read_text(encoding="utf-8"))
    parts = [f"{result['about']}\n", f"    {result['command']}\n"]
    if result["seconds"] > 60:
        parts.append(f"Its runs add up to {result['seconds'] / 60:.0f} minutes, some shared.\n")
    shown = ("partitions-label", "partitions-feature") if name == "partitions" else (name,)
    parts += [
        f"![{result['title']}](images/paper/{each}.png)\n"
        for each in shown
        if (docs / "images" / "paper" / f"{each}.png").is_file()
    ]
    tables = [f"**{title}**\n\n{table}" for title, table in build_tables(result)]
    if name in FOLDED:
        tables = ["<details><summary>the values</summary>\n", *tables, "</details>\n"]
    parts += tables
    notes = [QUICK] if result["quick"] else []
    if any(cell["mark"] for cell in result["cells"]):
        notes.append(explain_marks(len(result["seeds"])))
    read = {(cell["unit"], cell["predictor"]) for cell in result["cells"]}
    notes += [AS_IN_PAPER] if ("%", "personal_prototype") in read else []
    parts += [f"{note}\n" for note in [*notes, *result["notes"]]]
    if result["verdicts"] and name not in FOLDED:
        parts.append("What the seeds say (differences in points):\n")
        parts.append("\n".join(f"- {sentence}" for sentence in result["verdicts"]) + "\n")
    return "\n".join(parts)


def write_page(docs: Path, names: Sequence[str]) -> None:
    """Fill the page of the docs, or write a page of its own for a quick run."""
    parts = {name: format_item(name, docs) for name in names}
    page = docs / "reproduction.md"
    if docs != DOCS:
        page.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in names))
    fill_page(page, parts)


# Figures


def draw_item(name: str, item: Item, result: Json, folder: Path, runs: Runs, seed: int) -> None:
    """Draw the figures of an item."""
    if result["figures"]:
        _draw_lines(result["figures"], item.title, folder / f"{name}.png")
    if item.compares_tests:
        _draw_both_tests(result, folder / f"{name}.png")
    for picture, experiments in (item.pictures or {}).items():
        ran = {title: runs.prepare(each.replace(seed=seed)) for title, each in experiments.items()}
        paths = {title: runs.path(each) for title, each in ran.items()}
        if picture == "embeddings":
            _draw_embeddings(paths, folder / f"{picture}.png")
        else:
            title = f"{picture.rpartition('-')[2]} skew, seed {seed}"
            _draw_partitions(paths, title, folder / f"{picture}.png")


def _look(names: Sequence[str], name: str) -> dict[str, Any]:
    """Return the color and marker of a method, the same in every figure, or of a set."""
    order = [*METHODS.values()] if name in METHODS.values() else names
    place = list(order).index(name)
    return {"color": COLORS[place % 7], "marker": MARKERS[place % 7]}


def _legend(figure: Any, names: Sequence[str]) -> None:
    handles = [Line2D([], [], **_look(names, name), ms=4, label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(7, len(names)))


def _draw_lines(figures: Sequence[Json], title: str, path: Path) -> None:
    """Draw lines side by side, with bars for the deviation over seeds."""
    # Two per row, but three stand in one: no hole is left.
    columns = 3 if len(figures) == 3 else min(2, len(figures))
    rows = -(-len(figures) // columns)
    names = list(dict.fromkeys(line["name"] for figure in figures for line in figure["lines"]))
    size = (5.2 * columns, 3.4 * rows + 0.8)
    with figure_file(path, rows, columns, figsize=size, squeeze=False) as (page, grid):
        for axes, figure in zip(grid.flat, figures, strict=False):
            for line in figure["lines"]:
                every = max(1, len(line["x"]) // 12)
                axes.errorbar(
                    line["x"],
                    line["mean"],
                    yerr=line["std"],
                    **_look(names, line["name"]),
                    markersize=4,
                    markevery=every,
                    errorevery=every,
                    elinewidth=0.8,
                    capsize=2,
                )
            axes.set(title=figure["title"], xlabel=figure["x"], ylabel=figure["y"])
            axes.set_ylim(bottom=0)
            if figure["lines"] and len(ticks := figure["lines"][0]["x"]) <= 10:
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        for axes in list(grid.flat)[len(figures) :]:
            axes.set_visible(False)
        page.suptitle(f"{title}\n{BARS}")
        _legend(page, names)


def _draw_both_tests(result: Json, path: Path) -> None:
    """Draw local against global test set: a panel per column, a row per track."""
    titles = {row["key"]: row["title"] for row in result["rows"]}
    tracks = list(dict.fromkeys(cell["track"] for cell in result["cells"]))
    columns = [column["key"] for column in result["columns"]]
    by_test = {(c["test"], c["track"], c["row"], c["column"]): c["values"] for c in result["cells"]}
    size = (2.9 * len(columns), 3.0 * len(tracks) + 0.9)
    with figure_file(path, len(tracks), len(columns), figsize=size, squeeze=False) as (page, grid):
        for (test, track, row, column), local in by_test.items():
            overall = by_test["global test set", track, row, column]
            if test == "local test set" and None not in local:
                grid[tracks.index(track)][columns.index(column)].errorbar(
                    fmean(local),
                    fmean(overall),
                    xerr=pstdev(local),
                    yerr=pstdev(overall),
                    **_look([], titles[row]),
                    markersize=7,
                    elinewidth=0.9,
                )
        for row, track in zip(grid, tracks, strict=True):
            for axes, column in zip(row, result["columns"], strict=True):
                axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal", xlabel="local test set, %")
                axes.set_title(f"{column['title']}, {track}")
                axes.plot([0, 100], [0, 100], color="#bbbbbb", lw=0.8, zorder=0)
            row[0].set_ylabel("global test set, %")
        said = "right is better for a client, up is better for all"
        page.suptitle(f"{result['title']}: {said}\n{BARS}")
        _legend(page, list(titles.values()))


def _draw_partitions(paths: Mapping[str, Path], title: str, path: Path) -> None:
    """Draw the training images of each client and class: a dot's area is their number."""
    columns = min(2, len(paths))
    rows = -(-len(paths) // columns)
    size = (6.4 * columns, 3.4 * rows)
    with figure_file(path, rows, columns, figsize=size, squeeze=False) as (page, grid):
        for axes, (name, run) in zip(grid.flat, paths.items(), strict=False):
            content = json.loads((run / "partition.json").read_text())
            held = numpy.array([each["train"] for each in content["clients"].values()])
            clients, classes = held.nonzero()
            counts = held[clients, classes]
            axes.scatter(classes, clients, s=350 * counts / held.max(), color=COLORS[0], alpha=0.6)
            for client, label, count in zip(clients, classes, counts, strict=True):
                axes.text(label, client, str(count), ha="center", va="center", fontsize=7)
            axes.set(title=name, xticks=range(len(content["classes"])))
            axes.set_xticklabels(content["classes"], rotation=45, ha="right")
            axes.set_yticks(range(len(held)), list(content["clients"]))
            axes.margins(y=0.2)
        for axes in list(grid.flat)[len(paths) :]:
            axes.set_visible(False)
        page.suptitle(f"{title}: training images")


def _draw_embeddings(paths: Mapping[str, Path], path: Path) -> None:
    """Draw a panel per method (columns) and client (rows); colors are classes."""
    with numpy.load(data_file("mnist", "mnist")) as digits:
        step = max(1, len(digits["y_test"]) // IMAGES_SHOWN)
        images, labels = digits["x_test"][::step], digits["y_test"][::step].astype("int64")
    size = (3.6 * len(paths), 3.5 * CLIENTS_SHOWN + 0.8)
    shape = CLIENTS_SHOWN, len(paths)
    with figure_file(path, *shape, grid=False, figsize=size, squeeze=False) as (page, grid):
        for column, (title, run) in enumerate(paths.items()):
            clients = list(json.loads((run / "partition.json").read_text())["clients"])
            for row, client in enumerate(clients[:CLIENTS_SHOWN]):
                embeddings = Predictor.load(run, client).embed(images)
                _draw_map(grid[row][column], embeddings, labels)
                grid[row][column].set_title(f"{title}, {client}", fontsize=10)
        page.suptitle("Embeddings of two clients")
        handles = [
            Line2D([], [], ls="", marker="o", ms=6, color=CLASS_COLORS[k], label=str(k))
            for k in range(10)
        ]
        cross = Line2D([], [], ls="", marker="X", ms=9, color="#444444", label="prototype")
        page.legend(handles=[*handles, cross], loc="outside lower center", ncols=11)


def _draw_map(axes: Axes, embeddings: Any, labels: Any) -> None:
    import torch

    found = cluster_prototypes(
        embeddings, torch.from_numpy(labels), num_classes=10, num_prototypes=2, seed=0
    )
    together = torch.cat([embeddings, found.vectors]).double().numpy()
    # Barnes-Hut t-SNE from a fixed start: the same picture every time.
    plane = TSNE(init="pca", random_state=0).fit_transform(together)
    count = len(labels)
    colors = [CLASS_COLORS[label] for label in labels]
    axes.scatter(plane[:count, 0], plane[:count, 1], s=7, c=colors, alpha=0.6, lw=0)
    colors = [CLASS_COLORS[label] for label in found.labels.tolist()]
    look = {"s": 110, "marker": "X", "edgecolors": "black", "lw": 0.9, "zorder": 3}
    axes.scatter(plane[count:, 0], plane[count:, 1], c=colors, **look)  # type: ignore[arg-type]
    axes.set(xticks=[], yticks=[])
