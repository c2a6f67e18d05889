"""The reference: one client after the other, in plain PyTorch."""

from collections.abc import Sequence

import torch

from mpfedcl.engines.optimizer import Descent
from mpfedcl.engines.schedule import draw_batches
from mpfedcl.engines.trained_clients import Trained, TrainedAlone
from mpfedcl.engines.trainer import Work
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Batch, Context, Method
from mpfedcl.models import Model, Tensors


class LoopTrainer:
    """Trains clients in turn."""

    def __init__(self, experiment: Experiment, method: Method, model: Model) -> None:
        self._experiment = experiment
        self._method = method
        self._model = model

    def train(self, works: Sequence[Work], round_number: int, received: object) -> list[Trained]:
        """Train the clients; each stands alone afterwards."""
        return [self._train(work, round_number, received) for work in works]

    def _train(self, work: Work, round_number: int, received: object) -> TrainedAlone:
        params, loss, num_steps = self._descend(work, round_number, received)
        context = Context(self._model.apply, work.start, received, work.state)
        sums, state = self._method.finish(params, context, num_steps)
        return TrainedAlone(work.client, self._model, params, sums=sums, state=state, loss=loss)

    def _descend(
        self, work: Work, round_number: int, received: object
    ) -> tuple[Tensors, float, int]:
        """Run the local epochs of SGD; return the parameters, the mean loss and the steps."""
        client, train = work.client, self._experiment.train
        params = {n: v.detach().clone().requires_grad_() for n, v in work.start.items()}
        descent = Descent(params, train.learning_rate(round_number), train.momentum)
        losses = torch.zeros((), dtype=torch.float64, device=client.inputs.device)
        batches = draw_batches(client, self._experiment, round_number)
        for step, chosen in enumerate(batches):
            everyone = torch.ones(len(chosen), dtype=torch.bool, device=chosen.device)
            batch = Batch(client.inputs[chosen], client.labels[chosen], everyone)
            given = self._method.at_step(received, step)
            context = Context(self._model.apply, work.start, given, work.state)
            loss = self._method.loss(params, batch, context)
            gradients = torch.autograd.grad(loss, list(params.values()))
            adjusted = self._method.adjust(
                dict(zip(params, gradients, strict=True)), params, context
            )
            descent.step([adjusted[name] for name in params])
            losses += loss.detach() * len(chosen)
        trained = {name: value.detach() for name, value in params.items()}
        return trained, float(losses) / (train.epochs * len(client.labels)), len(batches)
