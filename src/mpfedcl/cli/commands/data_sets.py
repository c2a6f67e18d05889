"""`mpfedcl data fetch` and `mpfedcl data prepare`: public data into the data folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mpfedcl.cli.arguments.experiments import DataFetch, DataPrepare
from mpfedcl.errors import InvalidInput

if TYPE_CHECKING:
    from mpfedcl.data.fetch.download import DownloadProgress, RetryPolicy
    from mpfedcl.data.fetch.public_sources import PublicSource
    from mpfedcl.data.prepare import Preparation


def data_fetch_command(arguments: DataFetch) -> int:
    """Do what `mpfedcl data fetch` asks for."""
    return fetch_command(arguments.name, arguments.root, arguments.replace)


def data_prepare_command(arguments: DataPrepare) -> int:
    """Do what `mpfedcl data prepare` asks for."""
    return prepare_command(arguments.name, arguments.source, arguments.root, arguments.replace)


def fetch_command(
    name: str, root: Path | None, replace: bool = False, retries: "RetryPolicy | None" = None
) -> int:
    """Download what a set needs, prepare it, and tell what is left to do by hand."""
    from mpfedcl.data.fetch.download import fetch_source
    from mpfedcl.data.fetch.public_sources import fetch_plan
    from mpfedcl.data.prepare import prepare_set
    from mpfedcl.data.prepare.destination import is_prepared
    from mpfedcl.files import lock_folder

    plan = fetch_plan(name)
    data = _data_folder(root)
    folder, originals = data / plan.set_name, data / "originals"
    for public_source in plan.sources:
        if not replace and all(is_prepared(folder, domain) for domain in public_source.domains):
            continue
        download_folder = originals / public_source.name
        with lock_folder(download_folder), _show_progress(public_source) as report:
            fetch_source(public_source, download_folder, retries, report)
        _print(f"originals of {public_source.name}: {download_folder}")
    originals.mkdir(parents=True, exist_ok=True)
    # A whole set also takes the parts that a person has put there; a part of one only itself.
    fetched = {domain for public_source in plan.sources for domain in public_source.domains}
    only = None if name == plan.set_name else fetched
    preparation = prepare_set(plan.set_name, originals, folder, replace, only)
    _print_preparation(plan.set_name, preparation)
    if plan.by_hand and preparation.missing:
        _print(plan.by_hand.format(folder=originals))
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
    _print_preparation(name, preparation)
    return 0


def _data_folder(root: Path | None) -> Path:
    from mpfedcl.data.reader import find_data_folder
    from mpfedcl.experiment.settings import DatasetSettings

    return find_data_folder(DatasetSettings(root=root))[0]


def _print_preparation(name: str, preparation: "Preparation") -> None:
    lines = [f"{name}: {preparation.folder}"]
    lines += [f"  prepared {domain}: {what}" for domain, what in preparation.prepared.items()]
    lines += [f"  kept {domain}: it was there already" for domain in preparation.kept]
    lines += [f"  missing {domain}: {what}" for domain, what in preparation.missing.items()]
    _print("\n".join(lines))


def _print(text: str) -> None:
    from mpfedcl.cli.progress import stdout_console

    # Paths are neither broken into lines nor read as markup.
    stdout_console().print(text, soft_wrap=True, markup=False)


@contextmanager
def _show_progress(public_source: "PublicSource") -> "Iterator[DownloadProgress]":
    """Draw a bar a file, on a terminal only."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from mpfedcl.cli.progress import stderr_console
    from mpfedcl.data.fetch.public_sources import PublicFile

    console = stderr_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {
            public_file: progress.add_task(public_file.name, total=public_file.size, start=False)
            for public_file in public_source.files
        }

        def report(public_file: PublicFile, on_disk: int) -> None:
            task = progress.tasks[tasks[public_file]]
            if not task.started:
                progress.start_task(tasks[public_file])
            progress.update(tasks[public_file], completed=on_disk)

        yield report
