"""Operate federations: `federation status`, `revoke`, `rotate`, `renew` and `audit`."""

from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from mpfedcl.cli.arguments import (
    FederationAudit,
    FederationRenew,
    FederationRevoke,
    FederationRotate,
    FederationStatus,
)
from mpfedcl.cli.terminal import print_json, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.audit import AUDIT_FILE, FIRST, AuditLog, Entry, read_audit
from mpfedcl.network.flower.programs import is_port_in_use, read_address, require_flower
from mpfedcl.network.server.status import read_status
from mpfedcl.network.setup.folders import ClientFolder, ServerFolder


def federation_status_command(arguments: FederationStatus) -> int:
    """Show the server, its certificates, its clients and the run in progress."""
    from mpfedcl.network.setup.keys import describe_end, find_certificate_end
    from mpfedcl.network.setup.life_cycle import RENEW, revoked_names

    folder = ServerFolder.open(arguments.directory)
    require_flower("mpfedcl.network.flower.monitor")
    from mpfedcl.network.flower.control import list_nodes
    from mpfedcl.network.flower.monitor import describe_nodes

    is_running = _is_running(folder)
    status = _read_run(folder) if is_running else {}
    nodes = list_nodes(folder) if is_running else []
    clients = describe_nodes(folder, nodes, status)
    ends = {name: find_certificate_end(folder.server / name) for name in ("server.pem", "ca.pem")}
    if arguments.json:
        certificates = {name: end.isoformat() for name, end in ends.items()}
        found = {"running": is_running, "run": status or None, "clients": clients}
        print_json({**found, "revoked": revoked_names(folder), "certificates": certificates})
        return 0 if is_running else 1
    console = stdout_console()
    console.print(f"server: {read_address(folder) if is_running else 'does not run'}")
    console.print(f"run: {_describe_run(status)}")
    table = Table("client", "connected", "since", "last seen", "in the round", box=None)
    for row in clients:
        part = row.get("refused") or row.get("round", "")
        is_here = "yes" if row["connected"] else "no"
        table.add_row(row["client"], is_here, _short(row["since"]), _short(row["seen"]), part)
    console.print(table)
    for name in revoked_names(folder):
        console.print(f"revoked: {name}")
    for name, end in ends.items():
        remedy = f"{RENEW} {folder.root}{' --authority' if name == 'ca.pem' else ''} renews it"
        words = describe_end(name, end, remedy) or f"{name} expires on {end:%Y-%m-%d}."
        console.print(words)
    return 0 if is_running else 1


def federation_revoke_command(arguments: FederationRevoke) -> None:
    """Revoke a client's key, and tell the running server."""
    from mpfedcl.network.setup.life_cycle import revoke_client

    _change_key(arguments.directory, arguments.name, "revoked", revoke_client)
    stdout_console().print(
        f"{arguments.name} is revoked: its key is not accepted any more. It can come back with a "
        f"new one: mpfedcl federation init {arguments.directory} --names {arguments.name}"
    )


def federation_rotate_command(arguments: FederationRotate) -> None:
    """Create a new key for a client, and tell the running server."""
    from mpfedcl.network.setup.life_cycle import rotate_client

    _change_key(arguments.directory, arguments.name, "rotated", rotate_client)
    place = arguments.directory / "clients" / arguments.name
    stdout_console().print(
        f"{arguments.name} has a new key, and the old one is not accepted any more. Bring "
        f"{place / 'node.key'} to its machine (mode 0600), and start the client again."
    )


def _change_key(
    root: Path, name: str, event: str, change: Callable[[ServerFolder, str], object]
) -> None:
    require_flower("mpfedcl.network.flower.control")
    from mpfedcl.network.flower.control import register_clients

    folder = ServerFolder.open(root)
    change(folder, name)
    AuditLog(folder.server / AUDIT_FILE).append(event, client=name)
    # The server refuses the key from now on. This also ends its part in a run in progress.
    if _is_running(folder):
        register_clients(ServerFolder.open(root))


def federation_renew_command(arguments: FederationRenew) -> None:
    """Renew the server's certificate."""
    require_flower()
    from mpfedcl.network.setup.keys import find_certificate_end
    from mpfedcl.network.setup.life_cycle import renew_certificates

    folder = ServerFolder.open(arguments.directory)
    renew_certificates(folder, authority=arguments.authority)
    ends = {name: find_certificate_end(folder.server / name) for name in ("server.pem", "ca.pem")}
    AuditLog(folder.server / AUDIT_FILE).append(
        "renewed", **{name: end.isoformat() for name, end in ends.items()}
    )
    console = stdout_console()
    for name, end in ends.items():
        console.print(f"{name} expires on {end:%Y-%m-%d}.")
    if arguments.authority:
        console.print(f"Bring {folder.authority} to each client; the old one works until it ends.")
    console.print("A running server uses it within seconds; nginx needs systemctl reload nginx.")


def federation_audit_command(arguments: FederationAudit) -> None:
    """Verify and print the audit log of the server or of a client."""
    path, is_found = _find_log(arguments), arguments.contains is None
    # First verified, then printed: a long log is not kept in memory.
    last: deque[Entry] = deque(maxlen=1)
    for entry in read_audit(path):
        is_found = is_found or entry["sha256"].startswith(str(arguments.contains))
        last.append(entry)
    if not is_found:
        raise InvalidInput(
            f"{path} has no entry {arguments.contains!r}; it was cut off or written again."
        )
    head = last[0]["sha256"] if last else FIRST
    count = last[0]["number"] if last else 0
    if arguments.json:
        print_json({"entries": list(read_audit(path)), "last": head})
        return
    console = stdout_console()
    known = ("number", "time", "event", "previous", "sha256")
    for entry in read_audit(path):
        details = ", ".join(f"{n}: {each}" for n, each in entry.items() if n not in known)
        console.print(f"{entry['number']:>6} {entry['time'][:19]} {entry['event']}  {details}")
    console.print(f"{count} entries, unbroken; the last is {head}")


def _find_log(arguments: FederationAudit) -> Path:
    root = arguments.directory
    if arguments.client is None and (root / "federation.toml").is_file():
        return ServerFolder.open(root).server / AUDIT_FILE
    return ClientFolder.open(root, arguments.client).root / AUDIT_FILE


def _is_running(folder: ServerFolder) -> bool:
    """Return whether a program listens at the server's address."""
    try:
        host, _, port = read_address(folder).rpartition(":")
    except InvalidInput:
        # It was never started.
        return False
    return is_port_in_use(host, int(port))


def _read_run(folder: ServerFolder) -> dict[str, Any]:
    """Return the status of the run in progress; empty if its process was lost."""
    status = read_status(folder.status)
    is_over = status.get("what") in ("done", "stopped", "failed")
    return status if is_over or psutil.pid_exists(int(status.get("pid", -1))) else {}


def _describe_run(status: dict[str, Any]) -> str:
    if not status:
        return "none"
    if "round" in status:
        return f"{status['what']}, round {status['round']} of {status['rounds']}"
    if "wanted" in status:
        return f"{status['what']}, {len(status['here'])} of {status['wanted']} are connected"
    return f"{status['what']}{': ' + str(status['error']) if 'error' in status else ''}"


def _short(time: str | None) -> str:
    """Return a time in UTC to the second."""
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M:%S}" if time else ""
