"""`mpfedcl methods` and `mpfedcl data`: what there is."""

import json
from typing import Any

from mpfedcl.cli import DataList, DataShow, Methods
from mpfedcl.commands.run import describe_partition
from mpfedcl.data.catalogue import SPECIFICATIONS
from mpfedcl.data.federated import load_federated
from mpfedcl.data.reader import locate_set
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import DatasetSettings
from mpfedcl.methods import built_in_methods
from mpfedcl.progress import results
from mpfedcl.report.tables import READING_TITLES, Grid
from mpfedcl.simulation import describe_clients

_PICTURE_FORMATS = (".png", ".pdf", ".svg")


def methods_command(arguments: Methods) -> int:
    """List the methods."""
    methods = built_in_methods()
    if arguments.json:
        print(json.dumps({name: cls.summary for name, cls in methods.items()}, indent=2))
        return 0
    rows = [[name, cls.summary, READING_TITLES[cls.reading]] for name, cls in methods.items()]
    Grid("methods", ["name", "what it does", "read by"], rows).show(results())
    return 0


def data_list_command(arguments: DataList) -> int:
    """List the data sets."""
    sets = {
        name: {"summary": spec.summary, "source": spec.source, "here": _is_here(name, arguments)}
        for name, spec in SPECIFICATIONS.items()
    }
    if arguments.json:
        print(json.dumps(sets, indent=2))
        return 0
    rows = [[name, str(each["summary"]), str(each["here"])] for name, each in sets.items()]
    Grid("data sets", ["name", "what it is", "here"], rows).show(results())
    return 0


def _is_here(name: str, arguments: DataList) -> str:
    if SPECIFICATIONS[name].embedded:
        return "yes"
    if name == "folder":
        return "--dataset.root"
    try:
        locate_set(DatasetSettings(name=name, root=arguments.root))
    except InvalidInput:
        return "no"
    return "yes"


def data_show_command(arguments: DataShow) -> int:
    """Print and draw who holds what."""
    if arguments.out.suffix not in _PICTURE_FORMATS:
        raise InvalidInput(
            f"out is {str(arguments.out)!r}; it must end in {' or '.join(_PICTURE_FORMATS)}."
        )
    experiment = arguments.settings.replace(dataset__name=arguments.name).resolved()
    content = describe_clients(load_federated(experiment))
    from mpfedcl.report.figures import draw_partition

    draw_partition(content, f"training images, {describe_partition(experiment)}", arguments.out)
    if arguments.json:
        print(json.dumps({"picture": str(arguments.out), **content}, indent=2))
        return 0
    _clients_grid(f"{arguments.name}, {describe_partition(experiment)}", content).show(results())
    results().print(f"picture: {arguments.out}")
    return 0


def _clients_grid(title: str, content: dict[str, Any]) -> Grid:
    classes: list[str] = content["classes"]
    # More classes than fit 100 columns are only counted; the picture shows them all.
    listed = len(classes) <= 12
    columns = [*classes] if listed else ["classes held"]
    rows = []
    for name, client in content["clients"].items():
        held = [str(n) if n else "·" for n in client["train"]]
        cells = held if listed else [str(sum(n > 0 for n in client["train"]))]
        rows.append([name, *cells, f"{sum(client['train']):,}", f"{client['test']:,}"])
    return Grid(title, ["client", *columns, "train", "test"], rows)
