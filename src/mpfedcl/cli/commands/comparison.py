"""`mpfedcl compare`."""

import json
from pathlib import Path
from textwrap import fill

from mpfedcl.api import RUNNER
from mpfedcl.cli.arguments.experiments import Compare
from mpfedcl.cli.commands.parallel_jobs import check_runs
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console, stop_after_round
from mpfedcl.core.files import unused_folder
from mpfedcl.experiment.wording import describe_missing_encoder
from mpfedcl.report.export import write_comparison
from mpfedcl.report.tracking import make_trackers, read_failures
from mpfedcl.studies.comparison import Comparison, choose_methods
from mpfedcl.studies.jobs import JobOptions


def compare_command(arguments: Compare) -> int:
    """Execute the missing runs, then print the tables and draw the figures."""
    check_runs("compare", arguments.file, arguments.settings, arguments.jobs)
    # Missing packages are reported before the first run.
    make_trackers(arguments.settings.track)
    path = arguments.out or unused_folder(Path("runs") / "comparison")
    methods, left_out = choose_methods(arguments.settings, arguments.methods)
    comparison = Comparison.prepare(arguments.settings, methods, arguments.seeds, path)
    total = sum(each.experiment.rounds for each in comparison.planned_runs)
    console = stderr_console()
    for notice in describe_missing_encoder(arguments.settings):
        console.print(notice)
    for name, reason in left_out.items():
        console.print(f"{name} is left out: {reason}")
    with stop_after_round(console) as stop, progress_bar(console, "rounds") as bar:
        task = bar.add_task(f"{len(comparison.planned_runs)} runs", total=total, note="")

        def advance() -> None:
            bar.update(task, completed=comparison.rounds_done())

        # Counts the runs of an earlier command.
        advance()
        complete = comparison.run(JobOptions(RUNNER, arguments.jobs, stop, advance))
    if not complete:
        console.print(f"Stopped. The same command with --out {path} continues where it stopped.")
        return 130
    for each in comparison.planned_runs:
        for sentence in read_failures(each.path):
            console.print(f"{each.path.name}: {sentence}")
    content, tables = write_comparison(comparison, all_predictors=arguments.predictors == "all")
    if arguments.json:
        print(json.dumps({"path": str(path), **content}, indent=2))
        return 0
    for table in tables:
        table.show(stdout_console())
    stdout_console().print(f"comparison: {path}")
    figures = sorted(each.name for each in comparison.path.glob("*.png"))
    told = f"in it: {', '.join(['table.md', 'comparison.json', *figures])}"
    stdout_console().print(fill(told, 100, break_on_hyphens=False))
    return 0
