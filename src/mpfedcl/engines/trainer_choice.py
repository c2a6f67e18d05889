"""Which trainer a client gets: by what was measured (docs/performance.md)."""

import contextlib
from collections.abc import Sequence
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.direct import Begun, DirectTrainer
from mpfedcl.engines.factored import FactoredTrainer
from mpfedcl.engines.hardware import largest_cache
from mpfedcl.engines.linear_layers import Layer, find_layers
from mpfedcl.engines.loop import LoopTrainer
from mpfedcl.engines.stacked import StackedTrainer
from mpfedcl.engines.trained_clients import TrainedClients
from mpfedcl.engines.trainer import ClientTask, Trainer
from mpfedcl.engines.trainer_costs import describe_training
from mpfedcl.methods import Asynchronous, is_built_in
from mpfedcl.rounds.assembly import Assembly

MOST_ROWS = 512
"""Samples times epochs up to which the engine `stacked` trains a client as rows."""
_LONGEST_REASON = 200
_CONVOLUTION_AXES = 4


class TrainerChoice:
    """Sorts clients by the trainer that is fastest for them, unless one is forced."""

    def __init__(self, assembly: Assembly) -> None:
        self._experiment = assembly.experiment
        self._method = assembly.method
        self._model = assembly.model
        self._loop = LoopTrainer(assembly)
        self._direct = DirectTrainer(assembly)
        self._stacked = StackedTrainer(assembly)
        self._factored = FactoredTrainer(assembly)
        self._given_up: set[str] = set()
        """Trainers that this method is too much for."""
        self._counts: dict[str, int] = {}
        """Clients of this round by the trainer that they had."""
        self._fallbacks: list[str] = []
        """Why plainer ways are taken than were chosen, in this round and in those before it."""
        self._layers: tuple[Layer, ...] | None = None
        self._looked = False

    def begin_round(self) -> None:
        """Count anew."""
        self._counts = {}

    def describe_round(self) -> dict[str, Any]:
        """Return how many clients had which trainer, and why faster ones were given up."""
        told: dict[str, Any] = dict(sorted(self._counts.items()))
        if told and self._experiment.engine == "auto":
            # What the choice depends on, beside the clients' rows and the layers.
            told["cache_bytes"] = largest_cache()
        return told | ({"fallback": list(self._fallbacks)} if self._fallbacks else {})

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients, each by its trainer.

        A method may turn out to be more than a trainer can run, in any round: clients are then
        trained the plainer way from there on. No trainer changes anything before it returns.
        """
        while True:
            sorts = [pair for pair in self._sort(tasks, received) if pair[1]]
            done: list[TrainedClients] = []
            for trainer, some in sorts:
                try:
                    done += trainer.train(some, round_number, received)
                except Exception as error:
                    if not self._fall_back(trainer, error):
                        self._explain(error)
                        raise
                    break
            else:
                for trainer, some in sorts:
                    self._counts[trainer.name] = self._counts.get(trainer.name, 0) + len(some)
                return done

    def begin(
        self,
        task: ClientTask,
        round_number: int,
        received: object,
        part: float,
        memory: tuple[Tensors, Tensors],
    ) -> Begun:
        """Take a part of a client's steps where they can be continued elsewhere; else none."""
        if not self._can_continue(task, received):
            return Begun(0)
        try:
            return self._direct.begin(task, round_number, received, part, memory)
        except Exception:
            # Whatever it is: who answers for the client will tell.
            return Begun(0)

    def finish(
        self,
        task: ClientTask,
        round_number: int,
        received: object,
        begun: Begun,
        memory: tuple[Tensors, Tensors],
    ) -> list[TrainedClients]:
        """Take the steps that are left of a client's training; all of them, if there must be."""
        if begun.num_steps and self._can_continue(task, received):
            with contextlib.suppress(Exception):
                done = self._direct.finish(task, round_number, received, begun, memory)
                self._counts[self._direct.name] = self._counts.get(self._direct.name, 0) + 1
                return [done]
        return self.train([task], round_number, received)

    def _can_continue(self, task: ClientTask, received: object) -> bool:
        """Tell whether a client can be trained directly, be that the cheapest way or not."""
        self._direct.layers = self._find_layers(task, received) or ()
        return bool(self._direct.layers) and self._direct.name not in self._given_up

    def _fall_back(self, trainer: Trainer, error: Exception) -> bool:
        """Give up a trainer, and say why; False where it is the one that was asked for."""
        is_asked_for = trainer is self._stacked and self._experiment.engine == "stacked"
        if trainer is self._loop or is_asked_for:
            return False
        self._given_up.add(trainer.name)
        self._fallbacks.append(f"{trainer.name}: {_shorten(error)}")
        return True

    def _explain(self, error: Exception) -> None:
        """Say in a sentence what torch says in a page, where somebody's own method is not safe."""
        name = self._experiment.method
        if "vmap" in str(error) and not is_built_in(name):
            raise InvalidInput(
                f"method is {name!r}, which cannot train many clients at once "
                f"({_shorten(error)}): CONTRIBUTING.md, under Add a method, says what a loss may "
                "do under torch.func.vmap, and --engine loop trains without it."
            ) from error

    def _sort(
        self, tasks: Sequence[ClientTask], received: object
    ) -> list[tuple[Trainer, list[ClientTask]]]:
        engine = self._experiment.engine
        if engine == "loop":
            return [(self._loop, list(tasks))]
        layers = self._find_layers(tasks[0], received)
        self._factored.layers = self._direct.layers = layers or ()
        # Rows are what clients depart by from a start that all have in common.
        has_rows = (
            layers is not None
            and self._factored.name not in self._given_up
            and not isinstance(self._method, Asynchronous)
            and not self._experiment.train.weight_decay
            and not any(task.is_part for task in tasks)
        )
        if engine == "stacked":
            limit = MOST_ROWS if has_rows else 0
            few = [task for task in tasks if self._num_rows(task) <= limit]
            many = [task for task in tasks if self._num_rows(task) > limit]
            return [(self._factored, few), (self._stacked, many)]
        if layers is not None and self._direct.name not in self._given_up:
            rows = [self._factored] if has_rows else []
            return self._sort_by_cost(tasks, [self._direct, *rows, self._stacked])
        # Stacked convolutions took 1.1 to 2.3 times as long on images of 20 to 32 pixels and gained
        # only at 12; and a stack's activations need memory for all clients.
        if any(value.dim() == _CONVOLUTION_AXES for value in tasks[0].start.values()):
            return [(self._loop, list(tasks))]
        return self._sort_by_cost(tasks, [self._loop, self._stacked])

    def _sort_by_cost(
        self, tasks: Sequence[ClientTask], trainers: Sequence[Trainer]
    ) -> list[tuple[Trainer, list[ClientTask]]]:
        """Give each client that of some trainers which costs least."""
        sorts: dict[str, list[ClientTask]] = {
            trainer.name: [] for trainer in trainers if trainer.name not in self._given_up
        }
        for task in tasks:
            num_samples = len(task.client.labels)
            training = describe_training(self._method, task.start, num_samples, len(tasks))
            is_layers = self._direct.name in sorts
            costs = training.with_layers() if is_layers else training.with_anything()
            sorts[min(sorts, key=lambda name: costs[name])].append(task)
        return [(each, sorts[each.name]) for each in trainers if each.name in sorts]

    def _find_layers(self, task: ClientTask, received: object) -> tuple[Layer, ...] | None:
        if not self._looked:
            self._looked = True
            self._layers = find_layers(self._method, self._model, task, received)
        return self._layers

    def _num_rows(self, task: ClientTask) -> int:
        return self._experiment.train.epochs * len(task.client.labels)


def _shorten(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
