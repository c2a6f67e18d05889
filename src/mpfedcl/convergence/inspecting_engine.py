"""An engine that also measures its clients, for `--diagnostics convergence`."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from mpfedcl.convergence.diagnostics import ConvergenceDiagnostics
from mpfedcl.convergence.measurement import Inspection, Measurement
from mpfedcl.convergence.objectives import ObjectiveInspector, mean_gradient_norm
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines import InProcessEngine
from mpfedcl.methods.messages import Broadcast, Failure, Total, Update
from mpfedcl.rounds.aggregation import Peers
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine, WrappedEngine


class InspectingEngine(WrappedEngine):
    """Runs clients as another engine does, and inspects each round before they move on.

    Args:
        assembly: What the federation is made of.
        engine: The engine that runs the clients.
        local: The clients of this process; the engine itself where there is only one process.
        peers: The processes that share the clients, if there are several.
    """

    def __init__(
        self, assembly: Assembly, engine: Engine, local: InProcessEngine, peers: Peers | None
    ) -> None:
        super().__init__(engine)
        if not assembly.method.trains:
            raise InvalidInput(
                f"diagnostics is {', '.join(assembly.experiment.diagnostics)}; with method "
                f"{assembly.experiment.method} it must be left out: its clients do not train."
            )
        self._assembly = assembly
        self._local = local
        self._peers = peers
        self._judge = ConvergenceDiagnostics(assembly.experiment)
        self._broadcast: Broadcast | None = None
        self._diagnostics: dict[str, Any] | None = None

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update | Failure | Total]:
        """Train; every model is kept until it has been inspected."""
        self._broadcast = broadcast
        return super().train(broadcast, names, keep={*keep, *names})

    def keep_accepted(self, accepted: Sequence[str], following: Callable[[], Broadcast]) -> None:
        """Measure the accepted clients before they keep their new states."""
        assert self._broadcast is not None
        broadcast = self._broadcast
        with self._assembly.clock.phase("diagnose"):
            inspection = self._inspect(broadcast, following(), accepted)
            factor = self._assembly.method.pool_factor(broadcast)
            self._diagnostics = self._judge.judge(broadcast.round, inspection, factor)
        super().keep_accepted(accepted, following)

    def diagnostics(self) -> dict[str, Any] | None:
        """Return what the bounds say of the round."""
        return self._diagnostics

    def restore(self, state: Tensors, record: Mapping[str, Any]) -> None:
        """Continue with the constants that the round's record has."""
        self._judge.restore(record)
        super().restore(state, record)

    def _inspect(
        self, broadcast: Broadcast, following: Broadcast, names: Sequence[str]
    ) -> Inspection:
        """Measure the clients of this process one by one; put those of all together."""
        inspector = ObjectiveInspector(self._assembly, broadcast, following)
        total = {name: torch.zeros_like(each) for name, each in self._assembly.initial.items()}
        measured: dict[str, Measurement] = {}
        for name in self.local_clients(names):
            task = self._local.trained_task(name, broadcast)
            measured[name], gradient = inspector.inspect(*task)
            for each, slope in gradient.items():
                total[each].add_(slope, alpha=self.sizes[name])
        if self._peers is not None:
            total = self._peers.sum(total)
            own = json.dumps({name: each.to_json() for name, each in measured.items()})
            parts = [json.loads(part) for part in self._peers.gather(own.encode())]
            found = {name: values for part in parts for name, values in part.items()}
            measured = {name: Measurement.from_json(found[name]) for name in names}
        weight = sum(self.sizes[name] for name in names)
        return Inspection(measured, mean_gradient_norm(total, weight))


def inspect_where_asked(
    assembly: Assembly, engine: Engine, local: InProcessEngine, peers: Peers | None
) -> Engine:
    """Return the engine of a run: one that inspects where the experiment asks for diagnostics."""
    if not assembly.experiment.diagnostics:
        return engine
    return InspectingEngine(assembly, engine, local, peers)
