"""docs/benchmark.md from what `measure_benchmark.py` has found."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from mpfedcl.core.files import write_atomically
from mpfedcl.methods import find_method
from mpfedcl.studies.statistics import paired_difference

PAGE = Path("docs/benchmark.md")
RANKS = Path("docs/results/benchmark.json")
"""The ranks alone, for docs/methods.md."""
NOTES = Path("docs/results/benchmark-notes.md")
"""What somebody has found out about the numbers; it ends the page."""
TARGET = 0.9
"""Of FedAvg's last accuracy, by seed: how soon it is reached."""
TITLES = {
    "mnist-label": "MNIST, label skew",
    "office10-label": "Office-10, label skew",
    "office10-feature": "Office-10, feature skew",
    "digit5-label": "Digit-5, label skew",
    "digit5-feature": "Digit-5, feature skew",
}
_HEAD = """# All methods, side by side

Written by `make benchmark` (`scripts/measure_benchmark.py`, which goes on where it stopped, and can
be given more sets, methods and seeds); not by hand. [methods.md](methods.md) says what they are.

- **Same work for all**: {rounds} rounds, the data set's other defaults. Only the learning rate is
  chosen for each method, among {rates}, on validation images of another draw of
  the data. Its other settings are its defaults: with more tuning it may do better (`mpfedcl tune`).
- **Last round, not best.** own: each client on its local test set; union: every client on the test images
  of all. Both by the predictor that a method is judged by. mean(std) over seeds, std with ddof = 1.
- **rank**: by mean on that test. In brackets the ranks that the seeds allow: a method is surely
  ahead of another only where 0 lies outside the 95 % interval of their paired difference.
- **MB**: what a client sends and receives in the whole run. **s**: seconds per round of all clients
  on two cores, without evaluation; a dash where it was not measured on an idle machine.
- **target**: virtual seconds until {target:.0%} of FedAvg's last accuracy is reached on the own
  test, the median over seeds, where clients differ in speed (`--systems.kind lognormal`); in brackets
  how many seeds reached it, where not all. Runs are looked at five times: it is coarse.

"""


def write_page(content: Mapping[str, Any], *, rounds: int, rates: Sequence[float]) -> None:
    """Write the page anew."""
    named = ", ".join(f"{rate:g}" for rate in rates)
    text = _HEAD.format(rounds=rounds, rates=named, target=TARGET)
    for title, part in content.items():
        if part["methods"]:
            text += f"## {TITLES.get(title, title)}\n\n{tabulate(part)}\n"
            text += "".join(
                f"- `{name}` is left out: {why}\n" for name, why in part["left_out"].items()
            )
            text += "\n"
    text += summarize(content)
    if NOTES.exists():
        text += f"\n{NOTES.read_text()}"
    write_atomically(PAGE, text.encode())
    ranks = {
        title: {
            test: rank({name: each[test] for name, each in part["methods"].items()})
            for test in ("local_test", "global_test")
        }
        for title, part in content.items()
        if part["methods"]
    }
    write_atomically(RANKS, (json.dumps(ranks, indent=1) + "\n").encode())


def tabulate(part: Mapping[str, Any]) -> str:
    """Return a situation's table, best on the local test set first."""
    methods = part["methods"]
    own, union = (
        {name: each[test] for name, each in methods.items()}
        for test in ("local_test", "global_test")
    )
    ranks = {"local_test": rank(own), "global_test": rank(union)}
    order = sorted(methods, key=lambda name: ranks["local_test"][name][0])
    columns = ["method", "lr", "local_test", "rank", "global_test", "rank", "MB", "s", "target"]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    for name in order:
        each = methods[name]
        seconds = part["seconds"].get(name)
        lines.append(
            [
                f"`{name}`",
                f"{each['lr']:g}" if find_method(name).trains else "-",
                show(each["local_test"]),
                show_rank(ranks["local_test"][name]),
                show(each["global_test"]),
                show_rank(ranks["global_test"][name]),
                f"{each['megabytes']:.1f}",
                "-" if seconds is None else f"{seconds:.2f}",
                time_to_target(each, methods.get("fedavg")),
            ]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rank(values: Mapping[str, Sequence[float | None]]) -> dict[str, tuple[int, int, int]]:
    """Return each method's rank by mean, and the first and last that the seeds allow."""
    means = {name: mean_of(numbers) for name, numbers in values.items()}
    found = {}
    for name, numbers in values.items():
        above = below = 0
        for other, theirs in values.items():
            difference = paired_difference(theirs, numbers) if other != name else None
            verdict = difference.verdict if difference is not None else ""
            above += verdict == "better"
            below += verdict == "worse"
        place = 1 + sum(mean > means[name] for mean in means.values())
        found[name] = (place, 1 + above, len(values) - below)
    return found


def mean_of(numbers: Sequence[float | None]) -> float:
    """Return the mean; a method without a number comes last."""
    known = [number for number in numbers if number is not None]
    return fmean(known) if known else -1.0


def show(numbers: Sequence[float | None]) -> str:
    """Return mean(std), or a dash."""
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return "-"
    return f"{fmean(known):.1f}({stdev(known):.1f})" if len(known) > 1 else f"{known[0]:.1f}"


def show_rank(ranks: tuple[int, int, int]) -> str:
    """Return the rank and the range of ranks that are possible."""
    place, first, last = ranks
    return f"{place} ({first}-{last})"


def time_to_target(each: Mapping[str, Any], average: Mapping[str, Any] | None) -> str:
    """Return the virtual seconds to the target, the median over seeds that reach it."""
    if average is None or not each["curves"]:
        return "-"
    reached = []
    for curve, goal in zip(each["curves"], average["local_test"], strict=True):
        times = [at for at, value in curve if value is not None and value >= TARGET * goal]
        reached += times[:1]
    if not reached:
        return "not reached"
    missed = f" ({len(reached)})" if len(reached) < len(each["curves"]) else ""
    return f"{median(reached):,.1f}{missed}"


def summarize(content: Mapping[str, Any]) -> str:
    """Return the mean rank of each method over the situations that have it."""
    places: dict[str, dict[str, list[int]]] = {}
    for part in content.values():
        for test in ("local_test", "global_test"):
            values = {name: each[test] for name, each in part["methods"].items()}
            for name, (place, _, _) in rank(values).items():
                places.setdefault(name, {"local_test": [], "global_test": []})[test].append(place)
    if not places:
        return ""
    order = sorted(places, key=lambda name: fmean(places[name]["local_test"]))
    lines = [
        ["method", "mean rank, own", "best to worst", "mean rank, union", "best to worst", "in"],
        ["---", *["---:"] * 5],
    ]
    for name in order:
        own, union = places[name]["local_test"], places[name]["global_test"]
        lines.append(
            [
                f"`{name}`",
                f"{fmean(own):.1f}",
                f"{min(own)} to {max(own)}",
                f"{fmean(union):.1f}",
                f"{min(union)} to {max(union)}",
                str(len(own)),
            ]
        )
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return (
        f"## Over all settings\n\nA mean of ranks hides where a method loses: see above.\n\n{table}"
    )
