"""The columns of a table as a model takes them: numbers standardized, text as one number a word.

What is learnt of the columns comes from the clients' training rows alone, and from sums: nobody
needs to see another's rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy
from numpy.typing import NDArray
from pydantic import Field

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import FileContent
from mpfedcl.data.train_test_split import Indices

Numbers = NDArray[numpy.float64]
"""A column of numbers; NaN where one is missing."""


@dataclass(frozen=True)
class Words:
    """A column of text: each row's place among the words, -1 where it is missing."""

    codes: Indices
    words: tuple[str, ...]


RawColumns = Mapping[str, Numbers | Words]
"""Columns as they are in the files, by name and in order."""


def count_missing(column: Numbers | Words) -> int:
    """Return how many rows have nothing in a column."""
    gaps = column.codes < 0 if isinstance(column, Words) else numpy.isnan(column)
    return int(gaps.sum())


class NumericColumn(FileContent):
    """A column of numbers, standardized; a missing one is the mean, and so becomes 0."""

    kind: Literal["numeric"] = "numeric"
    name: str
    mean: float
    deviation: float
    """0 where all training rows have the same number: then every row becomes 0."""

    @property
    def width(self) -> int:
        """Numbers that stand for a cell."""
        return 1

    def transform(self, column: Numbers | Words, rows: Indices) -> Numbers:
        """Return [rows, 1]."""
        if isinstance(column, Words):
            raise InvalidInput(f"column {self.name!r} holds text; it must hold numbers.")
        if not self.deviation:
            return numpy.zeros((len(rows), 1))
        # What overflows is for whoever uses the rows to refuse.
        with numpy.errstate(over="ignore"):
            standardized = (column[rows] - self.mean) / self.deviation
        return numpy.nan_to_num(standardized, nan=0.0)[:, None]


class TextColumn(FileContent):
    """A column of text, a 0 or 1 for each word; all are 0 where it is missing or another word."""

    kind: Literal["text"] = "text"
    name: str
    categories: list[str]

    @property
    def width(self) -> int:
        """Numbers that stand for a cell."""
        return len(self.categories)

    def transform(self, column: Numbers | Words, rows: Indices) -> Numbers:
        """Return [rows, categories]."""
        if not isinstance(column, Words):
            raise InvalidInput(f"column {self.name!r} holds numbers; it must hold text.")
        places = {word: place for place, word in enumerate(self.categories)}
        # One more at the end, for what is missing: its code is -1.
        table = numpy.zeros((len(column.words) + 1, self.width))
        for code, word in enumerate(column.words):
            if word in places:
                table[code, places[word]] = 1
        return table[column.codes[rows]]


class TableColumns(FileContent):
    """What a run has learnt of its table, and all that new rows need to become its inputs."""

    label: str
    """The column of the classes."""
    columns: list[Annotated[NumericColumn | TextColumn, Field(discriminator="kind")]]

    @property
    def width(self) -> int:
        """Numbers that stand for a row."""
        return sum(column.width for column in self.columns)

    @property
    def kinds(self) -> dict[str, Literal["numeric", "text"]]:
        """What each column holds, in order."""
        return {column.name: column.kind for column in self.columns}

    def transform(self, raw: RawColumns, rows: Indices) -> Numbers:
        """Return rows as vectors [rows, width]."""
        for column in self.columns:
            if column.name not in raw:
                raise InvalidInput(f"the table lacks the column {column.name!r}.")
        parts = [column.transform(raw[column.name], rows) for column in self.columns]
        return numpy.concatenate(parts, axis=1)


def fit_columns(raw: RawColumns, label: str, clients: Sequence[Indices]) -> TableColumns:
    """Learn the columns from the training rows of each client."""
    return TableColumns(
        label=label,
        columns=[
            _fit_text(name, column, clients)
            if isinstance(column, Words)
            else _fit_numeric(name, column, clients)
            for name, column in raw.items()
        ],
    )


def _fit_text(name: str, column: Words, clients: Sequence[Indices]) -> TextColumn:
    seen = [set(column.codes[rows].tolist()) - {-1} for rows in clients]
    return TextColumn(
        name=name, categories=sorted(column.words[code] for code in set().union(*seen))
    )


def _fit_numeric(name: str, column: Numbers, clients: Sequence[Indices]) -> NumericColumn:
    """Return mean and deviation from sums of each client, exchanged three times.

    Distances to the mean are added up, not the numbers: their squares would lose all digits where
    the mean is large, and equal numbers would not be equal to their mean.
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
