"""`mpfedcl tune`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpfedcl.cli.arguments.experiments import Tune
from mpfedcl.cli.commands.parallel_jobs import count_jobs
from mpfedcl.cli.commands.run import describe_partition
from mpfedcl.cli.progress import gentle_interrupt, messages, progress_bar, results
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import FORMAT
from mpfedcl.files import free_folder, write_atomically
from mpfedcl.report.tables import Grid, percent
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.tuning import Search, Tuning, run_searches
from mpfedcl.studies.tuning.tuning import FILE, describe_changes

_CHANGES_A_LINE = 2


def tune_command(arguments: Tune) -> int:
    """Search what is not searched yet, then write and print what was chosen."""
    jobs = count_jobs("tune", arguments.file, arguments.settings, arguments.jobs)
    if arguments.settings.partition.validation:
        raise InvalidInput(
            f"partition.validation is {arguments.settings.partition.validation:g}; tune holds "
            "images out by itself: use --validation."
        )
    path = arguments.out or free_folder(Path("runs") / "tuning")
    searches = _prepare(arguments, path)
    before = _read_before(path)
    console = messages()
    with gentle_interrupt(console) as stop, progress_bar(console) as bar:
        total = sum(search.most_rounds for search in searches)
        task = bar.add_task(f"{len(searches)} methods", total=total, note="")

        def advance() -> None:
            bar.update(task, completed=sum(search.rounds_done() for search in searches))

        complete = run_searches(searches, jobs, stop, advance)
        if complete:
            bar.update(task, completed=total)
    if not complete:
        console.print(f"Stopped. The same command with --out {path} goes on where it stopped.")
        return 130
    found = [search.conclude() for search in searches]
    content = _write(path, searches, found, before)
    if arguments.json:
        print(json.dumps({"path": str(path), **content}, indent=2))
        return 0
    _grid(found).show(results())
    results().print(f"search: {path}")
    results().print("in it: tuning.json, and for mpfedcl run or compare best-<method>.toml")
    return 0


def _prepare(arguments: Tune, path: Path) -> list[Search]:
    methods = arguments.methods
    if not methods or len(set(methods)) < len(methods):
        raise InvalidInput(f"methods is {list(methods)}; it must name at least one, and each once.")
    return [
        Search.prepare(
            arguments.settings,
            method,
            path / method.replace(":", "."),
            arguments.budget,
            arguments.seeds,
            validation=arguments.validation,
            tolerance=arguments.tolerance,
        )
        for method in methods
    ]


def _read_before(path: Path) -> dict[str, Any]:
    """Return what earlier commands have found for other methods, by method."""
    content = RunDirectory(path).read_json(FILE) or {}
    methods = content.get("methods", {}) if isinstance(content, dict) else None
    if not isinstance(methods, dict) or content.get("format", FORMAT) != FORMAT:
        raise InvalidInput(
            f"{path / FILE} is not as mpfedcl writes it; it must be whole, or give another folder."
        )
    return methods


def _write(
    path: Path, searches: Sequence[Search], found: Sequence[Tuning], before: dict[str, Any]
) -> dict[str, Any]:
    """Write each method's search into its folder, and all of them and the choices beside."""
    for search, tuning in zip(searches, found, strict=True):
        tuning.write(search.path)
        tuning.write_best(path)
    methods = before | {each.method: each.to_json() for each in found}
    content = {"format": FORMAT, "methods": methods}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path / FILE, text.encode())
    for search in searches:
        search.clear()
    return content


def _grid(found: Sequence[Tuning]) -> Grid:
    first = found[0]
    rungs = ", ".join(f"{rung.settings} to round {rung.rounds}" for rung in first.rungs)
    partition = describe_partition(
        first.base.replace(partition__validation=first.validation), with_seed=False
    )
    return Grid(
        f"{first.base.dataset.name}, {partition}\nvalidation accuracy %; settings run: {rungs}",
        ["method", "chosen", "score", "± error", "defaults", "tried", "rounds"],
        [
            [
                each.method,
                _describe(each.changes),
                percent(each.score),
                percent(each.standard_error),
                percent(each.default_score),
                str(len(each.trials)),
                f"{each.rounds_run:,}",
            ]
            for each in found
        ],
        "Chosen: the fewest changes among settings within "
        f"{first.tolerance:g} times the standard error (±) of the best.\n"
        "No test image was opened; scores of chosen settings are flattered by the choice.",
    )


def _describe(changes: dict[str, Any]) -> str:
    """Return what is not as by default, a few a line."""
    if not changes:
        return "the defaults"
    words = describe_changes(changes)
    lines = [words[at : at + _CHANGES_A_LINE] for at in range(0, len(words), _CHANGES_A_LINE)]
    return ",\n".join(", ".join(line) for line in lines)
