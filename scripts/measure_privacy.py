"""Measure what a privacy budget costs: the table and the figure of docs/differential-privacy.md.

    MPFEDCL_DATA=... python scripts/measure_privacy.py build/privacy

Digits of MNIST behind `random-filters`: 500, 2,000, 10,000 and 60,000 to learn from, and 10,000 to
test. Every release goes through the package's own mechanism. What is measured stands in
FOLDER/cells.json and is not measured again. It needs the data folder (MPFEDCL_DATA) with mnist.
"""

import json
import math
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import matplotlib
import torch
from torch import Tensor

from mpfedcl import Experiment, run
from mpfedcl.core.files import write_atomically
from mpfedcl.core.rng import generator
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines.hardware import cap_threads
from mpfedcl.methods import Server, Tally, find_method
from mpfedcl.methods._one_shot import OneShot
from mpfedcl.models import GaussianClassifier
from mpfedcl.prototypes import Prototypes

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.lines import Line2D

IMAGES = (500, 2_000, 10_000, 60_000)
EPSILONS = (0.5, 1.0, 3.0, 8.0, math.inf)
SEEDS = (0, 1)
MOST_CLIENTS = 1000
ROUNDS = 15
LEAST_DIMENSIONS = 64
KINDS = {
    "means": ("fedncm", LEAST_DIMENSIONS),
    "moments": ("fedlda", LEAST_DIMENSIONS),
    "moments, 256 dimensions": ("fedlda", 256),
    "model, 15 rounds": ("fedavg", 0),
}
"""What is released: the method, and the dimensions that features are projected to."""


def main(folder: Path) -> None:
    """Measure what is missing, print the table in Markdown and draw the figure."""
    cap_threads()
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "cells.json")
    features = Features()
    for cell in product(("record", "client"), KINDS, IMAGES, SEEDS, EPSILONS):
        measure_sums(store, features, *cell)
    for images in IMAGES:
        for epsilon in EPSILONS:
            # One seed: a run takes a minute.
            store.measure(
                f"client/model, {ROUNDS} rounds/{images}/{epsilon:g}/0",
                partial(read_rounds, images, epsilon),
            )
    print(write_table(store))
    draw(store, folder / "privacy.png")


def measure_sums(
    store: "Store",
    features: "Features",
    unit: str,
    kind: str,
    images: int,
    seed: int,
    epsilon: float,
) -> None:
    """Measure one exchange; without a budget unit and projection make no difference."""
    method, dimensions = KINDS[kind]
    if method == "fedavg" or (
        dimensions > LEAST_DIMENSIONS and (images < 10_000 or unit == "client")
    ):
        return
    name = f"{images}/{epsilon:g}/{seed}"
    first = next(each for each, made in KINDS.items() if made[0] == method)
    if epsilon == math.inf and (unit, kind) != ("record", first):
        store.cells[f"{unit}/{kind}/{name}"] = store.cells[f"record/{first}/{name}"]
        return
    store.measure(
        f"{unit}/{kind}/{name}",
        lambda: features.read(unit, method, dimensions, images, epsilon, seed),
    )


class Store:
    """Accuracies by name, in a file that is whole after every one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cells: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}

    def measure(self, name: str, read: Callable[[], float]) -> None:
        """Measure something, if nobody has."""
        if name not in self.cells:
            self.cells[name] = read()
            print(f"{name}: {self.cells[name]:.1f}", file=sys.stderr, flush=True)
            write_atomically(self._path, json.dumps(self.cells, indent=1).encode())

    def of(self, unit: str, kind: str, images: int, epsilon: float) -> list[float]:
        """Return the accuracies over seeds."""
        start = f"{unit}/{kind}/{images}/{epsilon:g}/"
        return [value for name, value in self.cells.items() if name.startswith(start)]


class Features:
    """All digits behind the encoder, computed once and cached by the package."""

    def __init__(self) -> None:
        self._data: FederatedData | None = None
        self._collected: tuple[Any, list[dict[str, Tensor]]] = (None, [])

    def read(
        self, unit: str, method: str, dimensions: int, images: int, epsilon: float, seed: int
    ) -> float:
        """Return the accuracy of one exchange."""
        data = self._load()
        experiment = exchange_experiment(method, seed)
        if epsilon < math.inf:
            experiment = experiment.replace(
                privacy__epsilon=epsilon,
                privacy__unit=unit,
                privacy__dimensions=dimensions,
                privacy__moments=method != "fedncm",
                privacy__clip=expected_length(images / min(MOST_CLIENTS, images)),
            )
        made = find_method(method)(experiment, data.num_classes)
        assert isinstance(made, OneShot)
        key = (unit, method, dimensions, images, seed, epsilon == math.inf)
        if self._collected[0] != key:
            # The same under every budget; only noise differs.
            self._collected = key, self._collect(made, unit, images, seed)
        params = fit(made, self._collected[1], data.input_size)
        with torch.no_grad():
            _, scores = made.own_model(data.input_size).apply(params, data.test_inputs)
        return 100 * float((scores.argmax(1) == data.test_labels).double().mean())

    def _collect(
        self, method: OneShot, unit: str, images: int, seed: int
    ) -> list[dict[str, Tensor]]:
        """Return what clients collect; where clients do not matter there is one."""
        client = self._load().clients[0]
        key = generator(seed, images, "images of the measurement")
        chosen = torch.randperm(len(client.labels), generator=key)[:images]
        parts = chosen.chunk(min(MOST_CLIENTS, images) if unit == "client" else 1)
        return [method.collect(client.inputs[part], client.labels[part]) for part in parts]

    def _load(self) -> FederatedData:
        if self._data is None:
            experiment = exchange_experiment("fedncm", 0)
            self._data, _ = load_data_and_model(experiment, torch.device("cpu"))
        return self._data


def exchange_experiment(method: str, seed: int) -> Experiment:
    """Return an experiment with all digits at one client."""
    experiment = Experiment(method=method, clients=1, seed=seed).replace(
        dataset__name="mnist", dataset__train_size=60_000, partition__kind="iid"
    )
    return experiment.resolved(find_method(method).defaults)


def expected_length(images: float) -> float:
    """Return how long counts and sums of so many images of ten classes are: the clip."""
    # n images of C classes have about n/C each, and at least one image has a class of its own.
    classes = min(10.0, images)
    return math.sqrt(2) * images / math.sqrt(classes)


def fit(method: OneShot, collected: list[dict[str, Tensor]], input_size: int) -> dict[str, Tensor]:
    """Return the classifier of what clients have collected, as a run makes it."""
    mechanism = method.private_sums
    model = method.own_model(input_size)
    assert isinstance(model, GaussianClassifier)
    initial = model.init(generator(0, "weights"), torch.float32)
    bounded = [mechanism.bound(each) if mechanism else each for each in collected]
    total = {
        name: torch.stack([each[name].double() for each in bounded]).sum(0) for name in bounded[0]
    }
    own = mechanism.repair(mechanism.add_noise(total)) if mechanism else total
    held = own["counts"].nonzero().squeeze(1)
    means = (own["sums"][held] / own["counts"][held].unsqueeze(1)).float()
    rows = {"everybody": Prototypes(means, held, own["counts"][held].long())}
    tally = Tally([], [], [], [], 1.0, rows, own)
    served = method.reduce(Server(initial), {}, tally)
    return served.params


def read_rounds(images: int, epsilon: float) -> float:
    """Return the accuracy of DP-FedAvg with a small head behind the same encoder."""
    changes: dict[str, Any] = {
        "dataset__name": "mnist",
        "dataset__train_size": images,
        "partition__kind": "iid",
        "partition__min_size": 1,
        "encoder__name": "random-filters",
        "model__hidden": (16,),
        "train__lr": 0.1,
        "train__lr_decay": 1.0,
        "train__epochs": 2,
        "evaluate_every": ROUNDS,
        "evaluate_clients": 1,
        "personal_models": False,
        "trail": False,
    }
    if epsilon < math.inf:
        changes["privacy__epsilon"] = epsilon
    experiment = Experiment(method="fedavg", rounds=ROUNDS, clients=min(MOST_CLIENTS, images))
    with tempfile.TemporaryDirectory() as folder:
        result = run(experiment.replace(**changes), Path(folder) / "run")
    assert result.summary is not None
    return float(result.summary["predictors"]["global_test"]["global_classifier"])


def write_table(store: Store) -> str:
    """Return all that was measured as Markdown: mean over seeds, and their deviation."""
    head = ["unit", "what is released", "images", *(f"eps {_name(each)}" for each in EPSILONS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for unit in ("record", "client"):
        for kind in KINDS:
            for images in IMAGES:
                cells = [store.of(unit, kind, images, epsilon) for epsilon in EPSILONS]
                if any(cells):
                    row = [unit, kind, f"{images:,}", *(_cell(each) for each in cells)]
                    lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{fmean(values):.1f}" + (f" ({pstdev(values):.1f})" if len(values) > 1 else "")


def _name(epsilon: float) -> str:
    return "none" if epsilon == math.inf else f"{epsilon:g}"


def draw(store: Store, path: Path) -> None:
    """Draw accuracy over epsilon: a panel for each number of images, records above clients."""
    colors = dict(zip(KINDS, ("tab:blue", "tab:orange", "tab:red", "tab:green"), strict=True))
    figure, axes = pyplot.subplots(2, 4, figsize=(12, 6), sharex=True, sharey=True)
    places = range(len(EPSILONS))
    for row, unit in enumerate(("record", "client")):
        for column, images in enumerate(IMAGES):
            axis = axes[row][column]
            for kind, color in colors.items():
                cells = [store.of(unit, kind, images, epsilon) for epsilon in EPSILONS]
                if not all(cells):
                    continue
                means = [fmean(each) for each in cells]
                spread = [pstdev(each) for each in cells]
                axis.errorbar(
                    places[:-1], means[:-1], spread[:-1], color=color, marker="o", capsize=2
                )
                # Without a budget features are not projected either: more than noise is gone.
                axis.plot(places[-2:], means[-2:], color=color, linestyle=":")
                axis.plot(places[-1], means[-1], color=color, marker="o", markerfacecolor="white")
            clients = "" if unit == "record" else f", {min(MOST_CLIENTS, images):,} clients"
            axis.set_title(f"{images:,} images{clients}", fontsize=10)
            axis.grid(alpha=0.3)
            axis.set_xticks(list(places), [_name(each) for each in EPSILONS])
        axes[row][0].set_ylabel(f"one {'image' if unit == 'record' else unit}\naccuracy in %")
    for axis in axes[1]:
        axis.set_xlabel("epsilon")
    handles = [Line2D([], [], color=each, marker="o") for each in colors.values()]
    figure.legend(handles, list(colors), loc="lower center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/privacy"))
