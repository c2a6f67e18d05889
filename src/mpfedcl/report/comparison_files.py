"""The files of a finished comparison: its tables, its figures, and comparison.json."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mpfedcl.core.files import write_atomically
from mpfedcl.experiment.wording import describe_by_method, describe_partition
from mpfedcl.methods import TESTS, Test, find_method, name_methods
from mpfedcl.report.results.loaded import LoadedComparison
from mpfedcl.report.run_description import RunRecords
from mpfedcl.report.tables import (
    MARKS,
    PREDICTOR_TITLES,
    READING_GROUPS,
    TextTable,
    explain_deviation,
    explain_divergence,
    explain_marks,
    explain_prior,
    fairness_table,
    judged_by,
    mean_and_deviation,
    name_encoders,
    name_predictors,
)
from mpfedcl.studies.comparison import Comparison

_MOST_CLIENTS = 6
"""More columns do not fit."""
_ORDER = " (local test set; global test set)"


def write_comparison(
    comparison: Comparison, *, all_predictors: bool = False
) -> tuple[dict[str, Any], list[TextTable]]:
    """Write comparison.json, the figures and table.md; return the numbers and the tables."""
    content = comparison.collect()
    comparison.write(content)
    records = [RunRecords.read(each.path) for each in comparison.planned_runs]
    for name, draw in LoadedComparison(comparison.path, records).figures.items():
        draw(comparison.path / f"{name}.png")
    tables = _build_tables(comparison, content, all_predictors=all_predictors)
    text = "\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables)
    write_atomically(comparison.path / "table.md", text.encode())
    return content, tables


def _build_tables(
    comparison: Comparison, content: dict[str, Any], *, all_predictors: bool
) -> list[TextTable]:
    experiment = comparison.planned_runs[0].experiment
    num_seeds = len(content["seeds"])
    over = f"as mean(std) over {num_seeds} seeds" if num_seeds > 1 else "of one seed"
    names = name_methods(content["methods"])
    trained = [names[each] for each in names if find_method(each).trains]
    content = _rename(content, names)
    methods: dict[str, Any] = content["methods"]
    rates = [
        (names[each.experiment.method], f"{each.experiment.train.lr:g}")
        for each in comparison.planned_runs
        if names[each.experiment.method] in trained
    ]
    effort = f"lr {describe_by_method(rates)}, round {content['rounds']}, " if trained else ""
    setting = (
        f"{experiment.dataset.name}, {describe_partition(experiment, with_seed=False)}, "
        f"{effort}accuracy % {over}"
    )
    two_tests = experiment.partition.test != "shared"
    tests = (
        {test: f"{test.replace('_', ' ')} set" for test in TESTS}
        if two_tests
        else {TESTS[0]: "test"}
    )
    headline = TextTable(
        setting,
        ["method", *tests.values(), "MB sent", "seconds", f"read by{_ORDER if two_tests else ''}"],
        [
            [
                name,
                *(_judged_cell(content, name, test) for test in tests),
                _megabytes(sum(entry["bytes"]) / len(entry["bytes"])),
                f"{sum(entry['seconds']) / len(entry['seconds']):.1f}",
                name_predictors(judged_by(entry)[test] for test in tests),
            ]
            for name, entry in methods.items()
        ],
        "\n".join(_headline_notes(comparison, content, trained, names)),
    )
    if not all_predictors:
        return [headline]
    return [
        headline,
        fairness_table(methods),
        *_client_tables(methods),
        *_reading_tables(methods, tests),
    ]


def _rename(content: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return what was collected, with methods by the names that they have in tables."""
    marks = {test: content["differences"][test]["marks"] for test in TESTS}
    return {
        **content,
        "methods": {names[each]: entry for each, entry in content["methods"].items()},
        "differences": {
            test: {"marks": {names[each]: mark for each, mark in found.items()}}
            for test, found in marks.items()
        },
    }


def _judged_cell(content: dict[str, Any], name: str, test: str) -> str:
    entry, marks = content["methods"][name], content["differences"][test]["marks"]
    # Of one method there is nothing to compare.
    mark = MARKS[marks[name]] if marks[name] and len(marks) > 1 else ""
    return mark + mean_and_deviation(entry["predictors"][test][judged_by(entry)[test]])


def _headline_notes(
    comparison: Comparison,
    content: dict[str, Any],
    trained: Collection[str],
    names: Mapping[str, str],
) -> Iterator[str]:
    methods = content["methods"]
    experiments = {
        names[each.experiment.method]: each.experiment for each in comparison.planned_runs
    }
    if comparison.planned_runs[0].experiment.partition.test == "shared":
        yield "All clients have the same test."
    if note := explain_deviation(len(content["seeds"])):
        yield note
    if note := explain_divergence({name: each["diverged"] for name, each in methods.items()}):
        yield note
    if len(methods) > 1:
        yield explain_marks(len(content["seeds"]))
    if note := explain_prior(r for entry in methods.values() for r in judged_by(entry).values()):
        yield note
    if closed := [name for name in methods if name not in trained]:
        yield f"Without rounds and training: {', '.join(closed)}."
    if note := name_encoders({name: each.encoder.name for name, each in experiments.items()}):
        yield note


def _megabytes(count: float) -> str:
    """Return megabytes with one decimal, and more where that would say nothing was sent."""
    return f"{count / 1e6:.1f}" if not 0 < count < 50_000 else f"{count / 1e6:.3f}"


def _client_tables(methods: dict[str, Any]) -> list[TextTable]:
    """Return who is left behind: each client by the method's own predictor; none if too many."""
    clients = list(next(iter(methods.values()))["accuracy_per_client"])
    if not clients or len(clients) > _MOST_CLIENTS:
        return []
    rows = [
        [name, *(mean_and_deviation(entry["accuracy_per_client"][each]) for each in clients)]
        for name, entry in methods.items()
    ]
    return [
        TextTable(
            "each client's local test set, by the method's own reading", ["method", *clients], rows
        )
    ]


def _reading_tables(methods: dict[str, Any], tests: Mapping[Test, str]) -> list[TextTable]:
    """Return all predictors: for each test those without a label prior, then those with one."""
    return [
        TextTable(
            f"predictors {group} on the {title} (* the one a method is judged by)",
            ["method", *(PREDICTOR_TITLES[predictor] for predictor in predictors)],
            [
                [
                    name,
                    *(
                        mean_and_deviation(entry["predictors"][test][predictor])
                        + ("*" if predictor == judged_by(entry)[test] else "")
                        for predictor in predictors
                    ),
                ]
                for name, entry in methods.items()
            ],
            explain_prior(predictors),
        )
        for test, title in tests.items()
        for group, predictors in READING_GROUPS.items()
    ]
