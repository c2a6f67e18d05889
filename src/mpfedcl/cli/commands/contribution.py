"""`mpfedcl contribution`."""

import json

from mpfedcl.cli.arguments.deployment import Contributions
from mpfedcl.cli.progress import stderr_console, stdout_console
from mpfedcl.inference.contribution import OthersAccuracy, find_contributions
from mpfedcl.report.contribution_figure import draw_contributions
from mpfedcl.report.tables import PREDICTOR_TITLES, TextTable, percent
from mpfedcl.runs.directory import RunDirectory


def contribution_command(arguments: Contributions) -> int:
    """Show what clients are worth, and write it down."""
    console = stderr_console()

    def tell(done: int, count: int) -> None:
        if console.is_terminal:
            console.print(f"without {done} of {count} clients", end="\r")

    found = find_contributions(arguments.run, on_progress=tell)
    with RunDirectory.resume(arguments.run, "RUN") as directory:
        directory.write_json("contribution.json", found.to_json())
        title = f"What each client is worth to the others: {arguments.run.resolve().name}"
        draw_contributions(found.clients, title, arguments.run / "contribution.png")
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
        return 0
    predictors = [
        PREDICTOR_TITLES[each] for each in (found.predictor_global, found.predictor_local)
    ]
    note = (
        f"All tests: those of the others together, predicted with: {predictors[0]}.\n"
        f"Own test: each of the others on its own, averaged, predicted with: {predictors[1]}.\n"
        "Points: what the others gain from the client; below 0 they do better without it.\n"
        "A client that alone holds a class looks harmful here: the others' tests lack that class."
    )
    if found.untested:
        note += f"\nTheir local test set samples are not here: {', '.join(found.untested)}."
    TextTable(
        f"what each client of {arguments.run} is worth: accuracy % of the others",
        [
            "client",
            "train",
            "all tests",
            "without",
            "points",
            "local test set",
            "without",
            "points",
        ],
        [
            [each.client, f"{each.images:,}", *_cells(each.union), *_cells(each.own)]
            for each in found.clients
        ],
        note,
    ).show(stdout_console())
    stdout_console().print(f"figure: {arguments.run / 'contribution.png'}")
    return 0


def _cells(found: OthersAccuracy) -> list[str]:
    return [percent(found.whole), percent(found.without), f"{found.difference:+.1f}"]
