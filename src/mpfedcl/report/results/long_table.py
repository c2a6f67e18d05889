"""Tables in long form, one measurement a row: as a data frame, as plain columns, as CSV."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any, Literal, get_args

from mpfedcl.core.errors import InvalidInput

Library = Literal["polars", "pandas", "columns"]
Value = str | int | float | bool | None


@dataclass(frozen=True)
class LongTable:
    """Rows of plain values; each column has one type, and None where nothing was measured."""

    columns: Mapping[str, type]
    rows: Sequence[tuple[Value, ...]]

    def frame(self, library: Library | None = None) -> Any:
        """Return a data frame of polars, else of pandas, else a dict with a list per column."""
        chosen = library or next((each for each in ("polars", "pandas") if find_spec(each)), None)
        if chosen not in (None, *get_args(Library)):
            raise InvalidInput(
                f"library is {chosen!r}; it must be one of {', '.join(get_args(Library))}."
            )
        if chosen in (None, "columns"):
            return {name: [row[at] for row in self.rows] for at, name in enumerate(self.columns)}
        try:
            module = import_module(str(chosen))
        except ImportError:
            raise InvalidInput(
                f"library is {chosen!r}, which is not installed: pip install {chosen}, or take "
                "'columns'."
            ) from None
        if chosen == "polars":
            return module.DataFrame(self.rows, schema=dict(self.columns), orient="row")
        # Texts stay as they are: to pandas None would become a text of its own.
        kinds = {name: kind for name, kind in self.columns.items() if kind is not str}
        return module.DataFrame.from_records(self.rows, columns=[*self.columns]).astype(kinds)

    def csv(self) -> str:
        """Return the table as CSV, with a line of names; nothing stands for None."""
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow(str(each).lower() if isinstance(each, bool) else each for each in row)
        return text.getvalue()
