"""How a run is watched, stopped and accompanied from outside, and what it gives back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Method
from mpfedcl.models import Model
from mpfedcl.prototypes import PrototypePool
from mpfedcl.runs.directory import RunDirectory

Record = Mapping[str, Any]
"""A round, as a line of rounds.jsonl has it."""


@dataclass(frozen=True)
class RunResult:
    """What `run` gives back; everything else is in the run directory at `path`."""

    path: Path
    experiment: Experiment
    accuracy: float | None
    """The headline: the method's reading on the clients' local test sets in the last round, in %."""
    history: list[dict[str, Any]]
    """The rounds' records."""
    pool: PrototypePool | None
    summary: dict[str, Any] | None
    """None where the run was stopped before its last round."""


@dataclass(frozen=True)
class FinalModels:
    """What the last round of a simulation leaves, while it is being written."""

    directory: RunDirectory
    round: int
    method: Method
    model: Model
    pool: PrototypePool | None
    averaged: Tensors | None
    personal: Iterator[tuple[str, Tensors]]
    """The clients' own models, one at a time: together they may take gigabytes."""
    test_inputs: Tensor
    """The test images of all clients together."""
    test_labels: Tensor
    local_tests: Mapping[str, Tensor]
    """Which of them each client has."""
    label_counts: Mapping[str, Sequence[int]]
    """How many training images of each class each client has."""
    fitted: Tensors
    """What the server keeps beside the global model."""


@dataclass(frozen=True)
class Observer:
    """How a run is watched and stopped from outside."""

    on_start: Callable[[Experiment, int], None] = lambda *_: None
    """Told of the experiment, and of how many rounds are done already."""
    on_round: Callable[[Record], None] = lambda *_: None
    on_warning: Callable[[str], None] = lambda *_: None
    should_stop: Callable[[], bool] = lambda: False
    on_finish: Callable[[RunResult], None] = lambda *_: None
    """Called when the rounds are over, whether or not they were stopped early."""
    on_models: Callable[[FinalModels], Iterator[tuple[str, Tensors]]] = lambda end: end.personal
    """Sees the final models before they are written; passes the personal ones on."""


Attach = Callable[[Path, Observer], Observer]
"""Adds to an observer what a run leaves beside its records, given the run directory."""


@dataclass(frozen=True)
class Callbacks:
    """What accompanies a run from outside; by default nothing does."""

    attach: Callable[[Experiment], Attach] = lambda _: lambda _path, observer: observer
    """Trackers, a model card. Called before anything is made, so that what is missing is said at
    once."""
    change_exchange: Callable[..., Mapping[str, Any]] = lambda *_, **__: {}
    """Lets one client join or leave a finished run over a network, and tells what came of it:
    `mpfedcl.inference.one_shot_network` says how."""


NO_CALLBACKS = Callbacks()
