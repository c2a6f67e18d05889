"""Clip a client's statistics under a privacy budget and, with local DP, add noise to them."""

from dataclasses import replace
from typing import Self

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian.mechanism import PrivateSums
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.rounds.processors.base import Processor, mark


class PrivateStatistics(Processor):
    """Does a client's part for private statistics; models are clipped by `Clip`.

    With client-level DP, statistics are clipped at the client and again at the server. With
    `privacy.model local`, the client adds noise too, and only then is an update marked.
    """

    name = "private statistics"

    def __init__(self, experiment: Experiment) -> None:
        self._settings = experiment.privacy

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return a processor if there is a privacy budget."""
        return cls(experiment) if experiment.privacy.has_budget else None

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
