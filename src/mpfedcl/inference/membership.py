"""Joining and leaving a finished run.

A client that joins a run with a prototype pool starts from the global model and may add its
prototypes to the pool. A client that joins a one-shot run adds its sufficient statistics, and all
classifiers are computed again in closed form (`mpfedcl.inference.one_shot`). Each change is written
as a whole: a crash leaves all old files or all new ones.
"""

import contextlib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.core.json_files import Json
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.inference.new_client import Accuracies, ClientOutcome, NewClient
from mpfedcl.inference.one_shot import (
    OneShotFederation,
    check_client_name,
    is_one_shot,
    open_federation,
    reject_budget,
    reject_empty,
    take_out,
    write_change,
)
from mpfedcl.inference.trained_run import (
    LOG,
    MOST_NAMES_LISTED,
    TrainedRun,
    commit,
    load_trained_run,
    model_file,
    read_partition,
    read_pool,
)
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.metrics import percent_correct
from mpfedcl.runs.directory import RunDirectory, pack_pool


@dataclass(frozen=True)
class JoinResult:
    """The result of joining a run, or of a trial without `add`."""

    client: str
    event: str
    """joined or replaced."""
    train_images: int
    test_images: int
    classes_held: int
    prototypes: int
    before: Accuracies
    """With the run's model as it is."""
    after: Accuracies
    """With the client's model; in a one-shot run also with the new global classifier."""
    outcome: ClientOutcome
    noun: str
    """The word for a sample."""
    notices: tuple[str, ...]
    """Remarks on the client's data, one sentence each."""
    epochs: int | None = None
    """None for a one-shot run, which trains nothing."""
    lr: float | None = None
    was_added: bool = False

    @property
    def rejected(self) -> str | None:
        """Why the client was not added, or None."""
        return self.outcome.rejected

    def to_json(self) -> Json:
        """Return plain values."""
        names = ("client", "event", "train_images", "test_images", "classes_held", "prototypes")
        values: Json = {name: getattr(self, name) for name in names}
        values["accuracy"] = {"before": self.before, "after": self.after}
        if self.epochs is None:
            return values
        loss = self.outcome.update.loss
        finite = loss if self.epochs and math.isfinite(loss or 0) else None
        return {**values, "epochs": self.epochs, "lr": self.lr, "loss": finite}


Add = Callable[[Json], None]
"""Adds the client that has tried a run, with a record for the log."""


def join(
    run: Path | str,
    data: Path | str,
    name: str,
    *,
    epochs: int | None = None,
    lr: float | None = None,
    test_fraction: float | None = None,
    weights: Path | None = None,
    add: bool = False,
    replace: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> JoinResult:
    """Let a new client try a finished run, and with `add` join it.

    Args:
        run: The run directory: a one-shot run, or a run with a prototype pool and a global model.
        data: The client's samples: a folder per class or an npz file of images, an npz file of
            vectors, or a table, as the run takes.
        name: The client's name.
        epochs: Passes over the training samples [default: 1]; 0 keeps the run's model. Not for
            one-shot runs.
        lr: The learning rate [default: that of the run's first round]. Not for one-shot runs.
        test_fraction: The share of the samples to test on [default: the run's].
        weights: The encoder's file, if it has moved since the run.
        add: Write the change; without it the run's files are only read.
        replace: The samples replace those of a client of the same name that joined before.
        on_progress: Called with a phrase at each step.

    Returns:
        The accuracy before and after, and the client's model. A client whose update is rejected by
        update validation is not added: `rejected` gives the reason.

    Example:
        >>> import mpfedcl
        >>> images = Path(mpfedcl.__file__).parent / "data" / "mnist_sample.npz"
        >>> _ = mpfedcl.run(mpfedcl.Experiment(rounds=1, clients=2), out=folder / "run")
        >>> join(folder / "run", images, "clinic-7", epochs=0, add=True).was_added
        True
        >>> leave(folder / "run", "clinic-7").names
        ('client-0', 'client-1')
    """
    if epochs is not None and epochs < 0:
        raise InvalidInput(f"epochs is {epochs}; it must be at least 0.")
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise InvalidInput(f"lr is {lr:g}; it must be greater than 0.")
    path = Path(run)
    one_shot = is_one_shot(path)
    for field, value in (("epochs", epochs), ("lr", lr)):
        if one_shot and value is not None:
            raise InvalidInput(
                f"{field} is given; it must be left out, because a one-shot run trains nothing."
            )
    with RunDirectory.resume(path, "RUN") if add else contextlib.nullcontext():
        trained = load_trained_run(path, weights=weights)
        if add and trained.experiment.dataset.standardize == "client":
            raise InvalidInput(
                "add is given; it must be left out, because dataset.standardize is 'client' in "
                "this run, and it keeps no statistics of the columns of other clients."
            )
        noun = trained.input_format.noun
        members = open_federation(path) if one_shot else PoolMembers.of_run(trained)
        event = _choose_event(members, name, replace=replace)
        on_progress(f"reading the {noun}s of {data}")
        client = NewClient(trained, Path(data), name, test_fraction=test_fraction)
        on_progress(f"learning from {len(client.client.labels):,} {noun}s")
        if isinstance(members, PoolMembers):
            epochs, lr = 1 if epochs is None else epochs, lr or trained.experiment.train.lr
            result, write = _try_pool(trained, members, client, event, epochs, lr)
        else:
            result, write = _try_one_shot(trained, members, client, event)
        if add and result.rejected is None:
            write(result.to_json())
            return replaced(result, was_added=True)
        return result


def leave(run: Path | str, name: str) -> PrototypePool:
    """Take a client out of a finished run; return the pool without it.

    Any client can leave a one-shot run (exact unlearning), but only one that joined later can leave
    another run.
    """
    with RunDirectory.resume(Path(run), "RUN") as directory:
        path = directory.path
        if not is_one_shot(path):
            return PoolMembers.open(path).remove(name)
        federation = open_federation(path)
        federation.check_leaving(name)
        return take_out(federation, name, federation.statistics_of(name))


def warn_of_joined_clients(run: Path, warn: Callable[[str], None]) -> None:
    """Warn of joined clients, which a resumed run drops: their prototypes fit the old model."""
    if (run / LOG).is_file() and (joined := PoolMembers.open(run).joined):
        warn(
            "The pool will be written again without the clients that have joined since "
            f"({', '.join(joined)}); they can join again when the run has ended."
        )


def _choose_event(members: "PoolMembers | OneShotFederation", name: str, *, replace: bool) -> str:
    """Return joined or replaced; reject a name that is in use or not allowed."""
    check_client_name(name)
    if isinstance(members, PoolMembers) and name in members.original:
        raise InvalidInput(
            f"name is {name!r}, a client that the run was trained with; it must be another."
        )
    if name not in members.pool.names:
        return "joined"
    if not replace:
        raise InvalidInput(
            f"name is {name!r}, a client of the federation; give another one, or --replace to "
            "replace its samples."
        )
    return "replaced"


# Runs with a prototype pool


@dataclass(frozen=True)
class PoolMembers:
    """The clients of a run's prototype pool. The caller of `add` and `remove` holds the lock."""

    path: Path
    pool: PrototypePool
    original: Collection[str]
    """The clients that the run was trained with."""

    @classmethod
    def open(cls, path: Path) -> "PoolMembers":
        """Read a run's pool; neither its model nor its encoder is needed."""
        RunDirectory(path).settle()
        partition, file = read_partition(path), path / "pool.safetensors"
        if not file.is_file():
            raise InvalidInput(f"RUN is {str(path)!r}, which has no pool that clients could join.")
        return cls(path, read_pool(file, len(partition["classes"])), partition["clients"])

    @classmethod
    def of_run(cls, trained: TrainedRun) -> "PoolMembers":
        """Return the members of a run that new clients can join."""
        path, method = trained.path, trained.experiment.method
        reject_budget(trained.experiment, path)
        if trained.pool is None:
            raise InvalidInput(
                f"RUN is {str(path)!r}, a run of {method}, which shares no prototypes; a run that "
                "can be joined is of a method that does, such as mp-fedcl."
            )
        if not trained.has_global_model:
            raise InvalidInput(
                f"RUN is {str(path)!r}, a run of {method} whose clients keep their models; a run "
                "that can be joined has a global model for a new client to start from."
            )
        return cls(path, trained.pool, trained.partition["clients"])

    @property
    def joined(self) -> list[str]:
        """The clients that have joined the run since it was trained."""
        return [name for name in self.pool.names if name not in self.original]

    def add(self, name: str, prototypes: Prototypes, model: Tensors | None, record: Json) -> None:
        """Add a client's prototypes to the pool, or replace those that it has there."""
        if not len(prototypes):
            raise InvalidInput(
                f"{name} has no prototype to add: prototypes.min_cluster_size leaves none, so it "
                "must have more images."
            )
        after = self.pool.without(name).with_client(name, prototypes)
        files = {"pool.safetensors": pack_pool(after)}
        if model is not None:
            files[model_file(name)] = pack_tensors(model)
        commit(self.path, record, files, ())

    def remove(self, name: str) -> PrototypePool:
        """Remove a joined client's prototypes; return the pool without them."""
        if name in self.original:
            raise InvalidInput(
                f"leave is {name!r}, a client that the run was trained with; only a client that "
                "has joined can leave."
            )
        if name not in self.pool.names:
            allowed = f"it must be one of {enumerate_names(self.joined, MOST_NAMES_LISTED)}"
            raise InvalidInput(
                f"leave is {name!r}; {allowed if self.joined else 'no client has joined this run'}."
            )
        after, event = self.pool.without(name), {"event": "left", "client": name}
        commit(self.path, event, {"pool.safetensors": pack_pool(after)}, [model_file(name)])
        return after


def _describe(client: NewClient, event: str, **measured: Any) -> JoinResult:
    return JoinResult(
        client=client.name,
        event=event,
        train_images=len(client.client.labels),
        test_images=len(client.data.test_labels),
        noun=client.noun,
        notices=client.data.notices,
        **measured,
    )


def _try_pool(
    trained: TrainedRun, members: PoolMembers, client: NewClient, event: str, epochs: int, lr: float
) -> tuple[JoinResult, Add]:
    """Train a new client against the prototypes of the others."""
    pool, params = members.pool.without(client.name), trained.parameters()
    untrained = client.train(params, pool, epochs=0)
    outcome = client.train(params, pool, epochs=epochs, lr=lr) if epochs else untrained

    def add(record: Json) -> None:
        record["rounds"] = trained.experiment.rounds
        model = outcome.params if trained.experiment.personal_models else None
        members.add(client.name, outcome.prototypes, model, record)

    result = _describe(
        client,
        event,
        classes_held=len(set(client.client.labels.tolist())),
        prototypes=len(outcome.prototypes),
        before=client.evaluate(untrained.params, untrained.prototypes, pool),
        after=client.evaluate(outcome.params, outcome.prototypes, pool),
        outcome=outcome,
        epochs=epochs,
        lr=lr,
    )
    return result, add


# One-shot runs


def _try_one_shot(
    trained: TrainedRun, before: OneShotFederation, client: NewClient, event: str
) -> tuple[JoinResult, Add]:
    """Add a new client's statistics to a one-shot federation."""
    name, data, labels = client.name, client.data, client.client.labels
    update, rejected = client.collect()
    own = before.method.own_statistics(update.summed)
    reject_empty(name, own)
    counts = torch.bincount(labels, minlength=data.num_classes)
    accuracy = _evaluate(before, {"classifier": trained.parameters()}, counts, data)
    accuracy_after: Accuracies = {}
    after, personal = before, None
    if rejected is None:
        others = before.without(name, before.statistics_of(name)) if event == "replaced" else before
        after = others.with_client(name, own)
        personal = after.method.personalize(after.received, client.client.inputs, labels)
        models = {"classifier": after.server.params, "personal": personal}
        accuracy_after = _evaluate(after, models, counts, data)
    held = int((own["counts"] > 0).sum())

    def add(record: Json) -> None:
        write_change(before, after, event, name, own, personal=personal, record=record)

    result = _describe(
        client,
        event,
        classes_held=held,
        prototypes=held,
        before=accuracy,
        after=accuracy_after,
        outcome=ClientOutcome(personal or after.server.params, update, rejected),
    )
    return result, add


def _evaluate(
    federation: OneShotFederation,
    models: dict[str, Tensors | None],
    label_counts: Tensor,
    data: FederatedData,
) -> Accuracies:
    """Return the accuracy of each classifier, and with the client's label prior."""
    found: Accuracies = {}
    for name, params in models.items():
        for key, counts in ((name, None), (f"{name}_prior", label_counts)):
            test = (data.test_inputs, data.test_labels, counts)
            found[key] = None
            if params is not None and len(data.test_labels):
                found[key] = percent_correct(federation.predicts(params, *test))
    return found
