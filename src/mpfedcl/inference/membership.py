"""Joining and leaving a finished run.

A client that joins a run with a prototype pool starts from the global model and may add its
prototypes to the pool. A client that joins a one-shot run adds its sufficient statistics, and all
classifiers are computed again in closed form (`mpfedcl.inference.one_shot`). Each change is written
as a whole: a crash leaves all old files or all new ones.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors, digest, pack_tensors
from mpfedcl.gaussian import add_statistics
from mpfedcl.inference.join_log import (
    CHANGES,
    LOG,
    Json,
    extend_log,
    make_event,
    read_events,
    write_events,
)
from mpfedcl.inference.new_client import Accuracies, ClientOutcome, NewClient
from mpfedcl.inference.one_shot import (
    OneShotFederation,
    is_one_shot,
    open_federation,
    refuse_budget,
    take_out,
    write_change,
)
from mpfedcl.inference.trained_run import (
    JOINED,
    TrainedRun,
    load_trained_run,
    read_partition,
    read_pool,
)
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.metrics import percent_correct
from mpfedcl.rounds.predictions import log_prior
from mpfedcl.runs.change import change_files
from mpfedcl.runs.directory import RunDirectory, pack_pool

_LONGEST_NAME = 200


@dataclass(frozen=True)
class JoinResult:
    """The result of joining a run, or of a trial without `add`."""

    client: str
    event: str
    """joined, replaced or extended."""
    train_images: int
    test_images: int
    classes_held: int
    prototypes: int
    before: Accuracies
    """With the run's model as it is."""
    after: Accuracies
    """With the client's model; in a one-shot run also with the new global classifier."""
    outcome: ClientOutcome
    was_added: bool
    noun: str = "image"
    """The word for a sample."""
    notices: tuple[str, ...] = ()
    """Remarks on the client's data, one sentence each."""
    epochs: int | None = None
    """None for a one-shot run, which trains nothing."""
    lr: float | None = None
    new_classes: tuple[str, ...] = ()
    """Classes that the run did not know."""

    @property
    def rejected(self) -> str | None:
        """Why the client was not added, or None."""
        return self.outcome.rejected

    def to_json(self) -> Json:
        """Return plain values."""
        told: Json = {
            "client": self.client,
            "event": self.event,
            "train_images": self.train_images,
            "test_images": self.test_images,
            "classes_held": self.classes_held,
            "prototypes": self.prototypes,
            "accuracy": {"before": self.before, "after": self.after},
        }
        if self.epochs is None:
            return {**told, "new_classes": list(self.new_classes)}
        loss = self.outcome.update.loss
        finite = loss if self.epochs and math.isfinite(loss or 0) else None
        return {**told, "epochs": self.epochs, "lr": self.lr, "loss": finite}


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
    more: bool = False,
    new_classes: bool = False,
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
        more: One-shot runs: the samples are added to those of a client of the run.
        new_classes: One-shot runs: accept classes that the run does not know.
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
    _check_arguments(epochs, lr, test_fraction)
    path = Path(run)
    one_shot = is_one_shot(path)
    given = {"epochs": epochs is not None, "lr": lr is not None}
    if not one_shot:
        given = {"more": more, "new_classes": new_classes}
    for field in (field for field, is_given in given.items() if is_given):
        reason = "a one-shot run trains nothing" if one_shot else "only one-shot runs take it"
        raise InvalidInput(f"{field} is given; it must be left out, because {reason}.")
    with RunDirectory.resume(path, "RUN") if add else contextlib.nullcontext():
        trained = load_trained_run(path, weights=weights)
        noun = trained.input_format.noun

        def open_client() -> NewClient:
            on_progress(f"reading the {noun}s of {data}")
            found = NewClient(
                trained, Path(data), name, test_fraction=test_fraction, new_classes=new_classes
            )
            on_progress(f"learning from {len(found.client.labels):,} {noun}s")
            return found

        if one_shot:
            return _join_one_shot(trained, open_client, name, add, replace=replace, more=more)
        epochs = 1 if epochs is None else epochs
        return _join_pool(trained, open_client, name, add, replace, epochs, lr)


def leave(run: Path | str, name: str) -> PrototypePool:
    """Take a client out of a finished run; return the pool without it.

    Any client can leave a one-shot run (exact unlearning), but only one that joined later can leave
    another run.
    """
    with RunDirectory.resume(Path(run), "RUN") as directory:
        path = directory.path
        if is_one_shot(path):
            return take_out(path, name)
        members = PoolMembers.open(path)
        members.remove(name)
        return members.pool


def list_joined(run: Path | str) -> list[Json]:
    """Return the last log event of each client that joined a run, in the order of names."""
    path = Path(run)
    if is_one_shot(path):
        federation = open_federation(path)
        pool, original = federation.pool, federation.partition["clients"]
    else:
        members = PoolMembers.open(path)
        pool, original = members.pool, members.original
    last = {str(e.get("client")): e for e in read_events(path) if e.get("event") in CHANGES}
    found = [{"client": n, **last.get(n, {})} for n in pool.names if n not in original]
    if is_one_shot(path):
        # With `more` the event counts only the latest samples.
        found = [{**e, "train_images": int(pool.of(e["client"]).counts.sum())} for e in found]
    return found


def warn_of_joined_clients(run: Path, warn: Callable[[str], None]) -> None:
    """Warn of joined clients, which a resumed run drops: their prototypes fit the old model."""
    if not (run / LOG).is_file():
        return
    if names := ", ".join(each["client"] for each in list_joined(run)):
        warn(
            f"The pool will be written again without the clients that have joined since ({names}); "
            "they can join again when the run has ended."
        )


def _check_arguments(epochs: int | None, lr: float | None, test_fraction: float | None) -> None:
    if epochs is not None and epochs < 0:
        raise InvalidInput(f"epochs is {epochs}; it must be at least 0.")
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise InvalidInput(f"lr is {lr:g}; it must be greater than 0.")
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise InvalidInput(
            f"test_fraction is {test_fraction:g}; it must be greater than 0 and less than 1."
        )


def _check_name(name: str) -> None:
    """Refuse a name that cannot be a client's: names become file names and are sent as text."""
    plain = name.isprintable() and "/" not in name and not name.startswith(".")
    if not name or not plain or len(name.encode()) > _LONGEST_NAME:
        raise InvalidInput(
            f"name is {name!r}; it must be printable text of at most {_LONGEST_NAME} bytes "
            "without a slash, and must not begin with a dot."
        )


# Runs with a prototype pool


class PoolMembers:
    """The clients of a run's prototype pool. The caller of `add` and `remove` holds the lock."""

    def __init__(self, path: Path, pool: PrototypePool, original: Json) -> None:
        self.path = path
        self.pool = pool
        self.original = original
        """The clients that the run was trained with, by name."""

    @classmethod
    def open(cls, path: Path) -> "PoolMembers":
        """Read a run's pool; neither its model nor its encoder is needed."""
        RunDirectory(path).settle()
        partition, file = read_partition(path), path / "pool.safetensors"
        if not file.is_file():
            raise InvalidInput(f"RUN is {str(path)!r}, which has no pool that clients could join.")
        return cls(path, read_pool(file, len(partition["classes"])), partition["clients"])

    @property
    def joined(self) -> list[str]:
        """The clients that have joined since the run, in the order of names."""
        return [name for name in self.pool.names if name not in self.original]

    def check_new(self, name: str, *, replace: bool) -> None:
        """Refuse a name that is in use or not allowed."""
        _check_name(name)
        if name in self.original:
            raise InvalidInput(
                f"name is {name!r}, a client that the run was trained with; it must be another."
            )
        if name in self.joined and not replace:
            raise InvalidInput(
                f"name is {name!r}, which has joined already; give another one, or --replace to "
                f"compute its prototypes again, or --leave {name}."
            )

    def add(self, name: str, prototypes: Prototypes, model: Tensors | None, record: Json) -> None:
        """Add a client's prototypes to the pool, or replace those that it has there."""
        if not len(prototypes):
            raise InvalidInput(
                f"{name} has no prototype to add: prototypes.min_cluster_size leaves none, so it "
                "must have more images."
            )
        event = make_event("replaced" if name in self.joined else "joined", name)
        models = {} if model is None else {f"{JOINED}/{name}.safetensors": pack_tensors(model)}
        self._write(self.pool.without(name).with_client(name, prototypes), record | event, models)

    def remove(self, name: str) -> None:
        """Remove a joined client's prototypes from the pool."""
        if name in self.original:
            raise InvalidInput(
                f"leave is {name!r}, a client that the run was trained with; only a client that "
                "has joined can leave."
            )
        if name not in self.joined:
            known = ", ".join(self.joined)
            raise InvalidInput(
                f"leave is {name!r}; "
                + (f"it must be one of {known}." if known else "no client has joined this run.")
            )
        self._write(self.pool.without(name), make_event("left", name), {})

    def _write(self, after: PrototypePool, event: Json, models: dict[str, bytes]) -> None:
        content = pack_pool(after)
        event |= {"pool_before": digest(pack_pool(self.pool)), "pool_after": digest(content)}
        log = extend_log(self.path, *self._dropped_events(), event)
        kept = {name for name in after.names if name not in self.original}
        stale = [
            f"{JOINED}/{file.name}"
            for file in (self.path / JOINED).glob("*.safetensors")
            if file.stem not in kept and not file.name.startswith(".")
        ]
        change_files(self.path, {"pool.safetensors": content, LOG: log, **models}, stale)
        self.pool = after
        # The folder stays if it is missing or holds other files.
        with contextlib.suppress(OSError):
            (self.path / JOINED).rmdir()

    def _dropped_events(self) -> list[Json]:
        """Return events for joined clients that a resumed run has dropped from its pool."""
        logged: dict[str, None] = {}
        for event in read_events(self.path):
            if event.get("event") in ("joined", "replaced"):
                logged[str(event.get("client"))] = None
            elif event.get("event") in ("left", "dropped"):
                logged.pop(str(event.get("client")), None)
        reason = "its prototypes are no longer in the pool"
        gone = [name for name in logged if name not in self.pool.names]
        return [{**make_event("dropped", name), "reason": reason} for name in gone]


def _join_pool(
    trained: TrainedRun,
    open_client: Callable[[], NewClient],
    name: str,
    add: bool,
    replace: bool,
    epochs: int,
    lr: float | None,
) -> JoinResult:
    """Train a new client, and with `add` put its prototypes into the run's pool."""
    path, method = trained.path, trained.experiment.method
    refuse_budget(trained.experiment, path)
    if trained.pool is None:
        raise InvalidInput(
            f"RUN is {str(path)!r}, a run of {method}, which shares no prototypes; a run that can "
            "be joined is of a method that does, such as mp-fedcl."
        )
    if not trained.has_global_model:
        raise InvalidInput(
            f"RUN is {str(path)!r}, a run of {method} whose clients keep their models; a run that "
            "can be joined has a global model for a new client to start from."
        )
    members = PoolMembers(path, trained.pool, trained.partition["clients"])
    members.check_new(name, replace=replace)
    pool, params = members.pool.without(name), trained.parameters()
    client = open_client()
    untrained = client.train(params, pool, epochs=0)
    outcome = client.train(params, pool, epochs=epochs, lr=lr) if epochs else untrained
    result = JoinResult(
        client=name,
        event="replaced" if name in members.joined else "joined",
        train_images=len(client.client.labels),
        test_images=len(client.data.test_labels),
        classes_held=len(set(client.client.labels.tolist())),
        prototypes=len(outcome.prototypes),
        before=client.evaluate(untrained.params, untrained.prototypes, pool),
        after=client.evaluate(outcome.params, outcome.prototypes, pool),
        outcome=outcome,
        was_added=add and outcome.rejected is None,
        noun=trained.input_format.noun,
        notices=client.data.notices,
        epochs=epochs,
        lr=lr or trained.experiment.train.lr,
    )
    if add:
        record = {
            **result.to_json(),
            "rounds": trained.experiment.rounds,
            "model": digest((path / "model.safetensors").read_bytes()),
        }
        if outcome.rejected is None:
            model = outcome.params if trained.experiment.personal_models else None
            members.add(name, outcome.prototypes, model, record)
        else:
            event = make_event("rejected", name)
            write_events(path, {**record, **event, "reason": outcome.rejected})
    return result


# One-shot runs


def _join_one_shot(
    trained: TrainedRun,
    open_client: Callable[[], NewClient],
    name: str,
    add: bool,
    *,
    replace: bool,
    more: bool,
) -> JoinResult:
    """Add a new client's statistics to a one-shot federation; write it with `add`."""
    before = open_federation(trained.path)
    event = _choose_event(before, name, replace=replace, more=more)
    client = open_client()
    update, rejected = client.collect()
    own = before.method.own_statistics(update.summed)
    refuse_empty(name, own)
    data, labels = client.data, client.client.labels
    class_names = list(data.class_names)
    counts = torch.bincount(labels, minlength=len(class_names))
    test = (data.test_inputs, data.test_labels)
    known = trained.parameters()
    accuracy_before = _measure(before, {"classifier": known}, counts, *test)
    accuracy_after: Accuracies = {}
    after, personal = before, None
    if rejected is None:
        base = before.with_classes(class_names)
        if event != "joined":
            old = _old_statistics(base, name, event)
            base = base.without(name, old)
            own = add_statistics(old, own) if event == "extended" else own
        after = base.with_client(name, own)
        received = after.fitted.received
        if event == "extended":
            # Only the statistics of its earlier samples are known here.
            personal, counts = after.method.personalize_from(received, own), own["counts"]
        else:
            personal = after.method.personalize(received, client.client.inputs, labels)
        models = {"classifier": after.fitted.params, "personal": personal}
        accuracy_after = _measure(after, models, counts, *test)
    held = int((own["counts"] > 0).sum())
    result = JoinResult(
        client=name,
        event=event,
        train_images=len(labels),
        test_images=len(data.test_labels),
        classes_held=held,
        prototypes=held,
        before=accuracy_before,
        after=accuracy_after,
        outcome=ClientOutcome(personal or after.fitted.params, update, rejected),
        was_added=add and rejected is None,
        noun=trained.input_format.noun,
        notices=data.notices,
        new_classes=tuple(class_names[len(before.class_names) :]),
    )
    if result.was_added:
        write_change(
            before,
            after,
            event,
            name,
            own,
            personal=personal,
            class_names=class_names,
            record=result.to_json(),
        )
    elif add:
        write_events(
            trained.path, {**result.to_json(), **make_event("rejected", name), "reason": rejected}
        )
    return result


def refuse_empty(name: str, own: Tensors) -> None:
    """Refuse statistics without any class."""
    if not bool(own["counts"].any()):
        raise InvalidInput(
            f"{name} has no class to add: prototypes.min_cluster_size leaves none, so it must have "
            "more samples."
        )


def _measure(
    federation: OneShotFederation,
    models: dict[str, Tensors | None],
    label_counts: Tensor,
    inputs: Tensor,
    truth: Tensor,
) -> Accuracies:
    """Return the accuracy of each classifier, and with the client's label prior."""
    found: Accuracies = {}
    for name, params in models.items():
        found |= {name: None, f"{name}_prior": None}
        if params is not None and len(truth):
            scores = federation.scores(params, inputs)
            prior = log_prior(label_counts[: scores.shape[1]]).to(scores)
            found[name] = percent_correct(scores.argmax(1) == truth)
            found[f"{name}_prior"] = percent_correct((scores + prior).argmax(1) == truth)
    return found


def _choose_event(federation: OneShotFederation, name: str, *, replace: bool, more: bool) -> str:
    _check_name(name)
    is_in = name in federation.pool.names
    if replace and more:
        raise InvalidInput("more and replace are given; only one of them must be.")
    if not is_in and more:
        raise InvalidInput(
            f"name is {name!r}; with --more it must be one of {federation.name_clients()}."
        )
    if is_in and not (replace or more):
        raise InvalidInput(
            f"name is {name!r}, a client of the federation; give another one, or --more to add "
            "these samples to what it has, or --replace to replace them."
        )
    return "joined" if not is_in else "extended" if more else "replaced"


def _old_statistics(federation: OneShotFederation, name: str, event: str) -> Tensors:
    """Return a client's part of the pooled statistics, as far as the event needs it.

    The pool gives counts and class means. If samples are added, second moments only add up and need
    not be known; the scatter around the client's own class means must be.
    """
    knows_enough = federation.method.second_moment != "within" and event == "extended"
    if knows_enough and not federation.keeps_clients:
        return federation.statistics_from_pool(name)
    return federation.statistics_of(name)
