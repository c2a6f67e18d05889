"""Joining a finished run: a new client takes its model and pool, and may add its own prototypes."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpfedcl.deployment.membership import Membership
from mpfedcl.deployment.new_client import Learned, Newcomer, Row
from mpfedcl.deployment.trained_run import TrainedRun, load_trained, read_pool
from mpfedcl.errors import InvalidInput
from mpfedcl.prototypes import PrototypePool
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.tensors import digest


@dataclass(frozen=True)
class Joined:
    """What came of a client's joining."""

    client: str
    epochs: int
    lr: float
    train_images: int
    test_images: int
    classes_held: int
    before: Row
    """With the run's model as it is."""
    after: Row
    """With the client's own model; the same where it did not train."""
    learned: Learned
    was_added: bool

    def to_json(self) -> dict[str, Any]:
        """Return what is told of it, as plain values."""
        loss = self.learned.update.loss
        return {
            "client": self.client,
            "epochs": self.epochs,
            "lr": self.lr,
            "train_images": self.train_images,
            "test_images": self.test_images,
            "classes_held": self.classes_held,
            "prototypes": len(self.learned.prototypes),
            "loss": loss if self.epochs and math.isfinite(loss) else None,
            "accuracy": {"before": self.before, "after": self.after},
        }


def join(
    run: Path | str,
    data: Path | str,
    name: str,
    *,
    epochs: int = 1,
    lr: float | None = None,
    test_fraction: float | None = None,
    weights: Path | None = None,
    add: bool = False,
    replace: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Joined:
    """Let a new client learn from a finished run, and with `add` put its prototypes into the pool.

    Without `add` the run stays as it is. A client whose update the guard rejects is not added:
    `learned.rejected` says why. `tell` is told what is being done.
    """
    _check(epochs, lr, test_fraction)
    directory = RunDirectory(Path(run))
    with RunDirectory.resume(directory.path, "RUN") if add else contextlib.nullcontext():
        trained, pool = _load(directory.path, weights)
        members = _open_membership(directory, pool)
        members.check_newcomer(name, replace=replace)
        pool = members.pool.without(name)
        tell(f"reading the images of {data}")
        newcomer = Newcomer(trained, Path(data), name, test_fraction=test_fraction)
        params = trained.parameters()
        tell(f"learning from {len(newcomer.client.labels):,} images, {epochs} epochs")
        plain = newcomer.learn(params, pool, epochs=0)
        learned = newcomer.learn(params, pool, epochs=epochs, lr=lr) if epochs else plain
        before = newcomer.read(plain.params, plain.prototypes, pool)
        after = newcomer.read(learned.params, learned.prototypes, pool)
        joined = Joined(
            client=name,
            epochs=epochs,
            lr=lr or trained.experiment.train.lr,
            train_images=len(newcomer.client.labels),
            test_images=len(newcomer.data.test_labels),
            classes_held=newcomer.num_classes_held,
            before=before,
            after=after,
            learned=learned,
            was_added=add and learned.rejected is None,
        )
        if add:
            _add(members, joined, trained)
        return joined


def leave(run: Path | str, name: str) -> PrototypePool:
    """Take a joined client's prototypes out of a run's pool; return the pool without them."""
    with RunDirectory.resume(Path(run), "RUN") as directory:
        members = _open_membership(directory)
        members.remove(name)
        return members.pool


def list_joined(run: Path | str) -> list[dict[str, Any]]:
    """Return the records of the clients that have joined a run, in order of name."""
    members = _open_membership(RunDirectory(Path(run)))
    return [members.describe(name) for name in members.joined]


def warn_of_joined(run: Path, warn: Callable[[str], None]) -> None:
    """Say who drops out of a run that goes on: prototypes belong to the model they were made with.

    Without anybody who has joined, nothing is said.
    """
    if not (run / "joined").is_dir():
        return
    if names := ", ".join(each["client"] for each in list_joined(run)):
        warn(
            f"The pool will be written anew without those who have joined since ({names}); they "
            "can join again when the run has ended."
        )


def _add(members: Membership, joined: Joined, trained: TrainedRun) -> None:
    record = {
        **joined.to_json(),
        "rounds": trained.experiment.rounds,
        "model": digest((trained.path / "model.safetensors").read_bytes()),
    }
    if joined.learned.rejected is not None:
        members.note_rejection(joined.client, joined.learned.rejected, record)
        return
    keeps = trained.experiment.personal_models
    model = joined.learned.params if keeps else None
    members.add(joined.client, joined.learned.prototypes, model, record)


def _load(path: Path, weights: Path | None) -> tuple[TrainedRun, PrototypePool]:
    """Open a run that can be joined; return it and its pool."""
    trained = load_trained(path, weights=weights)
    method = trained.experiment.method
    if trained.pool is None:
        raise InvalidInput(
            f"RUN is {str(path)!r}, a run of {method}, which shares no prototypes; a run that can "
            "be joined is of a method that does, such as mp-fedcl."
        )
    if not trained.has_average:
        raise InvalidInput(
            f"RUN is {str(path)!r}, a run of {method} whose clients keep their models; a run that "
            "can be joined has an averaged model, for a new client to begin with."
        )
    return trained, trained.pool


def _open_membership(directory: RunDirectory, pool: PrototypePool | None = None) -> Membership:
    """Open a run's pool alone, if it is not given: who leaves needs neither model nor encoder."""
    path = directory.path
    if not directory.holds_run():
        raise InvalidInput(f"RUN is {str(path)!r}; it must be a folder that holds a run.")
    partition = directory.read_json("partition.json") or {}
    clients, classes = partition.get("clients"), partition.get("classes")
    if not isinstance(clients, dict) or not isinstance(classes, list) or not classes:
        raise InvalidInput(f"{path / 'partition.json'} must name the run's classes and clients.")
    if pool is None:
        file = path / "pool.safetensors"
        if not file.is_file():
            raise InvalidInput(f"RUN is {str(path)!r}, which has no pool; nobody has joined it.")
        pool = read_pool(file, len(classes))
    return Membership(path, pool, clients)


def _check(epochs: int, lr: float | None, test_fraction: float | None) -> None:
    if epochs < 0:
        raise InvalidInput(f"epochs is {epochs}; it must be at least 0.")
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise InvalidInput(f"lr is {lr:g}; it must be greater than 0.")
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise InvalidInput(
            f"test_fraction is {test_fraction:g}; it must be greater than 0 and less than 1."
        )
