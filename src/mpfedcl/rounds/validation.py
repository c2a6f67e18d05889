"""The guard: every update is judged before it touches the server's state.

In federated learning the server computes with what strangers send. One NaN, a forged sample count
or a tensor of another shape must cost that client its round, never the others their model.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import MemberSums
from mpfedcl.methods import CollectsStatistics, SharesPrototypes, prototype_rule
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.processors.clip import squared_change

LARGEST_LOSS = 1e12
"""Of one client, either way; beyond it the mean of all says nothing, and might not be finite."""
LARGEST_SUM = 1e100
"""Of any number that is added up: all clients' together stay far from the end of the floats."""


class UpdateValidator:
    """Judges updates against what an honest client would send.

    Args:
        assembly: The method, the model and what clients begin with.
        sizes: Training samples by client.
        label_counts: The same by class, of clients on other machines; they are judged more closely.
    """

    def __init__(
        self,
        assembly: Assembly,
        sizes: Mapping[str, int],
        label_counts: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        method = assembly.method
        self._method = method
        self.template = assembly.template
        """Tensors of the shapes and types of what is averaged."""
        self.sums = assembly.sums
        """The same of what is added up."""
        self._sizes = sizes
        self._label_counts = label_counts
        self._trains = method.trains
        self._is_private = method.experiment.privacy.has_budget
        self._max_images = method.experiment.network.max_images
        self._may_withhold = method.may_withhold
        self._num_classes = method.num_classes
        self._dimension = assembly.model.embedding_size
        self._most_prototypes = prototype_rule(method).max_prototypes
        self._shares_prototypes = isinstance(method, SharesPrototypes)
        self._max_norm = method.experiment.validation.max_norm
        # A unit vector may come out a rounding longer than 1, and 1 may be the bound.
        self._max_length = min(1.001 * self._max_norm, prototype_rule(method).max_norm)

    @property
    def bytes_up(self) -> int:
        """What a client sends at most, but for prototypes."""
        tensors = [*self.template.values(), *self.sums.values()]
        return sum(each.numel() * each.element_size() for each in tensors)

    def judge_form(self, update: Update) -> str | None:
        """Return why this is no update at all, or None: what follows may then look into it."""
        if not isinstance(update.client, str):
            return "the client's name is not text"
        if not isinstance(update.prototypes, Prototypes) or not isinstance(
            update.averaged, dict | StackMember | None
        ):
            return "tensors or prototypes are missing"
        # A share is this process's own; only tensors may come from a stranger.
        averaged = update.averaged if isinstance(update.averaged, dict) else {}
        summed = {} if isinstance(update.summed, MemberSums) else update.summed
        parts = {**averaged, **summed, "vectors": update.prototypes.vectors}
        for name, value in parts.items():
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                return f"{name} is not a dense tensor"
            if value.device.type == "meta":
                return f"{name} holds no values"
        return None

    def judge_shapes(self, update: Update) -> str | None:
        """Return which tensors are not of the names, shapes and types that were asked for."""
        averaged = update.averaged if isinstance(update.averaged, dict) else self.template
        return _judge_tensors(averaged, self.template) or _judge_tensors(
            update.summed_shapes, self.sums
        )

    def judge(self, update: Update, broadcast: Broadcast) -> str | None:
        """Return why a well-formed update must be rejected, or None if it is sound."""
        return (
            self._judge_numbers(update)
            or self.judge_shapes(update)
            or self._judge_change(update.averaged, broadcast)
            or self._judge_sums(update)
            or self._judge_prototypes(update, broadcast.pool.vectors.dtype)
        )

    def _judge_numbers(self, update: Update) -> str | None:
        expected = self._sizes.get(update.client)
        if expected is None:
            return f"{update.client!r} is not a client of this federation"
        if type(update.num_samples) is not int or update.num_samples != expected:
            return f"num_samples is {update.num_samples!r}; this client has {expected}"
        if update.loss is None and (self._is_private or not self._trains):
            return None
        if type(update.loss) is not float or not math.isfinite(update.loss):
            return f"loss is {update.loss!r}; it must be finite"
        if abs(update.loss) > LARGEST_LOSS:
            return f"loss is {update.loss:.3g}; at most {LARGEST_LOSS:g}"
        return None

    def _judge_change(
        self, averaged: Tensors | StackMember | None, broadcast: Broadcast
    ) -> str | None:
        if averaged is None:
            return None if self._may_withhold else "it withholds its update; this method never does"
        squares = squared_change(averaged, broadcast)
        # The sum of squares is finite only if every value is: one pass serves both checks.
        if not math.isfinite(squares):
            return "a tensor holds values that are not finite"
        if math.sqrt(squares) > self._max_norm:
            return f"the model changed by {math.sqrt(squares):.3g}; at most {self._max_norm:g}"
        return None

    def _judge_sums(self, update: Update) -> str | None:
        if isinstance(update.summed, MemberSums):
            # Made in this process from the samples themselves.
            sound = update.summed.stack.is_finite[update.summed.index]
            return None if sound else "the samples hold values that are not finite"
        for name, value in update.summed.items():
            if problem := _judge_size(value):
                return f"the sums {name} {problem}"
        if not isinstance(self._method, CollectsStatistics):
            return None
        announced = None if self._label_counts is None else self._label_counts[update.client]
        return self._method.judge_sums(update, announced=announced)

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
        # Under a budget nobody says how many samples there are.
        most = self._max_images if self._is_private else update.num_samples
        if int(prototypes.counts.min()) < 1 or int(prototypes.counts.double().sum()) > most:
            return f"prototype counts must be at least 1 and sum to at most {most}"
        found = int(prototypes.labels.bincount().max())
        if self._most_prototypes is not None and found > self._most_prototypes:
            return f"a class has {found} prototypes; at most {self._most_prototypes}"
        return self._judge_announced(update)

    def _judge_announced(self, update: Update) -> str | None:
        """Hold prototypes to what a client on another machine has said that it holds."""
        announced = (self._label_counts or {}).get(update.client)
        # Under a budget nobody says what it holds.
        if announced is None or self._is_private:
            return None
        counts = torch.zeros(self._num_classes, dtype=torch.float64)
        labels = update.prototypes.labels.cpu()
        counts.index_add_(0, labels, update.prototypes.counts.cpu().double())
        for label, (sent, held) in enumerate(zip(counts.tolist(), announced, strict=True)):
            if sent > held:
                return (
                    f"prototypes of class {label} stand for {sent:.0f} samples; this client has "
                    f"announced {held}"
                )
        return None


def _judge_size(value: Tensor) -> str | None:
    largest = float(value.double().abs().max()) if value.numel() else 0.0
    if not math.isfinite(largest):
        return "hold values that are not finite"
    return None if largest <= LARGEST_SUM else f"reach {largest:.3g}; at most {LARGEST_SUM:g}"


def _judge_tensors(tensors: Mapping[str, Tensor], template: Tensors) -> str | None:
    if tensors.keys() != template.keys():
        odd = sorted(tensors.keys() ^ template.keys())
        return f"tensors {odd[:3]} are missing or unknown"
    for name, value in tensors.items():
        wanted = template[name]
        if problem := _judge_tensor(f"tensor {name}", value, wanted.shape, wanted.dtype):
            return problem
    return None


def _judge_tensor(name: str, value: Tensor, shape: torch.Size, dtype: torch.dtype) -> str | None:
    if value.shape != shape:
        return f"{name} has shape {list(value.shape)}; expected {list(shape)}"
    if value.dtype != dtype:
        return f"{name} has type {value.dtype}; expected {dtype}"
    return None
