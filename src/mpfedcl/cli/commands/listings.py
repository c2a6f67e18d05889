"""`mpfedcl methods` and `mpfedcl data`: what there is."""

import json
from dataclasses import asdict
from itertools import islice
from typing import Any, get_args

from mpfedcl.cli.arguments.experiments import DataCache, DataList, DataShow, Methods
from mpfedcl.cli.progress import stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.data.client_split import expand_table, split_among_clients
from mpfedcl.data.folders import is_available
from mpfedcl.data.reader import open_data_set
from mpfedcl.data.samples import ImageFormat, SampleIndex
from mpfedcl.data.tables import fit_tables
from mpfedcl.experiment.datasets import SPECIFICATIONS
from mpfedcl.experiment.wording import describe_partition
from mpfedcl.methods import Family, Method, built_in_methods
from mpfedcl.models.feature_cache import FeatureCache
from mpfedcl.report.tables import TextTable

_MOST_CLASSES_SHOWN = 12
_MOST_CLIENTS_SHOWN = 200
_PICTURE = ImageFormat(96, 96, is_color=True)

_PICTURE_FORMATS = (".png", ".pdf", ".svg")


def methods_command(arguments: Methods) -> int:
    """List the methods."""
    methods = built_in_methods()
    if arguments.json:
        print(json.dumps({name: _describe(cls) for name, cls in methods.items()}, indent=2))
        return 0
    for family in get_args(Family):
        told = [_describe(cls) for cls in methods.values() if cls.family == family]
        rows = [
            [
                each["name"] + ("*" if each["interpretation"] else ""),
                each["summary"],
                each["sends"],
                each["keeps"],
                each["paper"],
            ]
            for each in told
        ]
        columns = ["name", "what it does", "a client sends", "and keeps", "paper"]
        if rows:
            TextTable(family, columns, rows).show(stdout_console())
    stdout_console().print(
        "* The paper leaves something open, and we had to choose: docs/methods.md says what.\n"
        "--json names more: how a method is judged, and the values that `mpfedcl tune` tries."
    )
    return 0


def _describe(method: type[Method]) -> dict[str, Any]:
    """Return what a method says of itself."""
    return {
        "name": method.name,
        "summary": method.summary,
        "family": method.family,
        "paper": method.paper,
        "interpretation": method.interpretation,
        "sends": method.sends,
        "keeps": method.keeps,
        "predictor": method.primary_predictor,
        "predictor_global": method.primary_predictor_global or method.primary_predictor,
        "search_space": {name: list(values) for name, values in method.search_space.items()},
    }


def data_list_command(arguments: DataList) -> int:
    """List the data sets."""
    sets = {}
    for name, spec in SPECIFICATIONS.items():
        here = "--dataset.root"
        if name not in ("folder", "table"):
            here = "yes" if is_available(name, arguments.root) else "no"
        sets[name] = {"summary": spec.summary, "source": spec.source, "here": here}
    if arguments.json:
        print(json.dumps(sets, indent=2))
        return 0
    rows = [[name, each["summary"], each["here"]] for name, each in sets.items()]
    TextTable("data sets", ["name", "what it is", "here"], rows).show(stdout_console())
    return 0


def data_cache_command(arguments: DataCache) -> int:
    """Show the feature cache, after clearing it if asked to."""
    cache = FeatureCache()
    if arguments.clear:
        cache.clear()
    content = cache.describe()
    total = sum(each.bytes for each in content.values())
    if arguments.json:
        shown = {
            "path": str(cache.folder),
            "bytes": total,
            "limit": cache.limit,
            "arrays": {name: asdict(each) for name, each in content.items()},
        }
        print(json.dumps(shown, indent=2))
        return 0
    rows = [
        [name, f"{each.files:,}", f"{each.samples:,}", f"{each.bytes / 1024**2:,.1f}"]
        for name, each in content.items()
    ]
    title = f"{cache.folder}: {total / 1024**2:,.1f} MiB of at most {cache.limit / 1024**2:,.0f}"
    heads = ["encoder", "files", "samples", "MiB"]
    TextTable(title, heads, rows or [["none", "0", "0", "0"]]).show(stdout_console())
    return 0


def data_show_command(arguments: DataShow) -> int:
    """Print and draw who holds what."""
    if arguments.out.suffix not in _PICTURE_FORMATS:
        raise InvalidInput(
            f"out is {str(arguments.out)!r}; it must end in {' or '.join(_PICTURE_FORMATS)}."
        )
    experiment = arguments.settings.replace(dataset__name=arguments.name).resolved()
    sample_index = open_data_set(experiment.dataset)
    split = split_among_clients(sample_index, experiment)
    sample_index = fit_tables(sample_index, split.training.values())
    content = expand_table(split.describe(sample_index.class_names))
    from mpfedcl.report.run_figures import draw_contact_sheet, draw_partition

    title = f"training {sample_index.noun}s, {describe_partition(experiment)}"
    draw_partition(content, title, arguments.out)
    pictures = [str(arguments.out)]
    if sample_index.vector_width is None:
        sheet = arguments.out.with_stem(f"{arguments.out.stem}-images")
        draw_contact_sheet(*_pick_images(sample_index), arguments.name, sheet)
        pictures.append(str(sheet))
    if arguments.json:
        print(json.dumps({"pictures": pictures, **content}, indent=2))
        return 0
    _clients_grid(f"{arguments.name}, {describe_partition(experiment)}", content).show(
        stdout_console()
    )
    stdout_console().print("\n  ".join(["pictures:", *pictures]))
    if sample_index.vector_width is not None:
        for notice in sample_index.notices:
            stdout_console().print(notice)
        stdout_console().print(f"There is no contact sheet: the samples are {sample_index}.")
    return 0


def _pick_images(sample_index: SampleIndex) -> tuple[dict[str, list[Images | None]], list[str]]:
    """Return the first training image of each class by domain, and the classes, at most twelve."""
    classes = list(sample_index.class_names[:_MOST_CLASSES_SHOWN])
    picked: dict[str, list[Images | None]] = {}
    for domain in sample_index.domains:
        picked[domain.name] = []
        for label in range(len(classes)):
            rows = domain.train.rows[domain.train.labels == label][:1]
            images = sample_index.store.load(rows, _PICTURE)
            picked[domain.name].append(images[0] if len(rows) else None)
    return picked, classes


def _clients_grid(title: str, content: dict[str, Any]) -> TextTable:
    classes: list[str] = content["classes"]
    # What does not fit 100 columns is only counted; the picture shows all classes.
    listed = sum(max(3, len(name)) + 3 for name in classes) <= 66
    columns = [*classes] if listed else ["classes held"]
    rows = []
    more = len(content["clients"]) - _MOST_CLIENTS_SHOWN
    for name, client in islice(content["clients"].items(), _MOST_CLIENTS_SHOWN):
        held = [str(n) if n else "·" for n in client["train"]]
        cells = held if listed else [str(sum(n > 0 for n in client["train"]))]
        rows.append([name, *cells, f"{sum(client['train']):,}", f"{client['test']:,}"])
    note = f"and {more:,} clients more, which --json lists." if more > 0 else ""
    return TextTable(title, ["client", *columns, "train", "test"], rows, note)
