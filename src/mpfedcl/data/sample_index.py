"""The reader of data sets: lists the samples of named sets, user folders and single clients."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.data.image_files import EXTENSIONS, ImageFileStore, is_image_file
from mpfedcl.data.npz_archive import ArchiveStore, open_archive, refuse_mixture
from mpfedcl.data.objects import find_objects
from mpfedcl.data.samples import (
    DomainIndex,
    JoinedSampleStore,
    SampleIndex,
    Subset,
    name_classes,
)
from mpfedcl.data.set_folders import (
    LAYOUT,
    check_domain_name,
    choose_domains,
    find_set_folder,
    list_visible_entries,
)
from mpfedcl.data.table_files import is_table_file
from mpfedcl.data.tables import TableColumns, open_own_tables, open_tables, read_tables
from mpfedcl.experiment.datasets import DatasetSpecification, find_specification
from mpfedcl.experiment.settings import DatasetSettings


def open_data_set(dataset: DatasetSettings) -> SampleIndex:
    """Find the data set that the settings name and list it; no sample is opened."""
    if ":" in dataset.name:
        return find_objects(dataset).index
    spec = find_specification(dataset.name)
    for name in ("label", "client", "columns", "drop"):
        if dataset.name != "table" and (value := getattr(dataset, name)):
            raise InvalidInput(
                f"dataset.{name} is {value!r}; it must be left out, because dataset.name is "
                f"{dataset.name!r} and only 'table' has columns."
            )
    try:
        found: SampleIndex
        if spec.open is not None:
            found = spec.open(dataset)
        elif dataset.name == "table":
            found = open_tables(dataset)
        else:
            found = _open_embedded(spec, dataset) if spec.embedded else _open_set(spec, dataset)
    except OSError as error:
        raise InvalidInput(
            f"{error.filename or dataset.name} cannot be read ({error.strerror or error}); the "
            f"folders and files of dataset.name {dataset.name!r} must be readable."
        ) from None
    if dataset.classes and dataset.classes != found.class_names:
        raise InvalidInput(
            f"dataset.classes is {', '.join(dataset.classes)}; {dataset.name} has "
            f"{', '.join(found.class_names)}."
        )
    return found


def _open_embedded(spec: DatasetSpecification, dataset: DatasetSettings) -> SampleIndex:
    choose_domains([spec.name], dataset, f"the embedded {spec.name}")
    path = Path(__file__).with_name(f"{spec.name.replace('-', '_')}.npz")
    return index_archives({spec.name: path}, spec, dataset)


def _open_set(spec: DatasetSpecification, dataset: DatasetSettings) -> SampleIndex:
    root = find_set_folder(dataset)
    archives, folders = _list_domains(root, dataset)
    chosen = choose_domains(sorted({*archives, *folders}), dataset, str(root))
    from_archive = [name for name in chosen if name in archives]
    from_folder = [name for name in chosen if name in folders]
    if from_archive and from_folder:
        raise InvalidInput(
            f"{root} has both npz files ({enumerate_names(from_archive)}) and domain folders "
            f"({enumerate_names(from_folder)}); a set must have one of the two layouts, or "
            "dataset.domains must name domains of one."
        )
    if from_archive:
        return index_archives({name: archives[name] for name in chosen}, spec, dataset)
    return index_folders(folders, chosen, spec, dataset)


def index_archives(
    paths: dict[str, Path],
    spec: DatasetSpecification,
    dataset: DatasetSettings,
    num_classes: int | None = None,
) -> SampleIndex:
    """List domains kept as archives; the store has each domain's training part, then its test."""
    num_classes = len(spec.class_names) or num_classes
    domains: list[DomainIndex] = []
    stores: list[ArchiveStore] = []
    own_names: tuple[str, ...] = ()
    for name, path in paths.items():
        found, clients, names = open_archive(path, num_classes, name, sum(map(len, stores)))
        own_names = own_names if stores else names
        stores += found
        domains += clients
        first = stores[0]
        if first.array_format is not None and dataset.name != "folder":
            raise InvalidInput(
                f"{first} has {first.array_format}; {dataset.name} must have "
                "images, uint8 (0 to 255)."
            )
        refuse_mixture(found[0], first)
        if names != own_names:
            listed = [enumerate_names(each) or "no names" for each in (own_names, names)]
            raise InvalidInput(
                f"{first.path} has the classes {listed[0]}, and {path} {listed[1]}; all files of a "
                "set must name the same classes in the same order."
            )
    taken: set[str] = set()
    for domain in domains:
        check_domain_name(domain.name, first.path.parent)
        if domain.name in taken:
            raise InvalidInput(
                f"{first.path.parent} has the domain or client {domain.name!r} twice; each must be "
                "in one file."
            )
        taken.add(domain.name)
    if spec.class_names and own_names and own_names != spec.class_names:
        raise InvalidInput(
            f"{first.path} has the classes {enumerate_names(own_names)}; those of {spec.name} must "
            f"be {', '.join(spec.class_names)}."
        )
    given = spec.class_names or own_names
    names, notices = (given, ()) if given else name_classes(domains)
    return SampleIndex(
        dataset.name,
        names,
        tuple(domains),
        JoinedSampleStore(stores),
        first.array_format,
        names_classes=bool(own_names),
        notices=notices,
    )


def _list_domains(root: Path, dataset: DatasetSettings) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the archives and the domain folders of a set by domain."""
    entries = list_visible_entries(root)
    archives = {
        entry.stem: entry for entry in entries if entry.suffix.lower() == ".npz" and entry.is_file()
    }
    folders = {}
    for entry in entries:
        if not entry.is_dir():
            continue
        within = list_visible_entries(entry)
        if any(inner.is_dir() for inner in within):
            folders[entry.name] = entry
        # These images would silently be left out, unless the domains are named explicitly.
        elif not dataset.domains and any(is_image_file(inner) for inner in within):
            raise InvalidInput(
                f"{entry} holds images but no class folders; images must be at "
                f"{root}/<domain>/<class>/*.png|jpg."
            )
    for name in (*archives, *folders):
        check_domain_name(name, root)
    if not archives and not folders:
        raise InvalidInput(f"{root} has neither npz files nor domain folders; it needs {LAYOUT}.")
    both = sorted(set(archives) & set(folders))
    if both:
        raise InvalidInput(
            f"{root} has {both[0]}.npz and the folder {both[0]}; a domain must be one of the two."
        )
    return archives, folders


def index_folders(
    folders: dict[str, Path],
    chosen: list[str],
    spec: DatasetSpecification,
    dataset: DatasetSettings,
) -> SampleIndex:
    """List domains kept as folders of class folders."""
    # Classes come from every domain, chosen or not, so that a label means the same in all runs.
    classes = {
        name: [entry for entry in list_visible_entries(folder) if entry.is_dir()]
        for name, folder in folders.items()
    }
    class_names = tuple(sorted({entry.name for entries in classes.values() for entry in entries}))
    if spec.class_names:
        unknown = [name for name in class_names if name not in spec.class_names]
        if unknown:
            raise InvalidInput(
                f"{folders[chosen[0]].parent} has the class folder {unknown[0]!r}; the classes of "
                f"{spec.name} must be among {', '.join(spec.class_names)}."
            )
        class_names = spec.class_names
    paths: list[Path] = []
    empty: list[str] = []
    domains: list[DomainIndex] = []
    for name in chosen:
        labels: list[int] = []
        for entry in classes[name]:
            files = [path for path in list_visible_entries(entry) if is_image_file(path)]
            paths += files
            labels += [class_names.index(entry.name)] * len(files)
            if not files:
                empty.append(str(entry))
        rows = numpy.arange(len(paths) - len(labels), len(paths))
        domains.append(DomainIndex(name, Subset(rows, numpy.array(labels, dtype=numpy.int64))))
    if empty:
        raise InvalidInput(
            f"{enumerate_names(empty)} "
            f"{'has' if len(empty) == 1 else 'have'} no images; a class folder must hold at least "
            f"one file {', '.join(f'*{extension}' for extension in EXTENSIONS)}, or be removed."
        )
    return SampleIndex(dataset.name, class_names, tuple(domains), ImageFileStore(paths))


_LAYOUTS = (
    "FOLDER/<class>/*.png|jpg, FOLDER/<domain>/<class>/*.png|jpg, FOLDER/<domain>.npz or FILE.npz"
)
_MOST_CLASSES_LISTED = 12


def open_own_samples(
    path: Path, class_names: Sequence[str] | None, columns: TableColumns | None = None
) -> SampleIndex:
    """List samples by the given classes, some of which may be missing; no image is opened.

    Class folders and the labels of tables go by name; the labels of npz files are positions among
    the classes, from 0, unless a file names its classes. If the classes are not known
    yet, the samples determine them. Tables need the columns of a run.
    """
    if not path.exists():
        raise InvalidInput(f"data is {str(path)!r}, which does not exist; it must be {_LAYOUTS}.")
    sample_index = _open_own(path, len(class_names) if class_names else None, columns)
    if not class_names:
        return sample_index
    if sample_index.names_classes:
        return _relabel(sample_index, class_names, path)
    subsets = [subset for each in sample_index.domains for subset in (each.train, each.test)]
    found = [each.labels for each in subsets if each and len(each.labels)]
    largest = max(int(labels.max()) for labels in found)
    if largest >= len(class_names):
        raise InvalidInput(
            f"data is {str(path)!r}, which has the label {largest}; the run has "
            f"{len(class_names)} classes, so labels must be from 0 to {len(class_names) - 1}."
        )
    return replace(sample_index, class_names=tuple(class_names))


def check_own_samples(path: Path) -> None:
    """Reject samples that cannot be opened; the columns of a table are not known yet."""
    if path.exists() and _holds_tables(path):
        read_tables(path, "data")
    else:
        open_own_samples(path, None)


def _open_own(path: Path, num_classes: int | None, columns: TableColumns | None) -> SampleIndex:
    if _holds_tables(path):
        if columns is not None:
            return open_own_tables(path, columns)
        raise InvalidInput(
            f"data is {str(path)!r}, a table; only a run on a table takes one: it must be "
            f"{_LAYOUTS}."
        )
    folder = DatasetSettings(name="folder", root=path)
    spec = find_specification("folder")
    if path.is_file():
        if path.suffix.lower() != ".npz":
            raise InvalidInput(f"data is {str(path)!r}, a file; it must be {_LAYOUTS}.")
        return index_archives({path.stem: path}, spec, folder, num_classes)
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
        raise InvalidInput(
            f"data is {str(path)!r}, which has the class {unknown[0]!r}; the run's classes are "
            f"{enumerate_names(class_names, _MOST_CLASSES_LISTED)}, and those of the data must be "
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
