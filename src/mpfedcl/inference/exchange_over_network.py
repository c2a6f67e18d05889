"""A finished federation of one exchange goes on: one client at a time, over the network.

The client sends its sums, as in the run, and gets its classifier in return. Nobody else need be
connected.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.inference.exchange import Exchange, open_exchange
from mpfedcl.inference.exchange_changes import write_joined, write_left
from mpfedcl.inference.exchange_join import check_leaving, leave_exchange
from mpfedcl.inference.ledger import make_event, write_events
from mpfedcl.methods.messages import Update
from mpfedcl.network.message import MessageError
from mpfedcl.network.packing import check_name
from mpfedcl.network.server.engine import digest_sums
from mpfedcl.network.server.single_client import SingleClient
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import Transport
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.runs.directory import RunDirectory


@dataclass(frozen=True)
class NetworkChange:
    """What came of a client's joining, updating or leaving over the network."""

    client: str
    event: str
    """joined, replaced, left or rejected."""
    clients: tuple[str, ...]
    """Who is in the federation now."""
    reason: str = ""
    """Why its sums were rejected."""
    before: float | None = None
    """Accuracy on the client's local test set, in %, by the federation's classifier as it was."""
    after: float | None = None
    """The same by its own classifier once it is in."""


def update_over_network(
    transport: Transport,
    run: Path,
    client: str,
    *,
    leave: bool = False,
    status: Path | None = None,
) -> NetworkChange:
    """Let one client join or leave a finished run of one exchange, or begin anew in it.

    Args:
        transport: How the client is reached; it is waited for as long as `network.patience` says.
        run: The run directory, of a run over a network.
        client: Its name. One that is in the federation sends sums that stand for all it had.
        leave: Take it out. Where each client's sums are kept it need not be there; else it must
            send the very sums that are in the total.
        status: A file that says what is being done.
    """
    with RunDirectory.resume(run, "RUN"):
        before, known = check_change(run, client, leave=leave)
        if leave and before.keeps_clients:
            return NetworkChange(client, "left", leave_exchange(run, client).names)
        told = SingleClient(transport, _experiment_of(before), known, client, Status(status))
        update, rejected = told.ask(before.fit().outcome)
        if leave and rejected is None and digest_sums(update.summed) != known["sums"][client]:
            rejected = "its sums are not those that it sent: its samples have changed since"
        if rejected is not None:
            write_events(run, {**make_event("rejected", client), "reason": rejected})
            return NetworkChange(client, "rejected", before.pool.names, rejected)
        if leave:
            return _leave(before, client, update)
        event = "replaced" if client in before.pool.names else "joined"
        return _join(before, told, update, event)


def check_change(run: Path, client: str, *, leave: bool) -> tuple[Exchange, dict[str, Any]]:
    """Return the federation and its federation.json; refuse what cannot be, asking nobody."""
    try:
        check_name(client)
    except MessageError as error:
        raise InvalidInput(f"client is {client!r}; {error}.") from None
    exchange = open_exchange(run)
    known = RunDirectory(run).read_json("federation.json")
    if known is None:
        raise InvalidInput(f"RUN is {str(run)!r}; it must be a run over a network.")
    if leave:
        check_leaving(exchange, client)
    if exchange.keeps_clients or client not in exchange.pool.names:
        return exchange, known
    pooled = f"RUN is {str(run)!r}: only pooled sums were kept (statistics.keep)"
    if not leave:
        raise InvalidInput(
            f"{pooled}, so {client} cannot replace its own; it must leave with the samples that "
            "it had, and join again with its new ones."
        )
    if client not in known.get("sums", {}):
        raise InvalidInput(
            f"{pooled}, and it is not known which of them came from {client}, so it cannot be "
            "taken out."
        )
    return exchange, known


def change_exchange(
    transport: Transport,
    run: Path,
    client: str,
    *,
    leave: bool = False,
    status: Path | None = None,
) -> dict[str, Any]:
    """Do what `update_over_network` does; return what is told of it, as plain values."""
    return asdict(update_over_network(transport, run, client, leave=leave, status=status))


def _experiment_of(exchange: Exchange) -> Experiment:
    """Return the run's experiment with the classes of now: some may have come since."""
    return exchange.experiment.replace(dataset__classes=exchange.class_names)


def _join(before: Exchange, told: SingleClient, update: Update, event: str) -> NetworkChange:
    name = told.name
    own = before.method.own_statistics(update.summed)
    if not bool(own["counts"].any()):
        raise InvalidInput(
            f"{name} has no class to add: prototypes.min_cluster_size leaves none, so it must have "
            "more samples."
        )
    base = before if event == "joined" else before.without(name, before.own_of(name))
    after = base.with_client(name, own)
    fitted = after.fit()
    write_joined(
        before,
        after,
        fitted,
        client=name,
        own=own,
        personal=None,
        class_names=before.class_names,
        event=event,
        record=_describe(update),
        beside={"federation.json": json.dumps(told.described(update), indent=2).encode() + b"\n"},
    )
    old, new = told.close(fitted.outcome)
    return NetworkChange(
        name,
        event,
        after.pool.names,
        before=_accuracy(before, old, "global_classifier"),
        after=_accuracy(before, new, None),
    )


def _leave(before: Exchange, client: str, update: Update) -> NetworkChange:
    own = before.method.own_statistics(update.summed)
    after = before.without(client, own)
    write_left(before, after, after.fit(), client=client, own=own)
    return NetworkChange(client, "left", after.pool.names)


def _describe(update: Update) -> dict[str, Any]:
    held = int((update.summed["counts"] > 0).sum())
    return {"train_images": update.num_samples, "classes_held": held, "over_network": True}


def _accuracy(
    exchange: Exchange, predictors: RoundEvaluation | None, predictor: Any
) -> float | None:
    if predictors is None:
        return None
    table = predictors.table()["local_test"]
    return table[predictor or exchange.method.predictor_on("local_test")]
