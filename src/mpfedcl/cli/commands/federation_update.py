"""`mpfedcl federation update`: one client joins or leaves a finished run over the network."""

import json
from pathlib import Path
from typing import Any

from mpfedcl.cli.arguments.federation import FederationUpdate
from mpfedcl.cli.commands.federation_start import follow_run
from mpfedcl.cli.progress import stdout_console
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.inference.one_shot import is_one_shot
from mpfedcl.inference.one_shot_network import check_change
from mpfedcl.network.flower.programs import require_flower
from mpfedcl.network.setup.folders import ServerFolder
from mpfedcl.report.tables import percent

_EVENTS = {"joined": "has joined", "replaced": "has started over in", "left": "has left"}


def federation_update_command(arguments: FederationUpdate) -> int:
    """Let one client join a finished run of one exchange, begin anew in it, or leave it."""
    folder = ServerFolder.open(arguments.directory)
    run, client = _check(arguments)
    require_flower("mpfedcl.network.flower.control")
    request = {
        "status": str(folder.status.resolve()),
        "update": str(run.resolve()),
        "client": client,
        "leave": "true" if arguments.leave else "false",
    }
    leaves = " --leave" if arguments.leave else ""
    again = f"mpfedcl federation update {folder.root} --run {run} --client {client}{leaves}"
    status = follow_run(folder, run, request, again).status
    if status["what"] == "failed":
        raise RunCutShort(str(status.get("error", "the server's log says why")))
    _show(arguments, status["change"])
    return 0


def _check(arguments: FederationUpdate) -> tuple[Path, str]:
    """Return which run and whose; what cannot be is said before the server is asked."""
    for name in ("run", "client"):
        if getattr(arguments, name) is None:
            raise InvalidInput(
                f"{name} is missing; it must be given: --run runs/lab --client clinic-7."
            )
    assert arguments.run is not None
    assert arguments.client is not None
    if not is_one_shot(arguments.run):
        raise InvalidInput(
            f"run is {str(arguments.run)!r}; it must be of a one-shot method, such as "
            "fedgauss: the others have trained with their clients."
        )
    check_change(arguments.run, arguments.client, leave=arguments.leave)
    return arguments.run, arguments.client


def _show(arguments: FederationUpdate, change: dict[str, Any]) -> None:
    client, clients = change["client"], change["clients"]
    if arguments.json:
        print(json.dumps(change, indent=2))
    if change["event"] == "rejected":
        raise InvalidInput(f"{client} was rejected, and nothing was changed: {change['reason']}.")
    if arguments.json:
        return
    console = stdout_console()
    console.print(
        f"{client} {_EVENTS[change['event']]} {arguments.run}, which has {len(clients)} clients now"
    )
    if change["after"] is not None:
        console.print(
            f"accuracy % on its local test set: {percent(change['before'])} with the run's classifier "
            f"before, {percent(change['after'])} with the client's own, which it has now"
        )
    elif change["event"] != "left":
        console.print(
            f"{client} did not get its classifier: it went away. Repeat the command when it is "
            "back."
        )
