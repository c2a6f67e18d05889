"""What the clients of a process read after a round: their own models, and the averaged one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.engines.trainers.base import TrainedClients, distinct_groups, predict_clients
from mpfedcl.methods import TESTS, Method, PredictorName, Test, prototype_rule
from mpfedcl.models import Model
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.calibration_error import BinSums, add_bins
from mpfedcl.rounds.client_tests import ClientTests, GlobalReader, PersonalReader
from mpfedcl.rounds.evaluation import (
    ConfusionCounts,
    Evaluator,
    Predictions,
    PredictorColumns,
    RoundEvaluation,
    WantedPredictors,
    as_stack,
    count_confusions,
    wanted_predictors,
)

_SCORES_AT_ONCE = 2**24
"""Of classes, images and clients that are read together where only scores differ."""
_MOST_CONFUSIONS = 1000
"""Clients up to which everybody's confusions are counted: beyond, of those with a model read."""


@dataclass(frozen=True)
class ClientEvaluation:
    """Reads what a method's clients in this process have, round after round."""

    method: Method
    model: Model
    data: FederatedData
    tests: ClientTests

    @classmethod
    def of(cls, method: Method, model: Model, data: FederatedData) -> "ClientEvaluation":
        """Lay out the clients' local test sets once."""
        counts = torch.from_numpy(data.label_counts()).to(data.test_labels.device)
        own = list(data.table.local_tests().values())
        tests = ClientTests.of(data.test_labels, counts, own)
        return cls(method, model, data, tests)

    def wanted(self, *, is_complete: bool) -> WantedPredictors:
        """Return what a round reads."""
        return wanted_predictors(self.method, is_complete=is_complete)

    def needs_pool(self, averaged: Tensors | None, wanted: WantedPredictors) -> bool:
        """Tell whether a method that shares no prototypes must make some to be read."""
        return averaged is not None and _is_wanted(wanted, "prototype")

    def predict_global(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        wanted: WantedPredictors,
        share: tuple[int, int] = (0, 1),
    ) -> Predictions | None:
        """Return what the global model says, of one process's share of the images.

        `share` are its number and the number of processes; None where nobody wants to know.
        """
        if averaged is None or not _is_wanted(wanted, "global"):
            return None
        compares = _is_wanted(wanted, "global_prototype")
        evaluator = self._evaluator(pool if compares else None)
        number, processes = share
        images = torch.arange(len(evaluator.labels)).tensor_split(processes)[number]
        if processes > 1:
            inputs = evaluator.inputs[images.to(evaluator.inputs.device)]
            evaluator = replace(evaluator, inputs=inputs)
        (said,) = evaluator.predict(
            lambda inputs: as_stack(self.model.apply(averaged, inputs)),
            with_similarities=_is_wanted(wanted, "global_prototype", "prior"),
        )
        return said

    def read(
        self,
        averaged: Predictions | None,
        pool: PrototypePool | None,
        trained: Mapping[str, TrainedClients],
        wanted: WantedPredictors,
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation:
        """Return every client's predictors; `trained` are those whose own models are read."""
        numbers = {name: number for number, name in enumerate(self.data.names)}
        read = torch.tensor(sorted(numbers[name] for name in trained), dtype=torch.int64)
        reader = None
        if averaged is not None:
            reader = GlobalReader(self.tests, averaged, read.to(self.tests.sizes.device))
        columns: PredictorColumns = {
            test: {
                r: reader.column(test, r)
                if reader and r.startswith("global")
                else [None] * len(numbers)
                for r in wanted[test]
            }
            for test in TESTS
        }
        counted = _Counted(self.method, self.tests, len(self.data.clients))
        for name, personal, is_whole in self._predict_personally(pool, trained, wanted):
            own = PersonalReader(self.tests, numbers[name], personal, is_whole)
            for test in TESTS:
                for predictor in wanted[test]:
                    if predictor.startswith("personal"):
                        columns[test][predictor][own.client] = own.percent(test, predictor)
            if with_confusion:
                counted.add_personal(name, own)
        if with_confusion and reader is not None:
            many = len(numbers) > _MOST_CONFUSIONS
            counted.add_averaged(reader, {n: numbers[n] for n in trained} if many else numbers)
        in_order = {n: counted.confusion[n] for n in numbers if n in counted.confusion}
        return RoundEvaluation(list(numbers), columns, list(trained), in_order, counted.bins)

    def _evaluator(self, pool: PrototypePool | None) -> Evaluator:
        rule = prototype_rule(self.method)
        reference = None if pool is None else rule.reference(pool)
        return Evaluator(
            self.data.test_inputs,
            self.data.test_labels,
            rule.project,
            reference,
            self.method.experiment.contrast.temperature,
        )

    def _predict_personally(
        self,
        pool: PrototypePool | None,
        trained: Mapping[str, TrainedClients],
        wanted: WantedPredictors,
    ) -> Iterator[tuple[str, Predictions, bool]]:
        """Yield what clients' models answer, and whether of all images; few are held at a time."""
        if not _is_wanted(wanted, "personal"):
            return
        if not self.method.trains or not _is_wanted(wanted, "personal_prototype"):
            # Features of a method that does not train are the same for everybody.
            pool = None
        evaluator = self._evaluator(pool)
        if not self.method.trains:
            # Only scores are personal, and they are small.
            evaluator = replace(evaluator, read_at_once=_SCORES_AT_ONCE // self.data.num_classes)
        alone: dict[str, Evaluator] = {}
        if (reference := evaluator.reference) is not None:
            rule = prototype_rule(self.method)
            own = {name: rule.reference_of(name, reference) for name in trained}
            alone = {
                n: replace(evaluator, reference=e) for n, e in own.items() if e is not reference
            }
        if self.tests.is_shared or _is_wanted(wanted, "personal", tests=["global_test"]):
            for name, said in _predict_together(trained, evaluator, alone):
                yield name, said, True
            return
        for name, group in trained.items():
            local_test = self.data.client(name).test
            inputs, labels = evaluator.inputs[local_test], evaluator.labels[local_test]
            reads = replace(alone.get(name, evaluator), inputs=inputs, labels=labels)
            for _, said in predict_clients(group, reads, [name]):
                yield name, said, False


def _predict_together(
    trained: Mapping[str, TrainedClients], evaluator: Evaluator, alone: Mapping[str, Evaluator]
) -> Iterator[tuple[str, Predictions]]:
    for group in distinct_groups(trained.values()):
        yield from predict_clients(group, evaluator, trained.keys() - alone.keys())
    for name, reads in alone.items():
        yield from predict_clients(trained[name], reads, [name])


class _Counted:
    """What the last round counts beside: confusions by client, probabilities by test."""

    def __init__(self, method: Method, tests: ClientTests, num_clients: int) -> None:
        self.confusion: dict[str, ConfusionCounts] = {}
        self.bins: dict[Test, BinSums] = {test: add_bins([]) for test in TESTS}
        self._judged: dict[Test, PredictorName] = {
            test: method.predictor_on(test) for test in TESTS
        }
        self._tests = tests
        self._num_clients = num_clients

    def add_personal(self, name: str, own: PersonalReader) -> None:
        """Count what a client's own model says."""
        if self._judged["local_test"].startswith("personal"):
            self._count(name, own.client, own.say("local_test", self._judged["local_test"]))
        for test, predictor in self._judged.items():
            if predictor.startswith("personal"):
                part = own.bins(test, predictor, self._num_clients)
                self.bins[test] = add_bins([self.bins[test], part])

    def add_averaged(self, reader: GlobalReader, clients: Mapping[str, int]) -> None:
        """Count what the global model says to clients."""
        if self._judged["local_test"].startswith("global"):
            for name, number in clients.items():
                self._count(name, number, reader.say(self._judged["local_test"], number))
        for test, predictor in self._judged.items():
            if predictor.startswith("global"):
                self.bins[test] = reader.bins(test, predictor)

    def _count(self, name: str, client: int, said: Tensor | None) -> None:
        own = self._tests.own(client)
        if said is not None and len(own):
            num_classes = self._tests.label_counts.shape[1]
            self.confusion[name] = count_confusions(said, self._tests.labels[own], num_classes)


def _is_wanted(wanted: WantedPredictors, *words: str, tests: Sequence[Test] = TESTS) -> bool:
    """Tell whether a reading with all of these words in its name is wanted on one of the tests."""
    return any(all(word in predictor for word in words) for t in tests for predictor in wanted[t])
