"""List, show, fetch, prepare and encode data sets: `data`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import DownloadColumn, Progress, TaskID, TimeRemainingColumn

from mpfedcl.cli.arguments import DataCache, DataEncode, DataFetch, DataList, DataPrepare, DataShow
from mpfedcl.cli.terminal import print_json, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import lock_folder
from mpfedcl.core.plugins import allow_current_folder
from mpfedcl.core.progress import stderr_console
from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.loading import write_feature_files
from mpfedcl.data.objects import use_objects
from mpfedcl.data.public.download import DownloadProgress, fetch_source
from mpfedcl.data.public.prepare import Preparation, is_prepared, prepare_set
from mpfedcl.data.public.sources import PublicFile, fetch_plan
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.data.sentences import TextColumns, write_text_features
from mpfedcl.data.set_folders import is_available
from mpfedcl.data.tables import fit_tables
from mpfedcl.experiment.data_folder import find_data_folder
from mpfedcl.experiment.datasets import SPECIFICATIONS
from mpfedcl.experiment.descriptions import describe_partition
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.models.encoders.sentence_encoder import PREFIX, SentenceEncoder
from mpfedcl.models.feature_cache import FeatureCache
from mpfedcl.report.tables import TextTable

_MOST_CLIENTS_SHOWN = 200
_FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


def data_list_command(arguments: DataList) -> None:
    """List the data sets."""
    sets = {}
    for name, spec in SPECIFICATIONS.items():
        here = "--dataset.root"
        if name not in ("folder", "table"):
            here = "yes" if is_available(name, arguments.root) else "no"
        sets[name] = {"summary": spec.summary, "source": spec.source, "here": here}
    if arguments.json:
        print_json(sets)
        return
    rows = [[name, each["summary"], each["here"]] for name, each in sets.items()]
    TextTable("data sets", ["name", "content", "available"], rows).show(stdout_console())


def data_cache_command(arguments: DataCache) -> None:
    """Show the feature cache, or clear it first."""
    cache = FeatureCache()
    if arguments.clear:
        cache.clear()
    content = cache.describe()
    total = sum(each.bytes for each in content.values())
    if arguments.json:
        arrays = {name: asdict(each) for name, each in content.items()}
        place = {"path": str(cache.folder), "bytes": total, "limit": cache.limit}
        print_json({**place, "arrays": arrays})
        return
    rows = [
        [name, f"{each.files:,}", f"{each.samples:,}", f"{each.bytes / 1024**2:,.1f}"]
        for name, each in content.items()
    ]
    title = f"{cache.folder}: {total / 1024**2:,.1f} MiB of at most {cache.limit / 1024**2:,.0f}"
    heads = ["encoder", "files", "samples", "MiB"]
    TextTable(title, heads, rows or [["none", "0", "0", "0"]]).show(stdout_console())


def data_show_command(arguments: DataShow) -> None:
    """Print and draw the samples of each client."""
    if arguments.out.suffix not in _FIGURE_SUFFIXES:
        raise InvalidInput(
            f"out is {str(arguments.out)!r}; it must end in {' or '.join(_FIGURE_SUFFIXES)}."
        )
    if ":" in arguments.name:
        allow_current_folder()
    named = arguments.settings.replace(dataset__name=arguments.name)
    experiment = use_objects(named).resolved()
    sample_index = open_data_set(experiment.dataset)
    split = split_among_clients(sample_index, experiment)
    sample_index = fit_tables(sample_index, split.training.values(), experiment.dataset)
    content = split.describe(sample_index.class_names)
    from mpfedcl.report.drawings import draw_partition

    title = f"training {sample_index.noun}s, {describe_partition(experiment)}"
    draw_partition(content, title, arguments.out)
    if arguments.json:
        print_json({"figures": [str(arguments.out)], **content})
        return
    console = stdout_console()
    _clients_grid(f"{arguments.name}, {describe_partition(experiment)}", content).show(console)
    console.print(f"samples: {sample_index}\nfigure: {arguments.out}")
    for notice in sample_index.notices:
        console.print(notice)


def _clients_grid(title: str, content: dict[str, Any]) -> TextTable:
    classes: list[str] = content["classes"]
    # Classes that do not fit 100 columns are only counted; the figure shows them all.
    listed = sum(max(3, len(name)) + 3 for name in classes) <= 66
    columns = [*classes] if listed else ["classes held"]
    rows = []
    more = len(content["clients"]) - _MOST_CLIENTS_SHOWN
    for name, client in islice(content["clients"].items(), _MOST_CLIENTS_SHOWN):
        held = [str(n) if n else "·" for n in client["train"]]
        cells = held if listed else [str(sum(n > 0 for n in client["train"]))]
        rows.append([name, *cells, f"{sum(client['train']):,}", f"{client['test']:,}"])
    note = f"and {more:,} more clients, which --json lists." if more > 0 else ""
    return TextTable(title, ["client", *columns, "train", "test"], rows, note)


def data_fetch_command(arguments: DataFetch) -> None:
    """Download and prepare a data set, and print the steps that are left to the user."""
    plan, replace = fetch_plan(arguments.name), arguments.replace
    data = _data_folder(arguments.root)
    folder, originals = data / plan.set_name, data / "originals"
    for public_source in plan.sources:
        if not replace and all(is_prepared(folder, domain) for domain in public_source.domains):
            continue
        download_folder = originals / public_source.name
        with lock_folder(download_folder), _show_downloads() as report:
            fetch_source(public_source, download_folder, report)
        stdout_console().print(f"originals of {public_source.name}: {download_folder}")
    originals.mkdir(parents=True, exist_ok=True)
    # A whole set includes parts that the user put there; a part includes only itself.
    fetched = {domain for public_source in plan.sources for domain in public_source.domains}
    only = None if arguments.name == plan.set_name else fetched
    preparation = prepare_set(plan.set_name, originals, folder, replace, only)
    _print_preparation(plan.set_name, preparation)
    if plan.by_hand and preparation.missing:
        stdout_console().print(plan.by_hand.format(folder=originals))


def data_prepare_command(arguments: DataPrepare) -> None:
    """Prepare the original files in a folder, and list those that are missing."""
    name, source = arguments.name, arguments.source
    folder = _data_folder(arguments.root) / name
    preparation = prepare_set(name, source.expanduser(), folder, arguments.replace)
    if not preparation.prepared:
        sought = "; ".join(f"{domain}: {what}" for domain, what in preparation.missing.items())
        if preparation.kept:
            raise InvalidInput(
                f"{folder} already has {', '.join(preparation.kept)}, and nothing else was found; "
                f"--replace must be given to prepare them again{f' ({sought})' if sought else ''}."
            )
        raise InvalidInput(
            f"source is {str(source)!r}, which holds no originals of {name}; it must hold at least "
            f"one of: {sought}."
        )
    _print_preparation(name, preparation)


def data_encode_command(arguments: DataEncode) -> None:
    """Encode images or texts into feature files, and list them."""
    root, name, weights = arguments.root.expanduser(), arguments.encoder, arguments.weights
    if arguments.folder and arguments.out:
        raise InvalidInput(
            f"out is {str(arguments.out)!r}, and OUT is {str(arguments.folder)!r}; one of them "
            "must be left out."
        )
    out = (arguments.folder or arguments.out or Path("features")).expanduser()
    columns = TextColumns(arguments.text, arguments.label, arguments.client, arguments.split)
    notices: list[str] = []
    if name.startswith(PREFIX):
        if weights is not None:
            raise InvalidInput(
                f"weights is {str(weights)!r}, but encoder {name!r} has its own; leave it out."
            )
        encoder = SentenceEncoder(Path(name.removeprefix(PREFIX)).expanduser())
        written, notices = write_text_features(root, out, encoder, columns)
    elif columns.named:
        role, column = next(iter(columns.named.items()))
        raise InvalidInput(
            f"{role} is {column!r}, but encoder {name!r} takes images; it must be left out, or "
            "encoder must be sentence:PATH, the folder of a sentence transformer."
        )
    else:
        written = write_feature_files(root, out, name, weights)
    lines = [f"  {path.name}: {count:,} vectors" for path, count in written.items()]
    stdout_console().print("\n".join([f"features by {name}: {out}", *lines, *notices]))
    use = f"--dataset.name folder --dataset.root {out}"
    if columns.text and not columns.label:
        use = f"mpfedcl predict RUN {out}/*.npz"
    stdout_console().print(f"use them with: {use}")


def _data_folder(root: Path | None) -> Path:
    return find_data_folder(DatasetSettings(root=root))[0]


def _print_preparation(name: str, preparation: Preparation) -> None:
    lines = [f"{name}: {preparation.folder}"]
    lines += [f"  prepared {domain}: {what}" for domain, what in preparation.prepared.items()]
    lines += [f"  kept {domain}: it already exists" for domain in preparation.kept]
    lines += [f"  missing {domain}: {what}" for domain, what in preparation.missing.items()]
    stdout_console().print("\n".join(lines))


@contextmanager
def _show_downloads() -> Iterator[DownloadProgress]:
    """Show a progress bar per file, on a terminal only."""
    console = stderr_console()
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[PublicFile, TaskID] = {}

        def report(public_file: PublicFile, on_disk: int) -> None:
            if public_file not in tasks:
                tasks[public_file] = progress.add_task(public_file.name, total=public_file.size)
            progress.update(tasks[public_file], completed=on_disk)

        yield report
