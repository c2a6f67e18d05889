"""A rule of aggregation behind the bounds that other clients' updates set."""

import json
import math
from collections.abc import Mapping
from statistics import median

import torch
from safetensors.torch import load
from torch import Tensor

from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.rounds.aggregation import Aggregator, Peers
from mpfedcl.rounds.bounds import RelativeBounds
from mpfedcl.rounds.processors.clip import Clip, changes_of, squared_change
from mpfedcl.rounds.standing import sketch

SHARE, LENGTH, DIRECTION = "bound on share", "bound on length", "bound on direction"
"""What a record's `processed` says of the clients that were cut down."""


class BoundedAggregation:
    """Passes updates on to a rule, cut down to their bounds where there are any.

    Updates are folded as they come. Only where no round before tells their length are they kept
    until all are there.
    """

    def __init__(
        self, rule: Aggregator, broadcast: Broadcast, bounds: RelativeBounds | None
    ) -> None:
        self.weights: dict[str, float] = {}
        """What each client's update weighs."""
        self.processed: dict[str, list[str]] = {}
        """Who was cut down by which bound; complete after `settle`."""
        self._rule, self._broadcast, self._bounds = rule, broadcast, bounds
        self._lengths: dict[str, float] = {}
        self._sketches: dict[str, Tensor] = {}
        self.standings: dict[str, float] = {}
        """Of all clients after this round; complete after `settle`."""
        limit = bounds.longest_change if bounds else None
        self._clip = Clip(limit, LENGTH) if limit is not None else None
        self._waiting: list[tuple[Update, float]] = []
        self._is_settled = False

    @property
    def median_length(self) -> float | None:
        """The median length of all clients' changes as they came, after `settle`; None: of none."""
        found = [each for each in self._lengths.values() if each > 0]
        return median(found) if found else None

    def add(self, update: Update, weight: float) -> None:
        """Take in an update with the method's weight."""
        if self._bounds is None:
            self._pass_on(update, weight)
            return
        assert update.averaged is not None
        share = self._bounds.share(update.client, update.num_samples)
        if share < 1:
            self._note(SHARE, update)
        self._lengths[update.client] = math.sqrt(squared_change(update.averaged, self._broadcast))
        self._sketches[update.client] = _sketch(update, self._broadcast)
        if self._clip is None:
            self._waiting.append((update, weight * share))
        else:
            self._pass_on_trusted(update, weight * share, self._bounds.standings)

    def settle(self, peers: Peers | None = None) -> None:
        """Pass on what was kept; with `peers`, by what came to all processes of a run."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._bounds is not None:
            self._gather(peers)
            self.standings = self._bounds.judge_directions(self._sketches)
            limit = self._bounds.longest_of(list(self._lengths.values()))
            if self._clip is None and limit is not None:
                self._clip = Clip(limit, LENGTH)
            for update, weight in self._waiting:
                self._pass_on_trusted(update, weight, self.standings)
            self._waiting = []
        if peers is not None:
            self._rule.merge(peers)

    def result(self) -> Tensors:
        """Return what the rule makes of the updates."""
        self.settle()
        return self._rule.result()

    def remarks(self) -> list[str]:
        """Return what the round's record should say, after `result`."""
        return self._rule.remarks()

    def _gather(self, peers: Peers | None) -> None:
        """Take in the lengths and sketches of the clients in other processes."""
        for part in peers.gather(json.dumps(self._lengths).encode()) if peers else []:
            self._lengths |= json.loads(part)
        for part in peers.gather(pack_tensors(self._sketches)) if peers else []:
            self._sketches |= load(part)

    def _pass_on_trusted(
        self, update: Update, weight: float, standings: Mapping[str, float]
    ) -> None:
        assert self._bounds is not None
        trust = self._bounds.trust(update.client, standings)
        if trust < 1:
            self._note(DIRECTION, update)
        self._pass_on(update, weight * trust)

    def _pass_on(self, update: Update, weight: float) -> None:
        if self._clip is not None:
            update = self._clip.outgoing(update, self._broadcast)
            if LENGTH in update.processed:
                self._note(LENGTH, update)
        self.weights[update.client] = weight
        self._rule.add(update, weight)

    def _note(self, bound: str, update: Update) -> None:
        self.processed.setdefault(bound, []).append(update.client)


@torch.no_grad()
def _sketch(update: Update, broadcast: Broadcast) -> Tensor:
    averaged = update.averaged
    if isinstance(averaged, StackMember):
        averaged = averaged.stack.tensors(averaged.index)
    assert averaged is not None
    return sketch(changes_of(averaged, broadcast))
