"""One exchange with one client of a finished run: its sums, and its outcome in return."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mpfedcl.core.errors import RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, Failure, Update
from mpfedcl.network.packing import Form
from mpfedcl.network.server.client_registry import ClientRegistry
from mpfedcl.network.server.engine import NetworkEngine, digest_sums
from mpfedcl.network.server.serve import make_network_model
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import Transport
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.rounds.processors import ProcessorChain
from mpfedcl.rounds.update_collector import UpdateCollector
from mpfedcl.rounds.validation import UpdateValidator

Json = dict[str, Any]


class SingleClient:
    """A client that is asked by itself, whoever else is connected or not.

    Args:
        transport: How it is reached.
        experiment: That of the run, with the classes that its federation has by now.
        known: The run's federation.json.
        name: The client.
        status: Told what is being done.
    """

    def __init__(
        self,
        transport: Transport,
        experiment: Experiment,
        known: Mapping[str, Any],
        name: str,
        status: Status,
    ) -> None:
        self.name = name
        self._known = dict(known)
        form = Form.from_json(known)
        registry = ClientRegistry(experiment, transport, status, form, only=name)
        registry.wait_for_only()
        device = torch.device("cpu")
        self._assembly = assemble(
            experiment,
            make_network_model(experiment, form, device),
            num_classes=len(experiment.dataset.classes),
            input_size=form.input_size,
            device=device,
        )
        self._engine = NetworkEngine(self._assembly, transport, registry, known["run"], status)
        settled: dict[str, int] = known.get("settled", {})
        # Of one exchange, which was round 1; what the client keeps of that must not be lost.
        self._round = 1 + max([1, *settled.values()])
        last = torch.tensor(settled.get(name, 1))
        self._engine.restore({f"settled/{name}": last}, {"round": self._round - 1})

    def ask(self, current: Broadcast) -> tuple[Update, str | None]:
        """Return the client's sums, and why the guard rejects them, or None.

        `current` is what the federation has now: the client reads it on its local test set samples.
        """
        broadcast = replace(current, round=self._round)
        self._engine.absent_clients()
        answers = list(self._engine.train(broadcast, [self.name], keep=[]))
        if not answers:
            missing = self._engine.remarks().get("missing", {})
            raise RunCutShort(f"{self.name} was asked: {missing.get(self.name, 'no answer')}.")
        method = self._assembly.method
        server = method.init_server(self._assembly.initial)
        guard = UpdateValidator(self._assembly, self._engine.sizes, self._engine.label_counts)
        collector = UpdateCollector(method, guard, server, broadcast, [self.name])
        (answer,) = answers
        collector.add(answer)
        if isinstance(answer, Failure):
            raise RunCutShort(f"{self.name} could not do it: {answer.reason}")
        # Totals are of secure aggregation, in which no client is asked by itself.
        assert isinstance(answer, Update)
        rejected = collector.rejected.get(self.name)
        if rejected is not None:
            return answer, rejected
        return ProcessorChain(method.experiment).unpack(answer, broadcast), None

    def close(self, outcome: Broadcast) -> tuple[RoundEvaluation | None, RoundEvaluation | None]:
        """Send the client what has become of it; return what it read before and reads after."""
        following = replace(outcome, round=self._round + 1)
        self._engine.keep_accepted([self.name], lambda: following)
        after, _ = self._engine.read_last_round(following)
        return self._engine.previous_predictors, after

    def described(self, update: Update) -> Json:
        """Return federation.json once the client's sums are in: which, and in which round."""
        settled = {**self._known.get("settled", {}), self.name: self._round}
        sums = {**self._known.get("sums", {}), self.name: digest_sums(update.summed)}
        return {**self._known, "settled": settled, "sums": sums}
