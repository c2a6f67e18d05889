"""`mpfedcl data fetch` and `mpfedcl data prepare`: public data into the data folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mpfedcl.cli.arguments.experiments import DataFetch, DataPrepare
from mpfedcl.errors import InvalidInput

if TYPE_CHECKING:
    from mpfedcl.data.fetch.download import Patience, Report
    from mpfedcl.data.fetch.originals import Collection
    from mpfedcl.data.prepare import Preparation


def data_fetch_command(arguments: DataFetch) -> int:
    """Do what `mpfedcl data fetch` asks for."""
    return fetch_command(arguments.name, arguments.root, arguments.replace)


def data_prepare_command(arguments: DataPrepare) -> int:
    """Do what `mpfedcl data prepare` asks for."""
    return prepare_command(arguments.name, arguments.source, arguments.root, arguments.replace)


def fetch_command(
    name: str, root: Path | None, replace: bool = False, patience: "Patience | None" = None
) -> int:
    """Download what a set needs, prepare it, and tell what is left to do by hand."""
    from mpfedcl.data.fetch.download import fetch_collection
    from mpfedcl.data.fetch.originals import fetch_plan
    from mpfedcl.data.prepare import prepare_set
    from mpfedcl.data.prepare.destination import is_prepared
    from mpfedcl.files import hold_folder

    plan = fetch_plan(name)
    data = _data_folder(root)
    folder, originals = data / plan.set_name, data / "originals"
    for collection in plan.collections:
        if not replace and all(is_prepared(folder, domain) for domain in collection.domains):
            continue
        place = originals / collection.name
        with hold_folder(place), _show_progress(collection) as report:
            fetch_collection(collection, place, patience, report)
        _say(f"originals of {collection.name}: {place}")
    originals.mkdir(parents=True, exist_ok=True)
    # A whole set also takes the parts that a person has put there; a part of one only itself.
    fetched = {domain for collection in plan.collections for domain in collection.domains}
    only = None if name == plan.set_name else fetched
    preparation = prepare_set(plan.set_name, originals, folder, replace, only)
    _tell(plan.set_name, preparation)
    if plan.by_hand and preparation.missing:
        _say(plan.by_hand.format(folder=originals))
    return 0


def prepare_command(name: str, source: Path, root: Path | None, replace: bool = False) -> int:
    """Prepare what is found in a folder, and tell what is missing."""
    from mpfedcl.data.prepare import prepare_set

    folder = _data_folder(root) / name
    preparation = prepare_set(name, source.expanduser(), folder, replace)
    if not preparation.prepared:
        sought = "; ".join(f"{domain}: {what}" for domain, what in preparation.missing.items())
        if preparation.kept:
            raise InvalidInput(
                f"{folder} has {', '.join(preparation.kept)} already and nothing else was found; "
                f"--replace must be given to prepare them anew{f' ({sought})' if sought else ''}."
            )
        raise InvalidInput(
            f"source is {str(source)!r}, which holds no originals of {name}; it must hold at least "
            f"one of: {sought}."
        )
    _tell(name, preparation)
    return 0


def _data_folder(root: Path | None) -> Path:
    from mpfedcl.data.reader import data_folder
    from mpfedcl.experiment.settings import DatasetSettings

    return data_folder(DatasetSettings(root=root))[0]


def _tell(name: str, preparation: "Preparation") -> None:
    lines = [f"{name}: {preparation.folder}"]
    lines += [f"  prepared {domain}: {what}" for domain, what in preparation.prepared.items()]
    lines += [f"  kept {domain}: it was there already" for domain in preparation.kept]
    lines += [f"  missing {domain}: {what}" for domain, what in preparation.missing.items()]
    _say("\n".join(lines))


def _say(text: str) -> None:
    from mpfedcl.cli.progress import results

    # Paths are neither broken into lines nor read as markup.
    results().print(text, soft_wrap=True, markup=False)


@contextmanager
def _show_progress(collection: "Collection") -> "Iterator[Report]":
    """Draw a bar a file, on a terminal only."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from mpfedcl.cli.progress import messages
    from mpfedcl.data.fetch.originals import Original

    console = messages()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {
            original: progress.add_task(original.name, total=original.size, start=False)
            for original in collection.files
        }

        def report(original: Original, on_disk: int) -> None:
            task = progress.tasks[tasks[original]]
            if not task.started:
                progress.start_task(tasks[original])
            progress.update(tasks[original], completed=on_disk)

        yield report
