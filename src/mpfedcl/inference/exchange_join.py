"""Joining and leaving a federation of one exchange: sums are added, or subtracted, on any day."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import add_statistics
from mpfedcl.inference.exchange import Exchange, Fitted, name_clients, open_exchange
from mpfedcl.inference.exchange_changes import CHANGES, write_joined, write_left
from mpfedcl.inference.joined_clients import check_name
from mpfedcl.inference.ledger import make_event, read_events, write_events
from mpfedcl.inference.new_client import Accuracies, NewClient
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import percent_correct
from mpfedcl.rounds.label_prior import log_prior
from mpfedcl.runs.directory import RunDirectory


@dataclass(frozen=True)
class ExchangeJoin:
    """What came of a client's joining a federation of one exchange."""

    client: str
    event: str
    """joined, replaced or extended."""
    train_images: int
    test_images: int
    classes_held: int
    new_classes: list[str]
    """Classes that the federation did not know."""
    before: Accuracies
    """By the federation's classifier as it was: as it is, and with the client's label prior."""
    after: Accuracies
    """The same once the client is in it, and by its own classifier."""
    rejected: str | None
    """Why its sums cannot be true, or None."""
    was_added: bool
    noun: str = "image"

    def to_json(self) -> dict[str, Any]:
        """Return what is told of it, as plain values."""
        return {
            "client": self.client,
            "event": self.event,
            "train_images": self.train_images,
            "test_images": self.test_images,
            "classes_held": self.classes_held,
            "prototypes": self.classes_held,
            "new_classes": self.new_classes,
            "accuracy": {"before": self.before, "after": self.after},
        }


def join_exchange(
    run: Path | str,
    data: Path | str,
    name: str,
    *,
    test_fraction: float | None = None,
    weights: Path | None = None,
    add: bool = False,
    replace: bool = False,
    more: bool = False,
    new_classes: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ExchangeJoin:
    """Let a client join a federation of one exchange; with `add` for all, else only to see.

    Args:
        run: The run directory; a run of fedgauss or its family.
        data: The client's samples, as for `mpfedcl.inference.join.join`.
        name: What the client is called.
        test_fraction: The share of its samples to test on; by default the run's.
        weights: The encoder's file, where it is not found as it was for the run.
        add: Whether to write the federation with it; without it the run's files are only read.
        replace: The samples stand for all that a client of that name had.
        more: They come on top of what it had.
        new_classes: Whether there may be classes that the run does not know.
        on_progress: Told in words what is being done.
    """
    path = Path(run)
    with RunDirectory.resume(path, "RUN") if add else contextlib.nullcontext():
        trained = load_trained_run(path, weights=weights)
        before = open_exchange(path)
        event = _choose_event(before, name, replace=replace, more=more)
        on_progress(f"reading the {trained.input_format.noun}s of {data}")
        source = NewClient(
            trained, Path(data), name, test_fraction=test_fraction, new_classes=new_classes
        )
        update, rejected = source.collect()
        own = before.method.own_statistics(update.summed)
        if not bool(own["counts"].any()):
            raise InvalidInput(
                f"{name} has no class to add: prototypes.min_cluster_size leaves none, so it must "
                "have more samples."
            )
        added = None
        if rejected is None:
            on_progress(f"adding {len(source.client.labels):,} {trained.input_format.noun}s")
            added = _add(before, source, own, event)
        class_names = list(source.data.class_names)
        labels = torch.bincount(source.client.labels, minlength=len(class_names))
        test = _Test(source.data.test_inputs, source.data.test_labels)
        joined = ExchangeJoin(
            client=name,
            event=event,
            train_images=len(source.client.labels),
            test_images=len(test.labels),
            classes_held=int(((added.own if added else own)["counts"] > 0).sum()),
            new_classes=class_names[len(before.class_names) :],
            before=test.read(before, {"classifier": trained.parameters()}, labels),
            after={} if added is None else added.read(test),
            rejected=rejected,
            was_added=add and rejected is None,
            noun=trained.input_format.noun,
        )
        if add and added is not None:
            write_joined(
                before,
                added.exchange,
                added.fitted,
                client=name,
                own=added.own,
                personal=added.personal,
                class_names=class_names,
                event=event,
                record=joined.to_json(),
            )
        elif add:
            told = {**joined.to_json(), **make_event("rejected", name), "reason": rejected}
            write_events(path, told)
        return joined


def leave_exchange(path: Path, name: str) -> PrototypePool:
    """Take a client out of a federation of one exchange; return the class means of the others.

    The federation is then exactly the one that never had it. Who calls holds the run's lock.
    """
    before = open_exchange(path)
    check_leaving(before, name)
    own = before.own_of(name)
    after = before.without(name, own)
    if bool((after.pooled["counts"] < 0).any()):
        raise InvalidInput(
            f"the sums of {name} are not among those of {path}; nothing was changed."
        )
    write_left(before, after, after.fit(), client=name, own=own)
    return after.pool


def check_leaving(exchange: Exchange, name: str) -> None:
    """Refuse a client that is not in a federation, and the last one."""
    if name not in exchange.pool.names:
        events = [each for each in read_events(exchange.path) if each.get("client") == name]
        if events and events[-1].get("event") == "left":
            raise InvalidInput(f"leave is {name!r}, which has left already.")
        raise InvalidInput(f"leave is {name!r}; it must be one of {name_clients(exchange)}.")
    if exchange.pool.num_clients == 1:
        raise InvalidInput(
            f"leave is {name!r}, the last client; a federation must have at least one."
        )


def list_joined_exchange(path: Path) -> list[dict[str, Any]]:
    """Return the last event of each client that has joined since the run, in order of name."""
    exchange = open_exchange(path)
    last = {
        str(event.get("client")): event
        for event in read_events(path)
        if event.get("event") in CHANGES
    }
    new = [name for name in exchange.pool.names if name not in exchange.partition["clients"]]
    sizes = {name: int(exchange.pool.of(name).counts.sum()) for name in new}
    return [{"client": n, **last.get(n, {}), "train_images": sizes[n]} for n in new]


@dataclass(frozen=True)
class _Test:
    """A client's held-out samples."""

    inputs: Tensor
    labels: Tensor

    def read(
        self, exchange: Exchange, models: dict[str, Tensors | None], label_counts: Tensor
    ) -> Accuracies:
        """Return the accuracy of each model as it is, and with the client's label prior."""
        found: Accuracies = {}
        for name, params in models.items():
            found |= {name: None, f"{name}_prior": None}
            if params is not None and len(self.labels):
                scores = exchange.scores(params, self.inputs)
                prior = log_prior(label_counts[: scores.shape[1]]).to(scores)
                found[name] = percent_correct(scores.argmax(1) == self.labels)
                found[f"{name}_prior"] = percent_correct((scores + prior).argmax(1) == self.labels)
        return found


@dataclass(frozen=True)
class _Addition:
    """A federation with a client in it."""

    exchange: Exchange
    fitted: Fitted
    own: Tensors
    """All statistics of the client."""
    personal: Tensors | None
    """The client's own classifier; None for a method that has none."""
    label_counts: Tensor

    def read(self, test: _Test) -> Accuracies:
        models = {"classifier": self.fitted.params, "own": self.personal}
        return test.read(self.exchange, models, self.label_counts)


def _add(before: Exchange, client: NewClient, own: Tensors, event: str) -> _Addition:
    """Add a client's sums, or put them in place of its old ones, or on top of these."""
    base, name = before.with_classes(client.data.class_names), client.name
    inputs, labels = client.client.inputs, client.client.labels
    if event != "joined":
        old = _old_statistics(base, name, event)
        base = base.without(name, old)
        if event == "extended":
            own = add_statistics(old, own)
    after = base.with_client(name, own)
    fitted = after.fit()
    if event == "extended":
        # Of what it had before, its sums are all that is known here.
        personal = after.method.personalize_from(fitted.received, own)
        return _Addition(after, fitted, own, personal, own["counts"])
    personal = after.method.personalize(fitted.received, inputs, labels)
    counts = torch.bincount(labels, minlength=base.pool.num_classes)
    return _Addition(after, fitted, own, personal, counts)


def _choose_event(exchange: Exchange, name: str, *, replace: bool, more: bool) -> str:
    check_name(name)
    is_in = name in exchange.pool.names
    if replace and more:
        raise InvalidInput("more and replace are given; only one of them must be.")
    if not is_in and more:
        raise InvalidInput(
            f"name is {name!r}; with --more it must be one of {name_clients(exchange)}."
        )
    if is_in and not (replace or more):
        raise InvalidInput(
            f"name is {name!r}, a client of the federation; give another one, or --more to add "
            "these samples to what it has, or --replace to replace them."
        )
    return "joined" if not is_in else "extended" if more else "replaced"


def _old_statistics(exchange: Exchange, name: str, event: str) -> Tensors:
    """Return what a client has in the pooled sums, as far as they must be known.

    Counts and class means are known of everybody. Second moments that add up need not be known
    where samples come on top; the scatter around own class means must be.
    """
    knows_enough = exchange.method.second_moment != "within" and event == "extended"
    if knows_enough and not exchange.keeps_clients:
        return exchange.told_by_pool(name)
    return exchange.own_of(name)
