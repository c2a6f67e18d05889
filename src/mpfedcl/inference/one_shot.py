"""The federation of a finished one-shot run: sufficient statistics that clients join and leave.

A `OneShotFederation` is a value: `with_client` and `without` return another one, and `fitted` is
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors, digest, load_tensors, pack_tensors
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
from mpfedcl.inference.join_log import LOG, extend_log, make_event, read_events
from mpfedcl.inference.trained_run import read_partition, read_pool
from mpfedcl.methods import OneShot, Server, find_method, is_built_in, prototype_rule
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.runs import statistics_files
from mpfedcl.runs.change import change_files
from mpfedcl.runs.directory import RunDirectory, pack_pool
from mpfedcl.runs.statistics_files import POOLED, client_file, pack_statistics

Json = dict[str, Any]

_MOST_NAMES_LISTED = 12


class Fitted(NamedTuple):
    """The closed form of a federation's statistics."""

    params: Tensors
    """The global classifier."""
    received: Any
    """The message from which a client computes its personal classifier."""
    found: Tensors
    """Other results, such as the metric."""
    outcome: Broadcast
    """The message that clients are sent."""


@dataclass(frozen=True)
class OneShotFederation:
    """The clients of a one-shot run and the sum of their statistics."""

    path: Path
    method: OneShot
    partition: Json
    """The content of partition.json."""
    pool: PrototypePool
    """Each client's class means and counts."""
    pooled: Tensors
    """The statistics of all clients together."""

    @property
    def experiment(self) -> Experiment:
        """The experiment of the run."""
        return self.method.experiment

    @property
    def class_names(self) -> list[str]:
        """The classes, in order."""
        return [str(name) for name in self.partition["classes"]]

    @property
    def encoder(self) -> str | None:
        """The fingerprint of the encoder."""
        return self.partition.get("encoder")

    @property
    def keeps_clients(self) -> bool:
        """Whether the statistics of each client are kept."""
        return (self.path / statistics_files.FOLDER).is_dir()

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
        own = statistics_files.read_statistics(
            file,
            names=[each for each in ("counts", "sums", "moment") if each in self.pooled],
            num_classes=len(self.partition["classes"]),
            dimension=self.pool.dimension,
            encoder=self.encoder,
        )
        if not torch.equal(own["counts"], self._counts_of(name, len(self.class_names))):
            raise InvalidInput(
                f"{file} has other counts than pool.safetensors; it must be the file of {name} in "
                "this federation."
            )
        alone = {name: self.pool.of(name)}
        pool = PrototypePool.gather(alone, num_classes=self.pool.num_classes, num_prototypes=1)
        _refuse_impossible(file, own, ClientMeans.of_pool(pool))
        return widen_classes(own, self.pool.num_classes)

    def statistics_from_pool(self, name: str) -> Tensors:
        """Return a client's counts and sums as its class means give them; its moment is zero."""
        rows = self.pool.of(name)
        sums = torch.zeros_like(self.pooled["sums"])
        sums[rows.labels] = rows.vectors.double() * rows.counts.unsqueeze(1)
        own = {"counts": self._counts_of(name, self.pool.num_classes), "sums": sums}
        if "moment" in self.pooled:
            own["moment"] = torch.zeros_like(self.pooled["moment"])
        return own

    def with_client(self, name: str, own: Tensors) -> "OneShotFederation":
        """Return the federation with one more client."""
        pooled = add_statistics(self.pooled, self.method.pool_of_one(own))
        pool = self.pool.with_client(name, self._class_means(name, own))
        return replace(self, pooled=pooled, pool=pool)

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
            pool=replace(self.pool, num_classes=size),
            pooled=widen_classes(self.pooled, size),
        )

    @cached_property
    def fitted(self) -> Fitted:
        """The classifier in closed form."""
        like = torch.zeros(0, dtype=getattr(torch, self.experiment.dtype))
        server = self.method.refit(Server({"weight": like}), self.pooled, self.pool)
        following = Broadcast(
            2, server.params, server.extra, prototype_rule(self.method).reference(self.pool)
        )
        found = {**server.extra, **server.private}
        return Fitted(server.params, self.method.prepare(following), found, following)

    @torch.no_grad()
    def scores(self, params: Tensors, inputs: Tensor) -> Tensor:
        """Return the scores [n, C] of a classifier for inputs."""
        return self.method.make_model(self.pool.dimension).apply(params, inputs)[1]

    def name_clients(self) -> str:
        """Return the clients' names for a message; a long list is cut."""
        more = len(self.pool.names) - _MOST_NAMES_LISTED
        shown = ", ".join(self.pool.names[:_MOST_NAMES_LISTED])
        return f"{shown} and {more} more" if more > 0 else shown

    def check_leaving(self, name: str) -> None:
        """Refuse a client that is not in the federation, and the last client."""
        if name not in self.pool.names:
            events = [each for each in read_events(self.path) if each.get("client") == name]
            if events and events[-1].get("event") == "left":
                raise InvalidInput(f"leave is {name!r}, which has left already.")
            raise InvalidInput(f"leave is {name!r}; it must be one of {self.name_clients()}.")
        if self.pool.num_clients == 1:
            raise InvalidInput(
                f"leave is {name!r}, the last client; a federation must have at least one."
            )

    def _class_means(self, name: str, own: Tensors) -> Prototypes:
        """Return a client's class means as a run computes them from its statistics."""
        dtype = getattr(torch, self.experiment.dtype)
        sent = {each: own[each].to(dtype) for each in ("counts", "sums")}
        nothing = Prototypes.empty(self.pool.dimension, dtype)
        return self.method.prototypes_of(Update(name, 0, {}, nothing, None, summed=sent))

    def _counts_of(self, name: str, size: int) -> Tensor:
        rows = self.pool.of(name)
        counts = torch.zeros(size, dtype=torch.float64)
        counts[rows.labels] = rows.counts.double()
        return counts


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
    refuse_budget(experiment, path)
    partition = read_partition(path)
    classes = partition["classes"]
    method = find_method(experiment.method)(experiment, len(classes))
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
    pool = read_pool(path / "pool.safetensors", len(classes), 1)
    names = ["counts", "sums", "groups", "squares", "counts_squared"]
    names += ["moment"] if method.second_moment else []
    names += ["within", "scatter"] if method.second_moment == "within" else []
    pooled = statistics_files.read_statistics(
        path / POOLED,
        names=names,
        num_classes=len(classes),
        dimension=pool.dimension,
        encoder=partition.get("encoder"),
    )
    if not torch.equal(pooled["counts"], ClientMeans.of_pool(pool).class_counts):
        raise InvalidInput(
            f"{path / POOLED} has other counts than pool.safetensors; both must be of one "
            "federation."
        )
    _refuse_impossible(path / POOLED, pooled, ClientMeans.of_pool(pool))
    return OneShotFederation(path, method, partition, pool, pooled)


def refuse_budget(experiment: Experiment, path: Path) -> None:
    """Refuse to add clients to a run with a privacy budget, or to take them out."""
    if experiment.privacy.has_budget:
        raise InvalidInput(
            f"RUN is {str(path)!r}, which has spent its privacy budget; clients can only join and "
            "leave runs without one, because another release costs as much again: start a new run."
        )


def _refuse_impossible(file: Path, statistics: Tensors, groups: ClientMeans) -> None:
    """Refuse a file that was modified: a wrong value could not be subtracted exactly later."""
    wrong = find_impossible_statistics(statistics, groups, len(statistics["counts"]))
    if wrong is not None:
        raise InvalidInput(
            f"{file} has {wrong} that no samples with the means of pool.safetensors have; it must "
            "be the file that the run wrote."
        )


def take_out(path: Path, name: str) -> PrototypePool:
    """Subtract a client's statistics; return the class means of the others.

    The caller holds the run's lock.
    """
    before = open_federation(path)
    before.check_leaving(name)
    own = before.statistics_of(name)
    after = before.without(name, own)
    if bool((after.pooled["counts"] < 0).any()):
        raise InvalidInput(
            f"the statistics of {name} are not part of those of {path}; nothing was changed."
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
    class_names: Sequence[str] | None = None,
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
        class_names: All classes, if new ones have come.
        record: More fields of the event in the log.
        extra: Other files of the run that change at the same moment.
    """
    path, leaves = before.path, event == "left"
    counts = [int(count) for count in own["counts"]]
    files = {
        POOLED: pack_statistics(after.pooled, before.encoder),
        "pool.safetensors": pack_pool(after.pool),
        "model.safetensors": pack_tensors(after.fitted.params),
        **extra,
    }
    # A run over a network has no such file: thresholds need samples, which stay with the clients.
    found = after.fitted.found
    if (path / METRIC_FILE).is_file() and {"covariance", "fit"} <= found.keys():
        files[METRIC_FILE] = pack_tensors({name: found[name] for name in ("covariance", "fit")})
    if before.keeps_clients and not leaves:
        statistics = {client: own}
        if after.pool.num_classes > before.pool.num_classes:
            others = (name for name in before.pool.names if name != client)
            statistics |= {name: after.statistics_of(name) for name in others}
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
    partition = _change_partition(before, client, None if leaves else counts, class_names)
    if partition != before.partition:
        files["partition.json"] = _to_json(partition)
    line = {**make_event(event, client), **record, "counts": counts}
    for name in ("model", "statistics", "pool"):
        file = f"{name}.safetensors"
        line[f"{name}_before"] = digest((path / file).read_bytes())
        line[f"{name}_after"] = digest(files[file])
    files[LOG] = extend_log(path, line)
    change_files(path, files, removed)


def _refit_personal_models(
    before: OneShotFederation, after: OneShotFederation, client: str
) -> Iterator[tuple[str, Tensors]]:
    """Yield the personal classifiers of the other clients that change.

    A classifier is computed from the client's statistics. Without them, or if the client has
    samples that it never sent (`min_cluster_size`), it stays and never predicts a new class.
    """
    sends_all = before.experiment.prototypes.min_cluster_size == 1
    for name in after.pool.names:
        file = before.path / _model_file(name)
        if name == client or not file.is_file():
            continue
        if before.keeps_clients and sends_all:
            own = after.statistics_of(name)
            personal = after.method.personalize_from(after.fitted.received, own)
            if personal is not None:
                yield name, personal
                continue
        if after.pool.num_classes > before.pool.num_classes:
            yield name, _widen_model(load_tensors(file), after.pool.num_classes)


def _widen_model(params: Tensors, num_classes: int) -> Tensors:
    """Return a classifier with more classes, which it never predicts."""
    weight, bias = params["weight"], params["bias"]
    missing = num_classes - len(bias)
    none = bias.new_full((missing, *bias.shape[1:]), ABSENT)
    return {
        "weight": torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]),
        "bias": torch.cat([bias, none]),
    }


def _change_partition(
    before: OneShotFederation,
    client: str,
    counts: list[int] | None,
    class_names: Sequence[str] | None,
) -> Json:
    """Return partition.json with new classes and a client's new counts (None: it has left)."""
    partition = dict(before.partition)
    classes = list(class_names or partition["classes"])
    missing = [0] * (len(classes) - len(partition["classes"]))
    clients = {
        name: {**each, "train": [*each["train"], *missing]}
        for name, each in partition["clients"].items()
    }
    if client in clients:
        if "input_means" in partition:
            # They were measured on samples that have changed or left.
            partition["input_means"] = _without(partition["input_means"], client)
        if counts is None:
            del clients[client]
        else:
            clients[client]["train"] = counts
    return {**partition, "classes": classes, "clients": clients}


def _to_json(content: Json) -> bytes:
    return json.dumps(content, indent=2, allow_nan=False).encode() + b"\n"


def _without(values: Json, name: str) -> Json:
    return {key: value for key, value in values.items() if key != name}


def _model_file(name: str) -> str:
    return f"models/{name}.safetensors"
