"""Checks of a method class, as `mpfedcl.methods.check_method` runs them."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.engines import DispatchingEngine, InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.methods import (
    PREDICTORS,
    Asynchronous,
    Family,
    Method,
    built_in_methods,
    check_hook_names,
    find_method,
)
from mpfedcl.models import Mlp
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.loop import RoundLoop, make_loop
from mpfedcl.rounds.systems import SystemModel, check_timing
from mpfedcl.runs.checkpoint import Checkpoint, checkpoint_from_bytes, checkpoint_to_bytes

ROUNDS = 3
SIZES = {"a": 11, "b": 6, "c": 6}
"""Samples by client: batches of 4 are of different sizes, and two clients are of one size."""
NUM_CLASSES, INPUT_SIZE, EMBEDDING_SIZE = 3, 5, 4
ENGINE_TOLERANCE = 1e-5
_LONGEST_NAME, _LONGEST_REASON = 60, 300


def check_method(method: type[Method]) -> None:
    """Raise `InvalidInput` that names the first check which a class fails."""
    checks: dict[str, Callable[[type[Method]], None]] = {
        "identity": _check_identity,
        "checkpoint": _check_checkpoint,
        "engines": _check_engines,
    }
    for name, check in checks.items():
        told = f"method is {getattr(method, '__qualname__', method)!r}, which fails the check"
        try:
            check(method)
        except (_CheckError, InvalidInput) as failure:
            raise InvalidInput(f"{told} {name!r}: {failure}") from None
        # The class is the user's: whatever it raises is reported with the check that found it.
        except Exception as error:
            raise InvalidInput(f"{told} {name!r}: {_describe(error)}") from error


class _CheckError(Exception):
    """A check has failed; the text says which value was found."""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"


def _check_identity(method: type[Method]) -> None:
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise _CheckError("it must be a subclass of mpfedcl.methods.Method")
    check_hook_names(method)
    name, summary, primary = method.name, method.summary, method.primary_predictor
    is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) <= _LONGEST_NAME
    is_line = isinstance(summary, str) and len(summary.splitlines()) == 1
    offered = method.predictors
    one_of_them = f"one of {', '.join(offered)}"
    checks = {
        "name": (is_name, f"1 to {_LONGEST_NAME} printable characters"),
        "summary": (is_line, "one line"),
        "family": (method.family in get_args(Family), f"one of {get_args(Family)}"),
        "predictors": (set(offered) <= set(PREDICTORS), f"of {', '.join(PREDICTORS)}"),
        "primary_predictor": (primary in offered, one_of_them),
        "primary_predictor_global": (
            (method.primary_predictor_global or primary) in offered,
            one_of_them,
        ),
    }
    for field, (is_right, allowed) in checks.items():
        if not is_right:
            raise _CheckError(f"{field} is {getattr(method, field)!r}; it must be {allowed}")
    _make_loop(method)


# A small federation


def _name(method: type[Method]) -> str:
    """Return the name by which an experiment knows the class, and so its settings."""
    if built_in_methods().get(method.name) is method:
        return method.name
    given = f"{method.__module__}:{method.__qualname__}"
    try:
        return given if find_method(given) is method else "fedavg"
    except InvalidInput:
        # A class in a function or a notebook: its settings have their defaults.
        return "fedavg"


def _make_data() -> FederatedData:
    """Return clients with three classes, each class around a point of its own."""
    draw = generator(0, "samples of a method check")
    centers = torch.randn(NUM_CLASSES, INPUT_SIZE, generator=draw, dtype=torch.float64)

    def make_samples(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % NUM_CLASSES
        noise = torch.randn(count, INPUT_SIZE, generator=draw, dtype=torch.float64)
        return centers[labels] + 0.5 * noise, labels

    tests = torch.arange(2 * len(SIZES)).view(-1, 2)
    clients = [
        ClientData(name, *make_samples(size), test)
        for (name, size), test in zip(SIZES.items(), tests, strict=True)
    ]
    names = tuple(f"class {number}" for number in range(NUM_CLASSES))
    public = make_samples(6)
    return FederatedData(
        "generated", names, clients, *make_samples(2 * len(SIZES)), {}, public=public
    )


def _assemble(method: type[Method], engine: str = "loop") -> Assembly:
    settings: dict[str, Any] = {
        "engine": engine,
        "rounds": ROUNDS,
        "dtype": "float64",
        "workers": 1,
        "evaluate_every": 1,
        # Methods that keep norms with clients (FedBN) refuse settings without any.
        "model__name": "cnn",
        "model__norm": "group",
        "train__batch_size": 4,
        "train__lr": 0.05,
        "prototypes__per_class": 2,
    }
    experiment = Experiment(method=_name(method)).replace(**settings).resolved(method.defaults)
    check_timing(method, experiment)
    return assemble(
        experiment,
        Mlp((INPUT_SIZE, 6, EMBEDDING_SIZE), NUM_CLASSES),
        num_classes=NUM_CLASSES,
        input_size=INPUT_SIZE,
        method_class=method,
        public=_make_data().public,
    )


def _make_loop(method: type[Method], engine: str = "loop") -> RoundLoop:
    assembly, data = _assemble(method, engine), _make_data()
    kind = DispatchingEngine if issubclass(method, Asynchronous) else InProcessEngine
    systems = SystemModel.of(assembly, data.label_counts_by_client())
    return make_loop(assembly, kind(assembly, data), systems)


def _run(loop: RoundLoop, rounds: int = ROUNDS) -> RoundLoop:
    for _ in range(rounds):
        record = loop.run_round(evaluate=False)
        if record.clients.rejected:
            name, reason = next(iter(record.clients.rejected.items()))
            raise _CheckError(
                f"the update of client {name} is rejected in round {record.round}: {reason}"
            )
    return loop


# Engines and checkpoints


def _check_engines(kind: type[Method]) -> None:
    """Compare clients that train together, under vmap, with the loop."""
    wanted = _state_of(_run(_make_loop(kind)))
    for engine in ("stacked", "auto"):
        found = _state_of(_run(_make_loop(kind, engine)))
        when = f"after {ROUNDS} rounds of engine {engine} instead of loop"
        _compare(found, wanted, ENGINE_TOLERANCE, when)


def _check_checkpoint(kind: type[Method]) -> None:
    whole = _run(_make_loop(kind))
    first = _run(_make_loop(kind), ROUNDS - 2)
    record = first.run_round(evaluate=False)
    saved = Checkpoint(first.state, first.engine.state(), record.to_json())
    try:
        opened = checkpoint_from_bytes(checkpoint_to_bytes(saved))
    except Exception as error:
        raise _CheckError(
            f"its state cannot be written ({_describe(error)}); states of server and clients must "
            "be dictionaries of tensors"
        ) from error
    second = _make_loop(kind)
    second.engine.restore(opened.clients, opened.record)
    second.state = opened.state
    second.run_round(evaluate=False)
    _compare(_state_of(second), _state_of(whole), 0.0, "after a checkpoint")


def _state_of(loop: RoundLoop) -> Tensors:
    server = loop.state.server
    groups = {
        "server.params": server.params,
        "server.extra": server.extra,
        "server.private": server.private,
        "client": loop.engine.state(),
        "prototypes": {name: rows.vectors for name, (_, rows) in loop.state.prototypes.items()},
    }
    return {f"{group} {name}": v for group, part in groups.items() for name, v in part.items()}


def _compare(found: Tensors, wanted: Tensors, tolerance: float, when: str) -> None:
    if found.keys() != wanted.keys():
        name = min(found.keys() ^ wanted.keys())
        raise _CheckError(f"{name} exists in one of two equal runs only, {when}")
    for name, value in wanted.items():
        if not _are_close(found[name], value, tolerance):
            raise _CheckError(f"{name} differs {when}")


def _are_close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() or not tolerance:
        return torch.equal(found, wanted)
    norm = float(wanted.double().norm())
    return float((found - wanted).double().norm()) <= tolerance * max(norm, 1e-6)
