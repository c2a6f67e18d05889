"""Observers and callbacks of a run, and its result."""

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
"""A round's record, as in rounds.jsonl."""


@dataclass(frozen=True)
class RunResult:
    """The result of `run`; everything else is in the run directory at `path`."""

    path: Path
    experiment: Experiment
    accuracy: float | None
    """The primary metric: accuracy on the local test sets in the last round, in percent."""
    history: list[dict[str, Any]]
    """The records of all rounds."""
    pool: PrototypePool | None
    summary: dict[str, Any] | None
    """None if the run was stopped before its last round."""


@dataclass(frozen=True)
class FinalModels:
    """The models of the last round of a simulation, before they are written."""

    directory: RunDirectory
    round: int
    method: Method
    model: Model
    pool: PrototypePool | None
    averaged: Tensors | None
    personal: Iterator[tuple[str, Tensors]]
    """The personalized models, one at a time: together they may take gigabytes."""
    test_inputs: Tensor
    """The global test set."""
    test_labels: Tensor
    local_tests: Mapping[str, Tensor]
    """The indices of each client's local test set."""
    label_counts: Mapping[str, Sequence[int]]
    """Training samples by class of each client."""
    fitted: Tensors
    """The server's tensors next to the global model."""


@dataclass(frozen=True)
class Observer:
    """Watches a run, and may stop it."""

    on_start: Callable[[Experiment, int], None] = lambda *_: None
    """Called with the experiment and the number of rounds that are done already."""
    on_round: Callable[[Record], None] = lambda *_: None
    on_warning: Callable[[str], None] = lambda *_: None
    should_stop: Callable[[], bool] = lambda: False
    on_finish: Callable[[RunResult], None] = lambda *_: None
    """Called after the last round, also if the run was stopped early."""
    on_models: Callable[[FinalModels], Iterator[tuple[str, Tensors]]] = lambda end: end.personal
    """Called with the final models before they are written; returns the personalized models."""


Attach = Callable[[Path, Observer], Observer]
"""Adds callbacks to an observer, given the run directory."""


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a run; none by default."""

    attach: Callable[[Experiment], Attach] = lambda _: lambda _path, observer: observer
    """Adds trackers and the model card. Called before the run begins, so that missing packages are
    reported at once."""
    change_exchange: Callable[..., Mapping[str, Any]] = lambda *_, **__: {}
    """Lets one client join or update a finished run over a network, and returns the outcome
    (`mpfedcl.inference.one_shot`)."""


NO_CALLBACKS = Callbacks()
