"""What a report says of runs that differ in their seed alone: tables, curves and costs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpfedcl.core.json_files import Json
from mpfedcl.experiment import Experiment
from mpfedcl.methods import PREDICTORS, TESTS, PredictorName, Test, find_method, is_built_in
from mpfedcl.report.comparison_section import describe_calibration, describe_cost, fairness_table
from mpfedcl.report.comparison_section import table_cell as _cell
from mpfedcl.report.headline import describe_mean, describe_server_model
from mpfedcl.report.method_styles import MethodStyle, style_of
from mpfedcl.report.number_formatting import (
    choose_evenly,
    deviation,
    finite_values,
    mean,
    round_significant,
    rounded,
)
from mpfedcl.report.round_costs import describe_round_costs
from mpfedcl.report.run_description import RunRecords
from mpfedcl.report.tables import (
    PREDICTOR_TITLES,
    READING_GROUPS,
    explain_deviation,
    explain_divergence,
    explain_prior,
    mean_and_deviation,
    name_encoders,
    name_predictors,
)
from mpfedcl.rounds.clock import training_seconds
from mpfedcl.studies.statistics import mark_best

_TEST_TITLES: dict[Test, str] = {"local_test": "local test set", "global_test": "global test set"}
_LEGEND = (
    "best: the highest mean. ≈: not clearly different from the best, because the 95 % interval of "
    "the difference, paired by seed, contains 0. With few seeds such intervals are wide."
)
_COSTS = "MB and seconds are of a whole run, without evaluation and checkpoints."
_ONE_TEST = "All clients share one test."
_ONE_SEED = "With one seed, no difference can be told from chance."


def describe_seed_group(
    name: str,
    runs: Sequence[RunRecords],
    places: Sequence[int],
    most: int,
    style: MethodStyle | None = None,
) -> Json:
    """Return the curves and costs of runs of one name; `places` says where they stand."""
    style = style or style_of(runs[0].experiment.method)
    accuracy = {
        test: {
            predictor: curve
            for predictor in PREDICTORS
            if (
                curve := _mean_curve(
                    [_accuracy_by_round(run, test, predictor) for run in runs], most
                )
            )
        }
        for test in TESTS
    }
    evaluated = {
        number for curves in accuracy.values() for each in curves.values() for number in each["x"]
    }
    return {
        "name": name,
        "style": style.to_json(),
        "shared_test": all(run.has_shared_test for run in runs),
        "end": {test: [run.value(test, run.predictors[test]) for run in runs] for test in TESTS},
        "diverged": [run.has_diverged for run in runs],
        "costs": [describe_cost(run) for run in runs],
        "calibration": {test: describe_calibration(runs, test) for test in TESTS},
        "judged_by": runs[0].predictors,
        "one_shot": runs[0].is_one_shot,
        "runs": list(places),
        "seeds": [run.experiment.seed for run in runs],
        "curves": {
            "accuracy": accuracy,
            "loss": _mean_curve(
                [{line.round: line.loss for line in run.rounds} for run in runs], most
            ),
        },
        "costs_by_round": describe_round_costs(runs, evaluated),
        "seconds": _mean_cost([[line.seconds for line in run.rounds] for run in runs]),
        "bytes": _mean_cost([[line.bytes for line in run.rounds] for run in runs]),
    }


def run_readings_table(run: RunRecords) -> Json:
    """Return all predictors of one run on both tests."""
    number = run.last_evaluated.round if run.last_evaluated else None

    def cell(test: Test, predictor: PredictorName) -> Json:
        value, is_judged = run.value(test, predictor), predictor == run.predictors[test]
        note = "judged by this" if is_judged else None
        return {**_cell("-" if value is None else f"{value:.2f}", note=note), "strong": is_judged}

    titles = _title_tests([run])
    rows = [
        [_cell(PREDICTOR_TITLES[predictor]), *(cell(test, predictor) for test in titles)]
        for predictor in PREDICTORS
    ]
    return {
        "caption": "Accuracy in %"
        + (f" in round {number}, the last one evaluated" if number else ""),
        "columns": ["predictor", *titles.values()],
        "rows": rows,
        "notes": [
            "personal: each client's own model after its training, averaged over clients; "
            "averaged: the server's model. classifier: the network's last layer; prototype: the "
            "nearest prototype. "
            + (
                _ONE_TEST
                if len(titles) == 1
                else "own: each client on its local test set images; union: on everybody's."
            ),
            *_describe_headline(run),
            explain_prior(PREDICTORS),
        ],
    }


def _describe_headline(run: RunRecords) -> list[str]:
    """Say which clients are in the means, and over a network what the server's model reaches."""
    if run.last_evaluated is None:
        return []
    known = run.partition.clients if run.partition else {}
    last = run.last_evaluated
    spread = last.accuracy_spread.to_json() if last.accuracy_spread else None
    told = describe_mean(last.accuracy_per_client, known, spread)
    notes = [f"Personal predictors: {told}."] if "not read" in told else []
    if run.is_network and run.last_evaluated.accuracy:
        notes += describe_server_model(run.last_evaluated.accuracy, run.predictors)
    return notes


def find_ranking_obstacles(groups: Sequence[Json], runs: Sequence[RunRecords]) -> list[str]:
    """Return why the numbers of groups cannot be ranked, each reason in a few words."""
    found = []
    all_runs = [runs[place] for group in groups for place in group["runs"]]
    tasks = set()
    encoders = set()
    for experiment in (run.experiment for run in all_runs):
        data = (experiment.dataset, experiment.partition)
        tasks.add(repr([experiment.clients, *(part.model_dump_json() for part in data)]))
        if not _has_own_encoder(experiment):
            encoders.add(experiment.encoder.model_dump_json())
    if len(tasks) > 1:
        found.append("data, clients or split differ")
    if len(encoders) > 1:
        found.append("encoders differ")
    if len({tuple(sorted(group["seeds"])) for group in groups}) > 1:
        found.append("seeds differ")
    # What does not train is complete after one round.
    trained = [group for group in groups if not group["one_shot"]]
    if len({_last_evaluated_round(runs[place]) for e in trained for place in e["runs"]}) > 1:
        ends = [
            f"{group['name']} {_round_range(runs[place] for place in group['runs'])}"
            for group in trained
        ]
        found.append(f"the last rounds that were evaluated differ ({', '.join(ends)})")
    return found


def _has_own_encoder(experiment: Experiment) -> bool:
    """Tell whether a method sees samples as it does by itself: that is a part of the method."""
    if not is_built_in(experiment.method):
        return False
    own = find_method(experiment.method).defaults.get("encoder__name")
    return own is not None and own == experiment.encoder.name


def _last_evaluated_round(run: RunRecords) -> int:
    return run.last_evaluated.round if run.last_evaluated else 0


def _round_range(runs: Iterable[RunRecords]) -> str:
    numbers = sorted({_last_evaluated_round(run) for run in runs})
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def comparison_tables(
    groups: Sequence[Json],
    runs: Sequence[RunRecords],
    content: Sequence[Json],
    obstacles: Sequence[str] = (),
) -> list[Json]:
    """Return the headline of several groups, then all predictors on each test.

    Nobody is marked as best where there are obstacles to a ranking; they are named.
    """
    return [
        _headline_table(groups, runs, obstacles),
        fairness_table(groups, content),
        *_reading_tables(groups, runs),
    ]


def _headline_table(
    groups: Sequence[Json], runs: Sequence[RunRecords], obstacles: Sequence[str]
) -> Json:
    is_ranked = not obstacles and len(groups) > 1
    seeds = sorted({seed for group in groups for seed in group["seeds"]})
    columns, notes = [], []
    titles = _title_tests([runs[place] for group in groups for place in group["runs"]])
    for test in titles:
        by_seed: dict[str, dict[int, float | None]] = {}
        for place, group in enumerate(groups):
            here = [runs[number] for number in group["runs"]]
            by_seed[str(place)] = {
                run.experiment.seed: run.value(test, group["judged_by"][test]) for run in here
            }
        aligned = {name: [each.get(seed) for seed in seeds] for name, each in by_seed.items()}
        found: dict[str, str | None] = dict(mark_best(aligned)) if is_ranked else {}
        columns.append([
            _cell(mean_and_deviation(list(each.values())), mark=found.get(name))
            for name, each in by_seed.items()
        ])  # fmt: skip
    if len(seeds) > 1:
        notes.append(explain_deviation(len(seeds)))
    lost = {
        group["name"]: [
            s for s, gone in zip(group["seeds"], group["diverged"], strict=True) if gone
        ]
        for group in groups
    }
    if told := explain_divergence(lost):
        notes.append(told)
    if len(titles) == 1:
        notes.append(_ONE_TEST)
    if is_ranked:
        notes.append(_LEGEND)
    if any(len(group["seeds"]) == 1 for group in groups):
        notes.append(_ONE_SEED)
    if obstacles:
        notes.append(f"Nothing is marked as best: {'; '.join(obstacles)}.")
    if closed := [group["name"] for group in groups if group["one_shot"]]:
        notes.append(f"Without rounds and training: {', '.join(closed)}.")
    judged = [predictor for group in groups for predictor in group["judged_by"].values()]
    encoders = {group["name"]: runs[group["runs"][0]].experiment.encoder.name for group in groups}
    notes += [each for each in (explain_prior(judged), name_encoders(encoders)) if each]
    rows = [
        [
            _cell(group["name"], note=name_predictors(group["judged_by"][test] for test in titles)),
            *(column[place] for column in columns),
            _cell(f"{sum(group['bytes'].values()) / 1e6:,.1f}"),
            _cell(f"{training_seconds(group['seconds']):,.1f}"),
        ]
        for place, group in enumerate(groups)
    ]
    counts = {len(group["seeds"]) for group in groups}
    number = f"{counts.pop()}" if len(counts) == 1 else "its"
    over = "one seed" if number == "1" else f"mean(std) over {number} seeds"
    return {
        "caption": f"Accuracy in % of the last round, never the best one: {over}, each method by "
        f"the reading it is judged by{'' if len(titles) == 1 else ' on each test'}",
        "columns": ["method", *titles.values(), "MB sent", "seconds"],
        "rows": rows,
        "notes": [*notes, _COSTS],
    }


def _reading_tables(groups: Sequence[Json], runs: Sequence[RunRecords]) -> list[Json]:
    """Return all predictors: for each test those without a label prior, then those with one.

    They stand below the charts: there are many, and few look for them first.
    """

    def values(group: Json, test: Test) -> dict[str, list[float | None]]:
        return {r: [runs[place].value(test, r) for place in group["runs"]] for r in PREDICTORS}

    named = _title_tests([runs[place] for group in groups for place in group["runs"]])
    titles = {test: f"the {title}" for test, title in named.items()}
    return [
        {
            "caption": f"Readings {name} on {title}, accuracy in % of the last round",
            "later": True,
            "columns": ["method", *(PREDICTOR_TITLES[predictor] for predictor in predictors)],
            "rows": [
                [
                    _cell(group["name"]),
                    *(
                        {
                            **_cell(mean_and_deviation(values(group, test)[predictor])),
                            "strong": predictor == group["judged_by"][test],
                        }
                        for predictor in predictors
                    ),
                ]
                for group in groups
            ],
            "notes": [
                "Bold: the predictor by which the method is judged on this test.",
                *([note] if (note := explain_prior(predictors)) else []),
            ],
        }
        for test, title in titles.items()
        for name, predictors in READING_GROUPS.items()
    ]


def _title_tests(runs: Sequence[RunRecords]) -> dict[Test, str]:
    """Return the tests with their titles: one where all clients of all runs share it."""
    return {"local_test": "test"} if all(run.has_shared_test for run in runs) else _TEST_TITLES


def _accuracy_by_round(run: RunRecords, test: Any, predictor: Any) -> dict[int, float | None]:
    """Return a reading in the rounds in which it was read."""
    tables = {line.round: line.accuracy.get(test, {}) for line in run.rounds if line.accuracy}
    return {number: table[predictor] for number, table in tables.items() if predictor in table}


def _mean_curve(several: Sequence[dict[int, float | None]], most: int) -> Json | None:
    """Return mean and deviation in the rounds that all runs have, at most so many of them.

    `lost` counts the runs that have no number there: they diverged.
    """
    known = {
        number: finite_values([each[number] for each in several])
        for number in several[0]
        if all(number in each for each in several)
    }
    common = [number for number, values in known.items() if values]
    if not common:
        return None
    chosen = [common[place] for place in choose_evenly(len(common), most)]
    values = [known[number] for number in chosen]
    curve: Json = {"x": chosen, "mean": [round_significant(mean(each), 5) for each in values]}
    if len(several) > 1:
        curve["std"] = [round_significant(deviation(each), 3) or 0.0 for each in values]
        lost = [len(several) - len(each) for each in values]
        curve |= {"lost": lost} if any(lost) else {}
    return curve


def _mean_cost(runs: Sequence[Sequence[Mapping[str, float]]]) -> Json:
    """Return what all rounds of a run took together, part by part, as the mean over runs."""
    totals: list[dict[str, float]] = [{} for _ in runs]
    for total, rounds in zip(totals, runs, strict=True):
        for part, cost in (each for costs in rounds for each in costs.items()):
            total[part] = total.get(part, 0) + cost
    parts = dict.fromkeys(part for total in totals for part in total)
    return {
        part: rounded(sum(total.get(part, 0) for total in totals) / len(totals), 3)
        for part in parts
    }
