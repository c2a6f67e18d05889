"""The reference trainer: one client after the other, in plain PyTorch."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData
from mpfedcl.engines.trainers.base import (
    ClientTask,
    TrainedClient,
    TrainedClients,
    Trainer,
    draw_batches,
)
from mpfedcl.engines.trainers.optimizer import make_optimizer
from mpfedcl.methods import Context, FullBatch, received_at


class LoopTrainer(Trainer):
    """Train clients in turn."""

    name = "loop"

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients, each with a model of its own."""
        return [self._train(task, round_number, received) for task in tasks]

    def _train(self, task: ClientTask, round_number: int, received: object) -> TrainedClient:
        context = Context(self._model.apply, task.start, received, task.state, task.own)
        begun, memory = self._method.begin(context)
        training = self._method.local_training(round_number)
        number = task.draw_number(round_number)
        batches = draw_batches(task.client, self._experiment, number, training)
        context = replace(context, memory=memory)
        params, memory, loss = self._run_steps(task.client, batches, begun, context, round_number)
        averaged, state = self._method.finish(params, replace(context, memory=memory), len(batches))
        return TrainedClient(
            task.client, self._model, params, averaged=averaged, state=state, loss=loss
        )

    def _run_steps(
        self,
        client: ClientData,
        batches: Sequence[Tensor],
        begun: Tensors,
        context: Context,
        round_number: int,
    ) -> tuple[Tensors, Tensors, float]:
        """Take a step on each batch; return the parameters, the memory and the mean loss."""
        method, received = self._method, context.received
        params = {n: v.detach().clone().requires_grad_() for n, v in begun.items()}
        optimizer = make_optimizer(
            params, self._experiment.train, method.local_training(round_number)[:2]
        )
        losses = torch.zeros((), dtype=torch.float64, device=client.inputs.device)
        for step, chosen in enumerate(batches):
            batch = FullBatch.of(client.inputs[chosen], client.labels[chosen])
            context = replace(context, received=received_at(received, step))
            loss = method.loss(params, batch, context)
            slopes = torch.autograd.grad(loss, list(params.values()))
            gradients = dict(zip(params, slopes, strict=True))
            with torch.no_grad():
                gradients, memory = method.adjust(gradients, params, context)
            optimizer.step([gradients[name] for name in params])
            context = self._end_step(params, replace(context, memory=memory))
            losses += loss.detach() * len(chosen)
        trained = {name: value.detach() for name, value in params.items()}
        mean = float(losses) / sum(map(len, batches))
        return trained, context.memory, mean

    @torch.no_grad()
    def _end_step(self, params: Tensors, context: Context) -> Context:
        """Let the method change parameters and memory after a step."""
        if self._method.plain_steps:
            return context
        changed, memory = self._method.after_step(params, context)
        # A method may swap the two, and they must not share memory.
        memory = {name: value.clone() for name, value in memory.items()}
        for name, value in params.items():
            value.copy_(changed[name])
        return replace(context, memory=memory)
