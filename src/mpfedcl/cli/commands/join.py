"""`mpfedcl join`."""

import json
import shlex
from dataclasses import replace

from mpfedcl.cli.arguments.deployment import Join, Leave
from mpfedcl.cli.commands.leave import leave_command
from mpfedcl.cli.progress import stderr_console, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.inference.membership import JoinResult, join, list_joined
from mpfedcl.report.tables import TextTable, percent

_PREDICTORS = {
    "classifier": "classifier",
    "pool": "pool's prototypes",
    "own": "own prototypes",
    "both": "pool + own",
}

_EVENTS = {"joined": "joins", "replaced": "replaces its samples in", "extended": "adds samples to"}


def join_command(arguments: Join) -> int:
    """Let a client join or leave, or list the clients that have joined."""
    if arguments.leave is not None:
        return _leave(arguments, arguments.leave)
    if arguments.data is None:
        return _list(arguments)
    if arguments.name is None:
        raise InvalidInput("name is missing; the new client must have one: --name clinic-7.")
    console = stderr_console()
    is_default = arguments.epochs == Join(arguments.run).epochs
    joined = join(
        arguments.run,
        arguments.data,
        arguments.name,
        epochs=None if is_default else arguments.epochs,
        lr=arguments.lr,
        test_fraction=arguments.test_fraction,
        weights=arguments.weights,
        add=arguments.add,
        replace=arguments.replace,
        more=arguments.more,
        new_classes=arguments.new_classes,
        on_progress=lambda words: console.print(f"{words} ...") if console.is_terminal else None,
    )
    for notice in joined.notices:
        console.print(notice)
    if arguments.json:
        told = {**joined.to_json(), "added": joined.was_added, "rejected": joined.rejected}
        print(json.dumps(told, indent=2))
    elif joined.epochs is None:
        _show_one_shot(arguments, joined)
    else:
        _show(arguments, joined, joined.epochs)
    if arguments.add and joined.rejected is not None:
        raise InvalidInput(
            f"{joined.client} was not added: update validation rejects it ({joined.rejected})."
        )
    return 0


def _show(arguments: Join, joined: JoinResult, epochs: int) -> None:
    console = stdout_console()
    rows = {"the run's model": joined.before}
    if epochs:
        rows[f"after {epochs} epoch{'s' if epochs > 1 else ''}, lr {joined.lr:g}"] = joined.after
    TextTable(
        f"{joined.client} joins {arguments.run}: accuracy % on its {joined.test_images:,} test "
        f"{joined.noun}s",
        ["model", *_PREDICTORS.values()],
        [[name, *(percent(row[each]) for each in _PREDICTORS)] for name, row in rows.items()],
    ).show(console)
    if not joined.test_images:
        console.print(f"There is no {joined.noun} to test on: too few of a class to hold any out.")
    console.print(
        f"{joined.prototypes} prototypes of {joined.train_images:,} {joined.noun}s of "
        f"{joined.classes_held} classes"
    )
    if joined.was_added:
        console.print(
            f"added to the pool; take them out with: mpfedcl join {arguments.run} "
            f"--leave {joined.client}"
        )
    elif joined.rejected is None:
        console.print("The run is unchanged; --add puts the prototypes into its pool.")


def _show_one_shot(arguments: Join, joined: JoinResult) -> None:
    console = stdout_console()
    before, after = joined.before, joined.after
    rows = {
        "the federation's": (before, "classifier"),
        f"the federation's with {joined.client}": (after, "classifier"),
        f"{joined.client}'s own": (after, "personal"),
    }
    TextTable(
        f"{joined.client} {_EVENTS[joined.event]} {arguments.run}: accuracy % on its "
        f"{joined.test_images:,} test {joined.noun}s",
        ["classifier", "as it is", "with its label shares"],
        [
            [title, *(percent(found.get(key)) for key in (each, f"{each}_prior"))]
            for title, (found, each) in rows.items()
        ],
    ).show(console)
    if not joined.test_images:
        console.print(f"There is no {joined.noun} to test on: too few of a class to hold any out.")
    if joined.new_classes:
        console.print(f"new to the federation: {', '.join(joined.new_classes)}")
    console.print(
        f"statistics of {joined.train_images:,} {joined.noun}s; {joined.client} has "
        f"{joined.classes_held} classes now"
    )
    if joined.was_added:
        words = ["mpfedcl", "leave", str(arguments.run), f"--name={joined.client}"]
        console.print(f"{joined.event}; take it out with: {shlex.join(words)}")
    elif joined.rejected is None:
        console.print("The federation is unchanged; --add adds these statistics to it.")


def _leave(arguments: Join, name: str) -> int:
    if replace(arguments, leave=None, json=False) != Join(arguments.run):
        raise InvalidInput(f"leave is {name!r}; it must be given alone, or with --json only.")
    return leave_command(Leave(arguments.run, name, arguments.json))


def _list(arguments: Join) -> int:
    if replace(arguments, json=False) != Join(arguments.run):
        raise InvalidInput(
            "data is missing; a client that joins needs --data FOLDER and --name NAME."
        )
    found = list_joined(arguments.run)
    if arguments.json:
        print(json.dumps(found, indent=2))
    elif not found:
        stdout_console().print(f"No client has joined {arguments.run} since it was trained.")
    else:
        columns = ["client", "joined", "images", "epochs", "prototypes"]
        names = ("client", "time", "train_images", "epochs", "prototypes")
        rows = [[str(record.get(name, "-")) for name in names] for record in found]
        TextTable(f"joined {arguments.run}", columns, rows).show(stdout_console())
    return 0
