"""`mpfedcl report`."""

from mpfedcl.cli.arguments.experiments import Report
from mpfedcl.cli.progress import messages, progress_bar, results
from mpfedcl.errors import InvalidInput
from mpfedcl.files import write_atomically
from mpfedcl.report.document import gather_document
from mpfedcl.report.html import fill_page
from mpfedcl.report.sources import find_sources


def report_command(arguments: Report) -> int:
    """Gather what the folders hold and write one HTML file."""
    if not arguments.folders:
        raise InvalidInput("DIR is missing; give at least one folder (see mpfedcl report --help).")
    sources = find_sources(arguments.folders)
    out = arguments.out or arguments.folders[0] / "report.html"
    if out.is_dir():
        raise InvalidInput(f"out is {str(out)!r}; it must be a file, and this is a folder.")
    with progress_bar(messages()) as bar:
        total = sum(len(source.runs) for source in sources)
        task = bar.add_task("report", total=total, note="")
        document = gather_document(sources, lambda name: bar.update(task, advance=1, note=name))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, fill_page(document).encode())
    results().print(f"report: {out}")
    return 0
