"""The reference trainer: one client after the other, in plain PyTorch."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mpfedcl.engines.trainers.base import (
    ClientTask,
    TrainedClient,
    TrainedClients,
    Trainer,
    draw_batches,
    replace_values,
)
from mpfedcl.engines.trainers.optimizer import make_optimizer
from mpfedcl.methods import Context, FullBatch


class LoopTrainer(Trainer):
    """Train clients in turn."""

    name = "loop"

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients, each with a model of its own."""
        return [self._train(task, round_number, received) for task in tasks]

    def _train(self, task: ClientTask, round_number: int, received: object) -> TrainedClient:
        method, client = self._method, task.client
        context = Context(self._model.apply, task.start, received, task.state, task.own)
        begun, memory = method.begin(context)
        context = replace(context, memory=memory)
        training = method.local_training(round_number)
        batches = draw_batches(client, self._experiment, task.number, training)
        params = {n: v.detach().clone().requires_grad_() for n, v in begun.items()}
        optimizer = make_optimizer(params, self._experiment.train, training[:2])
        losses = torch.zeros((), dtype=torch.float64, device=client.inputs.device)
        for step, chosen in enumerate(batches):
            batch = FullBatch.of(client.inputs[chosen], client.labels[chosen])
            context = replace(context, step=step)
            loss = method.loss(params, batch, context)
            slopes = torch.autograd.grad(loss, list(params.values()))
            gradients = dict(zip(params, slopes, strict=True))
            with torch.no_grad():
                gradients, memory = method.adjust(gradients, params, context)
            optimizer.step([gradients[name] for name in params])
            context = replace(context, memory=memory)
            if not method.plain_steps:
                with torch.no_grad():
                    changed, memory = method.after_step(params, context)
                    context = replace(context, memory=replace_values(params, changed, memory))
            losses += loss.detach() * len(chosen)
        trained = {name: value.detach() for name, value in params.items()}
        averaged, state = method.finish(trained, context, len(batches))
        mean = float(losses) / sum(map(len, batches))
        return TrainedClient(
            client, self._model, trained, averaged=averaged, state=state, loss=mean
        )
