"""The content of a report: groups of runs that differ only in their seed, tables and sections."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate, compress
from pathlib import Path
from statistics import fmean
from typing import Any

from mpfedcl.core.errors import enumerate_names
from mpfedcl.core.json_files import Json
from mpfedcl.experiment import CHOSEN_BY_A_RUN, RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.experiment.descriptions import describe_budget, describe_by_method, describe_data
from mpfedcl.experiment.names import metric_sign, metric_title
from mpfedcl.methods import PREDICTORS, TESTS, Test, find_method, is_built_in
from mpfedcl.report.figures import MethodStyle, style_of
from mpfedcl.report.result_folders import ResultFolder, find_tuning_files
from mpfedcl.report.run import (
    RunRecords,
    add_costs,
    describe_run_prototypes,
    describe_settings,
    find_worst_client_and_class,
)
from mpfedcl.report.tables import METRIC_NOTE, cell, metrics_table, predictors_table
from mpfedcl.report.tuning import describe_tuning
from mpfedcl.report.wording import (
    ONE_TEST,
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
    metric_digits,
    name_seeds,
    title_tests,
)
from mpfedcl.rounds.metrics import MetricValues
from mpfedcl.rounds.record import training_seconds
from mpfedcl.studies.statistics import mark_best

_MOST_DETAILED = 12
"""Runs that a comparison shows in detail: one per method."""
MOST_CLIENTS = 40
"""Columns of a heat map with a client each."""
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
OnRun = Callable[[str], None]
"""Called with the name of each run before it is read."""


# Sections


def build_document(folders: Sequence[ResultFolder], on_run: OnRun = lambda _: None) -> Json:
    """Return the document: a section per folder, and one of all runs if there are several."""
    # Each run is read once, however many sections show it.
    runs: dict[Path, RunRecords] = {}
    for path in (path for folder in folders for path in folder.runs):
        if path.resolve() not in runs:
            on_run(path.name)
            runs[path.resolve()] = RunRecords.read(path)
    sections = [
        _describe_folder(folder, [runs[path.resolve()] for path in folder.runs])
        for folder in folders
    ]
    num_folders = sum(bool(folder.runs) for folder in folders)
    if num_folders > 1:
        about = (
            f"{len(runs)} runs from {num_folders} folders; runs that differ only in their seed are "
            "one group. Each folder has its own section below."
        )
        together = {"kind": "together", "title": "All runs together", "about": [about]}
        sections.insert(0, compare_runs(list(runs.values())) | together)
    first = sections[0]["title"]
    return {
        "title": first if len(sections) == 1 else f"{len(folders)} results of mpfedcl",
        "version": version("mpfedcl"),
        "sections": sections,
    }


def compare_runs(runs: Sequence[RunRecords]) -> Json:
    """Return groups and tables of runs as a section."""
    groups = _describe_groups(runs)
    obstacles = find_ranking_obstacles(groups)
    return {
        "kind": "comparison",
        "about": _describe_setup(runs),
        "groups": groups,
        "tables": comparison_tables(groups, obstacles),
        "is_ranked": not obstacles,
    }


def _describe_folder(folder: ResultFolder, runs: Sequence[RunRecords]) -> Json:
    if folder.kind == "tuning":
        return describe_tuning(find_tuning_files(folder.path)) | {"folder": str(folder.path)}
    if folder.kind == "run":
        return describe_single_run(runs[0]) | {"folder": str(folder.path)}
    section = compare_runs(runs)
    datasets = ", ".join(dict.fromkeys(each.data[0] for each in runs))
    section["title"] = f"{len(section['groups'])} methods on {datasets}"
    if folder.left_out:
        names = enumerate_names(folder.left_out)
        section["about"].append(f"Left out, because no round is done yet: {names}.")
    # Of each method the first seed.
    firsts = [group["runs"][0] for group in section["groups"][:_MOST_DETAILED]]
    details = [_describe_in_detail(each) for each in firsts]
    return section | {"folder": str(folder.path), "details": details}


def describe_single_run(run: RunRecords) -> Json:
    """Return one run as a section."""
    return {
        "kind": "run",
        "title": f"{run.method_name} on {run.data[0]}",
        "about": _describe_setup([run]),
        "groups": _describe_groups([run]),
        "tables": [run_predictors_table(run), *_tables_of_metrics(run)],
        "details": [_describe_in_detail(run)],
    }


def _describe_in_detail(run: RunRecords) -> Json:
    return run.described | {
        "map": describe_run_prototypes(run),
        "settings": describe_settings(run),
    }


def _describe_setup(runs: Sequence[RunRecords]) -> list[str]:
    splits = (
        (
            each.method_name,
            ", ".join(
                describe_data(each.experiment, {"network": each.is_network}, with_seed=False)
            ),
        )
        for each in runs
    )
    trained = [each for each in runs if not each.is_one_shot]
    effort = ["one-shot"]
    if trained:
        rounds = ((each.method_name, f"{each.experiment.rounds} rounds") for each in trained)
        rates = ((each.method_name, f"{each.experiment.train.lr:g}") for each in trained)
        effort = [describe_by_method(rounds), f"learning rate {describe_by_method(rates)}"]
    # A run that has only begun may not say how many clients it has.
    populations = [
        (each.method_name, f"{each.num_clients:,} clients") for each in runs if each.num_clients
    ]
    words = [
        describe_by_method(splits),
        describe_by_method(populations or [("", "0 clients")]),
        *effort,
        name_seeds(sorted({each.experiment.seed for each in runs})),
    ]
    about = ["; ".join(words) + "."]
    unfinished = [
        f"{each.name} (round {each.rounds[-1].round} of {each.experiment.rounds})"
        for each in runs
        if each.summary is None
    ]
    if unfinished:
        about.append(
            f"Not finished: {enumerate_names(unfinished)}. Values are of the rounds so far."
        )
    budgets = {describe_budget(told): None for each in runs if (told := each.privacy)}
    about += [f"Differential privacy: {each}." for each in budgets]
    damaged = sum(each.damaged for each in runs)
    if damaged:
        about.append(f"{damaged} damaged lines of rounds.jsonl are left out.")
    return about


# Groups


def _describe_groups(runs: Sequence[RunRecords]) -> list[Json]:
    """Return groups of runs that differ only in their seed."""
    alike: dict[tuple[str, int], list[RunRecords]] = {}
    for run in runs:
        # Engine, workers and trackers do not change the result.
        changes = {**CHOSEN_BY_A_RUN, **RESULT_NEUTRAL_SETTINGS, "seed": 0}
        settings, copy = run.experiment.replace(**changes).to_toml(), 0
        # The same seed twice is the same run twice, not a second measurement.
        while any(
            other.experiment.seed == run.experiment.seed
            for other in alike.get((settings, copy), ())
        ):
            copy += 1
        alike.setdefault((settings, copy), []).append(run)
    names = _name_groups([members[0] for members in alike.values()])
    seen = Counter[str]()
    groups = []
    for name, members in zip(names, alike.values(), strict=True):
        method = members[0].method_name
        groups.append(_describe_seed_group(name, members, style_of(method, seen[method])))
        seen[method] += 1
    return groups


def _name_groups(records: Sequence[RunRecords]) -> list[str]:
    """Return names of groups: the method, and the folder if methods repeat."""
    methods = [each.method_name for each in records]
    if len(set(methods)) == len(methods):
        return methods
    names = [f"{method} ({each.name})" for method, each in zip(methods, records, strict=True)]
    if len(set(names)) == len(names):
        return names
    return [f"{method} ({each.path})" for method, each in zip(methods, records, strict=True)]


def _describe_seed_group(name: str, runs: Sequence[RunRecords], style: MethodStyle) -> Json:
    """Return curves and costs of runs of one name."""
    accuracy: Json = {test: {} for test in TESTS}
    for test in TESTS:
        for predictor in PREDICTORS:
            if curve := _mean_curve([_accuracy_by_round(run, test, predictor) for run in runs]):
                accuracy[test][predictor] = curve
    return {
        "name": name,
        "style": style,
        "shared_test": all(run.has_shared_test for run in runs),
        "metric": runs[0].experiment.metric,
        "end": {test: [run.primary_metric(test) for run in runs] for test in TESTS},
        "diverged": [run.has_diverged for run in runs],
        "judged_by": runs[0].predictors,
        "one_shot": runs[0].is_one_shot,
        "runs": runs,
        "seeds": [run.experiment.seed for run in runs],
        "curves": {
            "accuracy": accuracy,
            "metric": {
                test: _mean_curve([_metric_by_round(run, test) for run in runs]) for test in TESTS
            },
            "loss": _mean_curve([{line.round: line.loss for line in run.rounds} for run in runs]),
            "megabytes": _mean_curve([_megabytes_by_round(run) for run in runs]),
            "virtual_seconds": _mean_curve([_clock_by_round(run) for run in runs]),
        },
        "seconds": _mean_cost([run.seconds for run in runs]),
        "bytes": _mean_cost([run.bytes for run in runs]),
    }


def _accuracy_by_round(run: RunRecords, test: Any, predictor: Any) -> dict[int, float | None]:
    """Return a predictor's accuracy in the rounds in which it was evaluated."""
    tables = {line.round: line.accuracy.get(test, {}) for line in run.rounds if line.accuracy}
    return {number: table[predictor] for number, table in tables.items() if predictor in table}


def _metric_by_round(run: RunRecords, test: Any) -> dict[int, float | None]:
    """Return the primary metric in the rounds that have it; none if it is accuracy."""
    return {line.round: line.metric.get(test) for line in run.rounds if line.metric}


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


def _megabytes_by_round(run: RunRecords) -> dict[int, float | None]:
    """Return the megabytes sent by the end of each round."""
    sent = accumulate(sum(line.bytes.values()) / 1e6 for line in run.rounds)
    return {line.round: megabytes for line, megabytes in zip(run.rounds, sent, strict=True)}


def _clock_by_round(run: RunRecords) -> dict[int, float | None]:
    clock = {line.round: line.virtual_seconds for line in run.rounds}
    return {number: seconds for number, seconds in clock.items() if seconds is not None}


def _mean_cost(runs: Sequence[Mapping[str, float]]) -> Json:
    """Return the cost of a run, part by part, as the mean over runs."""
    return {part: cost / len(runs) for part, cost in add_costs(runs).items()}


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
    if len({group["metric"] for group in groups}) > 1:
        found.append("metrics differ")
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


def primary_by_seed(groups: Sequence[Json], test: Test) -> dict[str, list[float | None]]:
    """Return the primary metric of each group by its name, for the seeds of all groups.

    Larger is better: values of which smaller ones are better are negative.
    """
    seeds = _all_seeds(groups)
    ends = {
        group["name"]: {
            seed: value if value is None else metric_sign(group["metric"]) * value
            for seed, value in zip(group["seeds"], group["end"][test], strict=True)
        }
        for group in groups
    }
    return {name: [by_seed.get(seed) for seed in seeds] for name, by_seed in ends.items()}


def _all_seeds(groups: Sequence[Json]) -> list[int]:
    return sorted({seed for group in groups for seed in group["seeds"]})


# Accuracy per client


def describe_heat(groups: Sequence[Json]) -> Json | None:
    """Return accuracy per client, a row per group: values, and columns with the worst first.

    None if there are too many clients, or if a partition makes other ones for each seed.
    """
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
    clients = list(dict.fromkeys(client for row in by_group for client in row))
    is_dealt = len(_all_seeds(groups)) > 1 and all(map(_DEALT.fullmatch, clients))
    if is_dealt or not 1 < len(clients) <= MOST_CLIENTS:
        return None
    means = [{c: _mean_or_nan(values) for c, values in row.items()} for row in by_group]
    served = {c: _mean_or_nan([row.get(c) for row in means]) for c in clients}
    ordered = sorted(clients, key=lambda client: (math.isnan(served[client]), served[client]))
    values = [[row.get(each, math.nan) for each in ordered] for row in means]
    return {"values": values, "columns": ordered}


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
    return [
        _primary_table(groups, obstacles),
        *_metric_tables(groups),
        _fairness_table(groups),
        *_predictor_tables(groups),
    ]


def _primary_table(groups: Sequence[Json], obstacles: Sequence[str]) -> Json:
    titles = title_tests(groups)
    rows = []
    for group in groups:
        predictors = dict.fromkeys(PREDICTOR_TITLES[group["judged_by"][test]] for test in titles)
        rows.append([cell(group["name"], note="; ".join(predictors))])
    for test in titles:
        is_ranked = not obstacles and len(groups) > 1
        marks = mark_best(primary_by_seed(groups, test)) if is_ranked else {}
        for row, group in zip(rows, groups, strict=True):
            text = mean_and_deviation(group["end"][test], metric_digits(group["metric"]))
            row.append(cell(text, mark=marks.get(group["name"])))
    for row, group in zip(rows, groups, strict=True):
        row.append(cell(_megabytes(sum(group["bytes"].values()))))
        row.append(cell(f"{training_seconds(group['seconds']):,.1f}"))
    counts = {len(group["seeds"]) for group in groups}
    number = f"{counts.pop()}" if len(counts) == 1 else "its"
    over = "one seed" if number == "1" else f"mean(std) over {number} seeds"
    titles_of = dict.fromkeys(metric_title(group["metric"]) for group in groups)
    measured = "; ".join(f"{title[0].upper()}{title[1:]}" for title in titles_of)
    return {
        "caption": f"{measured} of the last round: {over}, each method by its primary predictor",
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
        explain_divergence(
            {group["name"]: compress(group["seeds"], group["diverged"]) for group in groups}
        ),
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


def _tables_of_metrics(run: RunRecords) -> list[Json]:
    """Return the table of all metrics of one run; none if the run has none."""
    if (found := run.metrics) is None:
        return []
    shared = run.has_shared_test and run.predictors["local_test"] == run.predictors["global_test"]
    return [metrics_table(found, run.experiment.metric, shared=shared)]


def _metric_tables(groups: Sequence[Json]) -> list[Json]:
    """Return all metrics of each group, a row each, on each test set; none without metrics."""
    names = {name: None for g in groups for run in g["runs"] for name in _metrics_on(run)}
    if not names:
        return []
    tables = []
    for test, title in title_tests(groups).items():
        rows = []
        for group in groups:
            row = [cell(group["name"])]
            for name in names:
                values = [_metrics_on(run, test).get(name) for run in group["runs"]]
                text = mean_and_deviation(values, metric_digits(name))
                row.append(cell(text, strong=name == group["metric"]))
            rows.append(row)
        tables.append({
            "caption": f"Metrics of the primary predictors on the {title}, last round",
            "later": True,
            "columns": ["method", *map(metric_title, names)],
            "rows": rows,
            "notes": [METRIC_NOTE],
        })  # fmt: skip
    return tables


def _metrics_on(run: RunRecords, test: Test = "local_test") -> MetricValues:
    return (run.metrics or {}).get(test, {})


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
    """Return all predictors, a row each, on each test set."""
    tables = []
    for test, title in title_tests(groups).items():
        rows = []
        for predictor, name in PREDICTOR_TITLES.items():
            row = [cell(name)]
            for group in groups:
                values = [run.value(test, predictor) for run in group["runs"]]
                is_primary = predictor == group["judged_by"][test]
                row.append(cell(mean_and_deviation(values), strong=is_primary))
            rows.append(row)
        tables.append({
            "caption": f"All predictors on the {title}, accuracy in % of the last round",
            "later": True,
            "columns": ["predictor", *(group["name"] for group in groups)],
            "rows": rows,
            "notes": ["*: the primary metric on this test set.", explain_prior(PREDICTORS)],
        })  # fmt: skip
    return tables
