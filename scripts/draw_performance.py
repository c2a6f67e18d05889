"""Draw the picture of docs/performance.md from what `make bench` and `make bench-peers` have left.

python scripts/draw_performance.py [benchmarks/results]
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from mpfedcl.report.figures import PALETTE, figure_file

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "images" / "performance.png"
NAMES = {"mpfedcl": "mpfedcl", "handwritten": "loop by hand", "pfl": "pfl", "flower": "Flower"}
WORKS = {"few": "5 clients x 400", "many": "100 clients x 20"}
SHOWN = 12
"""Methods in the panel of times; the peers come on top."""
PEER = "#999999"
TICKS = (0.1, 0.2, 0.5, 1, 2, 5)


def main(results: Path) -> None:
    """Draw a panel each for the peers, the population, and the time to a result."""
    with figure_file(OUT, 1, 3, figsize=(12, 4.4)) as (_, panels):
        _draw_peers(panels[0], _read(results / "peers.json")["entries"])
        _draw_population(panels[1], _read(results / "population.json")["data"])
        _draw_times(panels[2], _read(results / "time_to_accuracy.json")["data"]["methods"])


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _draw_peers(axes: Axes, entries: list[dict[str, Any]]) -> None:
    """Draw FedAvg's round, each program in the fastest of its settings; ours by default."""
    height = 0.38
    for number, (work, title) in enumerate(WORKS.items()):
        fastest = {
            name: min(
                entry["median_ms"]
                for entry in entries
                if (entry["work"], entry["method"], entry["peer"]) == (work, "fedavg", name)
                and "median_ms" in entry
            )
            for name in NAMES
        }
        for place, value in enumerate(fastest.values()):
            where = -place + (0.5 - number) * height
            axes.barh(where, value, height, color=PALETTE[number], label=None if place else title)
            ratio = value / fastest["mpfedcl"]
            text = f" {value:,.0f}" + (f" ({ratio:.1f}x)" if place else "")
            axes.text(value, where, text, va="center", fontsize=8)
    axes.set_yticks([-n for n in range(len(NAMES))], list(NAMES.values()))
    axes.set(xscale="log", xlabel="ms per round", title="FedAvg beside others")
    axes.set_xlim(10, axes.get_xlim()[1] * 6)
    axes.grid(visible=False, axis="y")
    axes.legend(loc="upper right")


def _draw_population(axes: Axes, data: dict[str, Any]) -> None:
    """Draw what a round takes as the population grows, for as many clients in each round."""
    cases = [found for found in data.values() if found["rounds"] < 100]
    clients = [int(found["case"].partition(" ")[0].replace(",", "")) for found in cases]
    rounds = [1000 * median(found["round_seconds"][1:]) for found in cases]
    axes.plot(clients, rounds, "o-", color=PALETTE[0])
    for x, y in zip(clients, rounds, strict=True):
        axes.annotate(f"{y:,.0f}", (x, y), (0, 7), textcoords="offset points", ha="center")
    axes.set(xscale="log", xlabel="clients, of which 1,000 per round", ylabel="ms per round")
    axes.set(title="MP-FedCL, a pool of 20 per class", ylim=(0, 1.4 * max(rounds)))
    axes.margins(x=0.12)


def _draw_times(axes: Axes, methods: list[dict[str, Any]]) -> None:
    """Draw the seconds to 80 and 85 % of the quickest methods and of the peers."""
    late = {known["method"]: [_seconds(known, goal) for goal in (80, 85)] for known in methods}
    there = {name: each for name, each in late.items() if each[0] < float("inf")}
    ours = sorted((n for n in there if " " not in n), key=lambda n: there[n])[:SHOWN]
    wanted = {*ours, "mp-fedcl", "fedavg", "fedgauss"} & there.keys()
    shown = sorted(wanted | {n for n in there if " " in n}, key=lambda n: there[n])
    for place, name in enumerate(shown):
        first, last = there[name]
        color = PEER if " " in name else PALETTE[0]
        axes.plot(first, -place, "o", color=color, ms=6)
        if last < float("inf"):
            axes.plot([first, last], [-place, -place], color=color)
            axes.plot(last, -place, "|", color=color, ms=10, mew=2)
    labels = [name.partition(",")[0].replace("handwritten's", "a loop's") for name in shown]
    axes.set_yticks([-n for n in range(len(shown))], labels, fontsize=8)
    axes.set(xscale="log", xlabel="seconds on MNIST digits", title="To 80 % (dot), 85 % (bar)")
    axes.set_xticks(TICKS, [f"{each:g}" for each in TICKS])
    axes.minorticks_off()


def _seconds(known: dict[str, Any], goal: float) -> float:
    reached = sorted(
        next((n for n, value in enumerate(curve["accuracy"], 1) if value >= goal), float("inf"))
        for curve in known["curves"]
    )
    return float(reached[len(reached) // 2] * known["seconds"])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks" / "results")
