"""One client's own labeled images, wherever they lie, by the classes that a run knows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.domains import list_visible_entries
from mpfedcl.data.image_files import is_image_file
from mpfedcl.data.reader import (
    index_archives,
    index_folders,
    open_archive_file,
    open_data_set,
)
from mpfedcl.data.samples import DomainIndex, SampleIndex, Subset
from mpfedcl.data.table_columns import TableColumns
from mpfedcl.data.table_files import is_table_file
from mpfedcl.data.tables import open_own_tables
from mpfedcl.data.train_test_split import Indices
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.settings import DatasetSettings

_LAYOUTS = (
    "FOLDER/<class>/*.png|jpg, FOLDER/<domain>/<class>/*.png|jpg, FOLDER/<domain>.npz or FILE.npz"
)
_MOST_CLASSES_LISTED = 12


def open_own_samples(
    path: Path,
    class_names: Sequence[str] | None,
    columns: TableColumns | None = None,
    *,
    new_classes: bool = False,
) -> SampleIndex:
    """List samples by the given classes, some of which may be missing; no image is opened.

    Class folders and the labels of tables go by name; the labels of npz files are positions among
    the classes, from 0, unless a file names its classes. Where the classes are not known yet the
    samples decide. A table is for a run that knows its columns. With `new_classes` others may come
    after the given ones.
    """
    if not path.exists():
        raise InvalidInput(f"data is {str(path)!r}, which does not exist; it must be {_LAYOUTS}.")
    known = len(class_names) if class_names and not new_classes else None
    sample_index = _open(path, known, columns)
    if not class_names:
        return sample_index
    if sample_index.names_classes:
        if new_classes:
            new = sorted(set(sample_index.class_names) - set(class_names))
            class_names = [*class_names, *new]
        return _relabel(sample_index, class_names, path)
    subsets = [subset for each in sample_index.domains for subset in (each.train, each.test)]
    found = [each.labels for each in subsets if each and len(each.labels)]
    largest = max(int(labels.max()) for labels in found)
    if new_classes:
        class_names = [*class_names, *_name_new_labels(found, class_names, path)]
    if largest >= len(class_names):
        raise InvalidInput(
            f"data is {str(path)!r}, which has the label {largest}; the run has "
            f"{len(class_names)} classes, so labels must be from 0 to {len(class_names) - 1}."
        )
    return replace(sample_index, class_names=tuple(class_names))


def _name_new_labels(
    labels: Sequence[Indices], class_names: Sequence[str], path: Path
) -> list[str]:
    """Return names for the labels that come after those of the known classes."""
    known = len(class_names)
    new = [int(label) for label in numpy.unique(numpy.concatenate(labels)) if label >= known]
    if new != list(range(known, known + len(new))):
        raise InvalidInput(
            f"data is {str(path)!r}, which has the new label {new[-1]}; the run has {known} "
            f"classes, so new labels must go on from {known} without a gap."
        )
    taken = [name for name in map(str, new) if name in class_names]
    if taken:
        raise InvalidInput(
            f"data is {str(path)!r}, which has the new label {taken[0]}; the run has another class "
            "of that name."
        )
    return [str(label) for label in new]


def _open(path: Path, num_classes: int | None, columns: TableColumns | None) -> SampleIndex:
    if _holds_tables(path):
        if columns is not None:
            return open_own_tables(path, columns)
        raise InvalidInput(
            f"data is {str(path)!r}, a table; only a run on a table takes one, and no client over "
            f"a network: it must be {_LAYOUTS}."
        )
    folder = DatasetSettings(name="folder", root=path)
    spec = find_specification("folder")
    if path.is_file():
        if path.suffix.lower() != ".npz":
            raise InvalidInput(f"data is {str(path)!r}, a file; it must be {_LAYOUTS}.")
        archive = open_archive_file(path, num_classes)
        return index_archives({path.stem: archive}, spec, folder)
    entries = list_visible_entries(path)
    inner = [entry for entry in entries if entry.is_dir()]
    if not inner and not any(entry.suffix.lower() == ".npz" for entry in entries):
        raise InvalidInput(
            f"data is {str(path)!r}, which holds neither class folders nor npz files; it must be "
            f"{_LAYOUTS}."
        )
    if any(is_image_file(file) for entry in inner for file in list_visible_entries(entry)):
        return index_folders({path.name: path}, [path.name], spec, folder)
    return open_data_set(folder)


def _holds_tables(path: Path) -> bool:
    entries = list_visible_entries(path) if path.is_dir() else [path]
    others = [each for each in entries if each.is_dir() or each.suffix.lower() == ".npz"]
    return not others and any(is_table_file(each) for each in entries)


def _relabel(sample_index: SampleIndex, class_names: Sequence[str], path: Path) -> SampleIndex:
    unknown = sorted(set(sample_index.class_names) - set(class_names))
    if unknown:
        shown = ", ".join(class_names[:_MOST_CLASSES_LISTED])
        more = len(class_names) - _MOST_CLASSES_LISTED
        raise InvalidInput(
            f"data is {str(path)!r}, which has the class {unknown[0]!r}; the run's classes are "
            f"{shown}{f' and {more} more' if more > 0 else ''}, and those of the data must be "
            "named as they are."
        )
    labels = numpy.array([list(class_names).index(name) for name in sample_index.class_names])

    def relabel(subset: Subset) -> Subset:
        return Subset(subset.rows, labels[subset.labels])

    domains = tuple(
        DomainIndex(each.name, relabel(each.train), each.test and relabel(each.test))
        for each in sample_index.domains
    )
    return replace(sample_index, class_names=tuple(class_names), domains=domains)
