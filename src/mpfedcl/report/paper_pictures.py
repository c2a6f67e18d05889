"""The paper's figures that show data and embeddings rather than numbers."""

from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file
from sklearn.manifold import TSNE

from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.data.reader import open_data_set
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.report.paper_figures import (
    EmbeddingMap,
    draw_both_tests,
    draw_embeddings,
    draw_lines,
    draw_partitions,
)
from mpfedcl.studies.paper.item import PaperItem, Picture
from mpfedcl.studies.paper.paper_runs import PaperRuns
from mpfedcl.studies.paper.run_store import resolve_with_seed

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
        draw_lines(figures, item.title, drawn[-1])
    if item.compares_tests:
        drawn.append(folder / f"{item.id}.png")
        draw_both_tests(result, drawn[-1])
    for picture in item.pictures:
        drawn.append(folder / f"{picture.name}.png")
        if picture.kind == "partitions":
            _draw_partitions(runs, picture, drawn[-1])
        else:
            _draw_embeddings(runs, picture, drawn[-1])
    return drawn


def _draw_partitions(runs: PaperRuns, picture: Picture, path: Path) -> None:
    partitions = {}
    for name, experiment in picture.experiments.items():
        complete = resolve_with_seed(experiment.replace(dataset__root=runs.root), runs.seeds[0])
        sample_index = open_data_set(complete.dataset)
        partitions[name] = split_among_clients(sample_index, complete).describe(
            sample_index.class_names
        )
    draw_partitions(partitions, f"{picture.title}, seed {runs.seeds[0]}: training images", path)


def _draw_embeddings(runs: PaperRuns, picture: Picture, path: Path) -> None:
    maps: list[EmbeddingMap] = []
    classes: tuple[str, ...] = ()
    for name, experiment in picture.experiments.items():
        prepared = runs.prepared_experiment(experiment, runs.seeds[0])
        found, classes = _map_clients(name, prepared, runs.store.folder(prepared))
        maps += found
    draw_embeddings(maps, classes, picture.title, path)


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
