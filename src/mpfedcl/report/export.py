"""Files of results: a finished comparison, tables in LaTeX, measurements as CSV, figures as PDF."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpfedcl.core.files import write_atomically
from mpfedcl.core.json_files import Json
from mpfedcl.report.latex import latex_table, name_for_file
from mpfedcl.report.long_tables import LongTable
from mpfedcl.report.result_folders import ResultFolder
from mpfedcl.report.results import LoadedComparison, read_result
from mpfedcl.report.run import RunRecords
from mpfedcl.report.tables import TextTable, text_table
from mpfedcl.studies.comparison import Comparison


def write_comparison(
    comparison: Comparison, *, all_predictors: bool = False
) -> tuple[dict[str, Any], list[TextTable]]:
    """Write comparison.json, the figures and table.md; return its content and the tables."""
    content = comparison.collect()
    comparison.write(content)
    records = [RunRecords.read(each.path) for each in comparison.planned_runs]
    loaded = LoadedComparison(comparison.path, records)
    for name, drawing in loaded.figures.items():
        drawing.save(comparison.path / f"{name}.png")
    primary, *others = loaded.tables
    shared = all(run.has_shared_test for run in records)
    noted = "predictor" if shared else "predictor (local; global test set)"
    tables = [text_table(primary, loaded.setup, noted=noted)]
    if all_predictors:
        tables += [text_table(each) for each in others]
    text = "\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables)
    write_atomically(comparison.path / "table.md", text.encode())
    return content, tables


def write_latex(section: Json, folder: Path, prefix: str = "") -> list[Path]:
    """Write each table of a section of the report into its own file."""
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
    written = []
    for name, drawing in read_result(result).figures.items():
        written.append(result.path / f"{name}.pdf")
        drawing.save(written[-1])
    return written


def _tables(section: Json) -> Iterator[tuple[str, Json]]:
    """Return each table with the title that its file is named after.

    Data and seeds, with which the section begins, end each caption; the rest is a note.
    """
    # A section of several folders begins with the order of the page.
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
