"""Python objects as a data set: arrays, Datasets and frames, all together or by client.

`give` opens the objects of a program under a name of their content, `find_objects` also those that
`package.module:function` returns. Samples of a Dataset are read when inputs are made of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from mpfedcl.core.errors import InvalidInput, enumerate_names, explain_faults, explain_user_code
from mpfedcl.core.plugins import import_function
from mpfedcl.data.npz_archive import MOST_CLASSES
from mpfedcl.data.object_stores import FORMS, Source, digest, is_array, open_source
from mpfedcl.data.samples import (
    DomainIndex,
    JoinedSampleStore,
    SampleIndex,
    Subset,
    name_classes,
)
from mpfedcl.data.set_folders import check_domain_name, choose_domains
from mpfedcl.data.table_files import import_table
from mpfedcl.data.tables import index_tables, keep_columns
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import GIVEN, OBJECTS, specify_objects
from mpfedcl.experiment.names import splits_domains
from mpfedcl.experiment.settings import DatasetSettings

_READ_BY_OBJECTS = ("label", "client", "classes", "domains", "drop", "columns", "image_size")
_MOST_KEPT = 3
"""Data sets of objects in memory: the newest, for runs that are resumed or compared."""


@dataclass(frozen=True)
class OpenedObjects:
    """Objects as a data set."""

    index: SampleIndex
    names_clients: bool
    """Whether each domain is a client, not only a part of a pool."""
    has_test: bool
    """Whether there is one test set that belongs to no client."""
    fingerprint: str


_opened: dict[str, OpenedObjects] = {}


def give(experiment: Experiment, data: Any, groups: Any = None, jobs: object = 1) -> Experiment:
    """Return an experiment on objects; they are kept in memory under a name of their content."""
    if data is None:
        if groups is not None:
            raise InvalidInput("groups is given without data; it must be left out, or data given.")
        return experiment
    if jobs != 1:
        raise InvalidInput(f"jobs is {jobs}; it must be 1, because data is given as objects.")
    found = _open(data, groups, experiment.dataset)
    name, before = f"{GIVEN}{found.fingerprint[:12]}", experiment.dataset.name
    if before.startswith(GIVEN) and before != name:
        raise InvalidInput(
            f"data has the fingerprint {name.removeprefix(GIVEN)}, and that of the run is "
            f"{before.removeprefix(GIVEN)}; they must be the same objects."
        )
    if before not in (name, DatasetSettings().name):
        raise InvalidInput(
            f"dataset.name is {before!r}; it must be left out, because data is given."
        )
    _keep(name, found)
    return experiment.replace(dataset__name=name)


def find_objects(dataset: DatasetSettings) -> OpenedObjects:
    """Return the objects that the settings name; a function is imported and called once."""
    name = dataset.name
    if not name.startswith(GIVEN):
        function = import_function("dataset.name", name)
        used = {each: getattr(dataset, each) for each in _READ_BY_OBJECTS}
        _keep(name, _open_result(function, DatasetSettings(name=name, **used)))
    elif name not in _opened:
        raise InvalidInput(
            f"dataset.name is {name!r}, objects of the program that started the run; they must be "
            "given again: mpfedcl.resume(path, data=...)."
        )
    return _opened[name]


def use_objects(experiment: Experiment) -> Experiment:
    """Return an experiment whose objects are open; objects by client are split by client."""
    if ":" not in experiment.dataset.name:
        return experiment
    found, kind = find_objects(experiment.dataset), experiment.partition.kind
    if not found.names_clients:
        return experiment
    if kind != "label" and not splits_domains(kind):
        raise InvalidInput(
            f"partition.kind is {kind!r}; it must be left out, or natural or feature, because the "
            "data name the clients."
        )
    if found.has_test and experiment.partition.test == "matched":
        raise InvalidInput(
            "partition.test is 'matched'; it must be shared or left out, because the test set "
            "names no clients."
        )
    # The default is for samples without an owner.
    return experiment.replace(partition__kind="natural") if kind == "label" else experiment


def _keep(name: str, found: OpenedObjects) -> None:
    _opened.pop(name, None)
    _opened[name] = found
    shared = {"partition__test": "shared"} if found.has_test else {}
    OBJECTS[name] = replace(
        specify_objects(name),
        open=lambda _: found.index,
        holds_images=found.index.array_format is None,
        pooled={"clients": 5, **shared},
        by_domain=shared,
    )
    for oldest in list(_opened)[:-_MOST_KEPT]:
        del _opened[oldest], OBJECTS[oldest]


@lru_cache(maxsize=1)
def _open_result(function: Any, dataset: DatasetSettings) -> OpenedObjects:
    """Call a user's function and open what it returns."""
    try:
        data = function()
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"dataset.name is {dataset.name!r}, which fails ({explain_user_code(error)}); it "
            f"must be a function without arguments that returns {FORMS}."
        ) from error
    return _open(data, None, dataset)


# Which objects there are: parts for training and testing, by client


class _Part(NamedTuple):
    """The samples of a client, or of all, that train or that test."""

    domain: str
    tests: bool
    value: Any

    @property
    def shown(self) -> str:
        """How an error names the part."""
        place = f"data[{self.domain!r}]" if self.domain else "data"
        return f"the test set of {place}" if self.tests else place


def _open(data: Any, groups: Any, dataset: DatasetSettings) -> OpenedObjects:
    if isinstance(data, Mapping) and hasattr(data, "column_names"):
        # A DatasetDict of Hugging Face.
        data = (data["train"], data.get("test"))
    if hasattr(data, "load_partition"):
        data = _open_partitioner(data)
    by_client = data if isinstance(data, Mapping) else {"": data}
    if not by_client:
        raise InvalidInput("data is an empty dictionary; it must have at least one client.")
    if by_client is data and groups is not None:
        raise InvalidInput("groups is given; it must be left out, because data names the clients.")
    names = sorted(str(name) for name in by_client)
    for name in names if by_client is data else ():
        check_domain_name(name, "data")
    values = {str(name): value for name, value in by_client.items()}
    if len(values) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"data has two clients {twice!r}; each must have a name of its own.")
    parts = [part for name in names for part in _split_pair(name, values[name])]
    if all(_is_frame(part.value) for part in parts):
        if groups is not None:
            raise InvalidInput(
                "groups is given; for frames it must be left out: dataset.client names a column."
            )
        return _open_frames(parts, dataset, names_clients=by_client is data)
    if dataset.client is not None:
        raise InvalidInput(
            f"dataset.client is {dataset.client!r}; it must be left out, because data has no "
            "columns: groups names the client of each sample."
        )
    sources = [open_source(part.value, part.shown, dataset) for part in parts]
    index = _index(parts, sources, dataset)
    told: list[Any] = [
        [part.domain, part.tests, source.fingerprint]
        for part, source in zip(parts, sources, strict=True)
    ]
    has_test = by_client is not data and any(part.tests for part in parts)
    if groups is not None:
        index, owners = _split_by_group(index, groups)
        told.append(owners)
    names_clients = by_client is data or groups is not None
    if names_clients:
        chosen = choose_domains([each.name for each in index.domains], dataset, "data")
        domains = tuple(each for each in index.domains if each.name in chosen)
        index = replace(index, domains=domains)
    fingerprint = digest([json.dumps([told, index.class_names]).encode()])
    return OpenedObjects(index, names_clients, has_test, fingerprint)


def _open_partitioner(given: Any) -> dict[str, Any]:
    """Return the data by client of a partitioner of flwr-datasets, or of its FederatedDataset."""
    wanted = "a partitioner of flwr-datasets with a data set, or a FederatedDataset with one"
    with explain_faults("data", wanted):
        if hasattr(given, "partitioners"):
            ((split, partitioner),) = given.partitioners.items()
            # Downloads the data set and gives it to the partitioner.
            given.load_partition(0, split)
            given = partitioner
        count = int(given.num_partitions)
        width = len(str(count - 1))
        return {f"client-{n:0{width}}": given.load_partition(n) for n in range(count)}


def _split_pair(name: str, value: Any) -> Iterator[_Part]:
    """Yield what trains and, if it is given, what tests."""
    test = None
    if isinstance(value, tuple) and len(value) == 2 and not is_array(value[0]):
        value, test = value
    yield _Part(name, tests=False, value=value)
    # Only a Dataset says its length.
    if test is not None and (isinstance(test, tuple) or not hasattr(test, "__len__") or len(test)):
        yield _Part(name, tests=True, value=test)


def _is_frame(value: Any) -> bool:
    root = type(value).__module__.partition(".")[0]
    return root in ("pandas", "polars") and hasattr(value, "columns")


def _index(
    parts: Sequence[_Part], sources: "Sequence[Source]", dataset: DatasetSettings
) -> SampleIndex:
    """Put the parts one after the other, and check that they fit together."""
    first = sources[0]
    class_names = dataset.classes
    for part, source in zip(parts, sources, strict=True):
        if source.array_format != first.array_format:
            raise InvalidInput(
                f"{part.shown} has {source.array_format or 'images'}, and {parts[0].shown} has "
                f"{first.array_format or 'images'}; all must have only images, or only arrays of "
                "one shape."
            )
        if class_names and source.class_names and source.class_names != class_names:
            raise InvalidInput(
                f"{part.shown} has the classes {enumerate_names(source.class_names)}, and the "
                f"others {enumerate_names(class_names)}; all must have the same, in one order."
            )
        class_names = class_names or source.class_names
    found: dict[str, list[Subset]] = {}
    begin, most = 0, len(class_names) or MOST_CLASSES
    for part, source in zip(parts, sources, strict=True):
        odd = numpy.flatnonzero((source.labels < 0) | (source.labels >= most))
        if len(odd):
            raise InvalidInput(
                f"{part.shown} has the label {source.labels[odd[0]]} at {odd[0]:,}; labels must be "
                f"whole numbers from 0 to {most - 1:,}."
            )
        rows = numpy.arange(begin, begin + len(source.labels))
        found.setdefault(part.domain, []).append(Subset(rows, source.labels))
        begin += len(rows)
    domains = tuple(DomainIndex(name or "data", *subsets) for name, subsets in found.items())
    names, notices = (class_names, ()) if class_names else name_classes(domains)
    return SampleIndex(
        dataset.name if ":" in dataset.name else "data",
        names,
        domains,
        JoinedSampleStore([source.store for source in sources]),
        first.array_format,
        names_classes=bool(class_names),
        notices=(*notices, *(notice for source in sources for notice in source.notices)),
    )


def _split_by_group(index: SampleIndex, groups: Any) -> tuple[SampleIndex, list[str]]:
    """Return each group of training samples as a domain, and the group of each sample."""
    (pool,) = index.domains
    owners = [str(each) for each in (groups.tolist() if hasattr(groups, "tolist") else groups)]
    if len(owners) != len(pool.train.labels):
        raise InvalidInput(
            f"groups has {len(owners):,} names; it must have one for each of the "
            f"{len(pool.train.labels):,} training samples."
        )
    names, places = numpy.unique(owners, return_inverse=True)
    for name in names:
        check_domain_name(str(name), "groups")
    parts = pool.train.split(places, len(names))
    tests: list[Subset | None] = [None] * len(names)
    if pool.test is not None:
        # The union of the clients' test sets is used: the first one has all of it.
        tests = [pool.test, *[pool.test.select(slice(0))] * (len(names) - 1)]
    domains = tuple(map(DomainIndex, map(str, names), parts, tests))
    return replace(index, domains=domains), owners


def _open_frames(
    parts: Sequence[_Part], dataset: DatasetSettings, *, names_clients: bool
) -> OpenedObjects:
    """Open frames as tables: rows are standardized as those of files."""
    has_test = any(part.tests for part in parts)
    if dataset.client is not None and (names_clients or has_test):
        raise InvalidInput(
            f"dataset.client is {dataset.client!r}; it must be left out if data names the clients "
            "or has a test frame."
        )
    shown = [part.shown for part in parts]
    read = {Path(part.shown): import_table(part.value, part.shown) for part in parts}
    frames = {path: frame for path, frame in read.items() if frame is not None}
    root = Path("data")
    frames = keep_columns(frames, dataset.drop, root)
    with explain_faults("data", "frames with columns of numbers or text (dataset.drop)"):
        identity = digest(frame.write_csv().encode() for frame in frames.values())
    index = index_tables(frames, dataset, root, identity)
    if dataset.client is None:
        by_part = {each.name: each.train for each in index.domains}
        domains = []
        for name in dict.fromkeys(part.domain for part in parts):
            own = [s for s, part in zip(shown, parts, strict=True) if part.domain == name]
            if own[0] not in by_part:
                raise InvalidInput(f"{own[0]} has no row with a label; it must have at least one.")
            subsets = [by_part[each] for each in own if each in by_part]
            domains.append(DomainIndex(name or "data", *subsets))
        index = replace(index, domains=tuple(domains))
    told = json.dumps([identity, shown, dataset.label, dataset.client]).encode()
    by_client = names_clients or dataset.client is not None
    return OpenedObjects(index, by_client, has_test and not names_clients, digest([told]))
