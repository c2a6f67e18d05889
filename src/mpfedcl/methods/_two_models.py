"""Methods whose clients train a personal model next to the one that they send."""

from torch import zeros_like

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.base import Context, LocalTraining
from mpfedcl.methods.fedavg import FedAvg

_OTHER, _SPEED, _OTHERS_SPEED = "other.", "speed.", "other speed."


class TwoModels(FedAvg):
    """FedAvg; each batch trains the personal model first, then the one that is sent.

    The two models swap places after each step, and each has its own velocity. A subclass changes
    the gradients in `adjust`; even steps train the personal model (`is_personal`).
    """

    family = "personal models"
    primary_predictor = "personal_classifier"
    primary_predictor_global = "global_classifier"
    needs_sgd = True

    def begin_personal(self, context: Context) -> Tensors:
        """Return the personal model that a client begins the round with."""
        return context.start

    def local_training(self, round_number: int) -> LocalTraining:
        """Take two steps on each batch; `adjust` applies the momentum of each model."""
        return super().local_training(round_number)._replace(momentum=0.0, repeats=2)

    def is_personal(self, context: Context) -> bool:
        """Return whether a step trains the personal model."""
        return context.step % 2 == 0

    def begin(self, context: Context) -> tuple[Tensors, Tensors]:
        """Begin with the personal model; both velocities are 0."""
        memory: Tensors = {}
        for name, value in context.start.items():
            memory |= {
                _OTHER + name: value,
                _SPEED + name: zeros_like(value),
                _OTHERS_SPEED + name: zeros_like(value),
            }
        return self.begin_personal(context), memory

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Return v <- momentum v + g."""
        momentum, memory = self.experiment.train.momentum, context.memory
        speed = {n: momentum * memory[_SPEED + n] + g for n, g in gradients.items()}
        return speed, memory | {_SPEED + name: value for name, value in speed.items()}

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        """Swap the two models."""
        memory, swapped = context.memory, dict(context.memory)
        for name, value in params.items():
            swapped[_OTHER + name] = value
            swapped[_SPEED + name] = memory[_OTHERS_SPEED + name]
            swapped[_OTHERS_SPEED + name] = memory[_SPEED + name]
        return {name: memory[_OTHER + name] for name in params}, swapped

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Send the other model; the personal one predicts."""
        return {name: context.memory[_OTHER + name] for name in params}, context.state
