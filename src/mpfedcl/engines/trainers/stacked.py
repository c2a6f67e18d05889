"""The trainer of many small models at once: each parameter is one [clients, ...] tensor.

The method's loss is written for one client; `torch.func.vmap` runs it for all of them. The sum of
their losses has every client's own gradient, so ordinary autograd differentiates it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers.base import (
    ClientTask,
    Schedule,
    TrainedClients,
    TrainedStack,
    Trainer,
    make_schedule,
    stack_tensors,
)
from mpfedcl.engines.trainers.optimizer import make_optimizer
from mpfedcl.methods import Batch, Context, received_at


class StackedTrainer(Trainer):
    """Train any method and any model that `vmap` can run, as a stack."""

    name = "stacked"

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train clients with states of the same names together."""
        alike: dict[tuple[str, ...], list[ClientTask]] = {}
        for task in tasks:
            alike.setdefault(tuple(sorted(task.state)), []).append(task)
        return [self._train_alike(some, round_number, received) for some in alike.values()]

    def _train_alike(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> TrainedClients:
        training = self._method.local_training(round_number)
        schedule = make_schedule(
            [task.client for task in tasks],
            self._experiment,
            [task.draw_number(round_number) for task in tasks],
            training,
        )
        by_name = {task.client.name: task for task in tasks}
        tasks = [by_name[client.name] for client in schedule.clients]
        contexts = [
            Context(self._model.apply, task.start, received, task.state, task.own) for task in tasks
        ]
        begun = [self._method.begin(context) for context in contexts]
        params = stack_tensors([params for params, _ in begun])
        stack = _StackedContext(
            stack_tensors([task.start for task in tasks]),
            stack_tensors([task.state for task in tasks]),
            stack_tensors([task.own for task in tasks]),
            stack_tensors([memory for _, memory in begun]),
        )
        losses = self._run_steps(schedule, params, stack, round_number, received)
        memories = [stack.memory_of(index) for index in range(len(tasks))]
        contexts = [replace(c, memory=m) for c, m in zip(contexts, memories, strict=True)]
        return self._finish(schedule, contexts, params, losses)

    def _run_steps(
        self,
        schedule: Schedule,
        params: Tensors,
        stack: "_StackedContext",
        round_number: int,
        received: object,
    ) -> Tensor:
        """Run all steps of all clients, in place; return their mean losses."""
        descent = self._method.local_training(round_number)[:2]
        optimizer = make_optimizer(params, self._experiment.train, descent)
        inputs, labels, num_rows = schedule.inputs(), schedule.labels(), schedule.num_rows
        sums = torch.zeros(len(schedule.clients), dtype=torch.float64, device=labels.device)
        has_own_steps = not self._method.plain_steps
        for step in range(schedule.num_steps[0]):
            given = received_at(received, step)
            active = schedule.active(step)
            rows = slice(step * num_rows, (step + 1) * num_rows)
            mask = schedule.mask[:active, step]
            batch = Batch(inputs[:active, rows], labels[:active, rows], mask)
            now, kept = {n: v[:active] for n, v in params.items()}, stack.first(active)
            leaves = {name: value.detach().requires_grad_() for name, value in now.items()}
            losses = vmap(partial(self._loss, given))(leaves, batch, kept)
            slopes = torch.autograd.grad(losses.sum(), list(leaves.values()))
            gradients = dict(zip(leaves, slopes, strict=True))
            if has_own_steps:
                gradients, memory = vmap(partial(self._adjust, given))(gradients, now, kept)
                stack.remember(memory)
            optimizer.step([gradients[name] for name in params], active)
            if has_own_steps:
                changed, memory = vmap(partial(self._after_step, given))(now, stack.first(active))
                # A method may swap the two, and they must not share memory.
                memory = {name: value.clone() for name, value in memory.items()}
                for name, value in now.items():
                    value.copy_(changed[name])
                stack.remember(memory)
            sums[:active] += losses.detach() * mask.sum(1)
        return sums.cpu() / schedule.mask.sum((1, 2)).cpu()

    def _loss(
        self, given: object, params: Tensors, batch: Batch, kept: "_StackedContext"
    ) -> Tensor:
        return self._method.loss(params, batch, self._context(given, kept))

    def _adjust(
        self, given: object, gradients: Tensors, params: Tensors, kept: "_StackedContext"
    ) -> tuple[Tensors, Tensors]:
        return self._method.adjust(gradients, params, self._context(given, kept))

    def _after_step(
        self, given: object, params: Tensors, kept: "_StackedContext"
    ) -> tuple[Tensors, Tensors]:
        return self._method.after_step(params, self._context(given, kept))

    def _context(self, given: object, kept: "_StackedContext") -> Context:
        """Return the context of one client in a step, under vmap."""
        return Context(self._model.apply, kept.start, given, kept.state, kept.own, kept.memory)

    def _finish(
        self,
        schedule: Schedule,
        contexts: Sequence[Context],
        params: Tensors,
        losses: Tensor,
    ) -> TrainedStack:
        method = self._method
        finished, states = None, [context.state for context in contexts]
        if not method.plain_steps:
            pairs = [
                method.finish(
                    {name: value[index] for name, value in params.items()},
                    context,
                    schedule.num_steps[index],
                )
                for index, context in enumerate(contexts)
            ]
            finished, states = [sent for sent, _ in pairs], [state for _, state in pairs]
        return TrainedStack(
            schedule.clients,
            self._model,
            params,
            starts=[
                {n: value for n, value in context.start.items() if method.shared(n)}
                for context in contexts
            ],
            finished=finished,
            states=states,
            losses=losses.tolist(),
        )


class _StackedContext(NamedTuple):
    """The contexts of clients in a stack: [clients, ...] by name."""

    start: Tensors
    state: Tensors
    own: Tensors
    memory: Tensors

    def first(self, active: int) -> "_StackedContext":
        """Return the first clients' part."""
        return _StackedContext(*({n: v[:active] for n, v in part.items()} for part in self))

    def remember(self, memory: Tensors) -> None:
        """Replace the memory of the first clients; the others have finished."""
        for name, value in memory.items():
            self.memory[name][: len(value)] = value

    def memory_of(self, index: int) -> Tensors:
        """Return the memory of one client."""
        return {name: value[index] for name, value in self.memory.items()}
