"""Bound what a client sends: the norm of the model's change, and private statistics."""

import math
from dataclasses import replace
from typing import Self

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import PrivacySettings
from mpfedcl.gaussian.mechanism import PrivateSums
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.privacy.private_rounds import MODEL_CLIP, ROUNDING
from mpfedcl.rounds.processors.base import Processor, mark


class Clip(Processor):
    """Scales changes down to the norm `limit`.

    The change is the difference between the parameters that a client sends and those it was sent.
    The server clips again, in case a client did not.
    """

    name = "clip"

    def __init__(self, limit: float, marked_as: str = name) -> None:
        self._limit = limit
        self._marked_as = marked_as

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return a clip to `update.clip`, or to `privacy.clip` where changes get noise."""
        limit: float | None = experiment.update.clip
        if experiment.privacy.has_budget:
            limit = experiment.privacy.clip or MODEL_CLIP
        return None if limit is None else cls(limit)

    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Clip the change."""
        return self._clip(update, broadcast, self._limit)

    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Clip the change of a client that did not."""
        return self._clip(update, broadcast, self._limit * (1 + ROUNDING))

    @torch.no_grad()
    def _clip(self, update: Update, broadcast: Broadcast, most: float) -> Update:
        """Scale the change down to the limit if its norm is above `most`."""
        if not update.averaged:
            return update
        squares = squared_change(update.averaged, broadcast)
        if _scale(squares, most) == 1:
            return update
        scale = _scale(squares, self._limit)
        averaged = update.written_out().averaged
        assert isinstance(averaged, dict)
        clipped = {
            name: broadcast.params[name] + scale * change
            if name in broadcast.params
            else scale * change
            for name, change in changes_of(averaged, broadcast).items()
        }
        return mark(replace(update, averaged=clipped), self._marked_as)


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
        if "counts" not in update.summed:
            return None
        found = PrivateSums.of(self._settings, has_moments="moment" in update.summed)
        return found if found and (found.is_local or found.unit == "client") else None


def _with_sums(update: Update, summed: Tensors) -> Update:
    like = update.summed
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
