"""What a report says of several methods beyond means: differences, clients, costs, calibration."""

from collections.abc import Sequence

from mpfedcl.core.json_files import Json
from mpfedcl.methods import TESTS, Test
from mpfedcl.report.comparison_content import client_grid
from mpfedcl.report.number_formatting import finite_values, mean, rounded
from mpfedcl.report.run_description import RunRecords, find_worst_client_and_class
from mpfedcl.report.tables import FAIRNESS_NOTE, FAIRNESS_TITLES, mean_and_deviation
from mpfedcl.rounds.calibration_error import pool_bins
from mpfedcl.rounds.clock import training_seconds
from mpfedcl.studies.statistics import LEVEL, find_best, paired_difference


def describe_comparison(groups: Sequence[Json], runs: Sequence[Json], *, is_paired: bool) -> Json:
    """Return paired differences to the first group and to the best, and accuracy per client.

    Groups that share neither data nor seeds have no pairs.
    """
    return {
        "differences": _describe_differences(groups) if is_paired and len(groups) > 1 else None,
        "heat": _describe_clients(groups, runs) if len(groups) > 1 else None,
    }


def _describe_differences(groups: Sequence[Json]) -> Json:
    seeds = sorted({seed for group in groups for seed in group["seeds"]})
    tests: Json = {}
    for test in TESTS:
        values = {}
        for place, group in enumerate(groups):
            found = dict(zip(group["seeds"], group["end"][test], strict=True))
            values[str(place)] = [found.get(seed) for seed in seeds]
        best = find_best(values)
        lost = {
            str(place): [s for s, gone in zip(g["seeds"], g["diverged"], strict=True) if gone]
            for place, g in enumerate(groups)
        }
        references = {"first": "0", "best": best}
        tests[test] = {
            name: {"reference": int(other), "rows": _rows(values, other, seeds, lost)}
            for name, other in references.items()
            if other is not None
        }
    return {"level": 100 * LEVEL, "seeds": seeds, "tests": tests}


def _rows(
    values: dict[str, list[float | None]], other: str, seeds: list[int], lost: dict[str, list[int]]
) -> list[Json]:
    """Return a row for each group but the reference: mean, interval, and each seed's difference."""
    rows = []
    for name, numbers in values.items():
        if name == other:
            continue
        found = paired_difference(numbers, values[other])
        pairs = zip(numbers, values[other], strict=True)
        rows.append({
            "group": int(name),
            "mean": rounded(found.mean if found else None, 3),
            "low": rounded(found.low if found else None, 3),
            "high": rounded(found.high if found else None, 3),
            "seeds": [None if None in (x, y) else rounded(x - y, 3) for x, y in pairs],  # type: ignore[operator]
            "lost": [seed in lost[name] or seed in lost[other] for seed in seeds],
        })  # fmt: skip
    return rows


def _describe_clients(groups: Sequence[Json], runs: Sequence[Json]) -> Json | None:
    """Return a heat map's rows and columns; many clients are sorted into equal parts."""
    methods: Json = {}
    if any(each["population"] > len(each["clients"]) for each in runs):
        # In each run others are listed, those that took part last.
        return None
    for place, group in enumerate(groups):
        by_client: dict[str, list[float | None]] = {}
        for run in group["runs"]:
            for client in runs[run]["clients"]:
                by_client.setdefault(client["name"], []).append(client["accuracy"])
        methods[str(place)] = {"accuracy_per_client": by_client}
    found = client_grid({"methods": methods})
    if len(found.columns) < 2:
        return None
    values = [[rounded(each) for each in row] for row in found.rows.values()]
    return {"columns": found.columns, "about": found.about, "values": values}


def describe_cost(run: RunRecords) -> Json:
    """Return what one run has sent and how long it has trained."""
    seconds: dict[str, float] = {}
    for line in run.rounds:
        for phase, value in line.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    sent = sum(sum(line.bytes.values()) for line in run.rounds)
    return {"bytes": sent, "seconds": rounded(training_seconds(seconds), 3)}


def describe_calibration(runs: Sequence[RunRecords], test: Test) -> Json | None:
    """Return calibration error and bins of runs on a test; None where they have none."""
    last = [run.rounds[-1] for run in runs if run.rounds]
    bins = pool_bins((line.calibration_bins or {}).get(test, []) for line in last)
    errors = [(line.calibration_error or {}).get(test) for line in last]
    if not bins:
        return None
    return {"error": mean_and_deviation(errors), "bins": bins}


def fairness_table(groups: Sequence[Json], content: Sequence[Json]) -> Json:
    """Return who is served worst by each group: clients, tenths, spread, and the worst class."""
    rows = []
    for group in groups:
        runs = [content[place] for place in group["runs"]]
        worst = [find_worst_client_and_class(run) for run in runs]
        measured = [run["fairness"] or {} for run in runs]
        classes = [each["accuracy"] if each else None for _, each in worst]
        names = [
            ", ".join(dict.fromkeys(each["name"] for each in column if each))
            for column in zip(*worst, strict=True)
        ]
        jain = mean(finite_values([each.get("jain") for each in measured]))
        numbers = [
            mean_and_deviation([each.get(key) for each in measured]) for key in FAIRNESS_TITLES
        ]
        rows.append([
            table_cell(group["name"]),
            table_cell(numbers[0], note=names[0]),
            *(table_cell(each) for each in numbers[1:]),
            table_cell("-" if jain is None else f"{jain:.3f}"),
            table_cell(mean_and_deviation(classes), note=names[1]),
        ])  # fmt: skip
    return {
        "caption": "Who is served worst: accuracy in % on the clients' local test sets",
        "columns": ["method", *FAIRNESS_TITLES.values(), "Jain's index", "worst class"],
        "rows": rows,
        "notes": [FAIRNESS_NOTE],
    }


def table_cell(text: str, *, mark: str | None = None, note: str | None = None) -> Json:
    """Return a cell of a page's table."""
    return {"text": text} | ({"mark": mark} if mark else {}) | ({"note": note} if note else {})
