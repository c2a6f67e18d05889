"""Clients that train a model of their own beside the one that they send."""

from typing import Any, NamedTuple

from torch import zeros_like

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods._round_values import Context
from mpfedcl.methods.fedavg import FedAvg

_OTHER, _SPEED, _OTHERS_SPEED = "other.", "speed.", "other speed."


class Turn(NamedTuple):
    """What a step is given: whose turn it is, beside what the round has brought."""

    is_own: bool
    received: Any


class TwoModels(FedAvg):
    """FedAvg; each batch serves the client's own model first, then the one that is sent.

    The two change places after each step, and each has a velocity of its own.
    """

    family = "personal models"
    predictor = "personal_classifier"
    global_test_predictor = "global_classifier"
    repeats = 2
    needs_sgd = True

    def begin_own(self, context: Context) -> Tensors:
        """Return the own model that a client begins the round with."""
        return context.start

    def descent(self, round_number: int) -> tuple[float, float]:
        """Momentum is each model's own, and kept in the memory."""
        return self.experiment.train.learning_rate(round_number), 0.0

    def at_step(self, received: Any, step: int) -> Turn:
        """Take turns."""
        return Turn(step % 2 == 0, received)

    def begin(self, context: Context) -> tuple[Tensors, Tensors]:
        """Begin with the own model, both at rest."""
        memory: Tensors = {}
        for name, value in context.start.items():
            memory |= {
                _OTHER + name: value,
                _SPEED + name: zeros_like(value),
                _OTHERS_SPEED + name: zeros_like(value),
            }
        return self.begin_own(context), memory

    def adjust_and_remember(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """v <- momentum v + g."""
        adjusted, memory = super().adjust_and_remember(gradients, params, context)
        momentum = self.experiment.train.momentum
        speed = {n: momentum * memory[_SPEED + n] + g for n, g in adjusted.items()}
        return speed, memory | {_SPEED + name: value for name, value in speed.items()}

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        """Let the other model come in."""
        memory, swapped = context.memory, dict(context.memory)
        for name, value in params.items():
            swapped[_OTHER + name] = value
            swapped[_SPEED + name] = memory[_OTHERS_SPEED + name]
            swapped[_OTHERS_SPEED + name] = memory[_SPEED + name]
        return {name: memory[_OTHER + name] for name in params}, swapped

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Send the other model; the own one predicts."""
        return {name: context.memory[_OTHER + name] for name in params}, context.state
