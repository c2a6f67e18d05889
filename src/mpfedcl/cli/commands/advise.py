"""`mpfedcl advise`."""

import json

from mpfedcl.cli.arguments.deployment import Advise
from mpfedcl.cli.progress import stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.inference.advice import CLASSIFIERS, Advice, advise
from mpfedcl.report.tables import TextTable, percent

_MOST_CLASSES = 12


def advise_command(arguments: Advise) -> int:
    """Advise a client whether to join."""
    if arguments.data is None:
        raise InvalidInput("data is missing; it must be the client's images: --data FOLDER.")
    found = advise(
        arguments.run,
        arguments.data,
        test_fraction=arguments.test_fraction,
        weights=arguments.weights,
    )
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        _show(arguments, found)
    return 0


def _show(arguments: Advise, found: Advice) -> None:
    console, nouns = stdout_console(), f"{found.noun}s"
    TextTable(
        f"{arguments.data} with {arguments.run}: accuracy % on {found.tested:,} {nouns}",
        ["classifier", "accuracy"],
        [[CLASSIFIERS[name], percent(value)] for name, value in found.accuracy.items()],
    ).show(console)
    gains = sorted(found.classes, key=lambda each: (each.local - each.federation, each.name))
    TextTable(
        "per class, largest gain from the federation first",
        ["class", "train", "tested", "local correct", "federation correct"],
        [
            [each.name, *(str(n) for n in (each.train, each.tested, each.local, each.federation))]
            for each in gains[:_MOST_CLASSES]
        ],
    ).show(console)
    console.print(_tell_how(found))
    console.print(_tell_needed(found, gains[0].name))
    console.print(
        f"{found.verdict} Compared: {CLASSIFIERS['local']}; {CLASSIFIERS[found.compared]}.",
        style="bold",
    )
    console.print("Nothing was sent or written.")


def _tell_how(found: Advice) -> str:
    if found.folds == 1:
        return f"{found.tested:,} {found.noun}s were held out; {found.train:,} were used to train."
    return (
        f"Few could be held out, so each {found.noun} was tested once, in {found.folds} folds; "
        f"about {found.train:,} were used to train each time."
    )


def _tell_needed(found: Advice, most_gained: str) -> str:
    curve = ", ".join(f"{percent(right)} % with {size:,}" for size, right in found.curve)
    told = f"Alone: {curve}. "
    if found.more_needed == 0:
        return told + "Your own images do at least as well as the federation."
    if found.more_needed is None:
        return told + (
            "This does not show how many more of your own would do as well as the federation."
        )
    return told + (
        f"Very roughly {found.more_needed:,} more of your own would do as well as the federation; "
        f"class {most_gained} would gain most."
    )
