"""Many small models at once: each parameter is one [clients, ...] tensor.

The method's loss is written for one client; `torch.func.vmap` runs it for all of them. The sum of
their losses has every client's own gradient, so ordinary autograd differentiates it.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from mpfedcl.engines.optimizer import MomentumSGD
from mpfedcl.engines.schedule import Schedule, make_schedule
from mpfedcl.engines.trained_clients import TrainedClients, TrainedStack
from mpfedcl.engines.trainer import ClientTask, Trainer
from mpfedcl.methods import Batch, Context, Method
from mpfedcl.tensors import Tensors


class StackedTrainer(Trainer):
    """Trains any method and any model that `vmap` can run, as a stack."""

    name = "stacked"

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train side by side the clients that keep the same things."""
        alike: dict[tuple[str, ...], list[ClientTask]] = {}
        for task in tasks:
            alike.setdefault(tuple(sorted(task.state)), []).append(task)
        return [self._train_alike(some, round_number, received) for some in alike.values()]

    def _train_alike(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> TrainedClients:
        schedule = make_schedule([task.client for task in tasks], self._experiment, round_number)
        by_name = {task.client.name: task for task in tasks}
        tasks = [by_name[client.name] for client in schedule.clients]
        start, state = _stack([w.start for w in tasks]), _stack([w.state for w in tasks])
        params, losses = self._run_steps(schedule, start, state, round_number, received)
        return self._finish(tasks, schedule, params, losses, received)

    def _run_steps(
        self,
        schedule: Schedule,
        start: Tensors,
        state: Tensors,
        round_number: int,
        received: object,
    ) -> tuple[Tensors, Tensor]:
        """Run all steps of all clients; return the stacked parameters and the mean losses."""
        train = self._experiment.train
        params = {name: value.clone() for name, value in start.items()}
        optimizer = MomentumSGD(params, train.learning_rate(round_number), train.momentum)
        inputs, labels, num_rows = schedule.inputs(), schedule.labels(), schedule.num_rows
        sums = torch.zeros(len(schedule.clients), dtype=torch.float64, device=labels.device)
        for step in range(schedule.num_steps[0]):
            given = self._method.at_step(received, step)
            active = schedule.active(step)
            rows = slice(step * num_rows, (step + 1) * num_rows)
            mask = schedule.mask[:active, step]
            batch = Batch(inputs[:active, rows], labels[:active, rows], mask)
            now, begun, own = (
                {n: v[:active] for n, v in t.items()} for t in (params, start, state)
            )
            leaves = {name: value.detach().requires_grad_() for name, value in now.items()}
            losses = vmap(partial(self._loss, given))(leaves, batch, begun, own)
            slopes = torch.autograd.grad(losses.sum(), list(leaves.values()))
            gradients = dict(zip(leaves, slopes, strict=True))
            if type(self._method).adjust is not Method.adjust:
                gradients = vmap(partial(self._adjust, given))(gradients, now, begun, own)
            optimizer.step([gradients[name] for name in params], active)
            sums[:active] += losses.detach() * mask.sum(1)
        sizes = torch.tensor([len(client.labels) for client in schedule.clients])
        return params, sums.cpu() / (train.epochs * sizes)

    def _loss(
        self, given: object, params: Tensors, batch: Batch, start: Tensors, state: Tensors
    ) -> Tensor:
        return self._method.loss(params, batch, Context(self._model.apply, start, given, state))

    def _adjust(
        self, given: object, gradients: Tensors, params: Tensors, start: Tensors, state: Tensors
    ) -> Tensors:
        context = Context(self._model.apply, start, given, state)
        return self._method.adjust(gradients, params, context)

    def _finish(
        self,
        tasks: Sequence[ClientTask],
        schedule: Schedule,
        params: Tensors,
        losses: Tensor,
        received: object,
    ) -> TrainedStack:
        method = self._method
        finished, states = None, [task.state for task in tasks]
        if type(method).finish is not Method.finish:
            pairs = [
                method.finish(
                    {name: value[index] for name, value in params.items()},
                    Context(self._model.apply, task.start, received, task.state),
                    schedule.num_steps[index],
                )
                for index, task in enumerate(tasks)
            ]
            finished, states = [sent for sent, _ in pairs], [state for _, state in pairs]
        return TrainedStack(
            schedule.clients,
            self._model,
            params,
            start={n: value for n, value in tasks[0].start.items() if method.shared(n)},
            finished=finished,
            states=states,
            losses=losses.tolist(),
        )


def _stack(each: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}
