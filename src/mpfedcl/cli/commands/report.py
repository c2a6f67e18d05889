"""`mpfedcl report`."""

from collections.abc import Sequence
from pathlib import Path

from mpfedcl.cli.arguments.experiments import Report
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.json_files import Json
from mpfedcl.report.document import build_document
from mpfedcl.report.export import write_csv, write_latex, write_pdf
from mpfedcl.report.html import render_page
from mpfedcl.report.result_folders import ResultFolder, find_result_folders


def report_command(arguments: Report) -> int:
    """Gather what the folders hold and write one HTML file, and files for a paper if asked."""
    if not arguments.folders:
        raise InvalidInput("DIR is missing; give at least one folder (see mpfedcl report --help).")
    result_folders = find_result_folders(arguments.folders)
    out = arguments.out or arguments.folders[0] / "report.html"
    if out.is_dir():
        raise InvalidInput(f"out is {str(out)!r}; it must be a file, and this is a folder.")
    with progress_bar(stderr_console()) as bar:
        total = sum(len(folder.runs) for folder in result_folders)
        task = bar.add_task("report", total=total, note="")
        document = build_document(
            result_folders, lambda name: bar.update(task, advance=1, note=name)
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, render_page(document).encode())
    stdout_console().print(f"report: {out}")
    if written := _write_paper_files(arguments, result_folders, document, out.parent):
        stdout_console().print(_describe_files(written))
    return 0


def _write_paper_files(
    arguments: Report, folders: Sequence[ResultFolder], document: Json, beside: Path
) -> list[Path]:
    """Write what was asked for beside the page: into the folder of each result."""
    written = []
    for section in document["sections"] if arguments.latex else ():
        # All folders together have no folder but that of the page.
        folder = Path(section["folder"]) if "folder" in section else beside
        written += write_latex(section, folder, "" if "folder" in section else "together-")
    for result in folders:
        written += write_csv(result) if arguments.csv else []
        written += write_pdf(result) if arguments.pdf else []
    return written


def _describe_files(paths: Sequence[Path]) -> str:
    """Return the files by folder, a folder per line."""
    names: dict[Path, list[str]] = {}
    for path in paths:
        names.setdefault(path.parent, []).append(path.name)
    return "\n".join(f"in {folder}: {', '.join(each)}" for folder, each in names.items())
