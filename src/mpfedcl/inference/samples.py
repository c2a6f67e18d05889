"""Samples that a user gives for a finished run: to be predicted, or labeled and held out.

Predicted samples are named one by one, because one that cannot be read must not stop the others.
Held-out samples have labels, and no client has trained with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.data.image_files import EXTENSIONS, is_image_file, read_image_file
from mpfedcl.data.npz_archive import open_unlabeled_samples
from mpfedcl.data.sample_index import open_own_samples
from mpfedcl.data.samples import (
    ImageFormat,
    Indices,
    SampleFormat,
    SampleIndex,
    Samples,
    Subset,
    choose_format,
)
from mpfedcl.data.table_files import is_table_file
from mpfedcl.data.tables import TableColumns, read_rows
from mpfedcl.inference.trained_run import TrainedRun

_SAMPLES_AT_ONCE = 256
_MOST_HELD_OUT = 1000


# Samples to predict


class NamedSample(NamedTuple):
    """A sample: an image file, an array, or the reason why it cannot be read."""

    name: str
    value: Path | Samples | InvalidInput
    cells: Mapping[str, Any] = {}
    """The row of a table as it was read; its label is text."""


def list_samples(
    words: Sequence[str],
    stdin: TextIO,
    wanted: SampleFormat,
    columns: TableColumns | None = None,
) -> list[NamedSample]:
    """Return the samples in files, folders and archives, in the given order.

    `-` stands for paths on stdin, one per line. `columns` are those of a run on a table.
    """
    found: list[NamedSample] = []
    for word in words:
        lines = (line.rstrip("\r\n") for line in stdin) if word == "-" else [word]
        for each in filter(None, lines):
            path = Path(each).expanduser()
            try:
                found += _list_path(path, wanted, columns)
            except InvalidInput as error:
                found.append(NamedSample(str(path), error))
            except OSError as error:
                reason = f"{path} cannot be read ({explain(error)}); it must be a file."
                found.append(NamedSample(str(path), InvalidInput(reason)))
    return found


def read_batches(
    samples: Sequence[NamedSample], wanted: SampleFormat
) -> Iterator[tuple[list[str], Samples, dict[int, str]]]:
    """Yield batches of samples, decoded in parallel.

    A batch is all names, the samples that could be read, and the errors of the others by place.
    """

    def read(sample: NamedSample) -> Samples | str:
        try:
            if isinstance(sample.value, InvalidInput):
                raise sample.value
            if isinstance(sample.value, Path):
                assert isinstance(wanted, ImageFormat)
                return read_image_file(sample.value, wanted.size, wanted.is_color)
            converted: Samples = wanted.convert(sample.value[None])[0]
        except InvalidInput as error:
            return str(error)
        return converted

    with ThreadPoolExecutor() as executor:
        for first in range(0, len(samples), _SAMPLES_AT_ONCE):
            part = samples[first : first + _SAMPLES_AT_ONCE]
            found = list(executor.map(read, part))
            sound = [each for each in found if not isinstance(each, str)]
            faults = {n: each for n, each in enumerate(found) if isinstance(each, str)}
            empty = numpy.empty((0, *wanted.shape), dtype=wanted.dtype)
            yield [sample.name for sample in part], numpy.stack(sound) if sound else empty, faults


def _list_path(path: Path, wanted: SampleFormat, columns: TableColumns | None) -> list[NamedSample]:
    is_archive = path.suffix.lower() == ".npz" and not path.is_dir()
    if is_archive or not isinstance(wanted, ImageFormat):
        rows, cells = _read_rows(path, wanted, columns)
        return [
            NamedSample(f"{path}[{number}]", *each)
            for number, each in enumerate(zip(rows, cells, strict=True))
        ]
    if not path.is_dir():
        return [NamedSample(str(path), path)]
    files = sorted(each for each in path.rglob("*") if is_image_file(each))
    if not files:
        names = ", ".join(f"*{extension}" for extension in EXTENSIONS)
        raise InvalidInput(f"{path} has no images; it must have files {names}.")
    return [NamedSample(str(each), each) for each in files]


def _read_rows(
    path: Path, wanted: SampleFormat, columns: TableColumns | None
) -> tuple[Samples, list[dict[str, Any]]]:
    """Return the samples of an npz file or a table, and the cells of a table's rows."""
    if path.suffix.lower() == ".npz" and not path.is_dir():
        store = open_unlabeled_samples(path)
        (found,) = store.inspect()
        if not wanted.accepts(store.array_format):
            raise InvalidInput(f"{path}: {store.key} has {found}; this run takes {wanted}.")
        # All at once and in their own size, because an archive is always read from its beginning.
        own = choose_format({found}, None, wanted.dtype)
        return store.load(numpy.arange(len(store)), own), [{}] * len(store)
    if columns is None:
        raise InvalidInput(
            f"{path} is not an npz file; this run takes {wanted}, as x [samples, ...] in one."
        )
    if not is_table_file(path):
        raise InvalidInput(f"{path} is not a table; this run takes rows of a CSV or Parquet file.")
    vectors, frame = read_rows(path, columns)
    return vectors, frame.to_dicts()


# Labeled samples


def open_labeled_samples(trained: TrainedRun, source: Path, field: str) -> SampleIndex:
    """List labeled samples of a run's classes and format; `field` names them in errors."""
    try:
        sample_index = open_own_samples(source, trained.class_names, trained.columns)
    except InvalidInput as error:
        raise InvalidInput(f"{field}{str(error).removeprefix('data')}") from None
    if not trained.input_format.accepts(sample_index.array_format):
        raise InvalidInput(
            f"{field} is {str(source)!r}, which holds {sample_index}; the run takes "
            f"{trained.input_format}."
        )
    return sample_index


def load_held_out(
    trained: TrainedRun, folder: Path, most: int = _MOST_HELD_OUT
) -> tuple[Samples, NDArray[numpy.int64]]:
    """Load up to `most` samples in a run's input format, evenly spaced over classes, and labels."""
    sample_index = open_labeled_samples(trained, folder, "held_out")
    parts = [part for each in sample_index.domains for part in (each.train, each.test) if part]
    drawn = draw_evenly(Subset.join(parts), most)
    return load_converted(trained, sample_index, drawn.rows), drawn.labels


def load_converted(trained: TrainedRun, sample_index: SampleIndex, rows: Indices) -> Samples:
    """Load samples in a run's input format, converted as for a prediction."""
    input_format = trained.input_format
    own = choose_format(sample_index.store.inspect(), None, input_format.dtype)
    if isinstance(own, ImageFormat) and isinstance(input_format, ImageFormat):
        # In their own color mode: `convert` removes color as it does for a prediction.
        own = replace(input_format, is_color=own.is_color)
    return input_format.convert(sample_index.store.load(rows, own))


def draw_evenly(part: Subset, most: int) -> Subset:
    """Return up to `most` samples, evenly spaced and so about as many of each class."""
    if len(part.labels) <= most:
        return part
    return part.select(numpy.linspace(0, len(part.labels) - 1, most).round().astype(numpy.int64))
