"""Tables as a data set: rows are samples, one column is the class, files or a column are the sites.

A model gets numeric columns standardized and text columns one-hot encoded. Means, standard
deviations and categories are computed from sums over each client's training rows, so no client sees
the rows of another. Each client may also standardize by its own training rows, or none.
"""

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    IN_MEMORY,
    MOST_NAMES_LISTED,
    Kind,
    Numbers,
    convert_columns,
    infer_kinds,
    is_missing_number,
    is_table_file,
    pick_columns,
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

    @property
    def statistics(self) -> dict[str, list[float]]:
        """The mean and standard deviation of each numeric column."""
        return {
            each.name: [each.mean, each.deviation]
            for each in self.columns
            if isinstance(each, NumericColumn)
        }

    def with_statistics(self, own: Mapping[str, Sequence[float]]) -> "TableColumns":
        """Return the columns with other means and standard deviations."""
        columns = [
            each.model_copy(update=dict(zip(("mean", "deviation"), own[each.name], strict=True)))
            if each.name in own
            else each
            for each in self.columns
        ]
        return self.model_copy(update={"columns": columns})

    def transform(self, frame: "polars.DataFrame") -> Numbers:
        """Return the rows of converted columns as vectors [rows, width]."""
        parts = [column.transform(frame[column.name]) for column in self.columns]
        return numpy.concatenate(parts, axis=1)


_NOT_STANDARDIZED = [0.0, 1.0]


def fit_columns(
    frame: "polars.DataFrame",
    label: str,
    clients: Sequence[Indices],
    *,
    standardizes: bool = True,
) -> TableColumns:
    """Learn the columns from the training rows of each client."""
    columns: list[NumericColumn | TextColumn] = []
    for column in frame.get_columns():
        if column.dtype.is_numeric():
            found = _NOT_STANDARDIZED
            if standardizes:
                found = _fit_numeric(column.to_numpy(), clients)
            columns.append(NumericColumn(name=column.name, mean=found[0], deviation=found[1]))
        else:
            words = column[numpy.concatenate(clients)].drop_nulls().unique().sort().to_list()
            columns.append(TextColumn(name=column.name, categories=words))
    return TableColumns(label=label, columns=columns)


def declare_columns(dataset: DatasetSettings) -> TableColumns | None:
    """Return the columns that the settings name, without statistics; None if they name none."""
    columns: list[NumericColumn | TextColumn] = []
    seen: set[str] = set()
    for told in dataset.columns:
        name, sign, words = told.partition("=")
        if sign:
            columns.append(TextColumn(name=name, categories=words.split("|")))
        else:
            deviation = 1.0 if dataset.standardize == "none" else 0.0
            columns.append(NumericColumn(name=name, mean=0.0, deviation=deviation))
        if name in seen or name in ("", dataset.label):
            raise InvalidInput(
                f"dataset.columns has {told!r}; each column must be named once, and not the label."
            )
        seen.add(name)
    return TableColumns(label=str(dataset.label), columns=columns) if columns else None


def _fit_numeric(column: Numbers, clients: Sequence[Indices]) -> list[float]:
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
    return [mean, float(numpy.sqrt(variance))]


_MOST_VALUES = 1000
"""Different values of a label or text column; more indicate a measurement, a name or free text."""
_MANY = 20
"""Up to this many different values a column is never taken for a measurement, text or ids."""
_FEW_ROWS = 10
"""A number of which there are fewer rows is no class, if half of many numbers are like that."""
_WORDS_OF_A_SENTENCE = 3
_DATE = r"^(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})([T ]\d{1,2}:\d{2}.*)?$"


@dataclass(frozen=True)
class TableStore:
    """The rows of tables in memory; vectors once the columns are known."""

    raw: "polars.DataFrame"
    label: str
    shown: str
    identity: str
    columns: TableColumns | None = None
    own: Mapping[str, TableColumns] = field(default_factory=dict)
    """The columns of clients that standardize by their own rows, by name."""
    owners: Indices = field(default_factory=lambda: numpy.empty(0, dtype=numpy.int64))
    """The place in `own` of each row's client; -1 for a row of none."""
    cells: Sequence[Sequence[Any]] = ()
    """Of a client's own tables: each row as it is in its file, columns in order of name."""

    def __len__(self) -> int:
        return self.raw.height

    def sign(self, rows: Indices) -> str:
        """Sign the files, what their columns become, and the rows."""
        fitted = [self._fitted.to_json()] + [each.statistics for each in self.own.values()]
        texts = [self.identity, self.label, *map(json.dumps, fitted)]
        return digest_rows(rows, *texts, *([digest_rows(self.owners[rows])] if self.own else []))

    def inspect(self) -> set[SampleFormat]:
        """All rows are alike."""
        return {ArrayFormat((self._fitted.width,))}

    def load(self, rows: Indices, wanted: SampleFormat) -> Samples:
        """Return rows as vectors."""
        vectors = self._fitted.transform(self.raw[rows])
        columns, owners = list(self.own.values()), self.owners[rows] if self.own else self.owners
        for place in numpy.unique(owners[owners >= 0]):
            mine = numpy.flatnonzero(owners == place)
            vectors[mine] = columns[place].transform(self.raw[rows[mine]])
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
    frames = read_tables(root, "dataset.root", dataset.drop)
    found = index_tables(frames, dataset, root)
    chosen = choose_domains([each.name for each in found.domains], dataset, str(root))
    return replace(found, domains=tuple(each for each in found.domains if each.name in chosen))


def index_tables(
    frames: Mapping[Path, "polars.DataFrame"],
    dataset: DatasetSettings,
    root: Path,
    identity: str | None = None,
) -> SampleIndex:
    """List the rows of tables by file, or by the column `dataset.client`.

    `identity` is that of frames in memory, which have no files.
    """
    path, first = next(iter(frames.items()))
    label, client = dataset.label, dataset.client
    if label is None:
        raise InvalidInput(
            f"dataset.label is not set; tables need it, one of the columns of {path}: "
            f"{enumerate_names(first.columns, MOST_NAMES_LISTED)}."
        )
    for setting, name in (("label", label), ("client", client)):
        if name in dataset.drop:
            raise InvalidInput(
                f"dataset.drop has {name!r}, the column of dataset.{setting}; it must name others."
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
    declared = declare_columns(dataset)
    for name in declared.kinds if declared else ():
        _check_column("columns", name, features, path)
    found = _index(
        frames,
        declared.kinds if declared else infer_kinds(frames, features),
        label,
        client,
        root,
        identity,
        any_number=bool(dataset.classes),
        standardizes=dataset.standardize != "none",
    )
    if not declared:
        _refuse_useless_columns(found, label, root)
    return found


def open_own_tables(path: Path, columns: TableColumns) -> SampleIndex:
    """Read one client's labeled rows for a run that knows its columns."""
    frames = read_tables(path, "data")
    for file, frame in frames.items():
        require_columns([columns.label], frame.columns, file)
    standardizes = any(each != _NOT_STANDARDIZED for each in columns.statistics.values())
    found = _index(
        *(frames, columns.kinds, columns.label, None, path),
        standardizes=standardizes,
        keeps_cells=True,
    )
    return use_columns(found, columns)


def read_rows(
    source: "Path | polars.DataFrame", columns: TableColumns
) -> tuple[Samples, "polars.DataFrame"]:
    """Read rows that need no label: as vectors of a run that knows its columns, and as they are.

    If the column of the label is there, it is text.
    """
    shown = source if isinstance(source, Path) else IN_MEMORY
    frame = read_table(source) if isinstance(source, Path) else source
    vectors = columns.transform(convert_columns(frame, columns.kinds, shown))
    if columns.label in frame.columns:
        frame = frame.with_columns(convert_columns(frame, {columns.label: "text"}, shown))
    return vectors, frame


def name_label(word: str | None, class_names: Sequence[str]) -> str | None:
    """Return a label as a run names its classes; None if it is missing."""
    if word is None or None in map(_parse_number, class_names):
        return word
    number = _parse_number(word)
    return None if is_missing_number(word) else word if number is None else str(number)


def fit_tables(
    sample_index: SampleIndex, training: Iterable[Subset], dataset: DatasetSettings
) -> SampleIndex:
    """Fit the columns of a table to the clients' training rows; other data is unchanged."""
    store = sample_index.store
    if not isinstance(store, TableStore):
        return sample_index
    clients, standardizes = [each.rows for each in training], dataset.standardize != "none"
    fitted = fit_columns(store.raw, store.label, clients, standardizes=standardizes)
    if declared := declare_columns(dataset):
        fitted = declared.with_statistics(fitted.statistics)
    return use_columns(sample_index, fitted)


def standardize_by_client(
    sample_index: SampleIndex, rows: Mapping[str, tuple[Indices, Indices]]
) -> SampleIndex:
    """Let each client standardize a table by its own training rows; other data is unchanged.

    Args:
        sample_index: A table with fitted columns.
        rows: The training and test rows of each client.
    """
    store = sample_index.store
    if not isinstance(store, TableStore) or store.columns is None:
        return sample_index
    own, owners = {}, numpy.full(len(store), -1)
    columns = {each: store.raw[each].to_numpy() for each in store.columns.statistics}
    for place, (name, (train, test)) in enumerate(rows.items()):
        owners[train] = owners[test] = place
        found = {each: _fit_numeric(column, [train]) for each, column in columns.items()}
        own[name] = store.columns.with_statistics(found)
    return replace(sample_index, store=replace(store, own=own, owners=owners))


def use_columns(sample_index: SampleIndex, columns: TableColumns | None) -> SampleIndex:
    """Return a table with fitted columns; other data is unchanged."""
    store = sample_index.store
    if columns is None or not isinstance(store, TableStore):
        return sample_index
    if not columns.width:
        raise InvalidInput(f"{store.shown} has no values to learn from; all are missing.")
    fitted = replace(store, columns=columns)
    return replace(sample_index, store=fitted, array_format=ArrayFormat((columns.width,)))


def find_own_columns(sample_index: SampleIndex) -> Mapping[str, TableColumns]:
    """Return the columns of clients that standardize a table by their own rows."""
    store = sample_index.store
    return store.own if isinstance(store, TableStore) else {}


def find_columns(sample_index: SampleIndex) -> TableColumns | None:
    """Return the fitted columns of a table; None for other data."""
    store = sample_index.store
    return store.columns if isinstance(store, TableStore) else None


def read_tables(
    root: Path, setting: str, drop: Sequence[str] = ()
) -> dict[Path, "polars.DataFrame"]:
    """Read a file, or all tables of a folder; apart from `drop` they must have the same columns."""
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
    return keep_columns({path: read_table(path) for path in paths}, drop, root)


def keep_columns(
    frames: Mapping[Path, "polars.DataFrame"], drop: Sequence[str], root: Path
) -> dict[Path, "polars.DataFrame"]:
    """Return tables without some columns; the others must be the same in all of them."""
    names = list(dict.fromkeys(name for frame in frames.values() for name in frame.columns))
    for name in drop:
        _check_column("drop", name, names, root)
    kept = {path: frame.drop(drop, strict=False) for path, frame in frames.items()}
    shown, first = next(iter(kept.items()))
    for path, frame in kept.items():
        require_columns(first.columns, frame.columns, path)
        require_columns(frame.columns, first.columns, shown)
    return kept


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
    *,
    any_number: bool = True,
    standardizes: bool = True,
    keeps_cells: bool = False,
) -> SampleIndex:
    """List the rows that have a label, by site and class.

    Without `any_number`, numbers that look like a measurement are rejected as labels.
    `keeps_cells` keeps also the columns that are not used.
    """
    import polars

    keys: dict[str, Kind] = {name: "text" for name in (label, client) if name is not None}
    everything = polars.concat(
        convert_columns(frame, {**kinds, **keys}, path) for path, frame in frames.items()
    )
    class_names, labels = _number_classes(everything[label], root, any_number=any_number)
    has_label = labels >= 0
    site_names, sites = _number_sites(everything, frames, client)
    labels, sites = labels[has_label], sites[has_label]
    parts = Subset(numpy.arange(len(labels)), labels).split(sites, len(site_names))
    domains = [
        DomainIndex(name, part) for name, part in sorted(zip(site_names, parts, strict=True))
    ]
    for domain in domains if identity is None or client else ():
        check_domain_name(domain.name, root)
    raw = pick_columns(everything, kinds).filter(has_label.tolist())
    identity = identity or "|".join(identify_file(path) for path in frames)
    cells: list[Sequence[Any]] = []
    if keeps_cells:
        rows = (row for f in frames.values() for row in f.select(sorted(f.columns)).iter_rows())
        cells = list(itertools.compress(rows, has_label.tolist()))
    return SampleIndex(
        "table",
        class_names,
        tuple(domain for domain in domains if len(domain.train.labels)),
        TableStore(raw, label, str(root), identity, cells=cells),
        ArrayFormat((len(kinds),)),
        notices=_describe_gaps(
            raw, int((~has_label).sum()), root, "the column's mean" if standardizes else "0"
        ),
    )


def _number_classes(
    column: "polars.Series", root: Path, *, any_number: bool
) -> tuple[tuple[str, ...], Indices]:
    """Return the classes in order and each row's class index, -1 without a label.

    Numbers are classes in their order, however they are written; all else is text.
    """
    about = f"{root}: dataset.label is {column.name!r}, a column"
    words = column.drop_nulls().unique().to_list()
    if len(words) > _MOST_VALUES:
        raise InvalidInput(
            f"{about} of {len(words):,} different values; a label must have at most "
            f"{_MOST_VALUES:,}: a class, and no measurement (there is no regression)."
        )
    numbers = {word: _parse_number(word) for word in words if not is_missing_number(word)}
    are_numbers = None not in numbers.values()
    named = numbers if are_numbers else {word: word for word in words}
    # All numbers, or all text.
    classes: list[Any] = list(set(named.values()))
    classes.sort()
    if not classes:
        raise InvalidInput(f"{about} without a value; some rows must have a label.")
    places = {name: place for place, name in enumerate(classes)}
    labels = numpy.array([places[named[word]] if word in named else -1 for word in column])
    if are_numbers and not any_number:
        _refuse_measurement(classes, numpy.bincount(labels[labels >= 0]), about)
    return tuple(str(each) for each in classes), labels


def _refuse_measurement(numbers: Sequence[int | float], counts: Indices, about: str) -> None:
    """Reject numbers that are to be predicted as such: regression is not supported."""
    found = next(
        (f"with the number {number:g}" for number in numbers if isinstance(number, float)), None
    )
    rare = int((counts < _FEW_ROWS).sum())
    if found is None and len(numbers) > _MANY and 2 * rare >= len(numbers):
        found = f"of {len(numbers):,} different numbers, {rare:,} of them in under {_FEW_ROWS} rows"
    if found:
        raise InvalidInput(
            f"{about} {found}; it must be a class, and no measurement (there is no regression): "
            "text or whole numbers that repeat, or dataset.classes must name its values."
        )


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


def _refuse_useless_columns(sample_index: SampleIndex, label: str, root: Path) -> None:
    """Reject columns from which nothing can be learned as they are: ids, dates and free text."""
    store = sample_index.store
    assert isinstance(store, TableStore)
    faults: dict[str, str] = {}
    for column in store.raw.get_columns():
        name, is_number = column.name, column.dtype.is_numeric()
        if is_number and not _ID.search(name):
            continue
        by_site = (column[each.train.rows].drop_nulls() for each in sample_index.domains)
        # Sites may number their rows alike.
        different = sum(own.n_unique() for own in by_site)
        judge = _judge_numbers if is_number else _judge_text
        if fault := judge(column.drop_nulls(), different):
            faults[name] = fault
    if not faults:
        return
    told = ", ".join(f"column {name!r} has {fault}" for name, fault in faults.items())
    advice = (
        f"--dataset.drop {shlex.join(faults)} leaves {'it' if len(faults) == 1 else 'them'} out"
    )
    if text := next((name for name in faults if faults[name] == _SENTENCES), None):
        words = ["data", "encode", str(root), "OUT", "--encoder", "sentence:PATH"]
        words += ["--text", text, "--label", label]
        advice += f"; `mpfedcl {shlex.join(words)}` makes features of sentences"
    raise InvalidInput(
        f"{root}: {told}; columns must hold numbers, or words that repeat. {advice}."
    )


_SENTENCES = "sentences"
_ID = re.compile(
    r"(?i:(^|[^a-z])u?u?id$)|[a-z]I[dD]$"
    r"|(?i:(account|case|client|customer|device|patient|person|record|row|sample|study|subject"
    r"|user|visit)id$)"
)
"""The end of a column name that marks an id: a word of its own, or after what is numbered. A
"fluid" is none."""


def _judge_numbers(column: "polars.Series", different: int) -> str | None:
    """Return what makes numbers useless: ids, if the name of the column marks them.

    `different` is counted within each site.
    """
    is_id = 2 * different > len(column)
    is_whole = column.n_unique() > _MANY and bool((column == column.floor()).all())
    return "another whole number in most rows, as ids do" if is_id and is_whole else None


def _judge_text(column: "polars.Series", different: int) -> str | None:
    """Return what makes text useless: dates, sentences, ids or too many words."""
    words = column.unique()
    if len(words) and bool(words.str.contains(_DATE).all()):
        return f"dates, such as {column[0]}"
    if len(words) > _MANY:
        num_words: Any = words.str.count_matches(r"\S+").mean()
        if num_words >= _WORDS_OF_A_SENTENCE and 4 * len(words) >= len(column):
            return _SENTENCES
        if different == len(column):
            return "another word in each row, as ids do"
    if len(words) > _MOST_VALUES:
        return f"{len(words):,} different words, more than {_MOST_VALUES:,}"
    return None


def _describe_gaps(
    raw: "polars.DataFrame", rows_dropped: int, root: Path, filled: str
) -> tuple[str, ...]:
    """Describe the missing values and their replacement in one line."""
    gaps = [count for count in raw.null_count().row(0) if count]
    told = []
    if gaps:
        told.append(
            f"missing values: {sum(gaps):,}, in {len(gaps):,} of {raw.width:,} columns; a number "
            f"counts as {filled}, a word as none of its words."
        )
    if rows_dropped:
        told.append(f"rows without a label, left out: {rows_dropped:,}.")
    return (f"{root.name}: {' '.join(told)}",) if told else ()
