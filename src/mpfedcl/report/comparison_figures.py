"""All figures of a comparison's end, from what comparison.json holds.

A method has the same colour and marker in each of them.
"""

from pathlib import Path

from mpfedcl.report.client_heat_map import draw_clients
from mpfedcl.report.comparison_content import Content
from mpfedcl.report.cost_figure import draw_costs
from mpfedcl.report.reliability_figure import draw_reliability
from mpfedcl.report.seed_figures import draw_differences, draw_seeds


def draw_comparison(content: Content, title: str, folder: Path) -> list[Path]:
    """Draw all figures of a comparison's end into a folder."""
    names = ("seeds", "differences", "clients", "costs", "reliability")
    paths = {name: folder / f"{name}.png" for name in names}
    draw_seeds(content, title, paths["seeds"])
    draw_costs(content, title, paths["costs"])
    if len(content["methods"]) > 1:
        draw_differences(content, title, paths["differences"])
    if any(entry["accuracy_per_client"] for entry in content["methods"].values()):
        draw_clients(content, title, paths["clients"])
    draw_reliability(content, title, paths["reliability"])
    return [path for path in paths.values() if path.is_file()]
