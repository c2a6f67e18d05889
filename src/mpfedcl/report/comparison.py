"""Runs that differ only in their seed, as one group: curves, costs, differences and tables."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations, pairwise, zip_longest
from statistics import fmean
from typing import Any

from mpfedcl.core.json_files import Json
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_by_method
from mpfedcl.methods import PREDICTORS, TESTS, Test, find_method, is_built_in
from mpfedcl.report.figures import MethodStyle
from mpfedcl.report.run import RunRecords, find_worst_client_and_class
from mpfedcl.report.tables import cell, predictors_table
from mpfedcl.report.wording import (
    ONE_TEST,
    PREDICTOR_GROUPS,
    PREDICTOR_TITLES,
    choose_evenly,
    describe_mean,
    describe_server_model,
    deviation,
    explain_divergence,
    explain_marks,
    explain_prior,
    known_values,
    mean_and_deviation,
    title_tests,
)
from mpfedcl.rounds.metrics import pool_bins
from mpfedcl.rounds.record import training_seconds
from mpfedcl.studies.statistics import LEVEL, find_best, mark_best, paired_difference

MOST_CLIENTS = 40
"""Columns of a heat map with a client each; more clients are sorted into `PARTS`."""
PARTS = 20
_MOST_POINTS = 400
"""Points of a curve, so that a page stays small."""
_DEALT = re.compile(r"client-\d+")
"""Clients that a partition has made: with another seed, such a client is another one."""
_FAIRNESS_TITLES = {
    "worst": "worst client",
    "worst_decile": "worst tenth",
    "best_decile": "best tenth",
    "std": "std",
}


# Groups


def describe_seed_group(name: str, runs: Sequence[RunRecords], style: MethodStyle) -> Json:
    """Return curves and costs of runs of one name."""
    accuracy: Json = {test: {} for test in TESTS}
    for test in TESTS:
        for predictor in PREDICTORS:
            if curve := _mean_curve([_accuracy_by_round(run, test, predictor) for run in runs]):
                accuracy[test][predictor] = curve
    evaluated = {
        number for curves in accuracy.values() for each in curves.values() for number in each["x"]
    }
    return {
        "name": name,
        "style": style,
        "shared_test": all(run.has_shared_test for run in runs),
        "end": {test: [run.primary_metric(test) for run in runs] for test in TESTS},
        "diverged": [run.has_diverged for run in runs],
        "costs": [
            {"bytes": sum(run.bytes.values()), "seconds": training_seconds(run.seconds)}
            for run in runs
        ],
        "calibration": {test: _describe_calibration(runs, test) for test in TESTS},
        "judged_by": runs[0].predictors,
        "one_shot": runs[0].is_one_shot,
        "runs": runs,
        "seeds": [run.experiment.seed for run in runs],
        "curves": {
            "accuracy": accuracy,
            "loss": _mean_curve([{line.round: line.loss for line in run.rounds} for run in runs]),
        },
        "costs_by_round": _describe_round_costs(runs, sorted(evaluated)),
        "seconds": _mean_cost([run.seconds for run in runs]),
        "bytes": _mean_cost([run.bytes for run in runs]),
    }


def _accuracy_by_round(run: RunRecords, test: Any, predictor: Any) -> dict[int, float | None]:
    """Return a predictor's accuracy in the rounds in which it was evaluated."""
    tables = {line.round: line.accuracy.get(test, {}) for line in run.rounds if line.accuracy}
    return {number: table[predictor] for number, table in tables.items() if predictor in table}


def _mean_curve(several: Sequence[dict[int, float | None]]) -> Json | None:
    """Return mean and deviation in the rounds that all runs have; of many rounds in some.

    `lost` counts the runs without a value there: they diverged.
    """
    known = {
        number: known_values([each[number] for each in several])
        for number in several[0]
        if all(number in each for each in several)
    }
    common = [number for number, values in known.items() if values]
    if not common:
        return None
    chosen = [common[place] for place in choose_evenly(len(common), _MOST_POINTS)]
    values = [known[number] for number in chosen]
    curve: Json = {"x": chosen, "mean": [fmean(each) for each in values]}
    if len(several) > 1:
        curve["std"] = [deviation(each) or 0.0 for each in values]
        lost = [len(several) - len(each) for each in values]
        curve |= {"lost": lost} if any(lost) else {}
    return curve


def _mean_cost(runs: Sequence[Mapping[str, float]]) -> Json:
    """Return the cost of a run, part by part, as the mean over runs."""
    total = Counter[str]()
    for run in runs:
        total.update(run)
    return {part: cost / len(runs) for part, cost in total.items()}


def _describe_round_costs(runs: Sequence[RunRecords], rounds: Sequence[int]) -> Json:
    """Return megabytes and virtual seconds by the end of some rounds, as the mean over runs.

    Virtual seconds are left out if a run has no virtual clock.
    """
    costs: dict[str, list[dict[int, float | None]]] = {"megabytes": [], "virtual_seconds": []}
    for run in runs:
        numbers = [line.round for line in run.rounds]
        sent = accumulate(sum(line.bytes.values()) / 1e6 for line in run.rounds)
        clock = (line.virtual_seconds for line in run.rounds)
        costs["megabytes"].append(dict(zip(numbers, sent, strict=True)))
        costs["virtual_seconds"].append(dict(zip(numbers, clock, strict=True)))
    found: Json = {"round": rounds}
    for name, several in costs.items():
        values = [known_values([each.get(number) for each in several]) for number in rounds]
        if all(len(each) == len(runs) for each in values):
            found[name] = [fmean(each) for each in values]
    return found


def _describe_calibration(runs: Sequence[RunRecords], test: Test) -> Json | None:
    """Return calibration error and bins of runs on a test set; None if they have none."""
    last = [run.rounds[-1] for run in runs if run.rounds]
    bins = pool_bins((line.calibration_bins or {}).get(test, []) for line in last)
    errors = [(line.calibration_error or {}).get(test) for line in last]
    return {"error": mean_and_deviation(errors), "bins": bins} if bins else None


# Differences between groups


def find_ranking_obstacles(groups: Sequence[Json]) -> list[str]:
    """Return why groups cannot be ranked, each reason in a few words."""
    found = []
    tasks, encoders = set(), set()
    for experiment in (run.experiment for group in groups for run in group["runs"]):
        data = (experiment.dataset, experiment.partition)
        tasks.add(repr([experiment.clients, *(part.model_dump_json() for part in data)]))
        if not _has_own_encoder(experiment):
            encoders.add(experiment.encoder.model_dump_json())
    if len(tasks) > 1:
        found.append("data, clients or partitions differ")
    if len(encoders) > 1:
        found.append("encoders differ")
    if len({tuple(sorted(group["seeds"])) for group in groups}) > 1:
        found.append("seeds differ")
    # A one-shot method is complete after one round.
    ends: dict[str, list[int]] = {
        group["name"]: sorted({run.last_evaluated_round for run in group["runs"]})
        for group in groups
        if not group["one_shot"]
    }
    if len({number for numbers in ends.values() for number in numbers}) > 1:
        words = [
            f"{name} {numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
            for name, numbers in ends.items()
        ]
        found.append(f"the last evaluated rounds differ ({', '.join(words)})")
    return found


def _has_own_encoder(experiment: Experiment) -> bool:
    """Return whether the encoder is the method's own default, and so a part of the method."""
    if not is_built_in(experiment.method):
        return False
    own = find_method(experiment.method).defaults.get("encoder__name")
    return own is not None and own == experiment.encoder.name


def describe_comparison(groups: Sequence[Json], *, is_paired: bool) -> Json:
    """Return paired differences to the first group and to the best, and accuracy per client.

    Groups that share neither data nor seeds have no pairs.
    """
    return {
        "differences": _describe_differences(groups) if is_paired and len(groups) > 1 else None,
        "heat": _describe_heat(groups) if len(groups) > 1 else None,
    }


def _accuracy_by_seed(groups: Sequence[Json], test: str) -> dict[str, list[float | None]]:
    """Return the primary metric of each group, by its place, for the seeds of all groups."""
    found = {}
    for place, group in enumerate(groups):
        by_seed = dict(zip(group["seeds"], group["end"][test], strict=True))
        found[str(place)] = [by_seed.get(seed) for seed in _all_seeds(groups)]
    return found


def _all_seeds(groups: Sequence[Json]) -> list[int]:
    return sorted({seed for group in groups for seed in group["seeds"]})


def list_differences(groups: Sequence[Json]) -> list[tuple[Any, ...]]:
    """Return the paired difference of each two groups on each test set.

    A row has test set, first and second group, pairs, mean, the ends of the interval, its level
    and the verdict.
    """
    rows: list[tuple[Any, ...]] = []
    for test in TESTS:
        values = _accuracy_by_seed(groups, test)
        for one, other in combinations(values, 2):
            if found := paired_difference(values[one], values[other]):
                names = (groups[int(one)]["name"], groups[int(other)]["name"])
                interval = (found.mean, found.low, found.high, LEVEL, found.verdict)
                rows.append((test, *names, found.pairs, *interval))
    return rows


def _describe_differences(groups: Sequence[Json]) -> Json:
    tests: Json = {}
    for test in TESTS:
        values = _accuracy_by_seed(groups, test)
        references = {"first": "0", "best": find_best(values)}
        tests[test] = {
            name: {"reference": int(other), "rows": _difference_rows(values, other, groups)}
            for name, other in references.items()
            if other is not None
        }
    return {"level": 100 * LEVEL, "seeds": _all_seeds(groups), "tests": tests}


def _difference_rows(
    values: dict[str, list[float | None]], other: str, groups: Sequence[Json]
) -> list[Json]:
    """Return mean, interval and each seed's difference of each group but the reference."""
    rows = []
    for name, numbers in values.items():
        if name == other:
            continue
        found = paired_difference(numbers, values[other])
        pairs = zip(numbers, values[other], strict=True)
        lost = [*_diverged_seeds(groups[int(name)]), *_diverged_seeds(groups[int(other)])]
        rows.append({
            "group": int(name),
            **{end: getattr(found, end, None) for end in ("mean", "low", "high")},
            "seeds": [None if x is None or y is None else x - y for x, y in pairs],
            "lost": [seed in lost for seed in _all_seeds(groups)],
        })  # fmt: skip
    return rows


def _diverged_seeds(group: Json) -> list[int]:
    return [seed for seed, gone in zip(group["seeds"], group["diverged"], strict=True) if gone]


def _describe_heat(groups: Sequence[Json]) -> Json | None:
    """Return rows and columns of accuracy per client; None if runs list different clients."""
    by_group = []
    for group in groups:
        by_client: dict[str, list[float | None]] = {}
        for run in group["runs"]:
            clients = run.described["clients"]
            if run.num_clients > len(clients):
                return None
            for client in clients:
                by_client.setdefault(client["name"], []).append(client["accuracy"])
        by_group.append(by_client)
    found = client_grid(by_group)
    return found if len(found["columns"]) > 1 else None


def client_grid(by_group: Sequence[Mapping[str, Sequence[float | None]]]) -> Json:
    """Return accuracy per client, a row per group, the worst first: values, columns, about.

    A client is a column if it is the same one for every seed. If a partition makes the clients
    again for each seed, or there are too many, the clients of each run are sorted from worst to
    best, put into at most `PARTS` parts of equal size, and these are averaged over seeds.
    """
    clients = list(dict.fromkeys(client for row in by_group for client in row))
    seeds = max((len(each) for row in by_group for each in row.values()), default=0)
    dealt = all(_DEALT.fullmatch(client) for client in clients)
    if len(clients) <= MOST_CLIENTS and (seeds < 2 or not dealt):
        means = [{c: _mean_or_nan(values) for c, values in row.items()} for row in by_group]
        served = {c: _mean_or_nan([row.get(c) for row in means]) for c in clients}
        ordered = sorted(clients, key=lambda client: (math.isnan(served[client]), served[client]))
        return {
            "values": [[row.get(each, math.nan) for each in ordered] for row in means],
            "columns": ordered,
            "about": "clients from worst to best by the mean over methods and seeds",
        }
    parts = min(PARTS, len(clients))
    values = []
    for row in by_group:
        runs = [sorted_parts(run, parts) for run in zip_longest(*row.values())]
        values.append([_mean_or_nan(column) for column in zip(*runs, strict=True)])
    if len(clients) <= PARTS:
        columns = ["worst", *(str(place) for place in range(2, parts)), "best"][-parts:]
        about = "clients of each run from worst to best, mean over seeds"
    else:
        step = 100 // parts
        columns = [f"{step * part}-{step * (part + 1)} %" for part in range(parts)]
        about = f"clients of each run from worst to best in {parts} equal parts, mean over seeds"
    return {"values": values, "columns": columns, "about": about}


def sorted_parts(values: Sequence[float | None], parts: int = PARTS) -> list[float]:
    """Return the means of equal parts of the sorted numbers, from the lowest; NaN of none."""
    known = sorted(known_values(values))
    ends = [len(known) * part // parts for part in range(parts + 1)]
    return [_mean_or_nan(known[start:end]) for start, end in pairwise(ends)]


def _mean_or_nan(values: Sequence[float | None]) -> float:
    known = [value for value in known_values(values) if not math.isnan(value)]
    return fmean(known) if known else math.nan


# Tables


def run_predictors_table(run: RunRecords) -> Json:
    """Return all predictors of one run on both test sets."""
    values = {test: {each: run.value(test, each) for each in PREDICTORS} for test in TESTS}
    last = run.last_evaluated
    caption = "Accuracy in %" + (f" in round {last.round}, the last one evaluated" if last else "")
    table = predictors_table(caption, values, run.predictors)
    if last is not None:
        known = run.partition.clients if run.partition else {}
        spread = last.accuracy_spread.to_json() if last.accuracy_spread else None
        told = describe_mean(last.accuracy_per_client, known, spread)
        if "not evaluated" in told:
            table["notes"].append(f"Personalized models: {told}.")
        if run.is_network and last.accuracy:
            table["notes"] += describe_server_model(last.accuracy, run.predictors)
    return table


def comparison_tables(groups: Sequence[Json], obstacles: Sequence[str]) -> list[Json]:
    """Return the primary metrics of several groups, their fairness, then all predictors.

    With obstacles to a ranking none is marked as best, and the obstacles are named.
    """
    return [_primary_table(groups, obstacles), _fairness_table(groups), *_predictor_tables(groups)]


def _primary_table(groups: Sequence[Json], obstacles: Sequence[str]) -> Json:
    titles = title_tests(groups)
    rows = []
    for group in groups:
        predictors = dict.fromkeys(PREDICTOR_TITLES[group["judged_by"][test]] for test in titles)
        rows.append([cell(group["name"], note="; ".join(predictors))])
    for test in titles:
        is_ranked = not obstacles and len(groups) > 1
        marks = mark_best(_accuracy_by_seed(groups, test)) if is_ranked else {}
        for place, group in enumerate(groups):
            text = mean_and_deviation(group["end"][test])
            rows[place].append(cell(text, mark=marks.get(str(place))))
    for row, group in zip(rows, groups, strict=True):
        row.append(cell(_megabytes(sum(group["bytes"].values()))))
        row.append(cell(f"{training_seconds(group['seconds']):,.1f}"))
    counts = {len(group["seeds"]) for group in groups}
    number = f"{counts.pop()}" if len(counts) == 1 else "its"
    over = "one seed" if number == "1" else f"mean(std) over {number} seeds"
    return {
        "caption": f"Accuracy in % of the last round: {over}, each method by its primary metric",
        "columns": ["method", *titles.values(), "MB sent", "seconds"],
        "rows": rows,
        "notes": _primary_notes(groups, obstacles),
    }


def _primary_notes(groups: Sequence[Json], obstacles: Sequence[str]) -> list[str]:
    num_seeds = len(_all_seeds(groups))
    predictors = [each for group in groups for each in group["judged_by"].values()]
    encoders = {group["name"]: group["runs"][0].experiment.encoder.name for group in groups}
    one_shot = [group["name"] for group in groups if group["one_shot"]]
    notes = [
        ONE_TEST if len(title_tests(groups)) == 1 else "",
        "(std): standard deviation over seeds, ddof 1." if num_seeds > 1 else "",
        explain_divergence({group["name"]: _diverged_seeds(group) for group in groups}),
        explain_marks(num_seeds) if len(groups) > 1 and not obstacles else "",
        f"None is marked as best: {'; '.join(obstacles)}." if obstacles else "",
        f"One-shot, without rounds of training: {', '.join(one_shot)}." if one_shot else "",
        explain_prior(predictors),
        "MB and seconds: a whole run without evaluation and checkpoints.",
    ]
    if len(set(encoders.values())) > 1:
        named = describe_by_method((name, each or "none") for name, each in encoders.items())
        notes.insert(-1, f"The methods use different encoders: {named}.")
    return [note for note in notes if note]


def _megabytes(count: float) -> str:
    """Return megabytes with one decimal, and more if one would read as nothing."""
    return f"{count / 1e6:,.1f}" if not 0 < count < 50_000 else f"{count / 1e6:.3f}"


def _fairness_table(groups: Sequence[Json]) -> Json:
    """Return the worst client, tenths, spread and the worst class of each group."""
    rows = []
    for group in groups:
        runs = [run.described for run in group["runs"]]
        worst = [find_worst_client_and_class(run) for run in runs]
        measured = [run["fairness"] or {} for run in runs]
        classes = [each["accuracy"] if each else None for _, each in worst]
        names = [
            ", ".join(dict.fromkeys(each["name"] for each in column if each))
            for column in zip(*worst, strict=True)
        ]
        jain = known_values([each.get("jain") for each in measured])
        numbers = [
            mean_and_deviation([each.get(key) for each in measured]) for key in _FAIRNESS_TITLES
        ]
        rows.append([
            cell(group["name"]),
            cell(numbers[0], note=names[0]),
            *(cell(each) for each in numbers[1:]),
            cell(f"{fmean(jain):.3f}" if jain else "-"),
            cell(mean_and_deviation(classes), note=names[1]),
        ])  # fmt: skip
    return {
        "caption": "Fairness: accuracy in % over clients, local test sets, primary metric",
        "columns": ["method", *_FAIRNESS_TITLES.values(), "Jain's index", "worst class"],
        "rows": rows,
        "notes": [
            "worst tenth: mean of the worst tenth of the clients, at least one; std: standard "
            "deviation over clients (ddof 1); Jain's index: 1 if all clients have the same "
            "accuracy."
        ],
    }


def _predictor_tables(groups: Sequence[Json]) -> list[Json]:
    """Return all predictors on each test set: those without a label prior, then those with one."""
    tables = []
    for test, title in title_tests(groups).items():
        for name, predictors in PREDICTOR_GROUPS.items():
            rows = []
            for group in groups:
                row = [cell(group["name"])]
                for predictor in predictors:
                    values = [run.value(test, predictor) for run in group["runs"]]
                    is_primary = predictor == group["judged_by"][test]
                    row.append(cell(mean_and_deviation(values), strong=is_primary))
                rows.append(row)
            notes = ["*: the primary metric on this test set.", explain_prior(predictors)]
            tables.append({
                "caption": f"Predictors {name} on the {title}, accuracy in % of the last round",
                "later": True,
                "columns": ["method", *(PREDICTOR_TITLES[predictor] for predictor in predictors)],
                "rows": rows,
                "notes": [note for note in notes if note],
            })  # fmt: skip
    return tables
