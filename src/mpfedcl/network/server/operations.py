"""What operators see of runs: the server's audit log, and totals over all runs for metrics."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.experiment import Experiment
from mpfedcl.network.audit import AuditLog, describe_request
from mpfedcl.network.transport import AnswerLimit, Kind, Message, Reply, Transport
from mpfedcl.runs.observer import Observer

TOTALS = ("runs", "rounds", "rejected", "missing", "bytes_up", "bytes_down", "seconds")
"""Counters over all runs: runs begun, rounds, updates rejected, answers missing, bytes from and to
clients, seconds of rounds."""


class AuditedTransport:
    """Records what clients are asked, and their answers that are failures."""

    def __init__(self, transport: Transport, log: AuditLog) -> None:
        self._transport, self._log = transport, log
        self._names: dict[int, str] = {}
        self._asked: dict[str, tuple[str, Kind]] = {}

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the connected nodes with the names of their keys."""
        found = self._transport.connected_nodes()
        self._names |= found
        return found

    def send(
        self, kind: Kind, messages: Mapping[int, Message], timeout: float, *, seconds: float
    ) -> dict[int, str]:
        """Send each node its message, and record before that it is asked."""
        if messages:
            names = {node: self._names.get(node, str(node)) for node in messages}
            request = describe_request(kind, next(iter(messages.values())))
            self._log.append("asked", **request, clients=sorted(names.values()))
        sent = self._transport.send(kind, messages, timeout, seconds=seconds)
        self._asked |= {request_id: (names[node], kind) for node, request_id in sent.items()}
        return sent

    def receive(self, limits: Mapping[str, AnswerLimit], seconds: float) -> list[Reply]:
        """Return new replies, and record failures with their reasons."""
        replies = self._transport.receive(limits, seconds)
        for reply in replies:
            name, kind = self._asked.pop(reply.request_id, ("", "hello"))
            if reply.message is None:
                event = {"gone": "lost", "failed": "refused"}.get(reply.failure or "", "rejected")
                self._log.append(event, client=name, kind=kind, reason=reply.reason)
        return replies


class RunRecorder:
    """Records the course of a run in the audit log and adds it to the totals."""

    def __init__(self, log: AuditLog, totals: Path) -> None:
        self._log, self._totals = log, totals

    def watch(self, observer: Observer) -> Observer:
        """Return the observer, which also records."""

        def on_start(experiment: Experiment, rounds_done: int) -> None:
            digest = hashlib.sha256(experiment.to_toml().encode()).hexdigest()
            about = {"method": experiment.method, "rounds": experiment.rounds}
            self._log.append("run", **about, done=rounds_done, experiment_sha256=digest)
            self._add({"runs": 1})
            observer.on_start(experiment, rounds_done)

        def on_round(record: Mapping[str, Any]) -> None:
            clients = record["clients"]
            names = {key: clients[key] for key in ("answered", "rejected", "missing")}
            self._log.append("round", round=record["round"], **names)
            counts = {
                "rounds": 1,
                "rejected": len(clients["rejected"]),
                "missing": len(clients["missing"]),
                "bytes_up": record["bytes"]["up"],
                "bytes_down": record["bytes"]["down"],
                "seconds": sum(record["seconds"].values()),
            }
            self._add(counts)
            observer.on_round(record)

        return replace(observer, on_start=on_start, on_round=on_round)

    def end(self, outcome: str, **details: Any) -> None:
        """Record how a run has ended."""
        self._log.append("run_end", outcome=outcome, **details)

    def _add(self, counts: Mapping[str, float]) -> None:
        # A full disk must not end the run here.
        with contextlib.suppress(OSError):
            totals = read_totals(self._totals)
            totals |= {name: totals[name] + each for name, each in counts.items()}
            write_atomically(self._totals, json.dumps(totals).encode(), durable=False)


def read_totals(path: Path) -> dict[str, float]:
    """Return the totals in a file; zeros if there is none."""
    found: dict[str, float] = dict.fromkeys(TOTALS, 0)
    with contextlib.suppress(OSError, ValueError, InvalidInput):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            found |= {n: content[n] for n in TOTALS if isinstance(content.get(n), int | float)}
    return found
