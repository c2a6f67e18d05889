"""Watches a running server: its clients' keys and connections, certificates, logs and metrics."""

import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.proto import node_pb2
from flwr.supercore.constant import NodeStatus

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.audit import AuditLog
from mpfedcl.network.flower.control import register_clients
from mpfedcl.network.logs import logger, rotate_log
from mpfedcl.network.server.metrics import Metric
from mpfedcl.network.server.operations import read_totals
from mpfedcl.network.server.status import read_status
from mpfedcl.network.setup.folders import ServerFolder
from mpfedcl.network.setup.keys import find_certificate_end
from mpfedcl.network.setup.life_cycle import check_certificates

_SECONDS = 5.0
"""Interval of checks."""
_DAY = 86_400.0
_SILENT_SECONDS = 60.0
"""Age of the last answer of the server at which it counts as not healthy."""
_ENDS = ("done", "stopped", "failed")


class ServerMonitor:
    """Keeps the registered keys up to date while the server runs, and records connections."""

    def __init__(self, root: Path, audit: AuditLog, log: Path) -> None:
        self._root, self._audit, self._log = root, audit, log
        self._folder = ServerFolder.open(root)
        self._online: set[str] = set()
        self._answered, self._warned = float("-inf"), float("-inf")
        self._problem = ""
        self._began = time.time()

    def start(self) -> None:
        """Check once, and then regularly in a daemon thread."""
        self.check()
        threading.Thread(target=self._watch, daemon=True).start()

    def check(self) -> None:
        """Register new keys, unregister revoked ones, and record who came and went."""
        known = self._folder.clients
        self._folder = ServerFolder.open(self._root)
        nodes = register_clients(self._folder)
        if new := [name for name in self._folder.clients if name not in known]:
            logger.info("New clients: %s", ", ".join(new))
        self._answered = time.monotonic()
        online = {node.name for node in nodes if node.status == NodeStatus.ONLINE}
        for event, names in (
            ("connected", online - self._online),
            ("disconnected", self._online - online),
        ):
            if names:
                self._audit.append(event, clients=sorted(names))
        self._online = online
        rotate_log(self._log)
        if time.monotonic() - self._warned > _DAY:
            self._warned = time.monotonic()
            for name in self._folder.clients:
                if not (key := self._folder.public_key(name)).is_file():
                    logger.warning("%s does not exist, so %s is not admitted.", key, name)
            for sentence in check_certificates(self._folder):
                logger.warning("%s", sentence)

    def is_healthy(self) -> bool:
        """Return whether the server has answered within the last minute."""
        return time.monotonic() - self._answered < _SILENT_SECONDS

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics by name."""
        folder = self._folder
        status, totals = read_status(folder.status), read_totals(folder.totals)
        runs = bool(status) and status.get("what") not in _ENDS
        number = status.get("round") if runs else None
        return {
            "up": ("gauge", "1 if the server answers.", int(self.is_healthy())),
            "start_time_seconds": ("gauge", "Unix time of the start.", self._began),
            "clients_registered": ("gauge", "Clients with a valid key.", len(folder.clients)),
            "clients_connected": ("gauge", "Clients that are connected.", len(self._online)),
            "run_active": ("gauge", "1 while a run is under way.", int(runs)),
            "run_round": ("gauge", "Its round.", number if isinstance(number, int) else None),
            "runs_total": ("counter", "Runs begun or resumed.", totals["runs"]),
            "rounds_total": ("counter", "Rounds of all runs.", totals["rounds"]),
            "updates_rejected_total": ("counter", "Updates rejected.", totals["rejected"]),
            "updates_missing_total": ("counter", "Updates missing.", totals["missing"]),
            "received_bytes_total": ("counter", "Bytes of updates.", totals["bytes_up"]),
            "sent_bytes_total": ("counter", "Bytes of broadcasts.", totals["bytes_down"]),
            "round_seconds_total": ("counter", "Seconds of rounds.", totals["seconds"]),
            "certificate_expiry_seconds": _expiry("server's", folder.server / "server.pem"),
            "authority_expiry_seconds": _expiry("authority's", folder.authority),
        }

    def _watch(self) -> None:
        while True:
            time.sleep(_SECONDS)
            problem = ""
            try:
                self.check()
            except InvalidInput as error:
                problem = str(error)
            # A thread that ends would leave revoked keys registered.
            except Exception as error:
                problem = f"The server cannot be checked: {type(error).__name__}: {error}"
            if problem and problem != self._problem:
                logger.error("%s", problem)
            self._problem = problem


def describe_nodes(
    folder: ServerFolder, nodes: list[node_pb2.NodeInfo], run: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return each client's connection: since when, last seen, and its part in the round."""
    by_name = {node.name: node for node in nodes}
    found = []
    for name in folder.clients:
        row: dict[str, Any] = {"client": name, "connected": False, "since": None, "seen": None}
        if (node := by_name.get(name)) is not None and node.last_activated_at:
            row["connected"] = node.status == NodeStatus.ONLINE
            changed = node.last_activated_at if row["connected"] else node.last_deactivated_at
            row["since"] = changed or None
            # Flower keeps until when a client counts as connected after its last heartbeat.
            seen = node.online_until
            if row["connected"]:
                seen -= HEARTBEAT_PATIENCE * node.heartbeat_interval
            row["seen"] = datetime.fromtimestamp(seen, UTC).isoformat(timespec="seconds")
        for state in ("waiting", "missing"):
            if name in run.get(state, ()):
                row["round"] = state
        if why := run.get("refused", {}).get(name):
            row["refused"] = why
        found.append(row)
    return found


def _expiry(whose: str, path: Path) -> Metric:
    words = f"Unix time at which the {whose} certificate expires."
    try:
        return "gauge", words, find_certificate_end(path).timestamp()
    except InvalidInput:
        return "gauge", words, None
