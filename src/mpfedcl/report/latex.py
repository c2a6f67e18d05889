"""Tables of the report in LaTeX, with the rules of booktabs."""

import re
import unicodedata
from collections.abc import Collection, Iterator

from mpfedcl.core.json_files import Json

HEADER = "% Written by mpfedcl report --latex. In the preamble: \\usepackage{booktabs}\n"
_OTHER_SCRIPTS = "% It has letters that pdflatex does not know: use lualatex or xelatex.\n"
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # After the end of a row these two are read as part of that command.
    "[": "{[}",
    "*": "{*}",
    # Babel takes it for a command in some languages.
    '"': r"\symbol{34}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\N{ALMOST EQUAL TO}": r"$\approx$",
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{MIDDLE DOT}": r"$\cdot$",
    "\N{LESS-THAN OR EQUAL TO}": r"$\leq$",
    "\N{GREATER-THAN OR EQUAL TO}": r"$\geq$",
    "\N{MINUS SIGN}": "$-$",
    "\N{RIGHTWARDS ARROW}": r"$\rightarrow$",
    "\N{EN DASH}": "--",
    "\N{EM DASH}": "---",
    "\N{HORIZONTAL ELLIPSIS}": r"\dots{}",
}
_NUMBER = re.compile(r"-?|[+-]?[\d,]+(\.\d+)?(\([\d.]+\))?")
_LAST_LATIN = 0x17F
"""Letters of European languages, which every LaTeX of today reads as they are."""


def latex_table(table: Json, *, label: str) -> str:
    """Return a table of the report as a float, its caption above and its notes below.

    Args:
        table: {caption, columns, rows, notes} of cells {text, mark?, note?, strong?}.
        label: For \\ref, without its `tab:`.
    """
    columns = [each for place in range(len(table["columns"])) for each in _columns(table, place)]
    head, *rows = zip(*(cells for _, cells in columns), strict=True)
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{escape_latex(table['caption'])}.}}",
        f"  \\label{{tab:{label}}}",
        f"  \\begin{{tabular}}{{{''.join(side for side, _ in columns)}}}",
        r"    \toprule",
        f"    {' & '.join(head)} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(row)} \\\\" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        *_notes(table),
        r"\end{table}",
    ]
    text = "\n".join(lines) + "\n"
    return HEADER + (_OTHER_SCRIPTS if any(map(_is_foreign, text)) else "") + text


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints as it stands, on one line."""
    plain = " ".join(text.split())
    # Marks of direction and other controls are nothing to print.
    seen = "".join(sign for sign in plain if unicodedata.category(sign)[0] != "C")
    # Two of these in a row are printed as another sign.
    apart = re.sub(r"([-'`,])(?=\1)", "\\1\0", seen)
    return "".join(_SPECIAL.get(sign, sign) for sign in apart).replace("\0", "{}")


def name_for_file(title: str) -> str:
    """Return a title in letters that every file system and LaTeX take."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "table"


def _columns(table: Json, place: int) -> Iterator[tuple[str, list[str]]]:
    """Return a column as LaTeX, its side and its cells from the head down; then that of its notes.

    Notes have a column of their own, so that numbers stay in line.
    """
    cells = [row[place] for row in table["rows"]]
    side = "r" if all(_NUMBER.fullmatch(cell["text"]) for cell in cells) else "l"
    yield side, [_format_head(table["columns"][place], side), *map(_format_cell, cells)]
    notes = [escape_latex(cell.get("note") or "") for cell in cells]
    if any(notes):
        yield "l", ["", *(rf"\footnotesize {note}" if note else "" for note in notes)]


def _format_head(title: str, side: str) -> str:
    """Return the head of a column; a long one has a line for each part."""
    parts = [escape_latex(part) for part in re.split(r"(?<=,) ", title)]
    lines = r" \\ ".join(parts)
    return rf"\shortstack[{side}]{{{lines}}}" if len(parts) > 1 else lines


def _format_cell(cell: Json) -> str:
    text = re.sub(r"^-(?=\d)", "$-$", escape_latex(cell["text"]))
    if cell.get("mark") == "within":
        return rf"$\approx$\,{text}"
    return rf"\textbf{{{text}}}" if cell.get("mark") == "best" or cell.get("strong") else text


def _notes(table: Json) -> Iterator[str]:
    """Return the notes below the table, in small letters."""
    marks = {cell.get("mark") for row in table["rows"] for cell in row}
    notes = [_name_marks(note, marks) for note in table["notes"] if note]
    if notes:
        yield r"  \par\medskip"
        yield rf"  \parbox{{\linewidth}}{{\footnotesize {escape_latex(' '.join(notes))}}}"


def _name_marks(note: str, marks: Collection[str | None]) -> str:
    """Return a note with the words for what the table shows as bold."""
    found = note.replace("▲ best", "Bold: best", 1) if "best" in marks else note
    return re.sub(r"^\*: ", "Bold: ", found)


def _is_foreign(sign: str) -> bool:
    return ord(sign) > _LAST_LATIN
