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
from torch.nn.functional import pad

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.core.json_files import Json
from mpfedcl.core.tensors import Tensors, load_tensors, pack_tensors
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian import (
    ABSENT,
    ClientMeans,
    add_statistics,
    find_impossible_statistics,
    take_from_pool,
    widen_classes,
)
from mpfedcl.inference.calibration import CALIBRATION_FILE, METRIC_FILE
from mpfedcl.inference.trained_run import (
    MOST_NAMES_LISTED,
    commit,
    log_rejected,
    make_event,
    read_events,
    read_partition,
    read_pool,
)
from mpfedcl.methods import OneShot, Server, find_method, is_built_in, prototype_rule
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.network.packing import check_name
from mpfedcl.network.server.engine import digest_sums
from mpfedcl.network.server.serve import SingleClient
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import MessageError, Transport
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.scoring import log_prior
from mpfedcl.runs import file_schemas
from mpfedcl.runs.directory import RunDirectory, pack_pool
from mpfedcl.runs.file_schemas import POOLED, client_file, pack_statistics


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
        return _read_statistics(file, names, self._means_of(name), self.encoder)

    def statistics_to_extend(self, name: str) -> Tensors:
        """Return a client's statistics, as far as adding samples to them needs them.

        The class means give counts and sums. Second moments only add up and need not be known;
        the scatter around the client's own class means must be.
        """
        if self.keeps_clients or self.method.second_moment == "within":
            return self.statistics_of(name)
        means = self._means_of(name)
        sums = means.by_class(means.counts.unsqueeze(1) * means.vectors)
        own = {"counts": means.class_counts, "sums": sums}
        if "moment" in self.pooled:
            own["moment"] = torch.zeros_like(self.pooled["moment"])
        return own

    def _means_of(self, name: str) -> ClientMeans:
        return ClientMeans.of_pool(self.pool.only(name))

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

    def with_classes(self, class_names: Sequence[str]) -> "OneShotFederation":
        """Return the federation with new classes after the known ones."""
        size = len(class_names)
        if size == self.pool.num_classes:
            return self
        return replace(
            self,
            method=type(self.method)(self.experiment, size),
            class_names=tuple(class_names),
            pool=replace(self.pool, num_classes=size),
            pooled=widen_classes(self.pooled, size),
        )

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
        return self.method.make_model(self.pool.dimension).apply(params, inputs)[1]

    def predicts(
        self, params: Tensors, inputs: Tensor, labels: Tensor, label_counts: Tensor | None = None
    ) -> Tensor:
        """Return which labels a classifier predicts, with the label prior of a client if given."""
        scores = self.scores(params, inputs)
        if label_counts is not None:
            scores = scores + log_prior(label_counts[: scores.shape[1]]).to(scores)
        return scores.argmax(1) == labels

    def check_leaving(self, name: str) -> None:
        """Reject a client that is not in the federation, and the last client."""
        if name not in self.pool.names:
            events = [each for each in read_events(self.path) if each.get("client") == name]
            reason = f"; it must be one of {enumerate_names(self.pool.names, MOST_NAMES_LISTED)}"
            if events and events[-1].get("event") == "left":
                reason = ", which has left already"
            raise InvalidInput(f"leave is {name!r}{reason}.")
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

    A modified file is rejected: a wrong value could not be subtracted exactly later.
    """
    size, dimension = means.num_classes, means.vectors.shape[1]
    found = file_schemas.read_statistics(
        file, names=names, num_classes=size, dimension=dimension, encoder=encoder
    )
    wrong: str | None = "counts"
    if torch.equal(found["counts"], means.class_counts):
        wrong = find_impossible_statistics(found, means, size)
    if wrong is not None:
        raise InvalidInput(
            f"{file} has {wrong} that no samples with the means of pool.safetensors have; it must "
            "be the file that the run wrote."
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
    try:
        check_name(name)
    except MessageError as error:
        raise InvalidInput(f"{error}.") from None


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
        event: joined, replaced, extended or left.
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
        statistics = {client: own}
        if len(after.class_names) > len(before.class_names):
            others = (name for name in before.pool.names if name != client)
            statistics |= {name: _widened_statistics(before, after, name) for name in others}
        for name, each in statistics.items():
            files[client_file(name)] = pack_statistics(each, before.encoder)
    if before.experiment.personal_models:
        models = dict(_refit_personal_models(before, after, client))
        models |= {} if personal is None else {client: personal}
        files |= {_model_file(name): pack_tensors(model) for name, model in models.items()}
    removed = ["contribution.json", "contribution.png"]
    if leaves:
        removed += [client_file(client), _model_file(client)]
        # Checkpoints hold the client's class means, and no round is left to resume.
        removed += [f"checkpoint/{file.name}" for file in (path / "checkpoint").glob("*")]
        for name, part in ((CALIBRATION_FILE, "clients"), ("federation.json", "sums")):
            content = RunDirectory(path).read_json(name) or {}
            if isinstance(content.get(part), dict) and client in content[part]:
                files[name] = _to_json({**content, part: _without(content[part], client)})
    partition = _change_partition(before.partition, after, client, None if leaves else counts)
    if partition != before.partition:
        files["partition.json"] = _to_json(partition)
    commit(path, {**make_event(event, client), **record, "counts": counts}, files, removed)


def _refit_personal_models(
    before: OneShotFederation, after: OneShotFederation, client: str
) -> Iterator[tuple[str, Tensors]]:
    """Yield the personal classifiers of the other clients that change.

    A classifier is computed from the client's statistics. Without them, or if the client has
    samples that it never sent (`min_cluster_size`), it stays and never predicts a new class.
    """
    sends_all = before.experiment.prototypes.min_cluster_size == 1
    missing = len(after.class_names) - len(before.class_names)
    for name in after.pool.names:
        file, personal = before.path / _model_file(name), None
        if name == client or not file.is_file():
            continue
        if before.keeps_clients and sends_all:
            own = _widened_statistics(before, after, name)
            personal = after.method.personalize_from(after.received, own)
        if personal is None and missing:
            kept = load_tensors(file)
            personal = {
                "weight": pad(kept["weight"], (0, 0, 0, 0, 0, missing)),
                "bias": pad(kept["bias"], (0, 0, 0, missing), value=ABSENT),
            }
        if personal is not None:
            yield name, personal


def _widened_statistics(before: OneShotFederation, after: OneShotFederation, name: str) -> Tensors:
    """Return the statistics of a client that stays, with zeros for new classes."""
    return widen_classes(before.statistics_of(name), len(after.class_names))


def _change_partition(
    partition: Json, after: OneShotFederation, client: str, counts: list[int] | None
) -> Json:
    """Return partition.json with new classes and a client's new counts (None: it has left)."""
    partition, clients = {**partition, "classes": list(after.class_names)}, {}
    for name, each in partition["clients"].items():
        train = counts if name == client else each["train"]
        if train is not None:
            missing = [0] * (len(after.class_names) - len(train))
            clients[name] = {**each, "train": [*train, *missing]}
    if client in partition["clients"] and "input_means" in partition:
        # They were measured on samples that have changed or left.
        partition["input_means"] = _without(partition["input_means"], client)
    return {**partition, "clients": clients}


def _to_json(content: Json) -> bytes:
    return json.dumps(content, indent=2, allow_nan=False).encode() + b"\n"


def _without(values: Json, name: str) -> Json:
    return {key: value for key, value in values.items() if key != name}


def _model_file(name: str) -> str:
    return f"models/{name}.safetensors"


# Over the network: one client at a time sends its statistics, as in the run, and receives its
# classifier. The other clients need not be connected.


def update_over_network(
    transport: Transport,
    run: Path,
    client: str,
    *,
    leave: bool = False,
    status: Path | None = None,
) -> Json:
    """Let one client join a finished one-shot run, replace its statistics there, or leave it.

    Args:
        transport: Reaches the client; `network.patience` limits the wait for it.
        run: The directory of a run over a network.
        client: The client's name. The statistics of a client of the federation are replaced.
        leave: Take the client out. It need not be connected if the statistics of each client are
            kept; otherwise it must send exactly the statistics that are in the total.
        status: A file to which progress is written.

    Returns:
        `client`; `event` (joined, replaced, left or rejected) and the `reason` of a rejection;
        `clients` of the federation now; accuracy in % on the client's local test set, `before` by
        the global classifier as it was and `after` by the client's personal classifier.
    """
    found: Json = {"client": client, "reason": "", "before": None, "after": None}
    with RunDirectory.resume(run, "RUN"):
        federation, known = check_change(run, client, leave=leave)
        if leave and federation.keeps_clients:
            pool = take_out(federation, client, federation.statistics_of(client))
            return {**found, "event": "left", "clients": list(pool.names)}
        # Classes may have been added since the run.
        experiment = federation.experiment.replace(dataset__classes=federation.class_names)
        asked = SingleClient(transport, experiment, known, client, Status(status))
        update, rejected = asked.ask(federation.outcome)
        if leave and rejected is None and digest_sums(update.summed) != known["sums"][client]:
            rejected = "its statistics are not those that it sent: its samples have changed since"
        if rejected is not None:
            log_rejected(run, client, rejected)
            clients = list(federation.pool.names)
            return {**found, "event": "rejected", "clients": clients, "reason": rejected}
        own = federation.method.own_statistics(update.summed)
        if leave:
            pool = take_out(federation, client, own)
            return {**found, "event": "left", "clients": list(pool.names)}
        reject_empty(client, own)
        event, base = "joined", federation
        if client in federation.pool.names:
            event = "replaced"
            base = federation.without(client, federation.statistics_of(client))
        after = base.with_client(client, own)
        held = int((update.summed["counts"] > 0).sum())
        record = {"train_images": update.num_samples, "classes_held": held, "over_network": True}
        extra = {"federation.json": _to_json(asked.described(update))}
        write_change(federation, after, event, client, own, record=record, extra=extra)
        old, new = asked.close(after.outcome)
        if old is not None:
            found["before"] = old.table()["local_test"]["global_classifier"]
        if new is not None:
            predictor = federation.method.predictor_on("local_test")
            found["after"] = new.table()["local_test"][predictor]
        return {**found, "event": event, "clients": list(after.pool.names)}


def check_change(run: Path, client: str, *, leave: bool) -> tuple[OneShotFederation, Json]:
    """Return the federation and its federation.json; reject an impossible change at once."""
    check_client_name(client)
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
