"""The samples that a command line names: files, folders, globs, archives, a list on stdin."""

import glob
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import identify_file
from mpfedcl.data.image_files import EXTENSIONS, is_image_file, read_image_file
from mpfedcl.data.npz_archive import open_unlabeled_samples
from mpfedcl.data.samples import SampleFormat, Samples, VectorFormat, choose_format
from mpfedcl.data.table_files import is_table_file
from mpfedcl.data.tables import TableColumns, read_rows

_SAMPLES_AT_ONCE = 256


@dataclass(frozen=True)
class NamedSample:
    """A sample that is opened when it is asked for; what is wrong with it is said then."""

    name: str
    load: Callable[[], Samples]


def list_samples(
    words: Sequence[str],
    stdin: TextIO,
    wanted: SampleFormat,
    columns: TableColumns | None = None,
) -> list[NamedSample]:
    """Return what the words name, in their order; `-` stands for a path a line on stdin.

    Rows of tables are for runs that know their columns.
    """
    found: list[NamedSample] = []
    for word in words:
        if word == "-":
            for line in stdin:
                if path := line.rstrip("\r\n"):
                    found += _list_path(path, wanted, columns)
        else:
            found += _list_path(word, wanted, columns)
    return found


def read_batches(
    samples: Sequence[NamedSample], wanted: SampleFormat
) -> Iterator[tuple[list[str], Samples, dict[int, str]]]:
    """Yield the samples batch by batch, decoded in parallel; none is lost for another's fault.

    A batch is all names, the samples that could be read, and what is wrong with the others by
    place.
    """

    def attempt(sample: NamedSample) -> Samples | str:
        try:
            return sample.load()
        except InvalidInput as error:
            return str(error)

    with ThreadPoolExecutor() as executor:
        for first in range(0, len(samples), _SAMPLES_AT_ONCE):
            part = samples[first : first + _SAMPLES_AT_ONCE]
            loaded = list(executor.map(attempt, part))
            sound = [each for each in loaded if not isinstance(each, str)]
            faults = {n: each for n, each in enumerate(loaded) if isinstance(each, str)}
            empty = numpy.empty((0, *wanted.shape), dtype=wanted.dtype)
            stacked = numpy.stack(sound) if sound else empty
            yield [sample.name for sample in part], stacked, faults


def _list_path(word: str, wanted: SampleFormat, columns: TableColumns | None) -> list[NamedSample]:
    path = Path(word).expanduser()
    if path.exists() or not glob.has_magic(word):
        return _list_one(path, wanted, columns)
    # pathlib has no glob for a pattern that may begin anywhere.
    matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
    if not matches:
        return [_unreadable(word, f"{word} matches no file; a pattern must match at least one.")]
    return [sample for each in matches for sample in _list_one(Path(each), wanted, columns)]


def _list_one(path: Path, wanted: SampleFormat, columns: TableColumns | None) -> list[NamedSample]:
    if path.suffix.lower() == ".npz" and not path.is_dir():
        return _from_archive(path, wanted)
    if isinstance(wanted, VectorFormat):
        if is_table_file(path) and columns is not None:
            return _from_table(path, wanted, columns)
        fault = (
            f"{path} is not an npz file; this run takes {wanted}, as x [vectors, numbers] in one."
        )
        if columns is not None:
            fault = f"{path} is not a table; this run takes rows of a CSV or Parquet file."
        return [_unreadable(str(path), fault)]
    if path.is_dir():
        pictures = sorted(each for each in path.rglob("*") if is_image_file(each))
        if not pictures:
            names = ", ".join(f"*{extension}" for extension in EXTENSIONS)
            return [_unreadable(str(path), f"{path} has no images; it must have files {names}.")]
    else:
        pictures = [path]

    def picture(file: Path) -> NamedSample:
        return NamedSample(str(file), lambda: read_image_file(file, wanted.size, wanted.is_color))

    return [picture(each) for each in pictures]


def _from_archive(path: Path, wanted: SampleFormat) -> list[NamedSample]:
    try:
        store = open_unlabeled_samples(lambda: path.open("rb"), str(path), identify_file(path))
        (found,) = store.inspect()
        if found.vector_width != wanted.vector_width:
            raise InvalidInput(f"{path}: {store.key} has {found}; this run takes {wanted}.")
        # At once and in their own size: an archive is read from its beginning each time.
        own = choose_format({found}, None, wanted.dtype)
        samples = store.load(numpy.arange(len(store)), own)
    except InvalidInput as error:
        return [_unreadable(str(path), str(error))]
    except OSError as error:
        reason = error.strerror or error
        return [
            _unreadable(str(path), f"{path} cannot be read ({reason}); it must be an npz file.")
        ]

    def sample(number: int) -> NamedSample:
        return NamedSample(f"{path}[{number}]", lambda: wanted.convert(samples[[number]])[0])

    return [sample(number) for number in range(len(store))]


def _from_table(path: Path, wanted: VectorFormat, columns: TableColumns) -> list[NamedSample]:
    try:
        rows = read_rows(path, columns)
    except InvalidInput as error:
        return [_unreadable(str(path), str(error))]
    except OSError as error:
        reason = error.strerror or error
        return [_unreadable(str(path), f"{path} cannot be read ({reason}); it must be a table.")]

    def sample(number: int) -> NamedSample:
        return NamedSample(f"{path}[{number}]", lambda: wanted.convert(rows[[number]])[0])

    return [sample(number) for number in range(len(rows))]


def _unreadable(name: str, fault: str) -> NamedSample:
    def refuse() -> Samples:
        raise InvalidInput(fault)

    return NamedSample(name, refuse)
