"""The engine of several processes: each trains its own clients, and all know the result.

Every process runs the same round loop on the same state. Between training and aggregation the
processes add up their sums of models and gather prototypes and the names of clients.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load

from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.engines.in_process import InProcessEngine
from mpfedcl.engines.workers import WorkerGroup
from mpfedcl.methods import TESTS, Test
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.engine import Engine, StatePlace
from mpfedcl.rounds.evaluation import PredictorColumns, RoundEvaluation
from mpfedcl.rounds.metrics import BinSums, add_bins
from mpfedcl.rounds.predictions import Predictions
from mpfedcl.rounds.prototype_pool import (
    pack_named,
    pack_prototypes,
    unpack_named,
    unpack_prototypes,
)


class DistributedEngine(Engine):
    """Run the clients of this process, and exchange results with the other processes."""

    def __init__(
        self,
        engine: InProcessEngine,
        sizes: Mapping[str, int],
        group: WorkerGroup,
        device: torch.device,
    ) -> None:
        self.sizes = sizes
        """Training samples of all clients, of all processes."""
        self._engine = engine
        self._group = group
        self._device = device
        self._remarks: dict[str, Any] = {}

    def local_clients(self, names: Sequence[str]) -> list[str]:
        """Return those of the named clients that train in this process."""
        return [name for name in names if name in self._engine.sizes]

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update]:
        """Train the clients of this process."""
        return self._engine.train(broadcast, self.local_clients(names), keep=keep)

    def merge(self, collector: UpdateCollector) -> None:
        """Make one collector of those of all processes."""
        collector.merge(self._group)
        if collector.client_sums is not None:
            parts = (pack_named(name, sums) for name, sums in collector.client_sums.items())
            # Only the leader writes them, and receives them one at a time.
            gathered = self._group.gather_to_leader(parts)
            collector.client_sums = dict(unpack_named(part) for part in gathered)
        own = {
            "losses": collector.losses,
            "weights": collector.weights,
            "rejected": collector.rejected,
            "withheld": collector.withheld,
            "processed": collector.processed,
            "bytes_up": collector.bytes_up,
            "uploads": collector.uploads,
            "largest": collector.largest,
            "remarks": self._engine.remarks(),
        }
        reports, collector.prototypes = self._exchange(own, collector.prototypes)
        for report in reports:
            collector.losses |= report["losses"]
            collector.weights |= report["weights"]
            collector.rejected |= report["rejected"]
            collector.uploads |= report["uploads"]
        collector.withheld = [name for report in reports for name in report["withheld"]]
        collector.processed = {
            name: [client for each in reports for client in each["processed"].get(name, [])]
            for name in {name for report in reports for name in report["processed"]}
        }
        collector.bytes_up = sum(report["bytes_up"] for report in reports)
        collector.largest = {
            name: max(report["largest"][name] for report in reports) for name in collector.largest
        }
        self._remarks = _join_remarks([report["remarks"] for report in reports])

    def agree(self, content: bytes) -> bytes:
        """Return the leader's content."""
        return self._group.broadcast(content)

    def remarks(self) -> dict[str, Any]:
        """Return how the clients of the round were trained, in all processes."""
        return self._remarks

    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation:
        """Evaluate the clients of each process, and join the results."""
        own, predictors = self._engine.readable(self.local_clients(names)), self._engine.predictors
        wanted = predictors.wanted(is_complete=with_confusion)
        if pool is None and predictors.needs_pool(averaged, wanted):
            _, rows = self._exchange(None, self._engine.prototypes_for_evaluation(own))
            pool = self._engine.pool_for_evaluation(rows)
        # Each process runs the global model on a share of the test images.
        share = self._group.rank, self._group.size
        said = self._join(predictors.predict_global(averaged, pool, wanted, share))
        trained = self._engine.trained(own)
        read = predictors.read(said, pool, trained, wanted, with_confusion=with_confusion)
        parts, _ = self._exchange([read.names, read.columns, read.confusion, read.bins], {})
        return _join_predictors(parts, list(self.sizes), names)

    def _join(self, own: Predictions | None) -> Predictions | None:
        """Return the predictions of all processes, in order of rank."""
        if own is None:
            return None
        tensors = {n: each for n, each in vars(own).items() if each is not None}
        parts = [load(part) for part in self._group.gather(pack_tensors(tensors))]
        whole = {n: torch.cat([part[n] for part in parts]).to(self._device) for n in tensors}
        return replace(own, **whole)

    def keep_accepted(self, accepted: Sequence[str], following: Callable[[], Broadcast]) -> None:
        """Keep the new states of the accepted clients of this process."""
        self._engine.keep_accepted(self.local_clients(accepted), following)

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield all clients' models to the leader, one at a time."""
        own = (pack_named(name, params) for name, params in self._engine.personal_models(shared))
        for part in self._group.gather_to_leader(own):
            yield unpack_named(part)

    def keep_states_in(self, place: StatePlace) -> None:
        """Let each process keep the states of its own clients there."""
        group = self._group
        self._engine.keep_states_in(replace(place, rank=group.rank, ranks=group.size))

    def state(self) -> Tensors:
        """Return all clients' states to the leader; an empty dict to the others."""
        own = self._engine.state()
        if not self._group.is_leader:
            # Before the leader receives the list of files.
            self._engine.sync_state()
        state: Tensors = {}
        for part in self._group.gather_to_leader(iter([pack_tensors(own)] if own else [])):
            theirs = load(part)
            # Each process knows the files of its own clients, and has -1 for the others.
            for name in theirs.keys() & state.keys():
                theirs[name] = torch.maximum(theirs[name], state[name])
            state |= theirs
        return state

    def sync_state(self) -> None:
        """Wait until the files of this process are on disk."""
        self._engine.sync_state()

    def restore(self, state: Tensors, record: Mapping[str, Any]) -> None:
        """Restore the states of the clients of this process."""
        self._engine.restore(state, record)

    def _exchange(
        self, report: Any, rows: Mapping[str, Prototypes]
    ) -> tuple[list[Any], dict[str, Prototypes]]:
        """Return the reports of all processes, as plain values, and the prototypes of all clients."""
        reports: list[Any] = []
        found: dict[str, Prototypes] = {}
        for part in self._group.gather(pack_prototypes(report, rows)):
            said, theirs = unpack_prototypes(part)
            reports.append(said)
            found |= theirs
        return reports, {name: found[name].to(self._device) for name in sorted(found)}


def _join_predictors(
    parts: Sequence[Any], names: Sequence[str], trained: Sequence[str]
) -> RoundEvaluation:
    """Join the evaluations of all processes, in name order."""
    read = [name for part, *_ in parts for name in part]
    place = {name: number for number, name in enumerate(read)}
    columns: PredictorColumns = {}
    for test in TESTS:
        columns[test] = {}
        for predictor in parts[0][1][test]:
            joined = [value for _, part, *_ in parts for value in part[test][predictor]]
            columns[test][predictor] = [joined[place[name]] for name in names]
    confusion = {name: counts for part in parts for name, counts in part[2].items()}
    in_order = {name: confusion[name] for name in names if name in confusion}
    bins: dict[Test, BinSums] = {test: add_bins(part[3][test] for part in parts) for test in TESTS}
    return RoundEvaluation(names, columns, trained, in_order, bins)


def _join_remarks(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the clients by trainer; list each reason once."""
    counts: dict[str, int] = {}
    fallbacks: list[str] = []
    for part in parts:
        for name, told in part.get("training", {}).items():
            if name == "fallback":
                fallbacks += [each for each in told if each not in fallbacks]
            else:
                counts[name] = counts.get(name, 0) + told
    told = dict(sorted(counts.items())) | ({"fallback": fallbacks} if fallbacks else {})
    return {"training": told} if told else {}
