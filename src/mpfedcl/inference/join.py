"""Joining a finished run: a new client takes its model and pool, and may add its own prototypes."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import digest
from mpfedcl.inference.exchange import is_exchange, refuse_budget
from mpfedcl.inference.exchange_join import leave_exchange, list_joined_exchange
from mpfedcl.inference.joined_clients import JoinedClients
from mpfedcl.inference.new_client import Accuracies, NewClient, TrainingOutcome
from mpfedcl.inference.trained_run import TrainedRun, load_trained_run, read_pool
from mpfedcl.prototypes import PrototypePool
from mpfedcl.runs.directory import RunDirectory


@dataclass(frozen=True)
class JoinResult:
    """What came of a client's joining."""

    client: str
    epochs: int
    lr: float
    train_images: int
    test_images: int
    classes_held: int
    before: Accuracies
    """With the run's model as it is."""
    after: Accuracies
    """With the client's own model; the same where it did not train."""
    outcome: TrainingOutcome
    was_added: bool
    noun: str = "image"
    """What a sample is."""
    notices: tuple[str, ...] = ()
    """What the client should know of its data, a sentence each."""

    def to_json(self) -> dict[str, Any]:
        """Return what is told of it, as plain values."""
        loss = self.outcome.update.loss
        return {
            "client": self.client,
            "epochs": self.epochs,
            "lr": self.lr,
            "train_images": self.train_images,
            "test_images": self.test_images,
            "classes_held": self.classes_held,
            "prototypes": len(self.outcome.prototypes),
            "loss": loss if self.epochs and math.isfinite(loss or 0) else None,
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
    on_progress: Callable[[str], None] = lambda _: None,
) -> JoinResult:
    """Train a new client of a finished run, and with `add` put its prototypes into the run's pool.

    Args:
        run: The run directory; a run of a method with prototypes and an global model.
        data: The client's images, a folder per class or an npz file, its vectors, an npz file, or
            its table, for a run on one.
        name: What the client is called; not a name that the run has already.
        epochs: Passes over the training images; with 0 the run's model stays as it is.
        lr: The learning rate; by default that of the run's first round.
        test_fraction: The share of the images to test on; by default the run's.
        weights: The encoder's file, where it is not found as it was for the run.
        add: Whether to add the prototypes to the pool; without it the run's files are only read.
        replace: Whether a client of that name may have joined before.
        on_progress: Told in words what is being done.

    Returns:
        The accuracy before and after training, and the client's model and prototypes. A client
        whose update the guard rejects is not added: `outcome.rejected` says why.

    Example:
        >>> import mpfedcl
        >>> images = Path(mpfedcl.__file__).parent / "data" / "mnist_sample.npz"
        >>> _ = mpfedcl.run(mpfedcl.Experiment(rounds=1, clients=2), out=folder / "run")
        >>> join(folder / "run", images, "clinic-7", epochs=0, add=True).was_added
        True
        >>> leave(folder / "run", "clinic-7").names
        ('client-0', 'client-1')
    """
    _check_arguments(epochs, lr, test_fraction)
    directory = RunDirectory(Path(run))
    if is_exchange(directory.path):
        raise InvalidInput(
            f"RUN is {str(run)!r}, a run of {directory.read_experiment().method}, whose sums are "
            "kept; it must be joined by mpfedcl.inference.exchange_join.join_exchange."
        )
    with RunDirectory.resume(directory.path, "RUN") if add else contextlib.nullcontext():
        opened, pool = _load_joinable_run(directory.path, weights)
        joined_clients = _open_joined_clients(directory, pool)
        joined_clients.check_new_name(name, replace=replace)
        pool = joined_clients.pool.without(name)
        noun = opened.input_format.noun
        on_progress(f"reading the {noun}s of {data}")
        new_client = NewClient(opened, Path(data), name, test_fraction=test_fraction)
        params = opened.parameters()
        on_progress(f"learning from {len(new_client.client.labels):,} {noun}s, {epochs} epochs")
        untrained = new_client.train(params, pool, epochs=0)
        trained = new_client.train(params, pool, epochs=epochs, lr=lr) if epochs else untrained
        joined = JoinResult(
            client=name,
            epochs=epochs,
            lr=lr or opened.experiment.train.lr,
            train_images=len(new_client.client.labels),
            test_images=len(new_client.data.test_labels),
            classes_held=len(set(new_client.client.labels.tolist())),
            before=new_client.evaluate(untrained.params, untrained.prototypes, pool),
            after=new_client.evaluate(trained.params, trained.prototypes, pool),
            outcome=trained,
            was_added=add and trained.rejected is None,
            noun=noun,
            notices=new_client.data.notices,
        )
        if add:
            _add(joined_clients, joined, opened)
        return joined


def leave(run: Path | str, name: str) -> PrototypePool:
    """Take a client out of a run; return the pool without it.

    Of a run of one exchange any client can leave, of others one that has joined since.
    """
    with RunDirectory.resume(Path(run), "RUN") as directory:
        if is_exchange(directory.path):
            return leave_exchange(directory.path, name)
        joined_clients = _open_joined_clients(directory)
        joined_clients.remove(name)
        return joined_clients.pool


def list_joined(run: Path | str) -> list[dict[str, Any]]:
    """Return the records of the clients that have joined a run, in order of name."""
    if is_exchange(Path(run)):
        return list_joined_exchange(Path(run))
    joined_clients = _open_joined_clients(RunDirectory(Path(run)))
    return [joined_clients.describe(name) for name in joined_clients.joined]


def warn_of_joined_clients(run: Path, warn: Callable[[str], None]) -> None:
    """Warn who drops out of a resumed run: prototypes belong to the model they were made with.

    Without anybody who has joined, nothing is said.
    """
    if not (run / "joined").is_dir():
        return
    if names := ", ".join(each["client"] for each in list_joined(run)):
        warn(
            f"The pool will be written again without the clients that have joined since ({names}); "
            "they can join again when the run has ended."
        )


def _add(joined_clients: JoinedClients, joined: JoinResult, trained: TrainedRun) -> None:
    record = {
        **joined.to_json(),
        "rounds": trained.experiment.rounds,
        "model": digest((trained.path / "model.safetensors").read_bytes()),
    }
    if joined.outcome.rejected is not None:
        joined_clients.note_rejection(joined.client, joined.outcome.rejected, record)
        return
    keeps = trained.experiment.personal_models
    model = joined.outcome.params if keeps else None
    joined_clients.add(joined.client, joined.outcome.prototypes, model, record)


def _load_joinable_run(path: Path, weights: Path | None) -> tuple[TrainedRun, PrototypePool]:
    """Open a run that can be joined; return it and its pool."""
    trained = load_trained_run(path, weights=weights)
    refuse_budget(trained.experiment, path)
    method = trained.experiment.method
    if trained.pool is None:
        raise InvalidInput(
            f"RUN is {str(path)!r}, a run of {method}, which shares no prototypes; a run that can "
            "be joined is of a method that does, such as mp-fedcl."
        )
    if not trained.has_global_model:
        raise InvalidInput(
            f"RUN is {str(path)!r}, a run of {method} whose clients keep their models; a run that "
            "can be joined has an global model, for a new client to begin with."
        )
    return trained, trained.pool


def _open_joined_clients(
    directory: RunDirectory, pool: PrototypePool | None = None
) -> JoinedClients:
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
    return JoinedClients(path, pool, clients)


def _check_arguments(epochs: int, lr: float | None, test_fraction: float | None) -> None:
    if epochs < 0:
        raise InvalidInput(f"epochs is {epochs}; it must be at least 0.")
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise InvalidInput(f"lr is {lr:g}; it must be greater than 0.")
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise InvalidInput(
            f"test_fraction is {test_fraction:g}; it must be greater than 0 and less than 1."
        )
