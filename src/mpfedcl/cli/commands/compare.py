"""`mpfedcl compare`."""

import json
from pathlib import Path
from typing import Any

from mpfedcl.cli.arguments.experiments import Compare
from mpfedcl.cli.commands.parallel_jobs import count_jobs
from mpfedcl.cli.commands.run import describe_partition
from mpfedcl.cli.progress import gentle_interrupt, messages, progress_bar, results
from mpfedcl.files import free_folder, write_atomically
from mpfedcl.methods import READINGS
from mpfedcl.report.tables import (
    MARKS,
    READING_TITLES,
    Grid,
    explain_marks,
    mean_and_deviation,
)
from mpfedcl.rounds.evaluation import TESTS
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.comparison import Comparison
from mpfedcl.tracking import read_failures

_MOST_CLIENTS = 6
"""More columns do not fit."""


def compare_command(arguments: Compare) -> int:
    """Run what is missing, then print the table and draw the figures."""
    jobs = count_jobs("compare", arguments.file, arguments.settings, arguments.jobs)
    path = arguments.out or free_folder(Path("runs") / "comparison")
    comparison = Comparison.prepare(arguments.settings, arguments.methods, arguments.seeds, path)
    total = sum(plan.experiment.rounds for plan in comparison.plans)
    console = messages()
    with gentle_interrupt(console) as stop, progress_bar(console) as bar:
        task = bar.add_task(f"{len(comparison.plans)} runs", total=total, note="")
        complete = comparison.run(
            jobs, stop, lambda: bar.update(task, completed=comparison.rounds_done())
        )
    if not complete:
        console.print(f"Stopped. The same command with --out {path} goes on where it stopped.")
        return 130
    for plan in comparison.plans:
        for sentence in read_failures(plan.path):
            console.print(f"{plan.path.name}: {sentence}")
    content = comparison.collect()
    comparison.write(content)
    _draw(comparison)
    grids = _grids(comparison, content, all_readings=arguments.readings == "all")
    text = "\n".join(f"{grid.title}\n\n{grid.markdown()}" for grid in grids)
    write_atomically(path / "table.md", text.encode())
    if arguments.json:
        print(json.dumps({"path": str(path), **content}, indent=2))
        return 0
    for grid in grids:
        grid.show(results())
    results().print(f"comparison: {path}")
    results().print("in it: table.md, comparison.json, accuracy.png, partition.png")
    return 0


def _grids(comparison: Comparison, content: dict[str, Any], *, all_readings: bool) -> list[Grid]:
    experiment = comparison.plans[0].experiment
    num_seeds = len(content["seeds"])
    over = f"as mean(std) over {num_seeds} seeds" if num_seeds > 1 else "of one seed"
    setting = (
        f"{experiment.dataset.name}, {describe_partition(experiment, with_seed=False)}, "
        f"lr {experiment.train.lr:g}, round {content['rounds']}, "
        f"accuracy % {over}"
    )
    methods: dict[str, Any] = content["methods"]
    # Of one method there is nothing to say.
    several = len(methods) > 1
    marks = {
        test: {
            name: MARKS[mark] if mark and several else ""
            for name, mark in content["differences"][test]["marks"].items()
        }
        for test in TESTS
    }
    headline = Grid(
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
        explain_marks(num_seeds) if several else "",
    )
    if not all_readings:
        return [headline]
    return [headline, *_client_grids(methods), *_reading_grids(methods)]


def _client_grids(methods: dict[str, Any]) -> list[Grid]:
    """Return who is left behind: each client by the method's own reading; none if too many."""
    clients = list(next(iter(methods.values()))["accuracy_per_client"])
    if len(clients) > _MOST_CLIENTS:
        return []
    rows = [
        [name, *(mean_and_deviation(entry["accuracy_per_client"][each]) for each in clients)]
        for name, entry in methods.items()
    ]
    return [Grid("each client's own test, by the method's own reading", ["method", *clients], rows)]


def _reading_grids(methods: dict[str, Any]) -> list[Grid]:
    """Return a table a test with all four readings, or one where both tests are the same."""
    same = all(entry["readings"]["own"] == entry["readings"]["union"] for entry in methods.values())
    titles = {"own": "own test", "union": "union test"}
    if same:
        titles = {"own": "own test, which is the union test here"}
    return [
        Grid(
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
    for plan in comparison.plans:
        directory = RunDirectory(plan.path)
        summary = directory.read_summary()
        assert summary is not None
        reading = summary["reading"]
        curve = [
            (record["round"], record["accuracy"]["own"][reading])
            for record in directory.read_records()
            if record["accuracy"]
        ]
        curves.setdefault(f"{plan.method} ({READING_TITLES[reading]})", []).append(curve)
    first = comparison.plans[0]
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
