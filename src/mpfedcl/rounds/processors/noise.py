"""Clip and, with local DP, add noise to a client's statistics under a privacy budget."""

from dataclasses import replace
from typing import Self

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian.mechanism import PrivateSums
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.rounds.processors.base import Processor


class Noise(Processor):
    """Does a client's part for private statistics; models are clipped by `clip`.

    With client-level DP, statistics are clipped at the client and again at the server. With
    `privacy.model local`, the client adds noise too.
    """

    name = "noise"
    stage = "noise"

    def __init__(self, experiment: Experiment) -> None:
        self._settings = experiment.privacy

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return a processor if there is a privacy budget."""
        return cls(experiment) if experiment.privacy.has_budget else None

    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Clip the statistics and, with local DP, add noise."""
        mechanism = self._mechanism(update)
        if mechanism is None or not (mechanism.is_local or mechanism.unit == "client"):
            return update
        bounded = mechanism.bound(update.summed)
        if not mechanism.is_local:
            return _with_sums(update, bounded)
        return _mark(_with_sums(update, mechanism.add_noise(bounded)))

    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Clip the statistics of a client that did not."""
        mechanism = self._mechanism(update)
        if mechanism is None or mechanism.is_local or mechanism.unit == "record":
            return update
        return _with_sums(update, mechanism.bound(update.summed))

    def _mechanism(self, update: Update) -> PrivateSums | None:
        if "counts" not in update.summed_shapes:
            return None
        return PrivateSums.of(self._settings, has_moments="moment" in update.summed_shapes)


def _with_sums(update: Update, summed: Tensors) -> Update:
    like = update.summed_shapes
    return replace(update, summed={n: value.to(like[n].dtype) for n, value in summed.items()})


def _mark(update: Update) -> Update:
    return replace(update, processed=tuple(sorted({*update.processed, Noise.name})))
