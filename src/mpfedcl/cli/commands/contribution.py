"""`mpfedcl contribution`."""

import json

from mpfedcl.cli.arguments.deployment import Contributions
from mpfedcl.cli.progress import stderr_console, stdout_console
from mpfedcl.inference.contribution import OthersAccuracy, find_contributions
from mpfedcl.report.run_figures import draw_contributions
from mpfedcl.report.tables import PREDICTOR_TITLES, TextTable, percent
from mpfedcl.runs.directory import RunDirectory


def contribution_command(arguments: Contributions) -> int:
    """Show the client contributions, and write them into the run directory."""
    console = stderr_console()

    def tell(done: int, count: int) -> None:
        if console.is_terminal:
            console.print(f"without {done} of {count} clients", end="\r")

    found = find_contributions(arguments.run, on_progress=tell)
    with RunDirectory.resume(arguments.run, "RUN") as directory:
        directory.write_json("contribution.json", found.to_json())
        title = f"Client contributions: {arguments.run.resolve().name}"
        draw_contributions(found.clients, title, arguments.run / "contribution.png")
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
        return 0
    predictors = [
        PREDICTOR_TITLES[each] for each in (found.predictor_global, found.predictor_local)
    ]
    note = (
        f"Global test set: the test sets of the others together, by {predictors[0]}.\n"
        f"Local test sets: those of the others, averaged, by {predictors[1]}.\n"
        "Points: the gain of the others from the client; below 0 they do better without it.\n"
        "The only client with a class looks harmful: the test sets of the others lack that class."
    )
    if found.untested:
        note += f"\nWithout test samples here: {', '.join(found.untested)}."
    TextTable(
        f"client contributions in {arguments.run}: accuracy % of the others",
        [
            "client",
            "train",
            "global",
            "without",
            "points",
            "local",
            "without",
            "points",
        ],
        [
            [each.client, f"{each.images:,}", *_cells(each.global_test), *_cells(each.local_test)]
            for each in found.clients
        ],
        note,
    ).show(stdout_console())
    stdout_console().print(f"figure: {arguments.run / 'contribution.png'}")
    return 0


def _cells(found: OthersAccuracy) -> list[str]:
    return [percent(found.whole), percent(found.without), f"{found.difference:+.1f}"]
