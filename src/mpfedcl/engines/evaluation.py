"""The evaluation of a process's clients after a round: personal models and the global model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.engines.trainers.base import TrainedClients, distinct_groups, predict_clients
from mpfedcl.methods import TESTS, Method, PredictorKind, Test, prototype_rule
from mpfedcl.models import Model
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import (
    PredictorColumns,
    RoundEvaluation,
    WantedPredictors,
    is_wanted,
)
from mpfedcl.rounds.metrics import BinSums, ConfusionCounts, add_bins, count_confusions
from mpfedcl.rounds.predictions import (
    ClientTests,
    Evaluator,
    GlobalScorer,
    PersonalScorer,
    Predictions,
    as_stack,
)

_SCORES_AT_ONCE = 2**24
"""Scores (classes x images x clients) held together if models differ only in their scores."""
_MOST_CONFUSIONS = 1000
"""Clients up to which all confusions are counted; beyond, only those of evaluated models."""


class ClientEvaluation:
    """Evaluates the clients of this process, round after round."""

    def __init__(self, method: Method, model: Model, data: FederatedData) -> None:
        self.method = method
        self.model = model
        self.data = data
        counts = torch.from_numpy(data.label_counts()).to(data.test_labels.device)
        self.tests = ClientTests.of(
            data.test_labels, counts, list(data.table.local_tests().values())
        )

    def predict_global(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        wanted: WantedPredictors,
        share: tuple[int, int] = (0, 1),
    ) -> Predictions | None:
        """Return the global model's predictions for this process's share of the images.

        `share` is the rank of the process and the number of processes. None if not wanted.
        """
        if averaged is None or not is_wanted(wanted, model="global"):
            return None
        compares = is_wanted(wanted, model="global", rule="prototype")
        evaluator = self._evaluator(pool if compares else None)
        number, processes = share
        images = torch.arange(len(evaluator.labels)).tensor_split(processes)[number]
        if processes > 1:
            inputs = evaluator.inputs[images.to(evaluator.inputs.device)]
            evaluator = replace(evaluator, inputs=inputs)
        (predictions,) = evaluator.predict(
            lambda inputs: as_stack(self.model.apply(averaged, inputs)),
            with_similarities=is_wanted(wanted, model="global", rule="prototype", prior="labels"),
        )
        return predictions

    def read(
        self,
        averaged: Predictions | None,
        pool: PrototypePool | None,
        trained: Mapping[str, TrainedClients],
        wanted: WantedPredictors,
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation:
        """Evaluate all clients; `trained` are those whose personal models are evaluated."""
        numbers = {name: number for number, name in enumerate(self.data.names)}
        columns: PredictorColumns = {
            test: {name: [None] * len(numbers) for name in wanted[test]} for test in TESTS
        }
        details = _Details(self.method, self.tests)
        if averaged is not None:
            evaluated = torch.tensor(sorted(numbers[name] for name in trained), dtype=torch.int64)
            scorer = GlobalScorer(self.tests, averaged, evaluated.to(self.tests.sizes.device))
            for test in TESTS:
                for name in wanted[test]:
                    if PredictorKind.of(name).model == "global":
                        columns[test][name] = scorer.column(test, name)
            if with_confusion:
                many = len(numbers) > _MOST_CONFUSIONS
                details.add_global(scorer, {n: numbers[n] for n in trained} if many else numbers)
        for client, predictions, is_whole in self._predict_personal(pool, trained, wanted):
            own = PersonalScorer(self.tests, numbers[client], predictions, is_whole)
            for test in TESTS:
                for name in wanted[test]:
                    if PredictorKind.of(name).model == "personal":
                        columns[test][name][own.client] = own.percent(test, name)
            if with_confusion:
                details.add_personal(client, own)
        in_order = {n: details.confusion[n] for n in numbers if n in details.confusion}
        return RoundEvaluation(list(numbers), columns, list(trained), in_order, details.bins)

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

    def _predict_personal(
        self,
        pool: PrototypePool | None,
        trained: Mapping[str, TrainedClients],
        wanted: WantedPredictors,
    ) -> Iterator[tuple[str, Predictions, bool]]:
        """Yield clients' predictions and whether they are for all images; few at a time."""
        if not is_wanted(wanted, model="personal"):
            return
        if not self.method.trains or not is_wanted(wanted, model="personal", rule="prototype"):
            # Without training, all clients have the same embeddings.
            pool = None
        evaluator = self._evaluator(pool)
        if not self.method.trains:
            # Only scores differ between clients, and they are small.
            evaluator = replace(evaluator, read_at_once=_SCORES_AT_ONCE // self.data.num_classes)
        alone: dict[str, Evaluator] = {}
        if (reference := evaluator.reference) is not None:
            rule = prototype_rule(self.method)
            own = {name: rule.reference_of(name, reference) for name in trained}
            alone = {
                n: replace(evaluator, reference=e) for n, e in own.items() if e is not reference
            }
        if self.tests.is_shared or is_wanted(wanted, ["global_test"], model="personal"):
            for group in distinct_groups(trained.values()):
                together = predict_clients(group, evaluator, trained.keys() - alone.keys())
                yield from ((name, predictions, True) for name, predictions in together)
            for name, each in alone.items():
                for _, predictions in predict_clients(trained[name], each, [name]):
                    yield name, predictions, True
            return
        for name, group in trained.items():
            local_test = self.data.client(name).test
            inputs, labels = evaluator.inputs[local_test], evaluator.labels[local_test]
            each = replace(alone.get(name, evaluator), inputs=inputs, labels=labels)
            for _, predictions in predict_clients(group, each, [name]):
                yield name, predictions, False


class _Details:
    """Confusions by client and calibration bins by test set, of the primary predictors."""

    def __init__(self, method: Method, tests: ClientTests) -> None:
        self.confusion: dict[str, ConfusionCounts] = {}
        self.bins: dict[Test, BinSums] = {test: add_bins([]) for test in TESTS}
        self._primary = {test: method.predictor_on(test) for test in TESTS}
        self._model = {test: PredictorKind.of(n).model for test, n in self._primary.items()}
        self._tests = tests

    def add_personal(self, name: str, own: PersonalScorer) -> None:
        """Count the predictions of a client's personal model."""
        if self._model["local_test"] == "personal":
            classes = own.predict("local_test", self._primary["local_test"])
            self._count(name, own.client, classes)
        for test, predictor in self._primary.items():
            if self._model[test] == "personal":
                part = own.bins(test, predictor, len(self._tests))
                self.bins[test] = add_bins([self.bins[test], part])

    def add_global(self, scorer: GlobalScorer, clients: Mapping[str, int]) -> None:
        """Count the predictions of the global model."""
        if self._model["local_test"] == "global":
            for name, number in clients.items():
                self._count(name, number, scorer.predict(self._primary["local_test"], number))
        for test, predictor in self._primary.items():
            if self._model[test] == "global":
                self.bins[test] = scorer.bins(test, predictor)

    def _count(self, name: str, client: int, classes: Tensor | None) -> None:
        own = self._tests.own(client)
        if classes is not None and len(own):
            num_classes = self._tests.label_counts.shape[1]
            self.confusion[name] = count_confusions(classes, self._tests.labels[own], num_classes)
