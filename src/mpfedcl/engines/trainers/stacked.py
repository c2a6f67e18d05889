"""The trainer of many small models at once: each parameter is one [clients, ...] tensor.

The method's loss is written for one client; `torch.func.vmap` runs it for all of them. The sum of
their losses has every client's own gradient, so ordinary autograd differentiates it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
    batch_dims,
    leaves_padding_out,
    make_schedule,
    replace_values,
    stack_tensors,
    take_first,
    take_one,
    take_some,
)
from mpfedcl.engines.trainers.optimizer import make_optimizer
from mpfedcl.methods import Context, LocalTraining


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
        method = self._method
        training = method.local_training(round_number)
        pads = leaves_padding_out(method)
        schedule = make_schedule(tasks, self._experiment, training, pads=pads)
        tasks = schedule.tasks
        contexts = [
            Context(self._model.apply, task.start, received, task.state, task.own) for task in tasks
        ]
        begun = [method.begin(context) for context in contexts]
        params = stack_tensors([params for params, _ in begun])
        stack = _Stack(
            stack_tensors([task.start for task in tasks]),
            stack_tensors([task.state for task in tasks]),
            stack_tensors([task.own for task in tasks]),
            stack_tensors([memory for _, memory in begun]),
        )
        losses = self._run_steps(schedule, params, stack, training, received)
        finished, states = None, [context.state for context in contexts]
        if not method.plain_steps:
            pairs = [
                method.finish(
                    take_one(params, index),
                    replace(context, memory=take_one(stack.memory, index)),
                    schedule.num_steps[index],
                )
                for index, context in enumerate(contexts)
            ]
            finished, states = [sent for sent, _ in pairs], [state for _, state in pairs]
        starts = [{n: v for n, v in task.start.items() if method.shared(n)} for task in tasks]
        return TrainedStack(
            schedule.clients,
            self._model,
            params,
            starts=starts,
            finished=finished,
            states=states,
            losses=losses.tolist(),
        )

    def _run_steps(
        self,
        schedule: Schedule,
        params: Tensors,
        stack: "_Stack",
        training: LocalTraining,
        received: object,
    ) -> Tensor:
        """Run all steps of all clients, in place; return their mean losses."""
        method = self._method
        optimizer = make_optimizer(params, self._experiment.train, training[:2])
        whole = schedule.whole()
        sums = torch.zeros(len(schedule.tasks), dtype=torch.float64, device=whole.labels.device)
        for step in range(schedule.num_steps[0]):
            active = schedule.active(step)
            now, kept = take_first(params, active), stack.first(active)
            leaves = {name: value.detach().requires_grad_() for name, value in now.items()}
            losses = []
            for some, batch in schedule.batches(whole, step):
                dims = (0, batch_dims(batch), 0)
                loss = self._for_each(method.loss, received, step, dims)
                found = loss(take_some(leaves, some), batch, stack.take(some))
                sums[some] += found.detach() * batch.mask.sum(1)
                losses.append(found.sum())
            slopes = torch.autograd.grad(losses, list(leaves.values()))
            gradients = dict(zip(leaves, slopes, strict=True))
            if not method.plain_steps:
                adjust = self._for_each(method.adjust, received, step)
                gradients, memory = adjust(gradients, now, kept)
                stack.remember(memory)
            optimizer.step([gradients[name] for name in params], active)
            if not method.plain_steps:
                kept = stack.first(active)
                after_step = self._for_each(method.after_step, received, step)
                changed, memory = after_step(now, kept)
                stack.remember(replace_values(now, changed, memory))
        return sums.cpu() / schedule.mask.sum((1, 2)).cpu()

    def _for_each(
        self, hook: Callable[..., Any], received: object, step: int, in_dims: Any = 0
    ) -> Callable[..., Any]:
        """Return a hook of the method for all clients at once; its last argument is a `_Stack`."""

        def run(*arguments: Any) -> Any:
            *values, stack = arguments
            apply, (start, state, own, memory) = self._model.apply, stack
            return hook(*values, Context(apply, start, received, state, own, memory, step))

        return vmap(run, in_dims)


class _Stack(NamedTuple):
    """The contexts of several clients: [clients, ...] by name."""

    start: Tensors
    state: Tensors
    own: Tensors
    memory: Tensors

    def first(self, active: int) -> "_Stack":
        """Return the first clients' part."""
        return self.take(slice(active))

    def take(self, some: slice | Tensor) -> "_Stack":
        """Return the part of some clients."""
        return _Stack(*(take_some(part, some) for part in self))

    def remember(self, memory: Tensors) -> None:
        """Replace the memory of the first clients; the others have finished."""
        for name, value in memory.items():
            self.memory[name][: len(value)] = value
