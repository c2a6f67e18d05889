"""Whether the paper's bounds held in a run: a table and a figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mpfedcl.convergence import BOUNDS, RoundMeasurement
from mpfedcl.report.figures import COLORS, figure_file
from mpfedcl.report.tables import TextTable

_STAGES = {
    "objective_before": "before training",
    "objective_after_training": "after training",
    "objective_after_pool": "after the new pool",
}
_COUNTS = {
    "running": "constants so far",
    "final": "final constants",
    "mean_over_clients": "mean over clients",
}
_STRIPES = {
    "lemma_1": "Lemma 1",
    "lemma_2": "Lemma 2",
    "theorem_1": "Theorem 1",
    "corollary_1": "Corollary 1",
    "falls_over_round": "L falls",
}


def convergence_table(title: str, found: Mapping[str, Any]) -> TextTable:
    """Return how often each bound held, as counts of client-rounds and of rounds."""
    rows = [
        [words, *(_format_count(found["bounds"][name][kind]) for kind in _COUNTS)]
        for name, words in BOUNDS.items()
    ]
    return TextTable(
        title, ["held of client-rounds (last column: of rounds)", *_COUNTS.values()], rows
    )


def describe_constants(found: Mapping[str, Any]) -> str:
    """Return the constants that a run has shown, in one line."""
    constants, rate = found["constants"], found["learning_rate"]
    limit = rate["median_limit"]
    return (
        "at least: "
        f"L1 {constants['smoothness']:.3g}, ζ {constants['slope']:.3g}, "
        f"δ² {constants['dissimilarity']:.3g}, G {constants['stochastic_gradient_norm']:.3g}, "
        f"L2 {constants['embedding_slope']:.3g}; "
        f"η {rate['first']:.3g} to {rate['last']:.3g}, Corollary 1 allows "
        + ("nothing: it is not defined" if limit is None else f"{limit:.3g} (median)")
    )


def draw_convergence(records: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the mean objective around each round's training, and below it which bounds held."""
    told = [record["diagnostics"]["convergence"] for record in records]
    numbers = [record["round"] for record in records]
    with figure_file(path, 2, 1, figsize=(7.2, 5.6), sharex=True, height_ratios=[3, 1.3]) as (
        figure,
        (upper, lower),
    ):
        _draw_objective(upper, numbers, [RoundMeasurement.from_json(each).mean for each in told])
        upper.set(ylabel="objective, mean over clients", title=title)
        image = _draw_bounds(lower, numbers, told)
        lower.set(xlabel="round")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        figure.colorbar(image, ax=lower, label="holds for", ticks=[0, 1], format="{x:.0%}")
        figure.legend(loc="outside lower center", ncols=3)


def _draw_objective(axes: Axes, numbers: Sequence[int], means: Sequence[Any]) -> None:
    values = numpy.array([[getattr(each, name) for name in _STAGES] for each in means], dtype=float)
    # A round is one unit wide: it begins half a unit before its number, as the stripes below do.
    places = numpy.array(numbers)[:, None] + numpy.array([-0.35, 0.0, 0.35])
    axes.plot(places.flatten(), values.flatten(), color="#bbbbbb", lw=0.8)
    size = 4 if len(numbers) <= 30 else 2
    for index, label in enumerate(_STAGES.values()):
        axes.plot(
            places[:, index],
            values[:, index],
            label=label,
            color=COLORS[index],
            marker="osv"[index],
            ms=size,
            lw=0,
        )
    axes.set_ylim(bottom=0)


def _draw_bounds(axes: Axes, numbers: Sequence[int], told: Sequence[Mapping[str, Any]]) -> Any:
    """Draw a stripe for each bound: the share of clients for which it held."""
    shares = [
        [
            _share_held([client["holds"][name] for client in each["clients"].values()])
            for each in told
        ]
        for name in _STRIPES
    ]
    # Hatched where a bound is not defined: nothing is painted over it.
    axes.patch.set(facecolor="white", edgecolor="#cccccc", hatch="////")
    axes.grid(visible=False)
    for place in range(1, len(_STRIPES)):
        axes.axhline(place - 0.5, color="white", lw=2)
    axes.set_yticks(range(len(_STRIPES)), list(_STRIPES.values()))
    extent = (numbers[0] - 0.5, numbers[-1] + 0.5, len(_STRIPES) - 0.5, -0.5)
    return axes.imshow(
        numpy.array(shares, dtype=float),
        aspect="auto",
        interpolation="nearest",
        extent=extent,
        cmap="YlGnBu",
        vmin=0,
        vmax=1,
    )


def _share_held(verdicts: Sequence[bool | None]) -> float:
    known = [verdict for verdict in verdicts if verdict is not None]
    return sum(known) / len(known) if known else numpy.nan


def _format_count(count: Mapping[str, int]) -> str:
    return f"{count['held']:,} of {count['judged']:,}" if count["judged"] else "-"
