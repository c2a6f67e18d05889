"""Tables as a data set: rows are samples, one column is the class, files or a column are the sites.

A model gets numeric columns standardized and text columns one-hot encoded. Means, standard
deviations and categories are computed from sums over each client's training rows, so no client sees
the rows of another.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy
from pydantic import Field

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.core.files import identify_file
from mpfedcl.core.json_files import FileContent
from mpfedcl.data.samples import (
    ArrayFormat,
    DomainIndex,
    Indices,
    SampleFormat,
    SampleIndex,
    Samples,
    Subset,
    digest_rows,
    find_not_finite,
)
from mpfedcl.data.set_folders import check_domain_name, choose_domains, list_visible_entries
from mpfedcl.data.table_files import (
    EXTENSIONS,
    MOST_NAMES_LISTED,
    Kind,
    Numbers,
    check_frame,
    convert_columns,
    infer_kinds,
    is_missing_number,
    is_table_file,
    read_table,
    require_columns,
)
from mpfedcl.experiment.names import did_you_mean
from mpfedcl.experiment.settings import DatasetSettings

if TYPE_CHECKING:
    import polars


class NumericColumn(FileContent):
    """A standardized numeric column; a missing value counts as the mean and becomes 0."""

    kind: Literal["numeric"] = "numeric"
    name: str
    mean: float
    deviation: float
    """0 if the column is constant in training; then every row becomes 0."""

    @property
    def width(self) -> int:
        """The number of input values of a cell."""
        return 1

    def transform(self, column: "polars.Series") -> Numbers:
        """Return [rows, 1]."""
        if not self.deviation:
            return numpy.zeros((len(column), 1))
        # Overflows are rejected by the caller.
        with numpy.errstate(over="ignore"):
            standardized = (column.to_numpy() - self.mean) / self.deviation
        return numpy.nan_to_num(standardized, nan=0.0)[:, None]


class TextColumn(FileContent):
    """A one-hot encoded text column; missing and unknown words become zeros."""

    kind: Literal["text"] = "text"
    name: str
    categories: list[str]

    @property
    def width(self) -> int:
        """The number of input values of a cell."""
        return len(self.categories)

    def transform(self, column: "polars.Series") -> Numbers:
        """Return [rows, categories]."""
        places = {word: place for place, word in enumerate(self.categories)}
        # The last row of this table has no 1.
        table = numpy.eye(self.width + 1, self.width)
        return table[[places.get(word, -1) for word in column.to_list()]]


class TableColumns(FileContent):
    """The fitted columns of a run, which turn new rows into its inputs."""

    label: str
    """The column of the classes."""
    columns: list[Annotated[NumericColumn | TextColumn, Field(discriminator="kind")]]

    @property
    def width(self) -> int:
        """The number of input values of a row."""
        return sum(column.width for column in self.columns)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The type of each column, in order."""
        return {column.name: column.kind for column in self.columns}

    def transform(self, frame: "polars.DataFrame") -> Numbers:
        """Return the rows of converted columns as vectors [rows, width]."""
        parts = [column.transform(frame[column.name]) for column in self.columns]
        return numpy.concatenate(parts, axis=1)


def fit_columns(frame: "polars.DataFrame", label: str, clients: Sequence[Indices]) -> TableColumns:
    """Learn the columns from the training rows of each client."""
    columns: list[NumericColumn | TextColumn] = []
    for column in frame.get_columns():
        if column.dtype.is_numeric():
            columns.append(_fit_numeric(column.name, column.to_numpy(), clients))
        else:
            words = column[numpy.concatenate(clients)].drop_nulls().unique().sort().to_list()
            columns.append(TextColumn(name=column.name, categories=words))
    return TableColumns(label=label, columns=columns)


def _fit_numeric(name: str, column: Numbers, clients: Sequence[Indices]) -> NumericColumn:
    """Return mean and standard deviation from three rounds of sums over clients.

    Deviations from the mean are summed, not raw values: squares of values with a large mean would
    lose all digits, and equal values would differ from their mean.
    """
    known = [own[~numpy.isnan(own)] for own in (column[rows] for rows in clients)]

    def average(measure: Callable[[Numbers], Numbers]) -> float:
        sums = [(len(own), float(measure(own).sum())) for own in known]
        counts, totals = zip(*sums, strict=True)
        return float(numpy.sum(totals) / max(1, sum(counts)))

    mean = average(lambda own: own)
    mean += average(lambda own: own - mean)
    variance = average(lambda own: numpy.square(own - mean))
    return NumericColumn(name=name, mean=mean, deviation=float(numpy.sqrt(variance)))


_MOST_VALUES = 1000
"""Different values of a label or text column; more indicate a measurement, a name or free text."""


@dataclass(frozen=True)
class TableStore:
    """The rows of tables in memory; vectors once the columns are known."""

    raw: "polars.DataFrame"
    label: str
    shown: str
    identity: str
    columns: TableColumns | None = None

    def __len__(self) -> int:
        return self.raw.height

    def sign(self, rows: Indices) -> str:
        """Sign the files, what their columns become, and the rows."""
        return digest_rows(rows, self.identity, self.label, json.dumps(self._fitted.to_json()))

    def inspect(self) -> set[SampleFormat]:
        """All rows are alike."""
        return {ArrayFormat((self._fitted.width,))}

    def load(self, rows: Indices, wanted: SampleFormat) -> Samples:
        """Return rows as vectors."""
        vectors = self._fitted.transform(self.raw[rows])
        if found := find_not_finite(vectors):
            raise InvalidInput(
                f"{self.shown}: a row becomes {found} once its columns are standardized; its "
                "values are too far from those of the training rows."
            )
        return vectors.astype(wanted.dtype)

    @property
    def _fitted(self) -> TableColumns:
        assert self.columns is not None, "the columns come from training rows: fit_tables"
        return self.columns


def open_tables(dataset: DatasetSettings) -> SampleIndex:
    """Read the tables that the settings name; the columns are not fitted yet."""
    if dataset.root is None:
        raise InvalidInput(
            "dataset.root is not set; dataset.name 'table' needs it, a CSV or Parquet file or a "
            "folder of them."
        )
    root = dataset.root.expanduser()
    frames = _read_files(root, "dataset.root")
    path, first = next(iter(frames.items()))
    label, client = dataset.label, dataset.client
    if label is None:
        raise InvalidInput(
            "dataset.label is not set; dataset.name 'table' needs it, one of the columns of "
            f"{path}: {enumerate_names(first.columns, MOST_NAMES_LISTED)}."
        )
    _check_column("label", label, first.columns, path)
    if client is not None:
        _check_column("client", client, first.columns, path)
    if label == client:
        raise InvalidInput(
            f"dataset.client is {client!r}, and so is dataset.label; they must be two columns."
        )
    features = [name for name in first.columns if name not in (label, client)]
    if not features:
        raise InvalidInput(f"{root} has no column but {label!r}; there must be more.")
    found = _index(frames, infer_kinds(frames, features), label, client, root)
    chosen = choose_domains([each.name for each in found.domains], dataset, str(root))
    return replace(found, domains=tuple(each for each in found.domains if each.name in chosen))


def index_frames(
    frames: Mapping[str, "polars.DataFrame"], dataset: DatasetSettings, identity: str
) -> SampleIndex:
    """List the rows of frames in memory by frame, or by the column `dataset.client`."""
    if dataset.label is None:
        first = next(iter(frames.values()))
        raise InvalidInput(
            "dataset.label is not set; frames need it, one of the columns "
            f"{enumerate_names(first.columns, MOST_NAMES_LISTED)}."
        )
    raw = {Path(shown): check_frame(frame, Path(shown)) for shown, frame in frames.items()}
    keys = [name for name in (dataset.label, dataset.client) if name is not None]
    columns = next(iter(raw.values())).columns
    for path, frame in raw.items():
        require_columns([*keys, *columns], frame.columns, path)
        require_columns(frame.columns, columns, path)
    kinds = infer_kinds(raw, [name for name in columns if name not in keys])
    return _index(raw, kinds, dataset.label, dataset.client, Path("data"), identity)


def open_own_tables(path: Path, columns: TableColumns) -> SampleIndex:
    """Read one client's labeled rows for a run that knows its columns."""
    frames = _read_files(path, "data")
    for file, frame in frames.items():
        require_columns([columns.label], frame.columns, file)
    return use_columns(_index(frames, columns.kinds, columns.label, None, path), columns)


def read_rows(path: Path, columns: TableColumns) -> Samples:
    """Read rows that need no label, as vectors of a run that knows its columns."""
    return columns.transform(convert_columns(read_table(path), columns.kinds, path))


def fit_tables(sample_index: SampleIndex, training: Iterable[Subset]) -> SampleIndex:
    """Fit the columns of a table to the clients' training rows; other data is unchanged."""
    store = sample_index.store
    if not isinstance(store, TableStore):
        return sample_index
    fitted = fit_columns(store.raw, store.label, [subset.rows for subset in training])
    return use_columns(sample_index, fitted)


def use_columns(sample_index: SampleIndex, columns: TableColumns | None) -> SampleIndex:
    """Return a table with fitted columns; other data is unchanged."""
    store = sample_index.store
    if columns is None or not isinstance(store, TableStore):
        return sample_index
    if not columns.width:
        raise InvalidInput(f"{store.shown} has no values to learn from; all are missing.")
    fitted = replace(store, columns=columns)
    return replace(sample_index, store=fitted, array_format=ArrayFormat((columns.width,)))


def find_columns(sample_index: SampleIndex) -> TableColumns | None:
    """Return the fitted columns of a table; None for other data."""
    store = sample_index.store
    return store.columns if isinstance(store, TableStore) else None


def _read_files(root: Path, setting: str) -> dict[Path, "polars.DataFrame"]:
    """Read a file, or all tables of a folder; they must have the same columns."""
    allowed = " or ".join(f"*{extension}" for extension in EXTENSIONS)
    if not root.exists():
        raise InvalidInput(
            f"{setting} is {str(root)!r}, which does not exist; it must be a table, {allowed}, or "
            "a folder of tables."
        )
    entries = list_visible_entries(root) if root.is_dir() else [root]
    paths = [path for path in entries if is_table_file(path)]
    if not paths:
        raise InvalidInput(
            f"{setting} is {str(root)!r}, which {'has' if root.is_dir() else 'is'} no table; there "
            f"must be files {allowed}."
        )
    stems = [path.stem for path in paths]
    for path in paths:
        if stems.count(path.stem) > 1:
            raise InvalidInput(
                f"{root} has two tables {path.stem!r}; each must have a name of its own."
            )
    frames = {path: read_table(path) for path in paths}
    first = frames[paths[0]].columns
    for path, frame in frames.items():
        require_columns(first, frame.columns, path)
        require_columns(frame.columns, first, paths[0])
    return frames


def _check_column(setting: str, name: str, columns: Sequence[str], path: Path) -> None:
    """Reject a setting that names no column."""
    if name not in columns:
        listed = f" ({enumerate_names(columns, MOST_NAMES_LISTED)})"
        raise InvalidInput(
            f"dataset.{setting} is {name!r}; it must be a column of {path}"
            f"{did_you_mean(name, columns) or listed}."
        )


def _index(
    frames: Mapping[Path, "polars.DataFrame"],
    kinds: Mapping[str, Kind],
    label: str,
    client: str | None,
    root: Path,
    identity: str | None = None,
) -> SampleIndex:
    """List the rows that have a label, by site and class."""
    import polars

    keys: dict[str, Kind] = {name: "text" for name in (label, client) if name is not None}
    everything = polars.concat(
        convert_columns(frame, {**kinds, **keys}, path) for path, frame in frames.items()
    )
    class_names, labels = _number_classes(everything[label], root)
    has_label = labels >= 0
    site_names, sites = _number_sites(everything, frames, client)
    labels, sites = labels[has_label], sites[has_label]
    parts = Subset(numpy.arange(len(labels)), labels).split(sites, len(site_names))
    domains = [
        DomainIndex(name, part) for name, part in sorted(zip(site_names, parts, strict=True))
    ]
    for domain in domains if identity is None or client else ():
        check_domain_name(domain.name, root)
    raw = everything.filter(has_label.tolist()).select(list(kinds))
    _refuse_free_text(raw, root)
    identity = identity or "|".join(identify_file(path) for path in frames)
    return SampleIndex(
        "table",
        class_names,
        tuple(domain for domain in domains if len(domain.train.labels)),
        TableStore(raw, label, str(root), identity),
        ArrayFormat((len(kinds),)),
        notices=_describe_gaps(raw, int((~has_label).sum()), root),
    )


def _number_classes(column: "polars.Series", root: Path) -> tuple[tuple[str, ...], Indices]:
    """Return the classes in order and each row's class index, -1 without a label.

    Whole numbers are classes in their order, however they are written; all else is text.
    """
    about = f"{root}: dataset.label is {column.name!r}, a column"
    words = column.drop_nulls().unique().to_list()
    if len(words) > _MOST_VALUES:
        raise InvalidInput(
            f"{about} of {len(words):,} different values; a label must have at most "
            f"{_MOST_VALUES:,}: a class, and no measurement."
        )
    numbers = {word: _parse_number(word) for word in words if not is_missing_number(word)}
    are_numbers = None not in numbers.values()
    named = numbers if are_numbers else {word: word for word in words}
    # All numbers, or all text.
    classes: list[Any] = list(set(named.values()))
    classes.sort()
    if not classes:
        raise InvalidInput(f"{about} without a value; some rows must have a label.")
    for number in classes:
        if isinstance(number, float):
            raise InvalidInput(
                f"{about} with the number {number:g}; a label must be text or a whole number: a "
                "class, and no measurement."
            )
    places = {name: place for place, name in enumerate(classes)}
    labels = [places[named[word]] if word in named else -1 for word in column.to_list()]
    return tuple(str(each) for each in classes), numpy.array(labels)


def _parse_number(word: str) -> int | float | None:
    """Return a word as an integer if possible, else as a float; None for text."""
    with contextlib.suppress(ValueError):
        return int(word)
    with contextlib.suppress(ValueError):
        number = float(word)
        return int(number) if number.is_integer() else number
    return None


def _number_sites(
    everything: "polars.DataFrame",
    frames: Mapping[Path, "polars.DataFrame"],
    client: str | None,
) -> tuple[tuple[str, ...], Indices]:
    """Return the sites' names and the number of each row's: by column, else by file."""
    heights = [frame.height for frame in frames.values()]
    if client is None:
        # Frames in memory have names that are no files'.
        by_file = tuple(p.stem if p.suffix.lower() in EXTENSIONS else str(p) for p in frames)
        return by_file, numpy.repeat(numpy.arange(len(frames)), heights)
    column = everything[client]
    if column.null_count():
        row, paths = column.to_list().index(None), list(frames)
        file = int(numpy.searchsorted(numpy.cumsum(heights), row, side="right"))
        raise InvalidInput(
            f"{paths[file]}: column {client!r} is empty in row {row - sum(heights[:file]) + 1}; "
            "each row must name its owner (dataset.client)."
        )
    names, sites = numpy.unique(column.to_list(), return_inverse=True)
    return tuple(names.tolist()), sites


def _refuse_free_text(raw: "polars.DataFrame", root: Path) -> None:
    for column in raw.get_columns():
        count = column.drop_nulls().n_unique()
        if not column.dtype.is_numeric() and count > _MOST_VALUES:
            raise InvalidInput(
                f"{root}: column {column.name!r} has {count:,} different words; a column of "
                f"text must have at most {_MOST_VALUES:,}, or be taken out of the table."
            )


def _describe_gaps(raw: "polars.DataFrame", rows_dropped: int, root: Path) -> tuple[str, ...]:
    """Describe the missing values and their replacement in one line."""
    gaps = [count for name in raw.columns if (count := raw[name].null_count())]
    told = []
    if gaps:
        told.append(
            f"missing values: {sum(gaps):,}, in {len(gaps):,} of {raw.width:,} columns; a number "
            "counts as the column's mean, a word as none of its words."
        )
    if rows_dropped:
        told.append(f"rows without a label, left out: {rows_dropped:,}.")
    return (f"{root.name}: {' '.join(told)}",) if told else ()
