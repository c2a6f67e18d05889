"""Bound what a client sends: the norm of the model's change, and private statistics."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import PrivacySettings
from mpfedcl.gaussian.mechanism import PrivateSums
from mpfedcl.methods.messages import Broadcast, StackMember, Update, UpdateStack
from mpfedcl.privacy.private_rounds import MODEL_CLIP, ROUNDING
from mpfedcl.rounds.processors.base import Processor, mark

_STACKS_KEPT = 4
"""Stacks kept at a time: their clients alternate in name order."""


class Clip(Processor):
    """Scales changes down to the norm `update.clip`.

    The change is the difference between the parameters that a client sends and those it was sent.
    The server clips again, in case a client did not.
    """

    name = "clip"

    def __init__(self, limit: float, marked_as: str = name) -> None:
        self._limit = limit
        self._marked_as = marked_as
        self._stacks: dict[int, _ClippedStack] = {}

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return a clip to `update.clip`, or to `privacy.clip` where changes get noise."""
        limit: float | None = experiment.update.clip
        if experiment.privacy.has_budget:
            limit = experiment.privacy.clip or MODEL_CLIP
        return None if limit is None else cls(limit)

    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Clip the change."""
        if isinstance(update.averaged, StackMember):
            return self._clip_member(update, update.averaged, broadcast)
        return self._clip_tensors(update, broadcast, self._limit)

    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Clip the change of a client that did not."""
        if isinstance(update.averaged, StackMember):
            return update
        return self._clip_tensors(update, broadcast, self._limit * (1 + ROUNDING))

    def end_round(self) -> None:
        """Release the stacks, which hold their clients' models in memory."""
        self._stacks = {}

    @torch.no_grad()
    def _clip_tensors(self, update: Update, broadcast: Broadcast, limit: float) -> Update:
        if not update.averaged:
            return update
        assert isinstance(update.averaged, dict)
        changes = changes_of(update.averaged, broadcast)
        squares = _squares(changes)
        if _scale(squares, limit) == 1:
            return update
        scale = _scale(squares, self._limit)
        clipped = {
            name: broadcast.params[name] + scale * change
            if name in broadcast.params
            else scale * change
            for name, change in changes.items()
        }
        return mark(replace(update, averaged=clipped), self._marked_as)

    def _clip_member(self, update: Update, member: StackMember, broadcast: Broadcast) -> Update:
        """Clip within the stack, whose clients are summed without being written out."""
        key = id(member.stack)
        if key not in self._stacks:
            # Only the last few, because stacks hold models in memory.
            kept = list(self._stacks.items())[1 - _STACKS_KEPT :]
            clipped = _ClippedStack(member.stack, broadcast.params, self._limit)
            self._stacks = dict([*kept, (key, clipped)])
        clipped = self._stacks[key]
        if all(scale == 1 for scale in clipped.scales):
            return update
        update = replace(update, averaged=StackMember(clipped, member.index))
        return mark(update, self._marked_as) if clipped.scales[member.index] < 1 else update


class _ClippedStack:
    """A stack whose clients' changes x_i - x are scaled: Σ w_i (x + s_i (x_i - x)) in one go."""

    def __init__(self, stack: UpdateStack, start: Tensors, limit: float) -> None:
        self.scales = [_scale(squares, limit) for squares in stack.squared_changes]
        self._stack = stack
        self._start = start

    def __len__(self) -> int:
        return len(self._stack)

    @property
    def template(self) -> Tensors:
        """One client's tensors, for their shapes."""
        return self._stack.template

    def weighted_sum(self, weights: Tensor) -> Tensors:
        """Return the weighted sum over clients."""
        scales = torch.tensor(self.scales, dtype=torch.float64)
        sums = self._stack.weighted_sum(weights * scales)
        rest = float((weights * (1 - scales)).sum())
        return {name: value + rest * self._start[name] for name, value in sums.items()}

    @property
    def squared_changes(self) -> Sequence[float]:
        """The squared norms of the clipped changes."""
        pairs = zip(self._stack.squared_changes, self.scales, strict=True)
        return [squares * scale**2 for squares, scale in pairs]

    def tensors(self, index: int) -> Tensors:
        """Return what one client shares."""
        scale, own = self.scales[index], self._stack.tensors(index)
        if scale == 1:
            return own
        return {n: self._start[n] + scale * (value - self._start[n]) for n, value in own.items()}


class PrivateStatistics(Processor):
    """Does a client's part for private statistics; models are clipped by `Clip`.

    With client-level DP, statistics are clipped at the client and again at the server. With
    `privacy.model local`, the client adds noise too, and only then is an update marked.
    """

    name = "private statistics"

    def __init__(self, settings: PrivacySettings) -> None:
        self._settings = settings

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return a processor if there is a privacy budget."""
        return cls(experiment.privacy) if experiment.privacy.has_budget else None

    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Clip the statistics and, with local DP, add noise."""
        mechanism = self._mechanism(update)
        if mechanism is None:
            return update
        bounded = mechanism.bound(update.summed)
        if not mechanism.is_local:
            return _with_sums(update, bounded)
        return mark(_with_sums(update, mechanism.add_noise(bounded)), self.name)

    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Clip the statistics of a client that did not."""
        mechanism = self._mechanism(update)
        if mechanism is None or mechanism.is_local:
            return update
        return _with_sums(update, mechanism.bound(update.summed))

    def _mechanism(self, update: Update) -> PrivateSums | None:
        """Return the mechanism; None if clients do nothing, as for record-level central DP."""
        shapes = update.summed_shapes
        if "counts" not in shapes:
            return None
        found = PrivateSums.of(self._settings, has_moments="moment" in shapes)
        return found if found and (found.is_local or found.unit == "client") else None


def _with_sums(update: Update, summed: Tensors) -> Update:
    like = update.summed_shapes
    return replace(update, summed={n: value.to(like[n].dtype) for n, value in summed.items()})


@torch.no_grad()
def squared_change(averaged: Tensors | StackMember, broadcast: Broadcast) -> float:
    """Return |x_i - x|² of a client's parameters; not finite if a value is not."""
    if isinstance(averaged, StackMember):
        return averaged.stack.squared_changes[averaged.index]
    return _squares(changes_of(averaged, broadcast))


def changes_of(averaged: Tensors, broadcast: Broadcast) -> Tensors:
    """Return the difference between the parameters that a client sends and those it was sent."""
    return {
        name: value - broadcast.params[name] if name in broadcast.params else value
        for name, value in averaged.items()
    }


def _squares(changes: Tensors) -> float:
    # Rows first: summing everything in double precision takes three times as long.
    return sum(float(each.square().sum(-1).sum(dtype=torch.float64)) for each in changes.values())


def _scale(squares: float, limit: float) -> float:
    """Return the factor that scales a change of this squared norm to the limit; at most 1.

    1 also if a value is not finite, which validation rejects.
    """
    length = math.sqrt(squares) if squares < math.inf else math.nan
    return limit / length if length > limit else 1.0
