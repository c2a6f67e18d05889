"""The reference trainer: one client after the other, in plain PyTorch."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mpfedcl.core.rng import seed_for
from mpfedcl.engines.trainers.base import (
    ClientTask,
    TrainedClient,
    TrainedClients,
    Trainer,
    draw_batches,
    replace_values,
)
from mpfedcl.engines.trainers.optimizer import make_optimizer
from mpfedcl.methods import Context
from mpfedcl.rounds.assembly import split_buffers


class LoopTrainer(Trainer):
    """Train clients in turn."""

    name = "loop"

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients, each with a model of its own."""
        return [self._train(task, round_number, received) for task in tasks]

    def _train(self, task: ClientTask, round_number: int, received: object) -> TrainedClient:
        # Whatever the model draws, such as dropout, depends on the client and the round only.
        with torch.random.fork_rng(enabled=self._model.difference is not None):
            if self._model.difference is not None:
                torch.manual_seed(
                    seed_for(self._experiment.seed, task.number, task.client.name, "training")
                )
            return self._run_steps(task, round_number, received)

    def _run_steps(self, task: ClientTask, round_number: int, received: object) -> TrainedClient:
        method, client = self._method, task.client
        start, buffers = split_buffers(task.start, self._model)
        buffers = {name: value.clone() for name, value in buffers.items()}
        apply = self._model.apply_in_training(task.start, buffers)
        context = Context(apply, start, received, task.state, task.own)
        begun, memory = method.begin(context)
        context = replace(context, memory=memory)
        training = method.local_training(round_number)
        # Batch normalization cannot train on a single sample.
        least = 2 if self._model.buffers else 1
        batches = draw_batches(client, self._experiment, task.number, training, least)
        params = {n: v.detach().clone().requires_grad_() for n, v in begun.items()}
        optimizer = make_optimizer(params, self._experiment.train, training[:2])
        losses = torch.zeros((), dtype=torch.float64, device=client.inputs.device)
        for step, chosen in enumerate(batches):
            batch = task.batch(chosen, step)
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
        if averaged:
            averaged = averaged | {n: each for n, each in buffers.items() if method.shared(n)}
        trained |= buffers
        mean = float(losses) / sum(map(len, batches))
        return TrainedClient(
            client, self._model, trained, averaged=averaged, state=state, loss=mean
        )
