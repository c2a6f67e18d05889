"""The trainer of each client: one that the experiment names, or by one rule."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.engines.trainers.base import ClientTask, TrainedClients, Trainer
from mpfedcl.engines.trainers.direct import DirectTrainer
from mpfedcl.engines.trainers.factored import FactoredTrainer
from mpfedcl.engines.trainers.find_linear_layers import Layer, find_layers
from mpfedcl.engines.trainers.loop import LoopTrainer
from mpfedcl.engines.trainers.stacked import StackedTrainer
from mpfedcl.methods import Asynchronous, Context, LocalTraining, is_built_in
from mpfedcl.rounds.assembly import Assembly

MOST_ROWS = 64
"""Samples times epochs up to which `auto` trains a client as rows."""
LEAST_TOGETHER = 4
"""Clients from which on `auto` trains them together."""
MOST_STACKED = 2**16
"""Values of a model up to which `auto` stacks clients whose loss is more than linear layers."""
_LONGEST_REASON = 200
_CONVOLUTION_AXES = 3
"""From on; weights of linear layers have 2."""


class TrainerChoice:
    """Trains clients, each by its trainer.

    `auto` follows the measurements in docs/performance.md. If the loss uses parameters in linear
    layers only, clients are factored if at least 4 of them have at most 64 rows each, and trained
    directly otherwise. For any other loss, many small models are stacked and all others take the
    loop; so do convolutional models, for which a stack is no faster and takes more memory.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._experiment = assembly.experiment
        self._method = assembly.method
        self._model = assembly.model
        self._loop = LoopTrainer(assembly)
        self._direct = DirectTrainer(assembly)
        self._stacked = StackedTrainer(assembly)
        self._factored = FactoredTrainer(assembly)
        self._failed: set[str] = set()
        """Trainers that cannot run this method."""
        self._counts: Counter[str] = Counter()
        """Clients of this round by trainer."""
        self._fallbacks: list[str] = []
        """Reasons for using other trainers than the chosen ones, over all rounds so far."""
        self._layers: tuple[Layer, ...] | None = None
        self._looked = False
        self._uses_weights = False

    def begin_round(self) -> None:
        """Reset the counts."""
        self._counts.clear()

    def describe_round(self) -> dict[str, Any]:
        """Return the number of clients by trainer, and why chosen trainers were not used."""
        return describe_training(self._counts, self._fallbacks)

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients, each by its trainer.

        A trainer may turn out, in any round, to be unable to run a method: clients then get a
        plainer trainer from there on. No trainer changes anything before it returns.
        """
        if self._experiment.train.class_weights != "none" and not self._uses_weights:
            self._check_class_weights(tasks[0], received)
        while True:
            chosen = [pair for pair in self._choose(tasks, received) if pair[1]]
            done: list[TrainedClients] = []
            try:
                for trainer, some in chosen:
                    done += trainer.train(some, round_number, received)
            except Exception as error:
                if trainer is self._loop or self._experiment.engine == "stacked":
                    self._explain(error)
                    raise
                self._failed.add(trainer.name)
                self._fallbacks.append(f"{trainer.name}: {_shorten(error)}")
            else:
                self._counts.update({trainer.name: len(some) for trainer, some in chosen})
                return done

    def _choose(
        self, tasks: Sequence[ClientTask], received: object
    ) -> list[tuple[Trainer, Sequence[ClientTask]]]:
        engine = self._experiment.engine
        if engine == "loop" or self._needs_loop():
            return [(self._loop, tasks)]
        if engine == "stacked":
            return [(self._stacked, tasks)]
        if not self._looked:
            self._looked = True
            self._layers = find_layers(self._method, self._model, tasks[0], received)
        layers = self._layers
        self._factored.layers = self._direct.layers = layers or ()
        can_factor = layers is not None and self._can_factor(tasks)
        if engine == "factored":
            first = self._factored if can_factor else self._stacked
            return [(self._loop if first.name in self._failed else first, tasks)]
        few = [task for task in tasks if can_factor and self._count_rows(task) <= MOST_ROWS]
        if len(few) < LEAST_TOGETHER:
            few = []
        names = {task.client.name for task in few}
        others = [task for task in tasks if task.client.name not in names]
        return [(self._factored, few), (self._choose_plain(others, layers), others)]

    def _needs_loop(self) -> bool:
        """Return whether clients cannot be trained together, and note the reason."""
        reason = self._model.difference
        if reason is None:
            return False
        if self._experiment.engine != "auto":
            raise InvalidInput(
                f"engine is {self._experiment.engine!r}; it must be auto or loop, because {reason}."
            )
        if not self._fallbacks:
            self._fallbacks.append(f"loop: {reason}")
        return True

    def _choose_plain(
        self, tasks: Sequence[ClientTask], layers: tuple[Layer, ...] | None
    ) -> Trainer:
        """Return the trainer of clients that are not factored."""
        if layers is not None and self._direct.name not in self._failed:
            return self._direct
        if len(tasks) < LEAST_TOGETHER or self._stacked.name in self._failed:
            return self._loop
        values = tasks[0].start.values()
        is_small = sum(value.numel() for value in values) <= MOST_STACKED
        has_convolutions = any(value.dim() >= _CONVOLUTION_AXES for value in values)
        return self._stacked if is_small and not has_convolutions else self._loop

    def _count_rows(self, task: ClientTask) -> float:
        """Return the samples of all steps of a client."""
        size, train = len(task.client.labels), self._experiment.train
        return size * LocalTraining.of(train, 1).passes(size, train.batch_size)

    def _can_factor(self, tasks: Sequence[ClientTask]) -> bool:
        """Return whether all clients start from common parameters and move by rows only."""
        return (
            self._factored.name not in self._failed
            and not isinstance(self._method, Asynchronous)
            and not self._experiment.train.weight_decay
            and not any(task.is_part for task in tasks)
        )

    def _check_class_weights(self, task: ClientTask, received: object) -> None:
        """Reject class weights if the loss does not depend on them."""
        context = Context(self._model.apply, task.start, received, task.state, task.own)
        params, memory = self._method.begin(context)
        weights = next(iter(task.start.values())).new_ones(2, requires_grad=True)
        rows = torch.arange(2, device=weights.device) % len(task.client.labels)
        batch = task.batch(rows, 0)._replace(weights=weights)
        loss = self._method.loss(params, batch, replace(context, memory=memory))
        if not loss.requires_grad:
            raise InvalidInput(
                f"train.class_weights is {self._experiment.train.class_weights!r}; with method "
                f"{self._experiment.method} it must be none: its loss does not use "
                "batch.cross_entropy."
            )
        self._uses_weights = True

    def _explain(self, error: Exception) -> None:
        """Raise a one-line error if a user's method cannot run under vmap."""
        name = self._experiment.method
        if "vmap" in str(error) and not is_built_in(name):
            raise InvalidInput(
                f"method is {name!r}, which cannot train many clients at once "
                f"({_shorten(error)}): CONTRIBUTING.md, under Add a method, says what a loss may "
                "do under torch.func.vmap, and --engine loop trains without it."
            ) from error


class TrainersByModel:
    """Trains clients with different models, those of one model together."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._choices = {e: TrainerChoice(e) for e in dict.fromkeys(assembly.clients.values())}

    def begin_round(self) -> None:
        """Reset the counts."""
        for choice in self._choices.values():
            choice.begin_round()

    def describe_round(self) -> dict[str, Any]:
        """Return the number of clients by trainer, and why chosen trainers were not used."""
        return join_trainings(choice.describe_round() for choice in self._choices.values())

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients, each by its trainer."""
        alike: dict[Assembly, list[ClientTask]] = {}
        for task in tasks:
            alike.setdefault(self._assembly.of(task.client.name), []).append(task)
        return [
            trained
            for assembly, some in alike.items()
            for trained in self._choices[assembly].train(some, round_number, received)
        ]


def join_trainings(trainings: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return one remark for clients that were trained in several places."""
    counts: Counter[str] = Counter()
    reasons: list[str] = []
    for training in trainings:
        reasons += training.pop("fallback", [])
        counts.update(training)
    return describe_training(counts, list(dict.fromkeys(reasons)))


def describe_training(counts: Mapping[str, int], fallbacks: Sequence[str]) -> dict[str, Any]:
    """Return the remark on the training of a round."""
    return dict(sorted(counts.items())) | ({"fallback": list(fallbacks)} if fallbacks else {})


def _shorten(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
