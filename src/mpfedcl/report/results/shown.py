"""A result as a notebook shows it: a heading, a small table and its notes."""

import re
from collections.abc import Sequence
from html import escape
from io import StringIO

from rich.console import Console

from mpfedcl.core.json_files import Json
from mpfedcl.report.tables import MARKS, TextTable

_WIDTH = 100
_CELL = "text-align: {}; padding: 0.2em 0.8em"


def as_text(heading: str, table: Json) -> str:
    """Return a table of the report as lines of text."""
    rows = [[_cell_text(cell) for cell in row] for row in table["rows"]]
    shown = TextTable(table["caption"], table["columns"], rows, "\n".join(_notes(table)))
    text = StringIO()
    # In a notebook a console would otherwise print, whatever its file is.
    plain = Console(
        file=text,
        width=_WIDTH,
        markup=False,
        highlight=False,
        color_system=None,
        force_jupyter=False,
    )
    shown.show(plain)
    return f"{heading}\n{text.getvalue().rstrip()}"


def as_html(heading: str, table: Json) -> str:
    """Return the same as HTML: names are escaped, and nothing is loaded from elsewhere."""
    head = _html_row("th", table["columns"])
    body = "".join(_html_row("td", [_cell_text(cell) for cell in row]) for row in table["rows"])
    notes = "".join(f"<br>{escape(note)}" for note in _notes(table))
    return (
        f"<div><b>{escape(heading)}</b><br>{escape(table['caption'])}"
        f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
        f"<small>{notes.removeprefix('<br>')}</small></div>"
    )


def _html_row(kind: str, texts: Sequence[str]) -> str:
    # Names to the left, as notebooks put everything to the right.
    sides = ["left", *["right"] * (len(texts) - 1)]
    cells = [
        f'<{kind} style="{_CELL.format(side)}">{escape(text)}</{kind}>'
        for side, text in zip(sides, texts, strict=True)
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell_text(cell: Json) -> str:
    return f"{MARKS[cell['mark']] if cell.get('mark') else ''}{cell['text']}"


def _notes(table: Json) -> list[str]:
    """Return the notes with the sign that stands for the best here; a page has a word for it."""
    return [re.sub(r"^best:", f"{MARKS['best']}:", note) for note in table["notes"]]
