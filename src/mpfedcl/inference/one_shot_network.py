"""Joining and leaving a finished one-shot run over the network, one client at a time.

The client sends its statistics, as in the run, and receives its classifier. The other clients need
not be connected.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.inference.join_log import make_event, write_events
from mpfedcl.inference.membership import refuse_empty
from mpfedcl.inference.one_shot import OneShotFederation, open_federation, take_out, write_change
from mpfedcl.methods import PredictorName
from mpfedcl.methods.messages import Update
from mpfedcl.network.messages import check_name
from mpfedcl.network.server.engine import digest_sums
from mpfedcl.network.server.single_client import SingleClient
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import MessageError, Transport
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.runs.directory import RunDirectory


@dataclass(frozen=True)
class NetworkChange:
    """The result of a client's joining, replacing its statistics or leaving over the network."""

    client: str
    event: str
    """joined, replaced, left or rejected."""
    clients: tuple[str, ...]
    """The clients of the federation now."""
    reason: str = ""
    """Why the statistics were rejected."""
    before: float | None = None
    """Accuracy in % on the client's local test set, by the global classifier as it was."""
    after: float | None = None
    """The same by the client's personal classifier afterwards."""


def change_federation(
    transport: Transport,
    run: Path,
    client: str,
    *,
    leave: bool = False,
    status: Path | None = None,
) -> dict[str, Any]:
    """Do as `update_over_network`, and return plain values."""
    return asdict(update_over_network(transport, run, client, leave=leave, status=status))


def update_over_network(
    transport: Transport,
    run: Path,
    client: str,
    *,
    leave: bool = False,
    status: Path | None = None,
) -> NetworkChange:
    """Let one client join a finished one-shot run, replace its statistics there, or leave it.

    Args:
        transport: Reaches the client; `network.patience` limits the wait for it.
        run: The directory of a run over a network.
        client: The client's name. The statistics of a client of the federation are replaced.
        leave: Take the client out. It need not be connected if the statistics of each client are
            kept; otherwise it must send exactly the statistics that are in the total.
        status: A file to which progress is written.
    """
    with RunDirectory.resume(run, "RUN"):
        before, known = check_change(run, client, leave=leave)
        if leave and before.keeps_clients:
            return NetworkChange(client, "left", take_out(run, client).names)
        # Classes may have come since the run.
        experiment = before.experiment.replace(dataset__classes=before.class_names)
        asked = SingleClient(transport, experiment, known, client, Status(status))
        update, rejected = asked.ask(before.fitted.outcome)
        if leave and rejected is None and digest_sums(update.summed) != known["sums"][client]:
            rejected = "its statistics are not those that it sent: its samples have changed since"
        if rejected is not None:
            write_events(run, {**make_event("rejected", client), "reason": rejected})
            return NetworkChange(client, "rejected", before.pool.names, rejected)
        own = before.method.own_statistics(update.summed)
        if leave:
            after = before.without(client, own)
            write_change(before, after, "left", client, own)
            return NetworkChange(client, "left", after.pool.names)
        refuse_empty(client, own)
        event, base = "joined", before
        if client in before.pool.names:
            event, base = "replaced", before.without(client, before.statistics_of(client))
        after = base.with_client(client, own)
        content = json.dumps(asked.described(update), indent=2).encode() + b"\n"
        write_change(
            before,
            after,
            event,
            client,
            own,
            record=_describe(update),
            extra={"federation.json": content},
        )
        old, new = asked.close(after.fitted.outcome)
        judged = before.method.predictor_on("local_test")
        return NetworkChange(
            client,
            event,
            after.pool.names,
            before=_accuracy(old, "global_classifier"),
            after=_accuracy(new, judged),
        )


def check_change(
    run: Path, client: str, *, leave: bool
) -> tuple[OneShotFederation, dict[str, Any]]:
    """Return the federation and its federation.json; refuse an impossible change at once."""
    try:
        check_name(client)
    except MessageError as error:
        raise InvalidInput(f"client is {client!r}; {error}.") from None
    federation = open_federation(run)
    known = RunDirectory(run).read_json("federation.json")
    if known is None:
        raise InvalidInput(f"RUN is {str(run)!r}; it must be a run over a network.")
    if leave:
        federation.check_leaving(client)
    if federation.keeps_clients or client not in federation.pool.names:
        return federation, known
    pooled = f"RUN is {str(run)!r}: only pooled statistics were kept (statistics.keep)"
    if not leave:
        raise InvalidInput(
            f"{pooled}, so {client} cannot replace its own; it must leave with the samples that "
            "it had, and join again with its new ones."
        )
    if client not in known.get("sums", {}):
        raise InvalidInput(
            f"{pooled}, and the part of {client} is not known, so it cannot be taken out."
        )
    return federation, known


def _describe(update: Update) -> dict[str, Any]:
    held = int((update.summed["counts"] > 0).sum())
    return {"train_images": update.num_samples, "classes_held": held, "over_network": True}


def _accuracy(found: RoundEvaluation | None, predictor: PredictorName) -> float | None:
    return None if found is None else found.table()["local_test"][predictor]
