"""Report results: `report`, `watch` and `methods`."""

import ipaddress
from pathlib import Path
from typing import Any, get_args

from mpfedcl.cli.arguments import Methods, Report, Watch
from mpfedcl.cli.terminal import print_json, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.progress import ProgressBar, stderr_console
from mpfedcl.methods import Family, Method, built_in_methods
from mpfedcl.report.result_folders import find_result_folders
from mpfedcl.report.tables import TextTable


def report_command(arguments: Report) -> None:
    """Write the results in the folders as one HTML file, and as files for a paper on request."""
    # Imported late: matplotlib takes a second to load.
    from mpfedcl.report.export import write_report

    if not arguments.folders:
        raise InvalidInput("DIR is missing; give at least one folder (see mpfedcl report --help).")
    folders = find_result_folders(arguments.folders)
    out = arguments.out or arguments.folders[0] / "report.html"
    kinds = {name: getattr(arguments, name) for name in ("latex", "csv", "pdf")}
    with ProgressBar(stderr_console()) as bar:
        total = sum(len(folder.runs) for folder in folders)
        task = bar.add_task("report", total=total, note="")
        files = write_report(
            folders, out, on_run=lambda name: bar.update(task, advance=1, note=name), **kinds
        )
    stdout_console().print(f"report: {out}")
    names: dict[Path, list[str]] = {}
    for path in files:
        names.setdefault(path.parent, []).append(path.name)
    for folder, each in names.items():
        stdout_console().print(f"in {folder}: {', '.join(each)}")


def watch_command(arguments: Watch) -> None:
    """Show the runs below a folder on a local web page, until Ctrl-C."""
    folder = arguments.folder
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise InvalidInput(f"RUNS_FOLDER is {str(folder)!r}, which {reason}; it must be a folder.")
    try:
        from mpfedcl.report.watch.web_app import open_listener, serve
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in ("starlette", "uvicorn"):
            raise
        raise InvalidInput(
            f"watch needs {missing}, which is not installed: pip install 'mpfedcl[watch]'."
        ) from None
    listener = open_listener(arguments.host, arguments.port)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if not ipaddress.ip_address(host).is_loopback:
        stderr_console().print(
            f"These runs are readable to anyone who can reach {shown}: there is no password and no "
            "encryption."
        )
    # The socket already accepts connections.
    stdout_console().print(f"watching {folder}: http://{shown}:{port}/ (Ctrl-C ends it)")
    with listener:
        serve(folder, listener)


def methods_command(arguments: Methods) -> None:
    """List the methods."""
    methods = built_in_methods()
    if arguments.json:
        print_json({name: _describe_method(cls) for name, cls in methods.items()})
        return
    for family in get_args(Family):
        told = [_describe_method(cls) for cls in methods.values() if cls.family == family]
        rows = [
            [
                each["name"] + ("*" if each["interpretation"] else ""),
                *(each[key] for key in ("summary", "sends", "keeps", "paper")),
            ]
            for each in told
        ]
        columns = ["name", "summary", "a client sends", "and keeps", "paper"]
        if rows:
            TextTable(family, columns, rows).show(stdout_console())
    stdout_console().print(
        "* Our interpretation of details that the paper leaves open, see docs/methods.md.\n"
        "--json adds the primary predictors and the search spaces of `mpfedcl tune`."
    )


def _describe_method(method: type[Method]) -> dict[str, Any]:
    """Return the description of a method."""
    same = ("name", "summary", "family", "paper", "interpretation", "sends", "keeps")
    return {
        **{name: getattr(method, name) for name in same},
        "predictor": method.primary_predictor,
        "predictor_global": method.primary_predictor_global or method.primary_predictor,
        "search_space": {name: list(values) for name, values in method.search_space.items()},
    }
