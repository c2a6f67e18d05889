"""`mpfedcl compare`."""

import json
from pathlib import Path
from typing import Any

from mpfedcl.api import RUNNER
from mpfedcl.cli.arguments.experiments import Compare
from mpfedcl.cli.commands.parallel_jobs import find_job_count
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console, stop_after_round
from mpfedcl.experiment.wording import describe_partition
from mpfedcl.files import unused_folder, write_atomically
from mpfedcl.methods import READINGS, TESTS
from mpfedcl.report.tables import (
    MARKS,
    READING_TITLES,
    TextTable,
    explain_marks,
    mean_and_deviation,
)
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions
from mpfedcl.tracking import make_trackers, read_failures

_MOST_CLIENTS = 6
"""More columns do not fit."""


def compare_command(arguments: Compare) -> int:
    """Run what is missing, then print the table and draw the figures."""
    jobs = find_job_count("compare", arguments.file, arguments.settings, arguments.jobs)
    # What is missing is said before any run is begun.
    make_trackers(arguments.settings.track)
    path = arguments.out or unused_folder(Path("runs") / "comparison")
    comparison = Comparison.prepare(arguments.settings, arguments.methods, arguments.seeds, path)
    total = sum(each.experiment.rounds for each in comparison.planned_runs)
    console = stderr_console()
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
    _draw(comparison)
    tables = _build_tables(comparison, content, all_readings=arguments.readings == "all")
    text = "\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables)
    write_atomically(path / "table.md", text.encode())
    if arguments.json:
        print(json.dumps({"path": str(path), **content}, indent=2))
        return 0
    for table in tables:
        table.show(stdout_console())
    stdout_console().print(f"comparison: {path}")
    stdout_console().print("in it: table.md, comparison.json, accuracy.png, partition.png")
    return 0


def _build_tables(
    comparison: Comparison, content: dict[str, Any], *, all_readings: bool
) -> list[TextTable]:
    experiment = comparison.planned_runs[0].experiment
    num_seeds = len(content["seeds"])
    over = f"as mean(std) over {num_seeds} seeds" if num_seeds > 1 else "of one seed"
    setting = (
        f"{experiment.dataset.name}, {describe_partition(experiment, with_seed=False)}, "
        f"lr {experiment.train.lr:g}, round {content['rounds']}, "
        f"accuracy % {over}"
    )
    methods: dict[str, Any] = content["methods"]
    # Of one method there is nothing to compare.
    several_methods = len(methods) > 1
    marks = {
        test: {
            name: MARKS[mark] if mark and several_methods else ""
            for name, mark in content["differences"][test]["marks"].items()
        }
        for test in TESTS
    }
    headline = TextTable(
        setting,
        ["method", "read by", "own test", "union test", "MB sent", "seconds"],
        [
            [
                name,
                READING_TITLES[entry["reading"]],
                *(
                    marks[test][name]
                    + mean_and_deviation(entry["readings"][test][entry["reading"]])
                    for test in TESTS
                ),
                f"{sum(entry['bytes']) / len(entry['bytes']) / 1e6:.1f}",
                f"{sum(entry['seconds']) / len(entry['seconds']):.1f}",
            ]
            for name, entry in methods.items()
        ],
        explain_marks(num_seeds) if several_methods else "",
    )
    if not all_readings:
        return [headline]
    return [headline, *_client_tables(methods), *_reading_tables(methods)]


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


def _reading_tables(methods: dict[str, Any]) -> list[TextTable]:
    """Return a table per test with all four readings, or one where both tests are the same."""
    same = all(entry["readings"]["own"] == entry["readings"]["union"] for entry in methods.values())
    titles = {"own": "own test", "union": "union test"}
    if same:
        titles = {"own": "own test, which is the union test here"}
    return [
        TextTable(
            f"all four readings on the {title} (* the one a method is judged by)",
            ["method", *(READING_TITLES[reading] for reading in READINGS)],
            [
                [
                    name,
                    *(
                        mean_and_deviation(entry["readings"][test][reading])
                        + ("*" if reading == entry["reading"] else "")
                        for reading in READINGS
                    ),
                ]
                for name, entry in methods.items()
            ],
        )
        for test, title in titles.items()
    ]


def _draw(comparison: Comparison) -> None:
    """Draw each method's headline reading per round, and the partition of the first seed."""
    from mpfedcl.report.figures import Curve, draw_curves, draw_partition

    curves: dict[str, list[Curve]] = {}
    for each in comparison.planned_runs:
        directory = RunDirectory(each.path)
        summary = directory.read_summary()
        assert summary is not None
        reading = summary["reading"]
        curve = [
            (record["round"], record["accuracy"]["own"][reading])
            for record in directory.read_records()
            if record["accuracy"]
        ]
        curves.setdefault(f"{each.experiment.method} ({READING_TITLES[reading]})", []).append(curve)
    first = comparison.planned_runs[0]
    setting = describe_partition(first.experiment, with_seed=False)
    draw_curves(
        curves,
        f"{first.experiment.dataset.name}, {setting}: clients' own tests",
        comparison.path / "accuracy.png",
    )
    content = RunDirectory(first.path).read_json("partition.json")
    assert content is not None
    draw_partition(
        content,
        f"training images, {describe_partition(first.experiment)}",
        comparison.path / "partition.png",
    )
