"""Files for a paper: tables in LaTeX, measurements as CSV, figures as PDF."""

import re
from collections.abc import Iterator
from pathlib import Path

from mpfedcl.core.files import write_atomically
from mpfedcl.core.json_files import Json
from mpfedcl.report.result_folders import ResultFolder
from mpfedcl.report.results.latex import latex_table, name_for_file
from mpfedcl.report.results.loading import read_result
from mpfedcl.report.results.long_table import LongTable


def write_latex(section: Json, folder: Path, prefix: str = "") -> list[Path]:
    """Write each table of a section of the report to a file of its own."""
    written: dict[str, Path] = {}
    for title, table in _tables(section):
        wanted = prefix + name_for_file(title)
        name, number = wanted, 2
        while name in written:
            name, number = f"{wanted}-{number}", number + 1
        written[name] = folder / f"{name}.tex"
        # A paper may have tables of several folders.
        label = f"{name_for_file(folder.resolve().name)}-{name}"
        write_atomically(written[name], latex_table(table, label=label).encode())
    return list(written.values())


def write_csv(result: ResultFolder) -> list[Path]:
    """Write the measurements of a result in long form, a file for each kind."""
    written = []
    for name, table in _long_tables(result):
        written.append(result.path / f"{name}.csv")
        write_atomically(written[-1], table.csv().encode())
    return written


def write_pdf(result: ResultFolder) -> list[Path]:
    """Write the figures of a result as PDF."""
    files = {
        result.path / f"{name}.pdf": draw for name, draw in read_result(result).figures.items()
    }
    for path, draw in files.items():
        draw(path)
    # Where there is nothing to draw, there is no file.
    return [path for path in files if path.is_file()]


def _tables(section: Json) -> Iterator[tuple[str, Json]]:
    """Return each table with what its file is named after.

    What the section says first, of data and seeds, ends each caption; the rest is a note.
    """
    # Of all folders together it says only how the page is ordered.
    about = [] if section["kind"] == "together" else section["about"]
    first, *others = [each for each in about if each] or [""]

    def complete(table: Json, title: str = "") -> Json:
        sentences = [each.rstrip(".") for each in (title, table["caption"], first) if each]
        return table | {"caption": ". ".join(sentences), "notes": [*table["notes"], *others]}

    for table in section["tables"]:
        yield re.split("[,:]", table["caption"].replace("in % ", ""))[0], complete(table)
    for search in section.get("searches", ()):
        yield search["title"], complete(search["table"], search["title"])


def _long_tables(result: ResultFolder) -> Iterator[tuple[str, LongTable]]:
    for name, make in read_result(result).long_tables.items():
        yield name, make()
