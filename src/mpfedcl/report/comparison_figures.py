"""All figures of a comparison's end, from what comparison.json holds.

A method has the same color and marker in each of them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mpfedcl.report.client_heat_map import draw_clients
from mpfedcl.report.comparison_content import Content
from mpfedcl.report.cost_figure import draw_costs
from mpfedcl.report.reliability_figure import draw_reliability
from mpfedcl.report.seed_figures import draw_differences, draw_seeds


def comparison_figures(content: Content, title: str) -> dict[str, Callable[[Path], object]]:
    """Return what draws each figure of a comparison's end into a file, by name."""
    figures: dict[str, Callable[[Path], object]]
    figures = {"seeds": partial(draw_seeds, content, title)}
    if len(content["methods"]) > 1:
        figures["differences"] = partial(draw_differences, content, title)
    if any(entry["accuracy_per_client"] for entry in content["methods"].values()):
        figures["clients"] = partial(draw_clients, content, title)
    figures["costs"] = partial(draw_costs, content, title)
    # Of a method that gives no probabilities there is none; then nothing is written.
    return figures | {"reliability": partial(draw_reliability, content, title)}
