"""`mpfedcl compare`."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from mpfedcl.api import RUNNER
from mpfedcl.cli.arguments.experiments import Compare
from mpfedcl.cli.commands.parallel_jobs import find_job_count
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console, stop_after_round
from mpfedcl.experiment.wording import describe_partition
from mpfedcl.files import unused_folder, write_atomically
from mpfedcl.methods import TESTS, Test, find_method
from mpfedcl.report.tables import (
    MARKS,
    READING_GROUPS,
    READING_TITLES,
    TextTable,
    explain_deviation,
    explain_divergence,
    explain_marks,
    explain_prior,
    fairness_table,
    judged_by,
    mean_and_deviation,
    name_encoders,
    name_readings,
)
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions
from mpfedcl.studies.method_choice import choose_methods
from mpfedcl.tracking import make_trackers, read_failures

_MOST_CLIENTS = 6
"""More columns do not fit."""
_ORDER = " (own test; union test)"


def compare_command(arguments: Compare) -> int:
    """Run what is missing, then print the table and draw the figures."""
    jobs = find_job_count("compare", arguments.file, arguments.settings, arguments.jobs)
    # What is missing is said before any run is begun.
    make_trackers(arguments.settings.track)
    path = arguments.out or unused_folder(Path("runs") / "comparison")
    methods, left_out = choose_methods(arguments.settings, arguments.methods)
    comparison = Comparison.prepare(arguments.settings, methods, arguments.seeds, path)
    total = sum(each.experiment.rounds for each in comparison.planned_runs)
    console = stderr_console()
    for name, reason in left_out.items():
        console.print(f"{name} is left out: {reason}")
    with stop_after_round(console) as stop, progress_bar(console) as bar:
        task = bar.add_task(f"{len(comparison.planned_runs)} runs", total=total, note="")

        def advance() -> None:
            bar.update(task, completed=comparison.rounds_done())

        complete = comparison.run(JobOptions(RUNNER, jobs, stop, advance))
    if not complete:
        console.print(f"Stopped. The same command with --out {path} continues where it stopped.")
        return 130
    for each in comparison.planned_runs:
        for sentence in read_failures(each.path):
            console.print(f"{each.path.name}: {sentence}")
    content = comparison.collect()
    comparison.write(content)
    _draw(comparison, content)
    tables = _build_tables(comparison, content, all_readings=arguments.readings == "all")
    text = "\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables)
    write_atomically(path / "table.md", text.encode())
    if arguments.json:
        print(json.dumps({"path": str(path), **content}, indent=2))
        return 0
    for table in tables:
        table.show(stdout_console())
    stdout_console().print(f"comparison: {path}")
    figures = ", ".join(sorted(each.name for each in comparison.path.glob("*.png")))
    stdout_console().print(fill(f"in it: table.md, comparison.json, {figures}", 100))
    return 0


def _build_tables(
    comparison: Comparison, content: dict[str, Any], *, all_readings: bool
) -> list[TextTable]:
    experiment = comparison.planned_runs[0].experiment
    num_seeds = len(content["seeds"])
    over = f"as mean(std) over {num_seeds} seeds" if num_seeds > 1 else "of one seed"
    methods: dict[str, Any] = content["methods"]
    trained = [name for name in methods if find_method(name).trains]
    effort = f"lr {experiment.train.lr:g}, round {content['rounds']}, " if trained else ""
    setting = (
        f"{experiment.dataset.name}, {describe_partition(experiment, with_seed=False)}, "
        f"{effort}accuracy % {over}"
    )
    two_tests = experiment.partition.test != "shared"
    tests = {test: f"{test} test" for test in TESTS} if two_tests else {TESTS[0]: "test"}
    headline = TextTable(
        setting,
        ["method", *tests.values(), "MB sent", "seconds", f"read by{_ORDER if two_tests else ''}"],
        [
            [
                name,
                *(_judged_cell(content, name, test) for test in tests),
                _megabytes(sum(entry["bytes"]) / len(entry["bytes"])),
                f"{sum(entry['seconds']) / len(entry['seconds']):.1f}",
                name_readings(judged_by(entry)[test] for test in tests),
            ]
            for name, entry in methods.items()
        ],
        "\n".join(_headline_notes(comparison, content, trained)),
    )
    if not all_readings:
        return [headline]
    return [
        headline,
        fairness_table(methods),
        *_client_tables(methods),
        *_reading_tables(methods, tests),
    ]


def _judged_cell(content: dict[str, Any], name: str, test: str) -> str:
    entry, marks = content["methods"][name], content["differences"][test]["marks"]
    # Of one method there is nothing to compare.
    mark = MARKS[marks[name]] if marks[name] and len(marks) > 1 else ""
    return mark + mean_and_deviation(entry["readings"][test][judged_by(entry)[test]])


def _headline_notes(
    comparison: Comparison, content: dict[str, Any], trained: Collection[str]
) -> Iterator[str]:
    methods = content["methods"]
    experiments = {each.experiment.method: each.experiment for each in comparison.planned_runs}
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
    """Return who is left behind: each client by the method's own reading; none if too many."""
    clients = list(next(iter(methods.values()))["accuracy_per_client"])
    if len(clients) > _MOST_CLIENTS:
        return []
    rows = [
        [name, *(mean_and_deviation(entry["accuracy_per_client"][each]) for each in clients)]
        for name, entry in methods.items()
    ]
    return [
        TextTable("each client's own test, by the method's own reading", ["method", *clients], rows)
    ]


def _reading_tables(methods: dict[str, Any], tests: Mapping[Test, str]) -> list[TextTable]:
    """Return all readings: for each test those without a label prior, then those with one."""
    return [
        TextTable(
            f"readings {group} on the {title} (* the one a method is judged by)",
            ["method", *(READING_TITLES[reading] for reading in readings)],
            [
                [
                    name,
                    *(
                        mean_and_deviation(entry["readings"][test][reading])
                        + ("*" if reading == judged_by(entry)[test] else "")
                        for reading in readings
                    ),
                ]
                for name, entry in methods.items()
            ],
            explain_prior(readings),
        )
        for test, title in tests.items()
        for group, readings in READING_GROUPS.items()
    ]


def _draw(comparison: Comparison, content: dict[str, Any]) -> None:
    """Draw accuracy per round, all figures of the end, and the partition of the first seed."""
    from mpfedcl.report.comparison_figures import draw_comparison
    from mpfedcl.report.figures import Curve, draw_curves, draw_over_time, draw_partition

    curves: dict[str, list[Curve]] = {}
    labels: dict[str, str] = {}
    clocked: dict[str, list[list[tuple[float, float]]]] = {}
    for each in comparison.planned_runs:
        reading = content["methods"][each.experiment.method]["reading"]
        records = [r for r in RunDirectory(each.path).read_records() if r["accuracy"]]
        curve = [(record["round"], record["accuracy"]["own"].get(reading)) for record in records]
        times = [record["virtual_seconds"] for record in records if "virtual_seconds" in record]
        method = each.experiment.method
        once = "" if find_method(method).trains else "; no rounds"
        label = f"{method} ({READING_TITLES[reading]}{once})"
        labels[label] = method
        curves.setdefault(label, []).append(curve)
        if times:
            accuracies = [accuracy for _, accuracy in curve]
            clocked.setdefault(method, []).append(list(zip(times, accuracies, strict=True)))
    first = comparison.planned_runs[0]
    setting = describe_partition(first.experiment, with_seed=False)
    data = f"{first.experiment.dataset.name}, {setting}"
    title = data if content["shared_test"] else f"{data}: clients' own tests"
    draw_curves(curves, title, comparison.path / "accuracy.png", labels)
    draw_comparison(content, data, comparison.path)
    if clocked:
        draw_over_time(clocked, title, comparison.path / "accuracy-over-time.png")
    partition = RunDirectory(first.path).read_json("partition.json")
    assert partition is not None
    draw_partition(
        partition,
        f"training images, {describe_partition(first.experiment)}",
        comparison.path / "partition.png",
    )
