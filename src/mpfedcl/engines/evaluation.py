"""The evaluation of a process's clients after a round: personal models and the global model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from safetensors.torch import load
from torch import Tensor

from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.engines.trainers.base import TrainedClients, predict_clients
from mpfedcl.engines.worker_group import WorkerGroup
from mpfedcl.methods import (
    TESTS,
    Method,
    PredictorKind,
    PredictorName,
    Test,
    prototype_rule,
)
from mpfedcl.models import Model
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import (
    PredictorColumns,
    RoundEvaluation,
    WantedPredictors,
    is_wanted,
)
from mpfedcl.rounds.metrics import BinSums, ConfusionCounts, add_bins, count_confusions
from mpfedcl.rounds.scoring import (
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
        group: WorkerGroup | None = None,
    ) -> Predictions | None:
        """Return the global model's predictions for all images; None if not wanted.

        Each process of a group runs the model on a share of them.
        """
        if averaged is None or not is_wanted(wanted, model="global"):
            return None
        compares = is_wanted(wanted, model="global", rule="prototype")
        evaluator = self._evaluator(pool if compares else None)
        if group is not None:
            rows = torch.arange(len(evaluator.labels)).tensor_split(group.size)[group.rank]
            inputs = evaluator.inputs[rows.to(evaluator.inputs.device)]
            evaluator = replace(evaluator, inputs=inputs)
        (own,) = evaluator.predict(
            lambda inputs: as_stack(self.model.apply(averaged, inputs)),
            with_similarities=is_wanted(wanted, model="global", rule="prototype", prior="labels"),
        )
        if group is None:
            return own
        tensors = {name: each for name, each in vars(own).items() if each is not None}
        parts = [load(part) for part in group.gather(pack_tensors(tensors))]
        device = self.data.test_inputs.device
        joined = {name: torch.cat([part[name] for part in parts]).to(device) for name in tensors}
        return replace(own, **joined)

    def read(
        self,
        averaged: Predictions | None,
        pool: PrototypePool | None,
        trained: Mapping[str, TrainedClients],
        wanted: WantedPredictors,
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation:
        """Evaluate all clients; `trained` are those whose personal models are evaluated.

        `with_confusion` adds the confusions by client and the calibration bins by test set of the
        primary predictors.
        """
        tests, numbers = self.tests, {name: place for place, name in enumerate(self.data.names)}
        columns: PredictorColumns = {
            test: {name: [None] * len(numbers) for name in wanted[test]} for test in TESTS
        }
        primary = {test: [self.method.predictor_on(test)] * with_confusion for test in TESTS}
        confusion: dict[str, ConfusionCounts] = {}
        bins: dict[Test, BinSums] = {test: add_bins([]) for test in TESTS}

        def count(name: str, classes: Tensor | None) -> None:
            own = tests.own(numbers[name])
            if classes is not None and len(own):
                counted = count_confusions(classes, tests.labels[own], self.data.num_classes)
                confusion[name] = counted

        if averaged is not None:
            places = torch.tensor(sorted(numbers[name] for name in trained), dtype=torch.int64)
            scorer = GlobalScorer(tests, averaged, places.to(tests.sizes.device))
            for test, predictor in _of_model("global", wanted):
                columns[test][predictor] = scorer.column(test, predictor)
            for test, predictor in _of_model("global", primary):
                bins[test] = scorer.bins(test, predictor)
                if test == "local_test":
                    for name in trained if len(numbers) > _MOST_CONFUSIONS else numbers:
                        count(name, scorer.predict(predictor, numbers[name]))
        for name, predictions, is_whole in self._predict_personal(pool, trained, wanted):
            own = PersonalScorer(tests, numbers[name], predictions, is_whole)
            for test, predictor in _of_model("personal", wanted):
                columns[test][predictor][own.client] = own.percent(test, predictor)
            for test, predictor in _of_model("personal", primary):
                bins[test] = add_bins([bins[test], own.bins(test, predictor, len(tests))])
                if test == "local_test":
                    count(name, own.predict(test, predictor))
        in_order = {name: confusion[name] for name in numbers if name in confusion}
        return RoundEvaluation(list(numbers), columns, list(trained), in_order, bins)

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
        on_all = self.tests.is_shared or is_wanted(wanted, ["global_test"], model="personal")
        if on_all:
            for group in dict.fromkeys(trained.values()):
                together = predict_clients(group, evaluator, trained.keys() - alone.keys())
                yield from ((name, predictions, True) for name, predictions in together)
        for name, group in trained.items():
            each = alone.get(name, evaluator)
            if not on_all:
                local_test = self.data.client(name).test
                inputs, labels = evaluator.inputs[local_test], evaluator.labels[local_test]
                each = replace(each, inputs=inputs, labels=labels)
            elif name not in alone:
                continue
            for _, predictions in predict_clients(group, each, [name]):
                yield name, predictions, on_all


def _of_model(model: str, predictors: WantedPredictors) -> list[tuple[Test, PredictorName]]:
    """Return the predictors of a kind of model, with their test sets."""
    pairs = [(test, name) for test in TESTS for name in predictors[test]]
    return [(test, name) for test, name in pairs if PredictorKind.of(name).model == model]
