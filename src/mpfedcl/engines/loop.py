"""The reference: one client after the other, in plain PyTorch."""

from collections.abc import Sequence

import torch

from mpfedcl.engines.optimizer import MomentumSGD
from mpfedcl.engines.schedule import draw_batches
from mpfedcl.engines.trained_clients import TrainedClient, TrainedClients
from mpfedcl.engines.trainer import ClientTask, Trainer
from mpfedcl.methods import Batch, Context
from mpfedcl.tensors import Tensors


class LoopTrainer(Trainer):
    """Trains clients in turn."""

    name = "loop"

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients; each stands alone afterwards."""
        return [self._train(task, round_number, received) for task in tasks]

    def _train(self, task: ClientTask, round_number: int, received: object) -> TrainedClient:
        params, loss, num_steps = self._run_steps(task, round_number, received)
        context = Context(self._model.apply, task.start, received, task.state)
        averaged, state = self._method.finish(params, context, num_steps)
        return TrainedClient(
            task.client, self._model, params, averaged=averaged, state=state, loss=loss
        )

    def _run_steps(
        self, task: ClientTask, round_number: int, received: object
    ) -> tuple[Tensors, float, int]:
        """Run the local epochs of SGD; return the parameters, the mean loss and the steps."""
        client, train = task.client, self._experiment.train
        params = {n: v.detach().clone().requires_grad_() for n, v in task.start.items()}
        optimizer = MomentumSGD(params, train.learning_rate(round_number), train.momentum)
        losses = torch.zeros((), dtype=torch.float64, device=client.inputs.device)
        batches = draw_batches(client, self._experiment, round_number)
        for step, chosen in enumerate(batches):
            everyone = torch.ones(len(chosen), dtype=torch.bool, device=chosen.device)
            batch = Batch(client.inputs[chosen], client.labels[chosen], everyone)
            given = self._method.at_step(received, step)
            context = Context(self._model.apply, task.start, given, task.state)
            loss = self._method.loss(params, batch, context)
            gradients = torch.autograd.grad(loss, list(params.values()))
            adjusted = self._method.adjust(
                dict(zip(params, gradients, strict=True)), params, context
            )
            optimizer.step([adjusted[name] for name in params])
            losses += loss.detach() * len(chosen)
        trained = {name: value.detach() for name, value in params.items()}
        return trained, float(losses) / (train.epochs * len(client.labels)), len(batches)
