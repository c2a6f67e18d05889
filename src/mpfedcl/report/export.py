"""Files of results: a finished comparison, tables in LaTeX, measurements as CSV, figures as PDF."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.json_files import Json
from mpfedcl.methods import PREDICTORS, TESTS
from mpfedcl.report.document import OnRun, build_document
from mpfedcl.report.html import render_page
from mpfedcl.report.result_folders import ResultFolder
from mpfedcl.report.results import LoadedComparison, read_result
from mpfedcl.report.run import RunRecords
from mpfedcl.report.tables import TextTable, text_table
from mpfedcl.rounds.record import training_seconds
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.statistics import LEVEL, find_best, mark_best, paired_difference


def write_comparison(
    comparison: Comparison, *, all_predictors: bool = False
) -> tuple[Json, list[TextTable]]:
    """Write comparison.json, the figures and table.md; return its content and the tables."""
    records = [RunRecords.read(each.path) for each in comparison.planned_runs]
    content = _collect_results(records)
    RunDirectory(comparison.path).write_json("comparison.json", content)
    loaded = LoadedComparison(comparison.path, records)
    for name, drawing in loaded.figures.items():
        drawing.save(comparison.path / f"{name}.png")
    primary, *others = loaded.section["tables"]
    shared = all(run.has_shared_test for run in records)
    noted = "predictor" if shared else "predictor (local; global test set)"
    tables = [text_table(primary, loaded.section["about"][0], noted=noted)]
    if all_predictors:
        tables += [text_table(each) for each in others]
    text = "\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables)
    write_atomically(comparison.path / "table.md", text.encode())
    return content, tables


def _collect_results(records: Sequence[RunRecords]) -> Json:
    """Return the results by method, test set and predictor, one number per seed."""
    runs: dict[str, list[RunRecords]] = {}
    for run in records:
        runs.setdefault(run.experiment.method, []).append(run)
    methods = {name: _collect_method(several) for name, several in runs.items()}
    differences: Json = {"level": LEVEL}
    for test in TESTS:
        values = {
            name: [run.rank_value(test) for run in several if run.summary]
            for name, several in runs.items()
        }
        differences[test] = {"marks": mark_best(values)}
        for name, other in (("best", find_best(values)), ("first", next(iter(values)))):
            found = {
                method: paired_difference(numbers, values[other]) if other else None
                for method, numbers in values.items()
                if method != other
            }
            differences[test] |= {
                name: other,
                f"to_{name}": {method: each and each.to_json() for method, each in found.items()},
            }
    return {
        # One-shot methods have one round.
        "rounds": max(run.experiment.rounds for run in records),
        "seeds": list(dict.fromkeys(run.experiment.seed for run in records)),
        "shared_test": all(run.experiment.partition.test == "shared" for run in records),
        "methods": methods,
        "differences": differences,
    }


def _collect_method(runs: Sequence[RunRecords]) -> Json:
    """Return the results of one method, one number per seed."""
    summaries = [run.summary for run in runs if run.summary]
    local, union = (runs[0].predictors[test] for test in TESTS)
    predictors = {
        test: {name: [each.predictors[test].get(name) for each in summaries] for name in PREDICTORS}
        for test in TESTS
    }
    # With many clients a run lists only the last participants, which differ between runs.
    listed = [{} if each.accuracy_spread else each.accuracy_per_client or {} for each in summaries]
    last = [run.rounds[-1] for run in runs]
    tables = [run.metrics or {} for run in runs if run.summary]
    return {
        "metric": runs[0].experiment.metric,
        "metrics": {test: [each.get(test) for each in tables] for test in TESTS},
        "predictor": local,
        "predictor_global": union,
        "accuracy": predictors["local_test"][local],
        "accuracy_global": predictors["global_test"][union],
        "predictors": predictors,
        "accuracy_per_client": {name: [each[name] for each in listed] for name in listed[0]},
        "fairness": [each.fairness and each.fairness.to_json() for each in summaries],
        "calibration_error": {
            test: [(each.calibration_error or {}).get(test) for each in last] for test in TESTS
        },
        "bytes": [sum(each.bytes.values()) for each in summaries],
        "seconds": [round(training_seconds(each.seconds), 3) for each in summaries],
        "runs": [run.path.name for run in runs],
        "diverged": [run.experiment.seed for run in runs if run.has_diverged],
    }


def write_report(
    folders: Sequence[ResultFolder],
    out: Path,
    *,
    latex: bool = False,
    csv: bool = False,
    pdf: bool = False,
    on_run: OnRun = lambda _: None,
) -> list[Path]:
    """Write results as one HTML file, and files for a paper next to them; return the latter."""
    if out.is_dir():
        raise InvalidInput(f"out is {str(out)!r}, which is a folder; it must be a file.")
    document = build_document(folders, on_run)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, render_page(document).encode())
    written = []
    for section in document["sections"] if latex else ():
        # The section about all folders together goes into the folder of the page.
        folder = Path(section["folder"]) if "folder" in section else out.parent
        written += write_latex(section, folder, "" if "folder" in section else "together-")
    for result in folders:
        written += write_csv(result) if csv else []
        written += write_pdf(result) if pdf else []
    return written


def write_csv(result: ResultFolder) -> list[Path]:
    """Write the measurements of a result in long form, a file for each kind."""
    written = []
    for name, make_table in read_result(result).long_tables.items():
        written.append(result.path / f"{name}.csv")
        write_atomically(written[-1], make_table().csv().encode())
    return written


def write_pdf(result: ResultFolder) -> list[Path]:
    """Write the figures of a result as PDF."""
    written = []
    for name, drawing in read_result(result).figures.items():
        written.append(result.path / f"{name}.pdf")
        drawing.save(written[-1])
    return written


def write_latex(section: Json, folder: Path, prefix: str = "") -> list[Path]:
    """Write each table of a section of the report into its own file.

    Data and seeds, with which the section begins, end each caption; the rest is a note.
    """
    # A section of several folders begins with the order of the page.
    about = [] if section["kind"] == "together" else section["about"]
    first, *others = [each for each in about if each] or [""]
    tables = [("", table) for table in section["tables"]]
    tables += [(search["title"], search["table"]) for search in section.get("searches", ())]
    written: dict[str, Path] = {}
    for title, table in tables:
        short = title or re.split("[,:]", table["caption"].replace("in % ", ""))[0]
        wanted = prefix + name_for_file(short)
        name, number = wanted, 2
        while name in written:
            name, number = f"{wanted}-{number}", number + 1
        written[name] = folder / f"{name}.tex"
        caption = ". ".join(each.rstrip(".") for each in (title, table["caption"], first) if each)
        complete = table | {"caption": caption, "notes": [*table["notes"], *others]}
        # A paper may have tables of several folders.
        label = f"{name_for_file(folder.resolve().name)}-{name}"
        write_atomically(written[name], latex_table(complete, label=label).encode())
    return list(written.values())


# LaTeX


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
    ]
    if notes := escape_latex(" ".join(each for each in table["notes"] if each)):
        # The table shows these marks as bold.
        notes = notes.replace("▲ best", "Bold: best", 1).replace("{*}: ", "Bold: ", 1)
        lines += [r"  \par\medskip", rf"  \parbox{{\linewidth}}{{\footnotesize {notes}}}"]
    text = "\n".join([*lines, r"\end{table}", ""])
    is_foreign = any(ord(sign) > _LAST_LATIN for sign in text)
    return HEADER + (_OTHER_SCRIPTS if is_foreign else "") + text


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
    yield side, [escape_latex(table["columns"][place]), *map(_format_cell, cells)]
    notes = [escape_latex(cell.get("note") or "") for cell in cells]
    if any(notes):
        yield "l", ["", *(rf"\footnotesize {note}" if note else "" for note in notes)]


def _format_cell(cell: Json) -> str:
    text = re.sub(r"^-(?=\d)", "$-$", escape_latex(cell["text"]))
    if cell.get("mark") == "within":
        return rf"$\approx$\,{text}"
    return rf"\textbf{{{text}}}" if cell.get("mark") == "best" or cell.get("strong") else text
