"""An exchange with a single client of a finished one-shot run: it joins or leaves."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mpfedcl.core.errors import RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, Failure, Update
from mpfedcl.network.messages import DataFormat
from mpfedcl.network.server.engine import NetworkEngine, digest_sums
from mpfedcl.network.server.registry import ClientRegistry
from mpfedcl.network.server.serve import make_network_model
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import Transport
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.rounds.processors import ProcessorChain
from mpfedcl.rounds.validation import UpdateValidator

Json = dict[str, Any]


class SingleClient:
    """One client of a finished run; other connected clients are ignored.

    Args:
        transport: Carries the messages.
        experiment: The run's experiment, with the current classes of the federation.
        known: The content of the run's federation.json.
        name: The client's name.
        status: Receives progress.
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
        data_format = DataFormat.from_json(known)
        registry = ClientRegistry(experiment, transport, status, data_format, only=name)
        registry.wait_for_only()
        device = torch.device("cpu")
        self._assembly = assemble(
            experiment,
            make_network_model(experiment, data_format, device),
            num_classes=len(experiment.dataset.classes),
            input_size=data_format.input_size,
            device=device,
        )
        self._engine = NetworkEngine(self._assembly, transport, registry, known["run"], status)
        settled: dict[str, int] = known.get("settled", {})
        # The one-shot exchange was round 1, and the client must keep its state of that round.
        self._round = 1 + max([1, *settled.values()])
        last = torch.tensor(settled.get(name, 1))
        self._engine.restore({f"settled/{name}": last}, {"round": self._round - 1})

    def ask(self, current: Broadcast) -> tuple[Update, str | None]:
        """Return the client's sums, and why update validation rejects them, or None.

        The client evaluates `current`, the federation's present outcome, on its local test set.
        """
        broadcast = replace(current, round=self._round)
        self._engine.absent_clients()
        answers = list(self._engine.train(broadcast, [self.name], keep=[]))
        if not answers:
            missing = self._engine.remarks().get("missing", {})
            raise RunCutShort(f"{self.name} did not answer: {missing.get(self.name, 'no answer')}.")
        method = self._assembly.method
        server = method.init_server(self._assembly.initial)
        validator = UpdateValidator(self._assembly, self._engine.sizes, self._engine.label_counts)
        collector = UpdateCollector(method, validator, server, broadcast, [self.name])
        (answer,) = answers
        collector.add(answer)
        if isinstance(answer, Failure):
            raise RunCutShort(f"{self.name} failed: {answer.reason}")
        # Secure aggregation, the only source of totals, cannot change single clients.
        assert isinstance(answer, Update)
        rejected = collector.rejected.get(self.name)
        if rejected is not None:
            return answer, rejected
        return ProcessorChain(method.experiment).unpack(answer, broadcast), None

    def close(self, outcome: Broadcast) -> tuple[RoundEvaluation | None, RoundEvaluation | None]:
        """Send the client the new outcome; return its evaluation before and after."""
        following = replace(outcome, round=self._round + 1)
        self._engine.keep_accepted([self.name], lambda: following)
        after, _ = self._engine.evaluate_last_round(following)
        return self._engine.previous_evaluation, after

    def described(self, update: Update) -> Json:
        """Return the content of federation.json with the digest of the client's new sums."""
        settled = {**self._known.get("settled", {}), self.name: self._round}
        sums = {**self._known.get("sums", {}), self.name: digest_sums(update.summed)}
        return {**self._known, "settled": settled, "sums": sums}
