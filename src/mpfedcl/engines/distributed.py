"""The engine of several processes: each trains its own clients, and all know the result.

Every process runs the same round loop on the same state. Between training and aggregation the
processes add up their sums of models and gather prototypes and the names of clients.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load

from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.engines.in_process import InProcessEngine
from mpfedcl.engines.trainers import join_trainings
from mpfedcl.engines.worker_group import WorkerGroup
from mpfedcl.methods import TESTS, Test
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Members
from mpfedcl.rounds.evaluation import PredictorColumns, RoundEvaluation
from mpfedcl.rounds.metrics import BinSums, add_bins
from mpfedcl.rounds.prototype_pool import pack_named, unpack_named


class DistributedEngine(InProcessEngine):
    """Run the clients of this process, and exchange results with the other processes.

    Args:
        assembly: The method and the model.
        data: The data of this process's clients.
        sizes: Training samples of the clients of all processes.
        group: The processes.
    """

    _group: WorkerGroup

    def __init__(
        self,
        assembly: Assembly,
        data: FederatedData,
        sizes: Mapping[str, int],
        group: WorkerGroup,
    ) -> None:
        super().__init__(assembly, data)
        self.members = Members(sizes, local=data.sizes)
        self.peers = self._group = group

    def remarks(self) -> dict[str, Any]:
        """Return how the clients of the round were trained, in all processes."""
        parts = map(json.loads, self._group.gather(json.dumps(super().remarks()).encode()))
        training = join_trainings(part["training"] for part in parts if part)
        return {"training": training} if training else {}

    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation:
        """Evaluate the clients of each process, and join the results."""
        own = super().evaluate(averaged, pool, names, with_confusion=with_confusion)
        report = json.dumps([own.names, own.columns, own.confusion, own.bins])
        parts = [json.loads(part) for part in self._group.gather(report.encode())]
        joined = _join_predictors(parts, list(self.sizes), names)
        if own.metrics is None:
            return joined
        # The processes have joined their metrics already.
        found = own.metrics.per_client
        in_order = {name: found[name] for name in self.sizes if name in found}
        return replace(joined, metrics=own.metrics.model_copy(update={"per_client": in_order}))

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield the models of all clients to the leader, one at a time."""
        own = (pack_named(name, params) for name, params in super().personal_models(shared))
        for part in self._group.gather_to_leader(own):
            yield unpack_named(part)

    def state(self) -> Tensors:
        """Return all clients' states to the leader; an empty dict to the others."""
        own = super().state()
        state: Tensors = {}
        for part in self._group.gather_to_leader(iter([pack_tensors(own)] if own else [])):
            theirs = load(part)
            # Each process lists the files of its own clients, and has -1 for the others.
            for name in theirs.keys() & state.keys():
                theirs[name] = torch.maximum(theirs[name], state[name])
            state |= theirs
        return state


def _join_predictors(
    parts: Sequence[Any], names: Sequence[str], trained: Sequence[str]
) -> RoundEvaluation:
    """Join the evaluations of all processes, in name order."""
    place = {name: number for number, name in enumerate(name for part in parts for name in part[0])}
    columns: PredictorColumns = {}
    for test in TESTS:
        columns[test] = {}
        for predictor in parts[0][1][test]:
            joined = [value for part in parts for value in part[1][test][predictor]]
            columns[test][predictor] = [joined[place[name]] for name in names]
    confusion = {name: counts for part in parts for name, counts in part[2].items()}
    in_order = {name: confusion[name] for name in names if name in confusion}
    bins: dict[Test, BinSums] = {test: add_bins(part[3][test] for part in parts) for test in TESTS}
    return RoundEvaluation(names, columns, trained, in_order, bins)
