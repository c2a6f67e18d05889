"""The local objective and its gradient around a round's training, client by client.

Nothing here changes a client: it is for `--diagnostics convergence`. One client's gradients exist
at a time, beside their sum.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from mpfedcl.convergence.measurement import Measurement, ratio
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.schedule import draw_batches
from mpfedcl.engines.trainer import ClientTask
from mpfedcl.methods import Batch, Context
from mpfedcl.methods.messages import Broadcast
from mpfedcl.models import Model
from mpfedcl.rounds.assembly import Assembly


class ObjectiveInspector:
    """Measures clients between two broadcasts: the one they trained with and the one to follow."""

    def __init__(self, assembly: Assembly, broadcast: Broadcast, following: Broadcast) -> None:
        self._experiment = assembly.experiment
        self._method = method = assembly.method
        self._model = assembly.model
        self._following = following
        self._round = broadcast.round
        self._received = method.prepare(broadcast)
        # The pool alone is new: what else a broadcast carries belongs to the next round.
        self._renewed = method.prepare(replace(broadcast, pool=following.pool))
        self._next = method.prepare(following)

    def inspect(
        self, task: ClientTask, trained: Tensors, state: Tensors
    ) -> tuple[Measurement, Tensors]:
        """Return one client's numbers, and ∇L_i(ω_t).

        `trained` are its parameters after the training, `state` is what it will keep then.
        """
        method, samples = self._method, _all_samples(task)
        now = self._context(task, method.in_full(self._received))
        before, gradient = self._differentiate(task.start, samples, now)
        after, gradient_after = self._differentiate(trained, samples, now)
        rate = self._experiment.train.learning_rate(self._round)
        one_step = {name: value - rate * gradient[name] for name, value in task.start.items()}
        renewed = self._context(task, method.in_full(self._renewed))
        embedding_slope, embedding_length = self._compare_embeddings(task, trained)
        step = _distance(trained, task.start)
        measurement = Measurement(
            num_samples=len(task.client.labels),
            num_steps=len(self._batches(task)),
            objective_before=before,
            objective_after_one_step=self._evaluate(one_step, samples, now),
            objective_after_training=after,
            objective_after_pool=self._evaluate(trained, samples, renewed),
            objective_after_aggregation=self._look_ahead(task, trained, state),
            gradient_norm=_length(gradient),
            stochastic_gradient_norm=self._average_batches(task),
            step=step,
            smoothness=ratio(_distance(gradient_after, gradient), step),
            slope=ratio(abs(after - before), step),
            embedding_slope=embedding_slope,
            embedding_length=embedding_length,
        )
        return measurement, gradient

    def _context(self, task: ClientTask, given: object) -> Context:
        return Context(self._model.apply, task.start, given, task.state, task.own)

    def _differentiate(
        self, params: Tensors, batch: Batch, context: Context
    ) -> tuple[float, Tensors]:
        """Return the loss and its gradient, before a method's `adjust` changes it."""
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        loss = self._method.loss(leaves, batch, context)
        slopes = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        return float(loss.detach()), dict(zip(leaves, slopes, strict=True))

    @torch.no_grad()
    def _evaluate(self, params: Tensors, batch: Batch, context: Context) -> float:
        return float(self._method.loss(params, batch, context))

    def _look_ahead(self, task: ClientTask, trained: Tensors, state: Tensors) -> float:
        """Return the objective of what the client would begin the next round with."""
        if not self._following.params:
            return math.nan
        begun = {**trained, **self._following.params}
        given = self._method.in_full(self._next)
        context = Context(self._model.apply, begun, given, state, task.own)
        return self._evaluate(begun, _all_samples(task), context)

    def _batches(self, task: ClientTask) -> list[Tensor]:
        method = self._method
        return draw_batches(
            task.client,
            self._experiment,
            self._round,
            epochs=method.epochs,
            repeats=method.repeats,
        )

    def _average_batches(self, task: ClientTask) -> float:
        """Return the mean length of the gradients of an epoch's batches, all at the start."""
        client = task.client
        size = self._experiment.train.batch_size
        batches = self._batches(task)
        lengths = []
        for step, chosen in enumerate(batches[: math.ceil(len(client.labels) / size)]):
            everyone = torch.ones(len(chosen), dtype=torch.bool, device=chosen.device)
            batch = Batch(client.inputs[chosen], client.labels[chosen], everyone)
            context = self._context(task, self._method.at_step(self._received, step))
            lengths.append(_length(self._differentiate(task.start, batch, context)[1]))
        return sum(lengths) / len(lengths)

    @torch.no_grad()
    def _compare_embeddings(self, task: ClientTask, trained: Tensors) -> tuple[float, float]:
        """Return how far embeddings moved for each unit that their parameters did, and |z|."""
        inputs, project = task.client.inputs, self._method.project
        old = project(self._model.apply(task.start, inputs)[0])
        new = project(self._model.apply(trained, inputs)[0])
        names = _find_embedding_parameters(self._model, trained, inputs[:1])
        moved = _distance({n: trained[n] for n in names}, {n: task.start[n] for n in names})
        farthest = float((new - old).norm(dim=1).max())
        return ratio(farthest, moved), float(new.norm(dim=1).mean())


def _all_samples(task: ClientTask) -> Batch:
    labels = task.client.labels
    everyone = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    return Batch(task.client.inputs, labels, everyone)


@torch.enable_grad()
def _find_embedding_parameters(model: Model, params: Tensors, inputs: Tensor) -> list[str]:
    """Return the parameters that the embedding depends on: all but the classifier's, mostly."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    embeddings, _ = model.apply(leaves, inputs)
    if not embeddings.requires_grad:
        return []
    slopes = torch.autograd.grad(embeddings.sum(), list(leaves.values()), allow_unused=True)
    return [name for name, slope in zip(leaves, slopes, strict=True) if slope is not None]


def _length(tensors: Tensors) -> float:
    """Return the length of all tensors as one vector."""
    squares = [value.square().sum(dtype=torch.float64) for value in tensors.values()]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def _distance(left: Tensors, right: Tensors) -> float:
    return _length({name: value - right[name] for name, value in left.items()})


def mean_gradient_norm(total: Tensors, weight: int) -> float:
    """Return the length of a weighted sum of gradients, divided by the weight; NaN for nobody."""
    return _length(total) / weight if weight else math.nan
