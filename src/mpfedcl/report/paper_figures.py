"""The paper's figures: lines over an axis, both tests, partitions side by side, embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from safetensors.torch import load_file
from sklearn.manifold import TSNE

from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.data.partition_table import expand_table
from mpfedcl.data.reader import open_data_set
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.report.figures import COLORS, MARKERS, draw_partition_into, figure_file
from mpfedcl.report.method_styles import is_styled, style_of
from mpfedcl.studies.paper.item import PaperItem, Picture
from mpfedcl.studies.paper.paper_runs import PaperRuns, resolve_with_seed

_CLASS_COLORS = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
_BARS = "(bars: \u00b1 1 standard deviation over seeds, ddof 0)"
_CLIENTS_SHOWN = 2
_IMAGES_SHOWN = 600


def draw_item(runs: PaperRuns, item: PaperItem, result: dict[str, object]) -> list[Path]:
    """Draw all figures of an item beside its result."""
    folder = runs.folder / "tables" / item.id
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    figures = result["figures"]
    if figures:
        assert isinstance(figures, list)
        drawn.append(folder / f"{item.id}.png")
        _draw_lines(figures, item.title, drawn[-1])
    if item.compares_tests:
        drawn.append(folder / f"{item.id}.png")
        _draw_both_tests(result, drawn[-1])
    for picture in item.pictures:
        drawn.append(folder / f"{picture.name}.png")
        if picture.kind == "partitions":
            _draw_partitions(runs, picture, drawn[-1])
        else:
            _draw_embeddings(runs, picture, drawn[-1])
    return drawn


def _draw_lines(figures: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the figures of a result side by side: lines with bars for the deviation over seeds."""
    # Two per row, but three stand in one: no hole is left.
    columns = 3 if len(figures) == 3 else min(2, len(figures))
    rows = -(-len(figures) // columns)
    names = list(dict.fromkeys(line["name"] for figure in figures for line in figure["lines"]))
    size = (5.2 * columns, 3.4 * rows + 0.8)
    with figure_file(path, rows, columns, figsize=size, squeeze=False) as (page, grid):
        for axes, figure in zip(grid.flat, figures, strict=False):
            _draw_lines_into(axes, figure, names)
        for axes in list(grid.flat)[len(figures) :]:
            axes.set_visible(False)
        has_bars = any(line["std"] for figure in figures for line in figure["lines"])
        page.suptitle(f"{title}\n{_BARS}" if has_bars else title)
        handles = [_legend_handle(number, name) for number, name in enumerate(names)]
        page.legend(handles=handles, loc="outside lower center", ncols=min(5, len(names)))


def _draw_lines_into(axes: Axes, figure: Mapping[str, Any], names: Sequence[str]) -> None:
    for line in figure["lines"]:
        number = names.index(line["name"])
        axes.errorbar(
            line["x"],
            line["mean"],
            yerr=line["std"],
            **_look(number, line["name"]),
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


def _look(number: int, name: str) -> dict[str, Any]:
    """Return a method's own color and marker, and those of its place for what is no method."""
    if is_styled(name):
        return style_of(name).dot()
    return {"color": COLORS[number % 7], "marker": MARKERS[number % 7]}


def _legend_handle(number: int, name: str) -> Line2D:
    return Line2D([], [], **_look(number, name), ms=4, label=name)


def _draw_both_tests(result: Mapping[str, Any], path: Path) -> None:
    """Draw each method's local test set against its global test set: a panel per column, a row per track."""
    titles = {row["key"]: row["title"] for row in result["rows"]}
    tracks = list(dict.fromkeys(cell["track"] for cell in result["cells"]))
    columns = [column["key"] for column in result["columns"]]
    unions = {
        (cell["track"], cell["panel"], cell["row"], cell["column"]): cell
        for cell in result["cells"]
        if cell["test"] == "global test set"
    }
    size = (2.9 * len(columns), 3.0 * len(tracks) + 0.9)
    with figure_file(path, len(tracks), len(columns), figsize=size, squeeze=False) as (page, grid):
        for cell in result["cells"]:
            place = columns.index(cell["column"])
            if cell["test"] == "local test set" and None not in cell["values"]:
                union = unions[cell["track"], cell["panel"], cell["row"], cell["column"]]
                number = list(titles).index(cell["row"])
                grid[tracks.index(cell["track"])][place].errorbar(
                    numpy.mean(cell["values"]),
                    numpy.mean(union["values"]),
                    xerr=numpy.std(cell["values"]),
                    yerr=numpy.std(union["values"]),
                    **_look(number, titles[cell["row"]]),
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
                axes.set_xlabel("local test set, %")
            row[0].set_ylabel("global test set, %")
        said = "right is better for a client, up is better for all"
        page.suptitle(f"{result['title']}: {said}\n{_BARS}")
        handles = [_legend_handle(number, name) for number, name in enumerate(titles.values())]
        page.legend(handles=handles, loc="outside lower center", ncols=len(titles))


def _draw_partitions(runs: PaperRuns, picture: Picture, path: Path) -> None:
    """Draw several partitions side by side."""
    columns = min(2, len(picture.experiments))
    rows = -(-len(picture.experiments) // columns)
    size = (7.2 * columns, 4.0 * rows)
    with figure_file(path, rows, columns, figsize=size, squeeze=False) as (page, grid):
        for axes, (name, experiment) in zip(grid.flat, picture.experiments.items(), strict=False):
            complete = resolve_with_seed(experiment.replace(dataset__root=runs.root), runs.seeds[0])
            sample_index = open_data_set(complete.dataset)
            split = split_among_clients(sample_index, complete)
            held = expand_table(split.describe(sample_index.class_names))
            draw_partition_into(axes, held, name)
        for axes in list(grid.flat)[len(picture.experiments) :]:
            axes.set_visible(False)
        page.suptitle(f"{picture.title}, seed {runs.seeds[0]}: training images")


@dataclass(frozen=True)
class EmbeddingMap:
    """A client's embeddings of test images in the plane, with its prototypes."""

    method: str
    client: str
    samples: NDArray[numpy.float64]
    labels: NDArray[numpy.int64]
    prototypes: NDArray[numpy.float64]
    prototype_labels: NDArray[numpy.int64]


def _draw_embeddings(runs: PaperRuns, picture: Picture, path: Path) -> None:
    """Draw a panel per method (columns) and client (rows); colors are classes."""
    maps: list[EmbeddingMap] = []
    classes: tuple[str, ...] = ()
    for name, experiment in picture.experiments.items():
        prepared = runs.prepared_experiment(experiment, runs.seeds[0])
        found, classes = _map_clients(name, prepared, runs.store.folder(prepared))
        maps += found
    methods = list(dict.fromkeys(each.method for each in maps))
    clients = list(dict.fromkeys(each.client for each in maps))
    size = (3.6 * len(methods), 3.5 * len(clients) + 0.8)
    with figure_file(
        path, len(clients), len(methods), lines=False, figsize=size, squeeze=False
    ) as (page, grid):
        for each in maps:
            axes = grid[clients.index(each.client)][methods.index(each.method)]
            _draw_map_into(axes, each)
            axes.set_title(f"{each.method}, {each.client}", fontsize=10)
        page.suptitle(picture.title)
        handles = [
            Line2D([], [], ls="", marker="o", ms=6, color=_CLASS_COLORS[k % 10], label=name)
            for k, name in enumerate(classes)
        ]
        star = Line2D([], [], ls="", marker="X", ms=9, color="#444444", label="prototype")
        page.legend(handles=[*handles, star], loc="outside lower center", ncols=11)


def _map_clients(
    title: str, experiment: Experiment, folder: Path
) -> tuple[list[EmbeddingMap], tuple[str, ...]]:
    """Return the first clients' embeddings of test images, each laid out with its prototypes."""
    data, model = load_data_and_model(experiment, torch.device("cpu"))
    found = find_method(experiment.method)
    method = found(experiment, data.num_classes)
    # Evenly over the test set, which is ordered by nothing that matters.
    step = max(1, len(data.test_labels) // _IMAGES_SHOWN)
    inputs, labels = data.test_inputs[::step], data.test_labels[::step]
    maps = []
    for client in data.clients[:_CLIENTS_SHOWN]:
        params = load_file(folder / "models" / f"{client.name}.safetensors")
        with torch.no_grad():
            embeddings = method.project(model.apply(params, inputs)[0])
            own = method.project(model.apply(params, client.inputs)[0])
        (rows,) = method.summarize([own], [client.labels], [experiment.seed])
        together = torch.cat([embeddings, rows.vectors]).double().numpy()
        # Barnes-Hut t-SNE from a fixed start: the same picture every time.
        plane = TSNE(
            init="pca", random_state=0, perplexity=min(30, len(together) / 4)
        ).fit_transform(together)
        maps.append(
            EmbeddingMap(
                title,
                client.name,
                numpy.asarray(plane[: len(embeddings)], dtype=numpy.float64),
                labels.numpy(),
                numpy.asarray(plane[len(embeddings) :], dtype=numpy.float64),
                rows.labels.numpy(),
            )
        )
    return maps, data.class_names


def _draw_map_into(axes: Axes, each: EmbeddingMap) -> None:
    colors = [_CLASS_COLORS[label % 10] for label in each.labels]
    axes.scatter(each.samples[:, 0], each.samples[:, 1], s=7, c=colors, alpha=0.6, lw=0)
    strong = [_CLASS_COLORS[label % 10] for label in each.prototype_labels]
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
