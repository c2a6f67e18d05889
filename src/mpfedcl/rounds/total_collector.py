"""What comes in during a round of secure aggregation: one total, judged as far as a total can be."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import CollectsStatistics, OneShot, Tally
from mpfedcl.methods.messages import Failure, Total, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.update_collector import UpdateCollector

OWNER = "global"
"""Whose the prototypes are that totals give."""


class TotalCollector(UpdateCollector):
    """The total of a round. Where it cannot be true nobody knows whose fault that is."""

    _total: Total | None = None

    @property
    def accepted(self) -> list[str]:
        """The clients whose updates are in the total."""
        return list(self._total.clients) if self._total else []

    def add(self, update: Update | Failure | Total) -> None:
        """Take in the total, and why single clients are not in it."""
        if isinstance(update, Failure):
            self._reject(update, update.reason)
        elif isinstance(update, Update):
            self._reject(update, "its update is not masked, and this run has secure aggregation")
        elif reason := self._judge(update):
            for name in update.clients:
                self._reject(Failure(name, ""), f"the total of all clients is impossible: {reason}")
        else:
            self._accept_total(update)

    def means(self) -> Tensors:
        """Return Σ w_i x_i / Σ w_i, in the types that clients send."""
        if self._total is None or not self._total.weight:
            return {}
        weight, template = self._total.weight, self._validator.template
        return {
            name: (value / weight).to(template[name])
            for name, value in self._total.averaged.items()
        }

    def tally(self, sizes: Mapping[str, int], num_samples: int) -> Tally:
        """Return what came in all; of single clients no more than that they are in it."""
        assert self._total is not None
        share = self._total.num_samples / max(1, num_samples)
        return Tally(self.accepted, [], [], [], share, self.prototypes, self.sums)

    def pooled_statistics(self) -> Tensors:
        """Return what a method keeps of the total."""
        if self._total is None or not isinstance(self._method, OneShot):
            return {}
        return self._method.statistics_of(self.sums)

    def _accept_total(self, total: Total) -> None:
        self._total = total
        self.noise = total.noise
        self.weights = dict.fromkeys(total.clients, total.weight / len(total.clients))
        # As sums of single clients are added up.
        self.sums = {name: value.double() for name, value in total.summed.items()}
        self.bytes_up = total.num_bytes
        self.largest = {"parameters": total.num_parameters, "prototype_floats": 0}
        if self._method.trains and total.num_samples:
            self.mean_loss = total.loss / total.num_samples
        like = self._broadcast.pool.vectors
        none = Prototypes.empty(like.shape[1], like.dtype, like.device)
        if isinstance(self._method, OneShot):
            found = self._method.prototypes_of(Update(OWNER, 0, {}, none, None, self.sums))
            none = replace(found, vectors=found.vectors.to(like))
        self.prototypes = {OWNER: none}

    @torch.no_grad()
    def _judge(self, total: Total) -> str | None:
        """Return why a total cannot be one of honest clients, or None."""
        if not total.is_possible:
            return "a number is out of range"
        if total.num_samples < 0 or total.weight < 0:
            return "its number of samples is negative"
        if total.weight:
            sent = self._broadcast.params
            squares = sum(
                float((value / total.weight - sent.get(name, 0)).square().sum())
                for name, value in total.averaged.items()
            )
            most = self._method.experiment.validation.max_norm
            if math.sqrt(squares) > most:
                return f"the model changed by {math.sqrt(squares):.3g}; at most {most:g}"
        elif any(bool(value.any()) for value in total.averaged.values()):
            return "models have come without any weight"
        if not isinstance(self._method, CollectsStatistics):
            return None
        return self._method.judge_totals(total.summed)
