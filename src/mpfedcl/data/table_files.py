"""CSV and Parquet files, read by polars and checked.

Cells of a CSV file are text until a whole column is known to be numeric. Row numbers in errors
count from 1, without the header.
"""

import csv
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, enumerate_names, explain_faults
from mpfedcl.data.samples import reject_bomb

if TYPE_CHECKING:
    import polars

EXTENSIONS = (".csv", ".parquet")

Numbers = NDArray[numpy.float64]
"""A numeric column; NaN for missing values."""

Kind = Literal["numeric", "text"]
"""The type of a column; true and false are the numbers 1 and 0."""

_MISSING_NUMBERS = ("na", "n/a", "nan", "null", "?")
"""Missing values in addition to empty cells; in a text column these are ordinary words."""
_LARGEST = float(numpy.finfo(numpy.float32).max)
MOST_NAMES_LISTED = 12
IN_MEMORY = "the given table"
"""The name of a table without a file in errors."""
_BYTES_NEVER_REJECTED = 2**28
"""Fits into any memory; sorted or constant columns compress better than 100:1."""


def is_table_file(path: Path) -> bool:
    """Return whether a path is a table file that is not hidden."""
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".") and path.is_file()


def read_table(path: Path) -> "polars.DataFrame":
    """Read a file whole: from CSV all cells are text, from Parquet as they are typed."""
    require_polars()
    import polars

    if path.suffix.lower() == ".csv":
        _check_csv(path)
        with explain_faults(path, "a whole CSV file"):
            frame = polars.read_csv(path, infer_schema=False)
    else:
        with explain_faults(path, "a whole Parquet file"):
            _check_size(path)
            frame = polars.read_parquet(path)
    return _clean(frame, path)


def import_table(samples: Any, shown: str = IN_MEMORY) -> "polars.DataFrame | None":
    """Return a frame of polars or pandas, or a list of dicts, as if read from a file; else None."""
    is_list = isinstance(samples, Sequence) and len(samples) and isinstance(samples[0], Mapping)
    library = type(samples).__module__.partition(".")[0]
    if not is_list and not (library in ("pandas", "polars") and hasattr(samples, "columns")):
        return None
    require_polars()
    import polars

    with explain_faults(shown, "a frame or a list of dicts"):
        if is_list:
            names = dict.fromkeys(name for row in samples for name in row)
            columns = [(name, [row.get(name) for row in samples]) for name in names]
        elif library == "pandas":
            known = samples.astype(object).where(samples.notna(), None)
            columns = [(name, known.iloc[:, at].tolist()) for at, name in enumerate(known.columns)]
        else:
            columns = [(each.name, each) for each in samples.get_columns()]
        # Cells of several types become text.
        _check_names([str(name).strip() for name, _ in columns], shown)
        series = [polars.Series(str(name), own, strict=False) for name, own in columns]
        return _clean(polars.DataFrame(series), shown)


def _clean(frame: "polars.DataFrame", path: Path | str) -> "polars.DataFrame":
    """Return text without surrounding blanks and empty cells as missing; other types as is."""
    import polars

    names = [name.strip() for name in frame.columns]
    _check_names(names, path)
    if not frame.height:
        raise InvalidInput(f"{path} has no rows; a table must have at least one below its header.")
    frame.columns = names
    # All columns in one expression: a call for each takes a millisecond.
    words = polars.selectors.categorical() | polars.selectors.enum() | polars.selectors.string()
    stripped = words.cast(polars.String).str.strip_chars()
    return frame.with_columns(polars.when(stripped != "").then(stripped))


def infer_kinds(frames: Mapping[Path, "polars.DataFrame"], names: Iterable[str]) -> dict[str, Kind]:
    """Return what each column holds in all files together: numbers, or text if one has any."""
    names = list(names)
    schemas = {path: frame.schema for path, frame in frames.items()}
    text = {path: _find_text(pick_columns(frame, names)) for path, frame in frames.items()}
    kinds: dict[str, Kind] = {}
    for name in names:
        with_text = next((path for path in frames if name in text[path]), None)
        typed = [path for path in frames if schemas[path][name].is_numeric()]
        if with_text is not None and typed:
            raise InvalidInput(
                f"column {name!r} is text in {with_text} and numbers in {typed[0]}; it must be the "
                "same in all files."
            )
        kinds[name] = "numeric" if with_text is None else "text"
    return kinds


def convert_columns(
    frame: "polars.DataFrame", kinds: Mapping[str, Kind], path: Path | str
) -> "polars.DataFrame":
    """Return columns as float64 or as text, in the order of `kinds`; what is missing is null."""
    import polars

    require_columns(kinds, frame.columns, path)
    schema = frame.schema
    for name in kinds:
        _check_type(name, schema[name], path)
    given = pick_columns(frame, (name for name in kinds if kinds[name] == "numeric"))
    numbers, odd = _parse_numbers(given)
    _reject_first(
        odd,
        lambda name, row: (
            f"{given[name][row]!r} in row {row + 1}; it must be a number, as in the other rows"
        ),
        path,
    )
    numbers = numbers.select(polars.all().cast(polars.Float64))
    _reject_first(
        numbers.select(polars.all().abs() > _LARGEST),
        lambda name, row: (
            f"{numbers[name][row]:g} in row {row + 1}; numbers must be finite and at most 3.4e38"
        ),
        path,
    )
    text = pick_columns(frame, (name for name in kinds if kinds[name] == "text"))
    text = text.with_columns(polars.selectors.float().fill_nan(None)).cast(polars.String)
    both = polars.DataFrame([*numbers.get_columns(), *text.get_columns()])
    return pick_columns(both, kinds)


def require_columns(wanted: Iterable[str], found: Sequence[str], path: Path | str) -> None:
    """Reject a file that lacks a column."""
    known = set(found)
    lacking = [name for name in wanted if name not in known]
    if lacking:
        raise InvalidInput(
            f"{path} lacks the column {lacking[0]!r}; it has "
            f"{enumerate_names(found, MOST_NAMES_LISTED)}."
        )


def is_missing_number(word: str) -> bool:
    """Return whether a word in a numeric column marks a missing value."""
    return word.lower() in _MISSING_NUMBERS


def require_polars() -> None:
    """Reject tables if polars is not installed."""
    try:
        importlib.import_module("polars")
    except ImportError:
        raise InvalidInput(
            "tables are read by polars, which is not installed: pip install 'mpfedcl[table]'."
        ) from None


def _check_csv(path: Path) -> None:
    """Reject lines with more or fewer cells than the header; polars would pad them."""
    wanted = "a CSV file in UTF-8 with commas and a header"
    with explain_faults(path, wanted), path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, strict=True)
        header = next(lines, [])
        _check_names([name.strip() for name in header], path)
        if len(header) < 2:
            raise InvalidInput(
                f"{path} has {len(header)} columns; a table must have at least two, and those of a "
                "CSV file must be separated by commas."
            )
        for cells in lines:
            # An empty line has no cells; the row has no label, and is left out for that.
            if cells and len(cells) != len(header):
                raise InvalidInput(
                    f"{path} has {len(cells)} cells in line {lines.line_num} and "
                    f"{len(header)} in its header; all lines must have the same number, "
                    "separated by commas."
                )


def _check_names(names: Sequence[str], path: Path | str) -> None:
    seen: set[str] = set()
    for place, name in enumerate(names):
        if not name or not name.isprintable():
            raise InvalidInput(
                f"{path} has the name {name!r} in column {place + 1} of its header; each column "
                "must have one, of printable text."
            )
        if name in seen:
            raise InvalidInput(
                f"{path} has two columns {name!r}; each must have a name of its own."
            )
        seen.add(name)


def _check_size(path: Path) -> None:
    """Reject a Parquet file that would fill the memory: repeated values take little space."""
    import polars

    scanned = polars.scan_parquet(path)
    rows = scanned.select(polars.len()).collect().item()
    columns = scanned.head(0).collect().width
    # Cells are counted as 8 bytes.
    reject_bomb(path, rows * columns * 8, _BYTES_NEVER_REJECTED)


def _check_type(name: str, kind: "polars.DataType", path: Path | str) -> None:
    """Reject dates and other types that are neither numbers nor text."""
    import polars

    if not kind.is_numeric() and kind not in (polars.Null, polars.Boolean, polars.String):
        raise InvalidInput(
            f"{path}: column {name!r} holds {kind}; columns must hold numbers, true and "
            f"false, or text. --dataset.drop {name} leaves it out."
        )


def _find_text(frame: "polars.DataFrame") -> set[str]:
    """Return the columns that hold words other than numbers."""
    _, odd = _parse_numbers(frame)
    return {column.name for column in odd.get_columns() if column.any()}


def _parse_numbers(frame: "polars.DataFrame") -> "tuple[polars.DataFrame, polars.DataFrame]":
    """Return words as numbers, and which words are neither numbers nor stand for missing ones.

    The second frame has only the columns in which there may be such words.
    """
    import polars

    number, words = polars.Float64, polars.selectors.string()
    plain = frame.with_columns(words.cast(number, strict=False))
    pairs = zip(frame.get_columns(), plain.get_columns(), strict=True)
    # Most columns are plain numbers; the rest takes long.
    lower = polars.DataFrame([each for each, now in pairs if now.null_count() > each.null_count()])
    lower = lower.select(polars.all().str.to_lowercase())
    parsed = polars.all().replace({"true": "1", "false": "0"}).cast(number, strict=False)
    stands = polars.all().is_null() | polars.all().is_in(_MISSING_NUMBERS).fill_null(value=True)
    odd = lower.select(parsed.is_null() & ~stands)
    numbers = plain.with_columns(lower.select(parsed).get_columns())
    return numbers.with_columns(polars.selectors.float().fill_nan(None)), odd


def pick_columns(frame: "polars.DataFrame", names: Iterable[str]) -> "polars.DataFrame":
    """Return some columns; in an expression of polars a name may be a pattern, and [] all."""
    import polars

    places = {name: place for place, name in enumerate(frame.columns)}
    columns = frame.get_columns()
    return polars.DataFrame([columns[places[name]] for name in names])


def _reject_first(
    faults: "polars.DataFrame", describe: Callable[[str, int], str], path: Path | str
) -> None:
    """Reject the first column that has a fault, by its first row."""
    for column in faults.get_columns():
        if column.any():
            name, row = column.name, int(column.fill_null(value=False).arg_max() or 0)
            raise InvalidInput(f"{path}: column {name!r} has {describe(name, row)}.")
