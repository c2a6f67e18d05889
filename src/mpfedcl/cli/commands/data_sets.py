"""`mpfedcl data fetch` and `prepare`: public data into the data folder; `encode`: into features."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mpfedcl.cli.arguments.experiments import DataEncode, DataFetch, DataPrepare
from mpfedcl.cli.progress import stderr_console, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import lock_folder
from mpfedcl.data.loading import write_feature_files
from mpfedcl.data.public.download import DownloadProgress, RetryPolicy, fetch_source
from mpfedcl.data.public.originals import is_prepared
from mpfedcl.data.public.prepare import Preparation, prepare_set
from mpfedcl.data.public.sources import PublicFile, PublicSource, fetch_plan
from mpfedcl.experiment.data_folder import find_data_folder
from mpfedcl.experiment.settings import DatasetSettings


def data_fetch_command(arguments: DataFetch, retries: RetryPolicy | None = None) -> int:
    """Download what a set needs, prepare it, and tell what is left to do by hand."""
    plan, replace = fetch_plan(arguments.name), arguments.replace
    data = _data_folder(arguments.root)
    folder, originals = data / plan.set_name, data / "originals"
    for public_source in plan.sources:
        if not replace and all(is_prepared(folder, domain) for domain in public_source.domains):
            continue
        download_folder = originals / public_source.name
        with lock_folder(download_folder), _show_progress(public_source) as report:
            fetch_source(public_source, download_folder, retries, report)
        stdout_console().print(f"originals of {public_source.name}: {download_folder}")
    originals.mkdir(parents=True, exist_ok=True)
    # A whole set also takes the parts that a person has put there; a part of one only itself.
    fetched = {domain for public_source in plan.sources for domain in public_source.domains}
    only = None if arguments.name == plan.set_name else fetched
    preparation = prepare_set(plan.set_name, originals, folder, replace, only)
    _print_preparation(plan.set_name, preparation)
    if plan.by_hand and preparation.missing:
        stdout_console().print(plan.by_hand.format(folder=originals))
    return 0


def data_prepare_command(arguments: DataPrepare) -> int:
    """Prepare what is found in a folder, and tell what is missing."""
    name, source = arguments.name, arguments.source
    folder = _data_folder(arguments.root) / name
    preparation = prepare_set(name, source.expanduser(), folder, arguments.replace)
    if not preparation.prepared:
        sought = "; ".join(f"{domain}: {what}" for domain, what in preparation.missing.items())
        if preparation.kept:
            raise InvalidInput(
                f"{folder} has {', '.join(preparation.kept)} already and nothing else was found; "
                f"--replace must be given to prepare them again{f' ({sought})' if sought else ''}."
            )
        raise InvalidInput(
            f"source is {str(source)!r}, which holds no originals of {name}; it must hold at least "
            f"one of: {sought}."
        )
    _print_preparation(name, preparation)
    return 0


def data_encode_command(arguments: DataEncode) -> int:
    """Write feature files of pictures, and tell what is in them."""
    root, out = arguments.root.expanduser(), arguments.out.expanduser()
    written = write_feature_files(root, out, arguments.encoder, arguments.weights)
    lines = [f"  {path.name}: {count:,} vectors" for path, count in written.items()]
    stdout_console().print("\n".join([f"features by {arguments.encoder}: {out}", *lines]))
    stdout_console().print(f"use them with: --dataset.name folder --dataset.root {out}")
    return 0


def _data_folder(root: Path | None) -> Path:
    return find_data_folder(DatasetSettings(root=root))[0]


def _print_preparation(name: str, preparation: "Preparation") -> None:
    lines = [f"{name}: {preparation.folder}"]
    lines += [f"  prepared {domain}: {what}" for domain, what in preparation.prepared.items()]
    lines += [f"  kept {domain}: it was there already" for domain in preparation.kept]
    lines += [f"  missing {domain}: {what}" for domain, what in preparation.missing.items()]
    stdout_console().print("\n".join(lines))


@contextmanager
def _show_progress(public_source: PublicSource) -> Iterator[DownloadProgress]:
    """Draw a bar a file, on a terminal only."""
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
