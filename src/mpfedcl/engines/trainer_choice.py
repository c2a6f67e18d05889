"""Which trainer a client gets: by what was measured (docs/performance.md)."""

from collections.abc import Sequence
from typing import Any

from mpfedcl.engines.factored import FactoredTrainer
from mpfedcl.engines.linear_layers import Layer, find_layers
from mpfedcl.engines.loop import LoopTrainer
from mpfedcl.engines.stacked import StackedTrainer
from mpfedcl.engines.trained_clients import TrainedClients
from mpfedcl.engines.trainer import ClientTask, Trainer
from mpfedcl.errors import InvalidInput
from mpfedcl.methods import is_built_in
from mpfedcl.rounds.assembly import Assembly

MOST_ROWS = 512
"""Samples times epochs up to which rows are cheaper than weights, in good company."""
ROWS_PER_CLIENT = 80
"""The same for few clients: so many rows for each client that is trained at the same time."""
SMALL_MODEL = 200_000
"""Parameters up to which a stack of models is faster than one after the other."""
FEWEST_STACKED = 4
_LONGEST_REASON = 200
_CONVOLUTION_AXES = 4


def most_rows(num_clients: int) -> int:
    """Return up to how many rows a client is trained as rows, among so many clients."""
    return min(MOST_ROWS, ROWS_PER_CLIENT * num_clients)


class TrainerChoice:
    """Sorts clients by the trainer that is fastest for them, unless one is forced."""

    def __init__(self, assembly: Assembly) -> None:
        self._experiment = assembly.experiment
        self._method = assembly.method
        self._model = assembly.model
        self._loop = LoopTrainer(assembly)
        self._stacked = StackedTrainer(assembly)
        self._factored = FactoredTrainer(assembly)
        self._loops = assembly.experiment.engine == "loop"
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
        return told | ({"fallback": list(self._fallbacks)} if self._fallbacks else {})

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients, each by its trainer.

        A method may turn out to be more than a trainer can run, in any round: clients are then
        trained the plainer way from there on. No trainer changes anything before it returns.
        """
        while True:
            try:
                sorts = [pair for pair in self._sort(tasks, received) if pair[1]]
                done = [
                    trained
                    for trainer, some in sorts
                    for trained in trainer.train(some, round_number, received)
                ]
            except Exception as error:
                if not self._fall_back(error):
                    self._explain(error)
                    raise
                continue
            for trainer, some in sorts:
                self._counts[trainer.name] = self._counts.get(trainer.name, 0) + len(some)
            return done

    def _fall_back(self, error: Exception) -> bool:
        """Give up the most demanding trainer, and say why; False where only the loop is left."""
        if self._layers is not None:
            given_up, self._layers = self._factored.name, None
        elif self._experiment.engine == "auto" and not self._loops:
            given_up, self._loops = self._stacked.name, True
        else:
            return False
        self._fallbacks.append(f"{given_up}: {_shorten(error)}")
        return True

    def _explain(self, error: Exception) -> None:
        """Say in a sentence what torch says in a page, where somebody's own method is not safe."""
        name = self._experiment.method
        if "vmap" in str(error) and not self._loops and not is_built_in(name):
            raise InvalidInput(
                f"method is {name!r}, which cannot train many clients at once "
                f"({_shorten(error)}): CONTRIBUTING.md, under Add a method, says what a loss may "
                "do under torch.func.vmap, and --engine loop trains without it."
            ) from error

    def _sort(
        self, tasks: Sequence[ClientTask], received: object
    ) -> list[tuple[Trainer, list[ClientTask]]]:
        if self._loops:
            return [(self._loop, list(tasks))]
        layers = self._find_layers(tasks[0], received)
        limit = 0
        # Rows are rows beside one start that all clients share.
        if layers is not None and not any(task.is_part for task in tasks):
            limit = MOST_ROWS if self._experiment.engine == "stacked" else most_rows(len(tasks))
        few = [task for task in tasks if self._num_rows(task) <= limit]
        self._factored.layers = layers or ()
        many = [task for task in tasks if self._num_rows(task) > limit]
        plain: Trainer = self._stacked
        if self._experiment.engine == "auto" and not self._is_worth_stacking(many):
            plain = self._loop
        return [(self._factored, few), (plain, many)]

    def _find_layers(self, task: ClientTask, received: object) -> tuple[Layer, ...] | None:
        if not self._looked:
            self._looked = True
            if self._method.timing != "rounds":
                # Rows are what clients depart by from a start that all have in common.
                return None
            self._layers = find_layers(self._method, self._model, task, received)
        return self._layers

    def _num_rows(self, task: ClientTask) -> int:
        return self._experiment.train.epochs * len(task.client.labels)

    def _is_worth_stacking(self, tasks: Sequence[ClientTask]) -> bool:
        start = list(tasks[0].start.values()) if tasks else []
        # Stacked convolutions took 1.1 to 2.3 times as long on images of 20 to 32 pixels and gained
        # only at 12; and a stack's activations need memory for all clients.
        if any(value.dim() == _CONVOLUTION_AXES for value in start):
            return False
        size = sum(value.numel() for value in start)
        return len(tasks) >= FEWEST_STACKED and size <= SMALL_MODEL


def _shorten(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
