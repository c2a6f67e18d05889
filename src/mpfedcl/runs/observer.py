"""Observers and callbacks of a run, and its result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Method
from mpfedcl.models import Model
from mpfedcl.models.factory import as_module
from mpfedcl.prototypes import PrototypePool
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.failure import describe_failure

if TYPE_CHECKING:
    from mpfedcl.inference.predictor import Predictor

Record = Mapping[str, Any]
"""A round's record, as in rounds.jsonl."""


class HasModels:
    """Opens the models of a finished run, which are in the run directory at `path`."""

    path: Path

    # The packages that open a run are built on this one.

    def predictor(self, client: str | None = None) -> "Predictor":
        """Return the predictor with the global model, or with a client's personalized model."""
        found: Predictor = import_module("mpfedcl.inference.predictor").Predictor.load(
            self.path, client
        )
        return found

    @property
    def global_model(self) -> nn.Module:
        """The global model as a module: of inputs it returns logits.

        `result.predictor().inputs(samples)` are the inputs of images or vectors.
        """
        return self._model(None)

    def personal_model(self, client: str) -> nn.Module:
        """Return a client's personalized model as a module."""
        return self._model(client)

    def _model(self, client: str | None) -> nn.Module:
        trained = import_module("mpfedcl.inference.trained_run").load_trained_run(self.path)
        params = trained.parameters(client)
        return as_module(trained.model_of(client), params)


@dataclass(frozen=True, repr=False)
class RunResult(HasModels):
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

    def __repr__(self) -> str:
        experiment, done = self.experiment, len(self.history)
        method = (self.summary or {}).get("method_name") or experiment.method
        lines = [f"{method} on {experiment.dataset.name}"]
        if self.summary is None:
            lines[0] += f": stopped after round {done} of {experiment.rounds}"
        else:
            tests = {"local test sets": self.accuracy}
            if experiment.partition.test != "shared":
                tests["global test set"] = self.summary["accuracy_global"]
            told = [f"{v:.1f} % on the {test}" for test, v in tests.items() if v is not None]
            rounds = f"{done} round{'s' if done > 1 else ''}"
            lines[0] += f": accuracy {', '.join(told) or 'not known'} after {rounds}"
            lines += [failure] if (failure := describe_failure(self.path)) else []
        return "\n".join([*lines, f"path: {self.path}"])

    def _repr_html_(self) -> str | None:
        # The report is built on this package. A notebook shows the text if there is no table.
        load = import_module("mpfedcl.report.results").load
        with suppress(InvalidInput):
            table: str = load(self.path, unfinished=True)._repr_html_()
            return table
        return None


@dataclass(frozen=True)
class FinalModels:
    """The models of the last round of a simulation, before they are written."""

    directory: RunDirectory
    round: int
    method: Method
    model_of: Callable[[str | None], Model]
    """Returns the model of a client, or the global one."""
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
