"""A figure of what clients are worth to the others."""

from collections.abc import Sequence
from pathlib import Path

import numpy

from mpfedcl.inference.contribution import ClientContribution
from mpfedcl.report.figures import COLORS, escape_math, figure_file

_MOST_SHOWN = 40
"""Clients from both ends of the list: more bars cannot be told apart."""


def draw_contributions(clients: Sequence[ClientContribution], title: str, path: Path) -> None:
    """Draw the points that the others lose without each client, the most valuable on top."""
    shown = list(clients)
    if len(shown) > _MOST_SHOWN:
        shown = [*shown[: _MOST_SHOWN // 2], *shown[-_MOST_SHOWN // 2 :]]
        title += f"\n(the first and last {_MOST_SHOWN // 2} of {len(clients)} clients)"
    places = numpy.arange(len(shown))
    height = 1.9 + 0.42 * len(shown)
    with figure_file(path, figsize=(7.2, height)) as (figure, axes):
        for shift, color, label, values in (
            (
                -0.2,
                COLORS[0],
                "all their tests together",
                [e.global_test.difference for e in shown],
            ),
            (
                0.2,
                COLORS[1],
                "each on its local test set",
                [e.local_test.difference for e in shown],
            ),
        ):
            bars = axes.barh(places + shift, values, height=0.38, color=color, label=label)
            axes.bar_label(bars, fmt="%+.1f", padding=3, fontsize=8)
        axes.axvline(0, color="#555555", lw=1)
        names = [f"{escape_math(e.client)}  ({e.images:,})" for e in shown]
        axes.set_yticks(places, names)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")
        axes.set(xlabel="points of accuracy that the others gain from the client")
        figure.suptitle(title, fontsize=11)
        figure.legend(loc="outside lower center", ncols=2)
