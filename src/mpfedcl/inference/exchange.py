"""A federation of one exchange as its run directory has it: sums that clients join and leave.

An `Exchange` is a value: `with_client` and `without` return another one, `fit` its classifier in
closed form. Only `mpfedcl.inference.exchange_changes` writes one down.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian import (
    ClientMeans,
    add_statistics,
    find_impossible_statistics,
    take_from_pool,
    widen_classes,
)
from mpfedcl.inference.prediction_rule import counts_of
from mpfedcl.inference.trained_run import read_pool
from mpfedcl.methods import OneShot, Server, find_method, is_built_in
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.runs import statistics_files
from mpfedcl.runs.directory import RunDirectory

_MOST_NAMES_LISTED = 12


class Fitted(NamedTuple):
    """What a federation's sums give."""

    params: Tensors
    """The classifier of all clients together."""
    received: Any
    """What a client makes its own classifier with."""
    found: Tensors
    """What was found beside: the metric, where there is one."""
    outcome: Broadcast
    """What clients are sent of it."""


@dataclass(frozen=True)
class Exchange:
    """Who is in a federation, and the sums of all of them."""

    path: Path
    method: OneShot
    partition: dict[str, Any]
    """As partition.json has it."""
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
        """What tells the encoder from others."""
        return self.partition.get("encoder")

    @property
    def keeps_clients(self) -> bool:
        """Whether each client's own sums are kept."""
        return (self.path / statistics_files.FOLDER).is_dir()

    def own_of(self, name: str) -> Tensors:
        """Return a client's own statistics."""
        if not self.keeps_clients:
            raise InvalidInput(
                f"RUN is {str(self.path)!r}: only pooled sums were kept (statistics.keep), so "
                f"{name} cannot be taken out of them."
            )
        file = self.path / statistics_files.client_file(name)
        if not file.is_file():
            raise InvalidInput(f"{file} is missing; it must be there for {name} to be taken out.")
        own = statistics_files.read_statistics(
            file,
            names=[each for each in ("counts", "sums", "moment") if each in self.pooled],
            num_classes=len(self.partition["classes"]),
            dimension=self.pool.dimension,
            encoder=self.encoder,
        )
        if not torch.equal(own["counts"], self._counts_of(name)):
            raise InvalidInput(
                f"{file} has other counts than pool.safetensors; it must be the file of {name} in "
                "this federation."
            )
        groups = ClientMeans.of_pool(self.pool)
        mine = groups.owners == self.pool.names.index(name)
        own_groups = groups._replace(
            vectors=groups.vectors[mine],
            labels=groups.labels[mine],
            counts=groups.counts[mine],
            owners=groups.owners[mine],
        )
        _refuse_impossible(file, own, own_groups)
        return widen_classes(own, self.pool.num_classes)

    def told_by_pool(self, name: str) -> Tensors:
        """Return a client's counts and sums as its class means tell them, without a moment."""
        rows = self.pool.of(name)
        sums = torch.zeros_like(self.pooled["sums"])
        sums[rows.labels] = rows.vectors.double() * rows.counts.unsqueeze(1)
        own = {"counts": self._counts_of(name, self.pool.num_classes), "sums": sums}
        if "moment" in self.pooled:
            own["moment"] = torch.zeros_like(self.pooled["moment"])
        return own

    def with_client(self, name: str, own: Tensors) -> "Exchange":
        """Return the federation with one more client."""
        pooled = add_statistics(self.pooled, self.method.pool_of_one(own))
        pool = self.pool.with_client(name, self._class_means(name, own))
        return replace(self, pooled=pooled, pool=pool)

    def without(self, name: str, own: Tensors) -> "Exchange":
        """Return the federation without a client that has these statistics in it."""
        pooled = take_from_pool(self.pooled, own, self.method.second_moment)
        return replace(self, pooled=pooled, pool=self.pool.without(name))

    def with_classes(self, class_names: Sequence[str]) -> "Exchange":
        """Return the federation with more classes after those it knows."""
        size = len(class_names)
        if size == self.pool.num_classes:
            return self
        return replace(
            self,
            method=type(self.method)(self.experiment, size),
            pool=replace(self.pool, num_classes=size),
            pooled=widen_classes(self.pooled, size),
        )

    def fit(self) -> Fitted:
        """Return the classifier in closed form."""
        like = torch.zeros(0, dtype=getattr(torch, self.experiment.dtype))
        server = self.method.refit(Server({"weight": like}), self.pooled, self.pool)
        following = Broadcast(2, server.params, server.extra, self.method.reference(self.pool))
        found = {**server.extra, **server.private}
        return Fitted(server.params, self.method.prepare(following), found, following)

    @torch.no_grad()
    def scores(self, params: Tensors, inputs: Tensor) -> Tensor:
        """Return the classes' scores [n, C] of inputs."""
        return self.method.make_model(self.pool.dimension).apply(params, inputs)[1]

    def _class_means(self, name: str, own: Tensors) -> Prototypes:
        """Return a client's class means as a run makes them of what it sends."""
        dtype = getattr(torch, self.experiment.dtype)
        sent = {each: own[each].to(dtype) for each in ("counts", "sums")}
        nothing = Prototypes.empty(self.pool.dimension, dtype)
        return self.method.prototypes_of(Update(name, 0, {}, nothing, None, summed=sent))

    def _counts_of(self, name: str, size: int | None = None) -> Tensor:
        rows = self.pool.of(name)
        counts = torch.zeros(size or len(self.partition["classes"]), dtype=torch.float64)
        counts[rows.labels] = rows.counts.double()
        return counts


def is_exchange(path: Path) -> bool:
    """Tell whether a folder holds a run of a one-shot method, whose sums are kept."""
    directory = RunDirectory(path)
    if not directory.holds_run():
        raise InvalidInput(f"RUN is {str(path)!r}; it must be a folder that holds a run.")
    if (path / statistics_files.POOLED).is_file():
        return True
    # Without its file only a method of ours is looked at: that of a stranger need not be here.
    method = directory.read_experiment().method
    return is_built_in(method) and issubclass(find_method(method), OneShot)


def open_exchange(path: Path) -> Exchange:
    """Open the federation of a finished run; neither its data nor its encoder need be here."""
    directory = RunDirectory(path)
    experiment = directory.read_finished().replace(device="cpu")
    refuse_budget(experiment, path)
    partition = directory.read_json("partition.json") or {}
    classes = partition.get("classes")
    if not isinstance(classes, list) or not isinstance(partition.get("clients"), dict):
        raise InvalidInput(f"{path / 'partition.json'} must name the run's classes and clients.")
    for name in partition["clients"]:
        counts_of(partition, name, len(classes))
    method = find_method(experiment.method)(experiment, len(classes))
    if not isinstance(method, OneShot):
        raise InvalidInput(
            f"RUN is {str(path)!r}, a run of {experiment.method}, which keeps no sums; it must be "
            "of a one-shot method, such as fedgauss."
        )
    if experiment.secure_aggregation:
        raise InvalidInput(
            f"RUN is {str(path)!r}; it must be a run without secure_aggregation: in this one only totals "
            "are known, so that no client can be added, taken out or compared."
        )
    for name in (statistics_files.POOLED, "pool.safetensors"):
        if not (path / name).is_file():
            raise InvalidInput(
                f"RUN is {str(path)!r}, which has no {name}; it must be a run that has kept its "
                "sums: run it again in a new folder."
            )
    pool = read_pool(path / "pool.safetensors", len(classes), 1)
    names = ["counts", "sums", "groups", "squares", "counts_squared"]
    names += ["moment"] if method.second_moment else []
    names += ["within", "scatter"] if method.second_moment == "within" else []
    pooled = statistics_files.read_statistics(
        path / statistics_files.POOLED,
        names=names,
        num_classes=len(classes),
        dimension=pool.dimension,
        encoder=partition.get("encoder"),
    )
    if not torch.equal(pooled["counts"], ClientMeans.of_pool(pool).class_counts):
        raise InvalidInput(
            f"{path / statistics_files.POOLED} has other counts than pool.safetensors; both must "
            "be of one federation."
        )
    _refuse_impossible(path / statistics_files.POOLED, pooled, ClientMeans.of_pool(pool))
    return Exchange(path, method, partition, pool, pooled)


def refuse_budget(experiment: Experiment, path: Path) -> None:
    """Refuse to take clients into a run with a privacy budget, or out of it."""
    if experiment.privacy.has_budget:
        raise InvalidInput(
            f"RUN is {str(path)!r}, which has a privacy budget, and that is spent; clients can "
            "only join and leave runs without one: another release costs as much again, in a new "
            "run."
        )


def _refuse_impossible(file: Path, statistics: Tensors, groups: ClientMeans) -> None:
    """Refuse a file that was changed since: what is wrong in it could not be taken out again."""
    wrong = find_impossible_statistics(statistics, groups, len(statistics["counts"]))
    if wrong is not None:
        raise InvalidInput(
            f"{file} has {wrong} that no samples with the means of pool.safetensors have; it must "
            "be the file that was written."
        )


def name_clients(exchange: Exchange) -> str:
    """Return the clients' names, or some of them, as a sentence lists them."""
    names = exchange.pool.names
    more = len(names) - _MOST_NAMES_LISTED
    shown = ", ".join(names[:_MOST_NAMES_LISTED])
    return f"{shown} and {more} more" if more > 0 else shown
