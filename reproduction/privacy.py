"""The cost of a privacy budget: the table and the figure of docs/differential-privacy.md.

Digits of MNIST behind `random-filters`: 500 to 60,000 to learn from, and 10,000 to test. Needs
mnist in the data folder (MPFEDCL_DATA).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from mpfedcl import Experiment
from reproduction.runs import Runs
from reproduction.tables import COLORS, DOCS, figure_file, markdown

IMAGES = (500, 2_000, 10_000, 60_000)
EPSILONS = (0.5, 1.0, 3.0, 8.0, math.inf)
MOST_CLIENTS, ROUNDS = 1000, 15
KINDS = {
    "means": ("fedncm", 64),
    "moments": ("fedlda", 64),
    "moments, 256 dimensions": ("fedlda", 256),
    f"model, {ROUNDS} rounds": ("fedavg", 0),
}
"""What is released: the method, and the dimensions that features are projected to."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    unit: str
    kind: str
    images: int

    @property
    def clients(self) -> int:
        """Where single images are protected, clients make no difference: there is one."""
        return min(MOST_CLIENTS, self.images) if self.unit == "client" else 1

    def experiment(self, epsilon: float) -> Experiment:
        """Return the run of a budget; without one (inf) nothing is clipped or projected."""
        method, dimensions = KINDS[self.kind]
        experiment = Experiment(method=method, clients=self.clients).replace(
            dataset__name="mnist",
            dataset__train_size=self.images,
            partition__kind="iid",
            partition__min_size=1,
            encoder__name="random-filters",
            evaluate_clients=1,
            personal_models=False,
        )
        if method == "fedavg":
            experiment = experiment.replace(
                rounds=ROUNDS,
                evaluate_every=ROUNDS,
                model__hidden=(16,),
                train__lr=0.1,
                train__lr_decay=1.0,
                train__epochs=2,
            )
        if epsilon == math.inf:
            return experiment
        experiment = experiment.replace(privacy__epsilon=epsilon, privacy__unit=self.unit)
        if method == "fedavg":
            return experiment
        return experiment.replace(
            privacy__dimensions=dimensions,
            privacy__moments=method != "fedncm",
            privacy__clip=expected_norm(self.images / self.clients),
        )


def expected_norm(images: float) -> float:
    """Return the norm of counts and sums of `images` images of ten classes: the clip."""
    # n images of C classes have about n/C each, and at least one image has a class of its own.
    return math.sqrt(2) * images / math.sqrt(min(10.0, images))


def rows() -> Iterator[Row]:
    """Yield the rows: rounds only protect clients, many dimensions only pay with many images."""
    for unit in ("record", "client"):
        for kind, (method, dimensions) in KINDS.items():
            for images in IMAGES:
                is_wide = dimensions > 64 and (images < 10_000 or unit == "client")
                if not is_wide and not (method == "fedavg" and unit == "record"):
                    yield Row(unit, kind, images)


def main(runs: Runs) -> None:
    """Measure every cell, print the table and draw the figure."""
    found: dict[Row, list[list[float]]] = {}
    for row in list(rows())[: 1 if runs.quick else None]:
        # One seed for rounds: a run takes a minute.
        seeds = (0,) if KINDS[row.kind][0] == "fedavg" else (0, 1)
        found[row] = []
        for epsilon in EPSILONS:
            last = [each[-1] for each in runs.by_seed(row.experiment(epsilon), seeds)]
            found[row].append([r["accuracy"]["global_test"]["global_classifier"] for r in last])
    names = ["none" if each == math.inf else f"{each:g}" for each in EPSILONS]
    table = [
        [row.unit, row.kind, f"{row.images:,}", *(_cell(values) for values in cells)]
        for row, cells in found.items()
    ]
    columns = ["unit", "what is released", "images", *(f"eps {name}" for name in names)]
    print(markdown(columns, table))
    if not runs.quick:
        draw(found, names)


def _cell(values: list[float]) -> str:
    return f"{fmean(values):.1f}" + (f" ({pstdev(values):.1f})" if len(values) > 1 else "")


def draw(found: dict[Row, list[list[float]]], names: list[str]) -> None:
    """Draw accuracy over epsilon: a panel for each number of images, records above clients."""
    path, places = DOCS / "images" / "privacy.png", range(len(EPSILONS))
    layout: dict[str, Any] = {"figsize": (12, 6.4), "sharex": True, "sharey": True}
    with figure_file(path, 2, len(IMAGES), **layout) as (figure, grid):
        for row, cells in found.items():
            axes = grid[("record", "client").index(row.unit)][IMAGES.index(row.images)]
            color = COLORS[list(KINDS).index(row.kind)]
            means, spread = [fmean(each) for each in cells], [pstdev(each) for each in cells]
            axes.errorbar(
                places[:-1], means[:-1], spread[:-1], color=color, marker="o", label=row.kind
            )
            # Without a budget features are not projected either: more than noise is gone.
            axes.plot(places[-2:], means[-2:], color=color, linestyle=":")
            axes.plot(places[-1], means[-1], color=color, marker="o", markerfacecolor="white")
            clients = "" if row.unit == "record" else f", {row.clients:,} clients"
            axes.set_title(f"{row.images:,} images{clients}", fontsize=10)
            axes.set_xticks(list(places), names)
        for axes, unit in zip(grid[:, 0], ("image", "client"), strict=True):
            axes.set_ylabel(f"one {unit}\naccuracy in %")
        for axes in grid[1]:
            axes.set_xlabel("epsilon")
        lines: dict[str, Any] = {}
        for axes in grid.flat:
            handles, labels = axes.get_legend_handles_labels()
            lines |= dict(zip(labels, handles, strict=True))
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
