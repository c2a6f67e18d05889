"""`mpfedcl watch`."""

import ipaddress

from mpfedcl.cli.arguments.experiments import Watch
from mpfedcl.cli.progress import stderr_console, stdout_console
from mpfedcl.core.errors import InvalidInput


def watch_command(arguments: Watch) -> int:
    """Show the runs below a folder on a local web page, until Ctrl-C."""
    folder = arguments.folder
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "it does not exist"
        raise InvalidInput(f"RUNS_FOLDER is {str(folder)!r}; it must be a folder, and {what}.")
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
            f"Everybody who reaches {shown} can read these runs: there is no password and nothing "
            "is encrypted."
        )
    with listener:
        serve(
            folder,
            listener,
            lambda: stdout_console().print(
                f"watching {folder}: http://{shown}:{port}/ (Ctrl-C ends it)"
            ),
        )
    return 0
