"""Figures of the paper's tables: lines over an axis, partitions side by side, embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from mpfedcl.report.figures import COLOURS, MARKERS, STYLE, draw_partition_into

_CLASS_COLOURS = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]


def draw_lines(figures: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the figures of a result side by side: lines with bars for the deviation over seeds."""
    # Two per row, but three stand in one: no hole is left.
    columns = 3 if len(figures) == 3 else min(2, len(figures))
    rows = -(-len(figures) // columns)
    names = list(dict.fromkeys(line["name"] for figure in figures for line in figure["lines"]))
    with pyplot.rc_context(STYLE):
        page, grid = pyplot.subplots(
            rows, columns, figsize=(5.2 * columns, 3.4 * rows + 0.8), squeeze=False
        )
        for axes, figure in zip(grid.flat, figures, strict=False):
            _draw_lines_into(axes, figure, names)
        for axes in list(grid.flat)[len(figures) :]:
            axes.set_visible(False)
        page.suptitle(title)
        handles = [_legend_handle(number, name) for number, name in enumerate(names)]
        page.legend(handles=handles, loc="outside lower center", ncols=min(5, len(names)))
        page.savefig(path)
        pyplot.close(page)


def _draw_lines_into(axes: Axes, figure: Mapping[str, Any], names: Sequence[str]) -> None:
    for line in figure["lines"]:
        number = names.index(line["name"])
        axes.errorbar(
            line["x"],
            line["mean"],
            yerr=line["std"],
            color=COLOURS[number % 7],
            marker=MARKERS[number % 7],
            markersize=4,
            markevery=max(1, len(line["x"]) // 12),
            errorevery=max(1, len(line["x"]) // 12),
            elinewidth=0.8,
            capsize=2,
        )
    axes.set(title=figure["title"], xlabel=figure["x"], ylabel=figure["y"])
    axes.set_ylim(bottom=0)
    if figure["lines"] and len(figure["lines"][0]["x"]) <= 10:
        ticks = figure["lines"][0]["x"]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _legend_handle(number: int, name: str) -> Line2D:
    return Line2D([], [], color=COLOURS[number % 7], marker=MARKERS[number % 7], ms=4, label=name)


def draw_both_tests(result: Mapping[str, Any], path: Path) -> None:
    """Draw each method's own test against its union test: a panel per column, a row per track."""
    titles = {row["key"]: row["title"] for row in result["rows"]}
    tracks = list(dict.fromkeys(cell["track"] for cell in result["cells"]))
    with pyplot.rc_context(STYLE):
        page, grid = pyplot.subplots(
            len(tracks),
            len(result["columns"]),
            figsize=(2.9 * len(result["columns"]), 3.0 * len(tracks) + 0.9),
            squeeze=False,
        )
        for cell in result["cells"]:
            place = [column["key"] for column in result["columns"]].index(cell["column"])
            if cell["test"] == "own test" and None not in cell["values"]:
                union = _find_cell(result, cell, "union test")
                number = list(titles).index(cell["row"])
                grid[tracks.index(cell["track"])][place].errorbar(
                    numpy.mean(cell["values"]),
                    numpy.mean(union["values"]),
                    xerr=numpy.std(cell["values"]),
                    yerr=numpy.std(union["values"]),
                    color=COLOURS[number % 7],
                    marker=MARKERS[number % 7],
                    markersize=7,
                    elinewidth=0.9,
                )
        for row, track in zip(grid, tracks, strict=True):
            for axes, column in zip(row, result["columns"], strict=True):
                axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal")
                axes.set_title(
                    f"{column['title']}, {track}" if len(tracks) > 1 else column["title"]
                )
                axes.plot([0, 100], [0, 100], color="#bbbbbb", lw=0.8, zorder=0)
                axes.set_xlabel("own test, %")
            row[0].set_ylabel("union test, %")
        page.suptitle(f"{result['title']}: right is better for a client, up is better for all")
        handles = [_legend_handle(number, name) for number, name in enumerate(titles.values())]
        page.legend(handles=handles, loc="outside lower center", ncols=len(titles))
        page.savefig(path)
        pyplot.close(page)


def _find_cell(result: Mapping[str, Any], like: Mapping[str, Any], test: str) -> Mapping[str, Any]:
    same = ("track", "panel", "row", "column")
    found: Mapping[str, Any] = next(
        cell
        for cell in result["cells"]
        if cell["test"] == test and all(cell[name] == like[name] for name in same)
    )
    return found


def draw_partitions(partitions: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw several partitions side by side."""
    columns = min(2, len(partitions))
    rows = -(-len(partitions) // columns)
    with pyplot.rc_context(STYLE):
        page, grid = pyplot.subplots(
            rows, columns, figsize=(7.2 * columns, 4.0 * rows), squeeze=False
        )
        for axes, (name, partition) in zip(grid.flat, partitions.items(), strict=False):
            draw_partition_into(axes, partition, name)
        for axes in list(grid.flat)[len(partitions) :]:
            axes.set_visible(False)
        page.suptitle(title)
        page.savefig(path)
        pyplot.close(page)


@dataclass(frozen=True)
class EmbeddingMap:
    """A client's embeddings of test images in the plane, with its prototypes."""

    method: str
    client: str
    samples: NDArray[numpy.float64]
    labels: NDArray[numpy.int64]
    prototypes: NDArray[numpy.float64]
    prototype_labels: NDArray[numpy.int64]


def draw_embeddings(
    maps: Sequence[EmbeddingMap], classes: Sequence[str], title: str, path: Path
) -> None:
    """Draw a panel per method (columns) and client (rows); colours are classes."""
    methods = list(dict.fromkeys(each.method for each in maps))
    clients = list(dict.fromkeys(each.client for each in maps))
    with pyplot.rc_context({**STYLE, "axes.grid": False}):
        page, grid = pyplot.subplots(
            len(clients),
            len(methods),
            figsize=(3.6 * len(methods), 3.5 * len(clients) + 0.8),
            squeeze=False,
        )
        for each in maps:
            axes = grid[clients.index(each.client)][methods.index(each.method)]
            _draw_map_into(axes, each)
            axes.set_title(f"{each.method}, {each.client}", fontsize=10)
        page.suptitle(title)
        handles = [
            Line2D([], [], ls="", marker="o", ms=6, color=_CLASS_COLOURS[k % 10], label=name)
            for k, name in enumerate(classes)
        ]
        star = Line2D([], [], ls="", marker="X", ms=9, color="#444444", label="prototype")
        page.legend(handles=[*handles, star], loc="outside lower center", ncols=11)
        page.savefig(path)
        pyplot.close(page)


def _draw_map_into(axes: Axes, each: EmbeddingMap) -> None:
    colours = [_CLASS_COLOURS[label % 10] for label in each.labels]
    axes.scatter(each.samples[:, 0], each.samples[:, 1], s=7, c=colours, alpha=0.6, lw=0)
    strong = [_CLASS_COLOURS[label % 10] for label in each.prototype_labels]
    if len(each.prototypes):
        axes.scatter(
            each.prototypes[:, 0],
            each.prototypes[:, 1],
            s=110,
            c=strong,
            marker="X",
            edgecolors="black",
            lw=0.9,
            zorder=3,
        )
    axes.set(xticks=[], yticks=[])
