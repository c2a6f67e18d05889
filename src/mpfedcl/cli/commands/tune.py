"""`mpfedcl tune`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpfedcl.api import RUNNER
from mpfedcl.cli.arguments.experiments import Tune
from mpfedcl.cli.commands.parallel_jobs import check_runs
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console, stop_after_round
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, unused_folder
from mpfedcl.experiment.wording import describe_missing_encoder, describe_partition
from mpfedcl.methods import name_methods
from mpfedcl.report.tables import TextTable, percent
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.jobs import JobOptions
from mpfedcl.studies.tuning import FILE, Search, TuningResult, describe_changes, run_searches

_CHANGES_PER_LINE = 2


def tune_command(arguments: Tune) -> int:
    """Run the missing trials, then write and print the chosen settings."""
    check_runs("tune", arguments.file, arguments.settings, arguments.jobs)
    if arguments.settings.partition.validation:
        raise InvalidInput(
            f"partition.validation is {arguments.settings.partition.validation:g}; tune holds out "
            "images itself: use --validation."
        )
    path = arguments.out or unused_folder(Path("runs") / "tuning")
    searches = _prepare(arguments, path)
    earlier = _read_earlier(path)
    console = stderr_console()
    for notice in describe_missing_encoder(arguments.settings):
        console.print(notice)
    with stop_after_round(console) as stop, progress_bar(console, "rounds") as bar:
        total = sum(search.most_rounds for search in searches)
        task = bar.add_task(f"{len(searches)} methods", total=total, note="")

        def advance() -> None:
            bar.update(task, completed=sum(search.rounds_done() for search in searches))

        complete = run_searches(searches, JobOptions(RUNNER, arguments.jobs, stop, advance))
        if complete:
            bar.update(task, completed=total)
    if not complete:
        console.print(f"Stopped. The same command with --out {path} continues where it stopped.")
        return 130
    found = [search.write_result() for search in searches]
    for each in found:
        each.write_best(path)
    methods = earlier | {each.method: each.to_json() for each in found}
    content = {"format": FORMAT, "methods": methods}
    RunDirectory(path).write_json(FILE, content)
    if arguments.json:
        print(json.dumps({"path": str(path), **content}, indent=2))
        return 0
    _build_table(found).show(stdout_console())
    stdout_console().print(f"search: {path}")
    stdout_console().print("in it: tuning.json, and for mpfedcl run or compare best-<method>.toml")
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


def _read_earlier(path: Path) -> dict[str, Any]:
    """Return the results of earlier commands for other methods, by method."""
    content = RunDirectory(path).read_json(FILE) or {}
    methods = content.get("methods", {}) if isinstance(content, dict) else None
    if not isinstance(methods, dict) or content.get("format", FORMAT) != FORMAT:
        raise InvalidInput(
            f"{path / FILE} is not as mpfedcl writes it; it must be intact, or give another folder."
        )
    return methods


def _build_table(found: Sequence[TuningResult]) -> TextTable:
    names = name_methods(each.method for each in found)
    first = next((each for each in found if not each.is_fixed), found[0])
    rungs = ", ".join(f"{rung.settings} to round {rung.rounds}" for rung in first.rungs)
    partition = describe_partition(
        first.base.replace(partition__validation=first.validation), with_seed=False
    )
    return TextTable(
        f"{first.base.dataset.name}, {partition}\nvalidation accuracy %; trials: {rungs}",
        ["method", "chosen", "score", "± error", "defaults", "trials", "rounds"],
        [
            [
                names[each.method],
                "nothing to choose" if each.is_fixed else _format_changes(each.changes),
                percent(each.score),
                percent(each.standard_error),
                percent(each.default_score),
                str(len(each.trials)),
                f"{each.rounds_run:,}",
            ]
            for each in found
        ],
        "Chosen: the fewest changes among trials within "
        f"{first.tolerance:g} times the standard error (±) of the best.\n"
        "No test image was opened; the scores of chosen settings are too high, because they are "
        "the best of many."
        + "".join(
            f"\n{names[each.method]} has nothing to tune." for each in found if each.is_fixed
        ),
    )


def _format_changes(changes: dict[str, Any]) -> str:
    """Return the changes to the defaults, a few per line."""
    if not changes:
        return "the defaults"
    words = describe_changes(changes)
    lines = [words[at : at + _CHANGES_PER_LINE] for at in range(0, len(words), _CHANGES_PER_LINE)]
    return ",\n".join(", ".join(line) for line in lines)
