"""`mpfedcl report`."""

from mpfedcl.cli.arguments.experiments import Report
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console
from mpfedcl.errors import InvalidInput
from mpfedcl.files import write_atomically
from mpfedcl.report.document import build_document
from mpfedcl.report.html import render_page
from mpfedcl.report.result_folders import find_result_folders


def report_command(arguments: Report) -> int:
    """Gather what the folders hold and write one HTML file."""
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
    return 0
