"""The figure of a search for settings: how each setting did, and which was chosen."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from mpfedcl.report.figures import COLORS, escape_math, figure_file
from mpfedcl.report.file_schemas import SearchRecord
from mpfedcl.report.tuning_section import format_settings


def draw_scores(searches: Sequence[SearchRecord], path: Path) -> None:
    """Draw validation accuracy by round, a panel per method; a line ends where it was dropped."""
    size = (7.2, 3.0 * len(searches) + 0.4)
    with figure_file(path, len(searches), 1, figsize=size, squeeze=False) as (_, panels):
        for axes, search in zip(panels[:, 0], searches, strict=True):
            for trial in search.trials:
                known = sorted((n, score) for n, score in trial.scores.items() if score is not None)
                style = {"color": "#b0b0b0", "lw": 1.0, "zorder": 1}
                if trial.number == 0:
                    style = {"color": COLORS[1], "lw": 1.8, "zorder": 2, "label": "the defaults"}
                if trial.number == search.chosen:
                    told = f"chosen: {format_settings(trial.changes)}"
                    style = {"color": COLORS[0], "lw": 2.2, "zorder": 3, "label": told}
                rounds, scores = [number for number, _ in known], [score for _, score in known]
                axes.plot(rounds, scores, marker="o", ms=4, **style)
            axes.set(
                title=escape_math(search.method), xlabel="round", ylabel="validation accuracy (%)"
            )
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            axes.legend(loc="best", fontsize=8)
