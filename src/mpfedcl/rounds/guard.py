"""The guard: every update is judged before it touches the server's state.

In federated learning the server computes with what strangers send. One NaN, a forged sample count
or a tensor of another shape must cost that client its round, never the others their model.
"""

import math
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from mpfedcl.messages import Broadcast, ClientReadings, StackMember, Update
from mpfedcl.methods import Method
from mpfedcl.prototypes import Prototypes
from mpfedcl.tensors import Tensors


class Guard:
    """Judges updates against what an honest client would send."""

    def __init__(
        self,
        template: Tensors,
        sizes: Mapping[str, int],
        *,
        num_classes: int,
        dimension: int,
        num_prototypes: int | None,
        shares_prototypes: bool,
        max_norm: float,
        max_length: float,
    ) -> None:
        self.template = template
        self._sizes = sizes
        self._num_classes = num_classes
        self._dimension = dimension
        self._num_prototypes = num_prototypes
        self._shares_prototypes = shares_prototypes
        self._max_norm = max_norm
        self._max_length = max_length

    @classmethod
    def of(
        cls, method: Method, params: Tensors, sizes: Mapping[str, int], *, dimension: int
    ) -> Self:
        """Return the guard of a method's server whose clients have so many samples."""
        max_norm = method.experiment.guard.max_norm
        return cls(
            method.template(params),
            sizes,
            num_classes=method.num_classes,
            dimension=dimension,
            num_prototypes=method.num_prototypes,
            shares_prototypes=method.shares_prototypes,
            max_norm=max_norm,
            # A unit vector may come out a rounding longer than 1, and 1 may be the bound.
            max_length=min(1.001 * max_norm, method.longest_prototype()),
        )

    def judge_form(self, update: Update) -> str | None:
        """Return why this is no update at all, or None: what follows may then look into it."""
        if not isinstance(update.client, str):
            return "the client's name is no text"
        if not isinstance(update.prototypes, Prototypes) or not isinstance(
            update.averaged, dict | StackMember
        ):
            return "tensors or prototypes are missing"
        # A share is this process's own; only tensors may come from a stranger.
        averaged = {} if isinstance(update.averaged, StackMember) else update.averaged
        parts = {**averaged, "vectors": update.prototypes.vectors}
        for name, value in parts.items():
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                return f"{name} is no dense tensor"
            if value.device.type == "meta":
                return f"{name} holds no values"
        return None

    def judge(self, update: Update, broadcast: Broadcast) -> str | None:
        """Return why a well-formed update must be rejected, or None if it is sound."""
        return (
            self._judge_numbers(update)
            or (self.judge_readings(update.readings) if update.readings else None)
            or self._judge_change(update.averaged, broadcast)
            or self._judge_prototypes(update, broadcast.pool.vectors.dtype)
        )

    def _judge_numbers(self, update: Update) -> str | None:
        expected = self._sizes.get(update.client)
        if expected is None:
            return f"{update.client!r} is not a client of this federation"
        if type(update.num_samples) is not int or update.num_samples != expected:
            return f"num_samples is {update.num_samples!r}; this client has {expected}"
        if type(update.loss) is not float or not math.isfinite(update.loss):
            return f"loss is {update.loss!r}; it must be finite"
        return None

    def judge_readings(self, readings: ClientReadings) -> str | None:
        """Judge what a client says of the round before: percentages, and counts of images."""
        said = [
            value for row in readings.table.values() for value in row.values() if value is not None
        ]
        if not all(type(value) is float and 0 <= value <= 100 for value in said):
            return "a reading is not in 0 to 100 %"
        rows = readings.confusion or []
        width = self._num_classes + 1
        if rows and (len(rows) != width - 1 or any(len(row) != width for row in rows)):
            return f"confusions must be [{width - 1}][{width}] counts"
        if any(type(count) is not int or not 0 <= count < 2**40 for row in rows for count in row):
            return "confusions must be counts of images"
        return None

    @torch.no_grad()
    def _judge_change(self, averaged: Tensors | StackMember, broadcast: Broadcast) -> str | None:
        if isinstance(averaged, StackMember):
            squares = averaged.stack.squared_changes[averaged.index]
        else:
            if problem := self._judge_shapes(averaged):
                return problem
            squares = 0.0
            for name, value in averaged.items():
                change = value - broadcast.params[name] if name in broadcast.params else value
                squares += float(change.square().sum(dtype=torch.float64))
        # The sum of squares is finite only if every value is: one pass serves both checks.
        if not math.isfinite(squares):
            return "a tensor holds values that are not finite"
        if math.sqrt(squares) > self._max_norm:
            return f"the model changed by {math.sqrt(squares):.3g}; at most {self._max_norm:g}"
        return None

    def _judge_shapes(self, averaged: Tensors) -> str | None:
        if averaged.keys() != self.template.keys():
            odd = sorted(averaged.keys() ^ self.template.keys())
            return f"tensors {odd[:3]} are missing or unknown"
        for name, value in averaged.items():
            wanted = self.template[name]
            if problem := _judge_tensor(f"tensor {name}", value, wanted.shape, wanted.dtype):
                return problem
        return None

    def _judge_prototypes(self, update: Update, dtype: torch.dtype) -> str | None:
        prototypes = update.prototypes
        count = prototypes.labels.shape[0] if prototypes.labels.ndim == 1 else -1
        if count and not self._shares_prototypes:
            return "prototypes came although the method shares none"
        for problem in (
            _judge_tensor("labels", prototypes.labels, torch.Size([count]), torch.int64),
            _judge_tensor("counts", prototypes.counts, torch.Size([count]), torch.int64),
            _judge_tensor(
                "vectors", prototypes.vectors, torch.Size([count, self._dimension]), dtype
            ),
        ):
            if problem:
                return f"prototype {problem}"
        if count == 0:
            return None
        if not prototypes.vectors.isfinite().all():
            return "prototype vectors hold values that are not finite"
        longest = float(prototypes.vectors.norm(dim=1).max())
        if longest > self._max_length:
            return f"a prototype has length {longest:.3g}; at most {self._max_length:g}"
        if int(prototypes.labels.min()) < 0 or int(prototypes.labels.max()) >= self._num_classes:
            return f"prototype labels must lie in 0..{self._num_classes - 1}"
        if (
            int(prototypes.counts.min()) < 1
            or int(prototypes.counts.double().sum()) > update.num_samples
        ):
            return f"prototype counts must be at least 1 and sum to at most {update.num_samples}"
        most = int(prototypes.labels.bincount().max())
        if self._num_prototypes is not None and most > self._num_prototypes:
            return f"a class has {most} prototypes; at most {self._num_prototypes}"
        return None


def _judge_tensor(name: str, value: Tensor, shape: torch.Size, dtype: torch.dtype) -> str | None:
    if value.shape != shape:
        return f"{name} has shape {list(value.shape)}; expected {list(shape)}"
    if value.dtype != dtype:
        return f"{name} has type {value.dtype}; expected {dtype}"
    return None
