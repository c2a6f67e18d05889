"""The federation of a finished one-shot run: sufficient statistics that clients join and leave.

A `OneShotFederation` is a value: `with_client` and `without` return another one, and `server` has
its classifier in closed form. Subtracting a client's statistics is exact unlearning: the classifier
is that of a run without the client. `write_change` replaces all files of the run at once; a crash
leaves all old files or all new ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.core.json_files import Json
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian import (
    ClientMeans,
    add_statistics,
    take_from_pool,
)
from mpfedcl.inference.calibration import CALIBRATION_FILE, METRIC_FILE
from mpfedcl.inference.trained_run import (
    MOST_NAMES_LISTED,
    commit,
    model_file,
    read_model,
    read_partition,
    read_pool,
)
from mpfedcl.methods import OneShot, Server, find_method, is_built_in, prototype_rule
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.models import GaussianClassifier
from mpfedcl.network.server.serve import SingleClient
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import Transport, shorten
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.scoring import log_prior
from mpfedcl.runs import file_schemas
from mpfedcl.runs.directory import RunDirectory, pack_pool
from mpfedcl.runs.file_schemas import POOLED, client_file, pack_statistics

_ROUNDING = 1e-3
"""Tolerance of sums that are computed again from class means in single precision."""


@dataclass(frozen=True)
class OneShotFederation:
    """The clients of a one-shot run and the sum of their statistics."""

    path: Path
    method: OneShot
    partition: Json
    """The content of partition.json."""
    class_names: tuple[str, ...]
    pool: PrototypePool
    """Each client's class means and counts."""
    pooled: Tensors
    """The statistics of all clients together."""

    @property
    def experiment(self) -> Experiment:
        """The experiment of the run."""
        return self.method.experiment

    @property
    def encoder(self) -> str | None:
        """The fingerprint of the encoder."""
        return self.partition.get("encoder")

    @property
    def keeps_clients(self) -> bool:
        """Whether the statistics of each client are kept."""
        return (self.path / file_schemas.STATISTICS).is_dir()

    def statistics_of(self, name: str) -> Tensors:
        """Return the statistics of one client; they must agree with its class means."""
        if not self.keeps_clients:
            raise InvalidInput(
                f"RUN is {str(self.path)!r}: only pooled statistics were kept (statistics.keep), "
                f"so {name} cannot be taken out of them."
            )
        file = self.path / client_file(name)
        if not file.is_file():
            raise InvalidInput(f"{file} is missing; without it {name} cannot be taken out.")
        names = [each for each in ("counts", "sums", "moment") if each in self.pooled]
        means = ClientMeans.of_pool(self.pool.only(name))
        return _read_statistics(file, names, means, self.encoder)

    def with_client(self, name: str, own: Tensors) -> "OneShotFederation":
        """Return the federation with one more client, whose statistics are `own`."""
        dtype = getattr(torch, self.experiment.dtype)
        # The class means as a run computes them from the statistics.
        sent = {each: own[each].to(dtype) for each in ("counts", "sums")}
        nothing = Prototypes.empty(self.pool.dimension, dtype)
        means = self.method.prototypes_of(Update(name, 0, {}, nothing, None, summed=sent))
        pooled = add_statistics(self.pooled, self.method.pool_of_one(own))
        return replace(self, pooled=pooled, pool=self.pool.with_client(name, means))

    def without(self, name: str, own: Tensors) -> "OneShotFederation":
        """Return the federation without a client, whose statistics are `own`."""
        pooled = take_from_pool(self.pooled, own, self.method.second_moment)
        return replace(self, pooled=pooled, pool=self.pool.without(name))

    @cached_property
    def server(self) -> Server:
        """The closed form: the global classifier, and other results such as the metric."""
        like = torch.zeros(0, dtype=getattr(torch, self.experiment.dtype))
        return self.method.refit(Server({"weight": like}), self.pooled, self.pool)

    @cached_property
    def outcome(self) -> Broadcast:
        """The message that is sent to clients."""
        reference = prototype_rule(self.method).reference(self.pool)
        return Broadcast(2, self.server.params, self.server.extra, reference)

    @cached_property
    def received(self) -> Any:
        """The message from which a client computes its personal classifier."""
        return self.method.prepare(self.outcome)

    @torch.no_grad()
    def scores(self, params: Tensors, inputs: Tensor) -> Tensor:
        """Return the scores [n, C] of a classifier for inputs."""
        return self.method.make_model(inputs.shape[-1]).apply(params, inputs)[1]

    def predicts(
        self, params: Tensors, inputs: Tensor, labels: Tensor, label_counts: Tensor | None = None
    ) -> Tensor:
        """Return which labels a classifier predicts, with the label prior of a client if given."""
        scores = self.scores(params, inputs)
        if label_counts is not None:
            scores = scores + log_prior(label_counts).to(scores)
        return scores.argmax(1) == labels

    def check_leaving(self, name: str) -> None:
        """Reject a client that is not in the federation, and the last client."""
        if name not in self.pool.names:
            allowed = enumerate_names(self.pool.names, MOST_NAMES_LISTED)
            raise InvalidInput(f"leave is {name!r}; it must be one of {allowed}.")
        if self.pool.num_clients == 1:
            raise InvalidInput(
                f"leave is {name!r}, the last client; a federation must have at least one."
            )


def is_one_shot(path: Path) -> bool:
    """Return whether a folder holds a run of a one-shot method with its statistics."""
    directory = RunDirectory(path)
    if not directory.holds_run():
        raise InvalidInput(f"RUN is {str(path)!r}; it must be a folder that holds a run.")
    if (path / POOLED).is_file():
        return True
    # Without the file only built-in methods are loaded: a plugin's class may not be importable.
    method = directory.read_experiment().method
    return is_built_in(method) and issubclass(find_method(method), OneShot)


def open_federation(path: Path) -> OneShotFederation:
    """Open the federation of a finished one-shot run; data and encoder are not needed."""
    experiment = RunDirectory(path).read_finished().replace(device="cpu")
    reject_budget(experiment, path)
    partition = read_partition(path)
    class_names = tuple(str(name) for name in partition["classes"])
    method = find_method(experiment.method)(experiment, len(class_names))
    if not isinstance(method, OneShot):
        raise InvalidInput(
            f"RUN is {str(path)!r}, a run of {experiment.method}, which keeps no sufficient "
            "statistics; it must be of a one-shot method, such as fedgauss."
        )
    if experiment.secure_aggregation:
        raise InvalidInput(
            f"RUN is {str(path)!r}; it must be a run without secure_aggregation: in this one only "
            "totals are known, so clients can be neither added nor taken out nor compared."
        )
    for name in (POOLED, "pool.safetensors"):
        if not (path / name).is_file():
            raise InvalidInput(
                f"RUN is {str(path)!r}, which has no {name}; it must be a run that has kept its "
                "statistics: run it again in a new folder."
            )
    pool = read_pool(path / "pool.safetensors", len(class_names), 1)
    names = ["counts", "sums", "groups", "squares", "counts_squared"]
    names += ["moment"] if method.second_moment else []
    names += ["within", "scatter"] if method.second_moment == "within" else []
    means = ClientMeans.of_pool(pool)
    pooled = _read_statistics(path / POOLED, names, means, partition.get("encoder"))
    return OneShotFederation(path, method, partition, class_names, pool, pooled)


def _read_statistics(
    file: Path, names: Sequence[str], means: ClientMeans, encoder: str | None
) -> Tensors:
    """Read the statistics of the clients with these class means.

    The file of another state of the run is rejected: it could not be subtracted exactly later.
    """
    size, dimension = means.num_classes, means.vectors.shape[1]
    found = file_schemas.read_statistics(
        file, names=names, num_classes=size, dimension=dimension, encoder=encoder
    )
    expected = means.by_class(means.counts.unsqueeze(1) * means.vectors)
    slack = _ROUNDING * max(1.0, float(means.counts.sum()))
    if not (
        torch.equal(found["counts"], means.class_counts)
        and torch.allclose(found["sums"], expected, rtol=_ROUNDING, atol=slack)
    ):
        raise InvalidInput(
            f"{file} has counts or sums that no samples with the means of pool.safetensors have; "
            "it must be the file that the run wrote."
        )
    return found


def reject_budget(experiment: Experiment, path: Path) -> None:
    """Reject adding clients to a run with a privacy budget, or taking them out."""
    if experiment.privacy.has_budget:
        raise InvalidInput(
            f"RUN is {str(path)!r}, which has spent its privacy budget; clients can only join and "
            "leave runs without one, because another release costs as much again: start a new run."
        )


def reject_empty(name: str, own: Tensors) -> None:
    """Reject statistics without any class."""
    if not bool(own["counts"].any()):
        raise InvalidInput(
            f"{name} has no class to add: prototypes.min_cluster_size leaves none, so it must have "
            "more samples."
        )


def check_client_name(name: str) -> None:
    """Reject a name that cannot be a client's: names become file names and are sent as text."""
    is_plain = name.isprintable() and 0 < len(name.encode()) <= 200
    if not is_plain or name.startswith(".") or {"/", "\\"} & set(name):
        raise InvalidInput(
            f"the name is {shorten(name)}; it must be printable text of at most 200 bytes without "
            "slashes that does not begin with a dot."
        )


# Changes: the caller holds the run's lock


def take_out(before: OneShotFederation, name: str, own: Tensors) -> PrototypePool:
    """Subtract a client's statistics; return the class means of the others."""
    after = before.without(name, own)
    if bool((after.pooled["counts"] < 0).any()):
        raise InvalidInput(
            f"the statistics of {name} are not part of those of {before.path}; nothing was changed."
        )
    write_change(before, after, "left", name, own)
    return after.pool


def write_change(
    before: OneShotFederation,
    after: OneShotFederation,
    event: str,
    client: str,
    own: Tensors,
    *,
    personal: Tensors | None = None,
    record: Mapping[str, Any] = MappingProxyType({}),
    extra: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a federation that one client has joined, changed or left.

    Args:
        before, after: The federation that the files hold, and the new one.
        event: joined, replaced or left.
        client: The client's name.
        own: All of its statistics; those that are subtracted if it leaves.
        personal: Its personal classifier, if it is known here.
        record: More fields of the event in the log.
        extra: Other files of the run that change at the same moment.
    """
    path, leaves = before.path, event == "left"
    counts = [int(count) for count in own["counts"]]
    files = {
        POOLED: pack_statistics(after.pooled, before.encoder),
        "pool.safetensors": pack_pool(after.pool),
        "model.safetensors": pack_tensors(after.server.params),
        **extra,
    }
    # A run over a network has no such file: thresholds need samples, which stay with the clients.
    found = {**after.server.extra, **after.server.private}
    if (path / METRIC_FILE).is_file() and {"covariance", "fit"} <= found.keys():
        files[METRIC_FILE] = pack_tensors({name: found[name] for name in ("covariance", "fit")})
    if before.keeps_clients and not leaves:
        files[client_file(client)] = pack_statistics(own, before.encoder)
    if before.experiment.personal_models:
        models = dict(_refit_personal_models(before, after, client))
        models |= {} if personal is None else {client: personal}
        files |= {model_file(name): pack_tensors(model) for name, model in models.items()}
    removed = ["contribution.json"]
    partition = before.partition
    if client in partition["clients"] and "input_means" in partition:
        # They were measured on samples that have changed or left.
        partition = {**partition, "input_means": _without(partition["input_means"], client)}
    clients = partition["clients"]
    if leaves:
        removed += [client_file(client), model_file(client)]
        # Checkpoints hold the client's class means, and no round is left to resume.
        removed += [f"checkpoint/{file.name}" for file in (path / "checkpoint").glob("*")]
        calibration = RunDirectory(path).read_json(CALIBRATION_FILE) or {}
        if client in calibration.get("clients", {}):
            calibration["clients"] = _without(calibration["clients"], client)
            files[CALIBRATION_FILE] = _to_json(calibration)
        partition = {**partition, "clients": _without(clients, client)}
    elif client in clients:
        changed = {**clients[client], "train": counts}
        partition = {**partition, "clients": {**clients, client: changed}}
    if partition != before.partition:
        files["partition.json"] = _to_json(partition)
    commit(path, {"event": event, "client": client, **record, "counts": counts}, files, removed)


def _refit_personal_models(
    before: OneShotFederation, after: OneShotFederation, client: str
) -> Iterator[tuple[str, Tensors]]:
    """Yield the personal classifiers of the other clients, which change with the federation.

    A classifier is computed from the client's statistics, with its earlier sharpness. Without them,
    or if the client has samples that it never sent (`min_cluster_size`), it stays.
    """
    if not before.keeps_clients or before.experiment.prototypes.min_cluster_size > 1:
        return
    size, num_classes = before.pool.dimension, len(before.class_names)
    form = GaussianClassifier(size, num_classes, lambda features: features)
    for name in after.pool.names:
        if name != client and (file := before.path / model_file(name)).is_file():
            own, method = before.statistics_of(name), after.method
            chosen = method.sharpness_of(before.received, own, read_model(file, form))
            if (personal := method.personalize_from(after.received, own, chosen)) is not None:
                yield name, personal


def _to_json(content: Json) -> bytes:
    return json.dumps(content, indent=2, allow_nan=False).encode() + b"\n"


def _without(values: Json, name: str) -> Json:
    return {key: value for key, value in values.items() if key != name}


# Over the network: one client at a time sends its statistics, as in the run, and receives its
# classifier. The other clients need not be connected.


def update_over_network(
    transport: Transport, run: Path, client: str, *, status: Path | None = None
) -> Json:
    """Let one client join a finished one-shot run, or replace its statistics there.

    Args:
        transport: Reaches the client; `network.patience` limits the wait for it.
        run: The directory of a run over a network.
        client: The client's name. The statistics of a client of the federation are replaced.
        status: A file to which progress is written.

    Returns:
        `client`; `event` (joined, replaced or rejected) and the `reason` of a rejection;
        `clients` of the federation now; accuracy in % on the client's local test set, `before` by
        the global classifier as it was and `after` by the client's personal classifier.
    """
    found: Json = {"client": client, "reason": "", "before": None, "after": None}
    with RunDirectory.resume(run, "RUN"):
        federation, known = check_change(run, client)
        asked = SingleClient(transport, federation.experiment, known, client, Status(status))
        update, rejected = asked.ask(federation.outcome)
        if rejected is not None:
            clients = list(federation.pool.names)
            return {**found, "event": "rejected", "clients": clients, "reason": rejected}
        own = federation.method.own_statistics(update.summed)
        reject_empty(client, own)
        event, base = "joined", federation
        if client in federation.pool.names:
            event = "replaced"
            base = federation.without(client, federation.statistics_of(client))
        after = base.with_client(client, own)
        held = int((update.summed["counts"] > 0).sum())
        record = {"train_images": update.num_samples, "classes_held": held, "over_network": True}
        extra = {"federation.json": _to_json(asked.described())}
        write_change(federation, after, event, client, own, record=record, extra=extra)
        old, new = asked.close(after.outcome)
        if old is not None:
            found["before"] = old.table()["local_test"]["global_classifier"]
        if new is not None:
            predictor = federation.method.predictor_on("local_test")
            found["after"] = new.table()["local_test"][predictor]
        return {**found, "event": event, "clients": list(after.pool.names)}


def check_change(run: Path, client: str) -> tuple[OneShotFederation, Json]:
    """Return the federation and its federation.json; reject an impossible change at once."""
    check_client_name(client)
    federation = open_federation(run)
    known = RunDirectory(run).read_json("federation.json")
    if known is None:
        raise InvalidInput(f"RUN is {str(run)!r}; it must be a run over a network.")
    if client in federation.pool.names:
        # They are subtracted when the client's new ones are added.
        federation.statistics_of(client)
    return federation, known
