"""The evaluation of a process's clients after a round: personal models and the global model."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
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
from mpfedcl.privacy.private_rounds import released_predictors
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import (
    PredictorColumns,
    RoundEvaluation,
    WantedPredictors,
    is_wanted,
)
from mpfedcl.rounds.metrics import (
    MOST_PROBABILITIES,
    BinSums,
    ConfusionCounts,
    MetricTables,
    MetricValues,
    OwnMetric,
    PredictedSamples,
    add_bins,
    count_confusions,
    find_own_metric,
    mean_values,
    measure,
)
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
        evaluator = replace(
            evaluator,
            keeps_projected=self._needs_closeness("global"),
            keeps_similarities=is_wanted(wanted, model="global", rule="prototype", prior="labels"),
        )
        if group is not None:
            rows = torch.arange(len(evaluator.labels)).tensor_split(group.size)[group.rank]
            inputs = evaluator.inputs[rows.to(evaluator.inputs.device)]
            evaluator = replace(evaluator, inputs=inputs)
        (own,) = evaluator.predict(lambda inputs: as_stack(self.model.apply(averaged, inputs)))
        if group is None:
            return own
        tensors = own.tensors()
        parts = [load(part) for part in group.gather(pack_tensors(tensors))]
        device = self.data.test_inputs.device
        joined: dict[str, Any] = {
            name: torch.cat([part[name] for part in parts]).to(device) for name in tensors
        }
        return replace(own, **joined)

    def read(
        self,
        averaged: Predictions | None,
        pool: PrototypePool | None,
        trained: Mapping[str, TrainedClients],
        wanted: WantedPredictors,
        *,
        with_confusion: bool = False,
        group: WorkerGroup | None = None,
    ) -> RoundEvaluation:
        """Evaluate all clients; `trained` are those whose personal models are evaluated.

        `with_confusion` adds the confusions by client and the calibration bins by test set of the
        primary predictors, and their metrics, which the processes of a group join here.
        """
        tests, numbers = self.tests, {name: place for place, name in enumerate(self.data.names)}
        columns: PredictorColumns = {
            test: {name: [None] * len(numbers) for name in wanted[test]} for test in TESTS
        }
        primary = {test: [self.method.predictor_on(test)] * with_confusion for test in TESTS}
        confusion: dict[str, ConfusionCounts] = {}
        bins: dict[Test, BinSums] = {test: add_bins([]) for test in TESTS}
        measures = with_confusion or self.method.experiment.metric != "accuracy"
        released = released_predictors(self.method)
        judged = {
            test: [name for name in [self.method.predictor_on(test)] if name in released] * measures
            for test in TESTS
        }
        listed = list(trained if len(numbers) > _MOST_CONFUSIONS else numbers)
        measured = _MeasuredClients(
            self.method, listed, self._own_metric, is_shared=tests.is_shared
        )

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
                    for name in listed:
                        count(name, scorer.predict(predictor, numbers[name]))
            for test, predictor in _of_model("global", judged):
                for client, samples in scorer.samples(test, predictor):
                    measured.add(test, self.data.names[client], samples)
        predicted = self._predict_personal(pool, trained, wanted, measures=measures)
        for name, predictions, is_whole in predicted:
            own = PersonalScorer(tests, numbers[name], predictions, is_whole)
            for test, predictor in _of_model("personal", wanted):
                columns[test][predictor][own.client] = own.percent(test, predictor)
            for test, predictor in _of_model("personal", primary):
                bins[test] = add_bins([bins[test], own.bins(test, predictor)])
                if test == "local_test":
                    count(name, own.predict(test, predictor))
            for test, predictor in _of_model("personal", judged):
                measured.add(test, name, own.samples(test, predictor))
        in_order = {name: confusion[name] for name in numbers if name in confusion}
        metrics = measured.tables(group) if measures else None
        return RoundEvaluation(list(numbers), columns, list(trained), in_order, bins, metrics)

    @cached_property
    def _own_metric(self) -> OwnMetric | None:
        return find_own_metric(self.method.experiment.metric, self.method.num_classes)

    def _needs_closeness(self, model: str) -> bool:
        """Return whether the probabilities of a primary predictor are those of prototypes."""
        kinds = [PredictorKind.of(self.method.predictor_on(test)) for test in TESTS]
        return any(kind.model == model and kind.rule == "prototype" for kind in kinds)

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
        *,
        measures: bool,
    ) -> Iterator[tuple[str, Predictions, bool]]:
        """Yield clients' predictions and whether they are for all images; few at a time."""
        if not is_wanted(wanted, model="personal"):
            return
        if not self.method.trains or not is_wanted(wanted, model="personal", rule="prototype"):
            # Without training, all clients have the same embeddings.
            pool = None
        evaluator = self._evaluator(pool)
        evaluator = replace(
            evaluator,
            keeps_projected=measures and self._needs_closeness("personal"),
            keeps_similarities=is_wanted(
                wanted, model="personal", rule="prototype", prior="labels"
            ),
        )
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


class _MeasuredClients:
    """The metrics of this process's clients, and the samples of their local test sets."""

    def __init__(
        self, method: Method, listed: Collection[str], own: OwnMetric | None, *, is_shared: bool
    ) -> None:
        self._num_classes, self._metric = method.num_classes, method.experiment.metric
        self._listed = set(listed)
        self._own = own
        self._is_shared = is_shared
        """Whether the local test set of each client is the global one."""
        self._values: dict[Test, dict[str, MetricValues]] = {test: {} for test in TESTS}
        self._local: list[PredictedSamples] = []
        self._num_local = 0
        self._last: tuple[PredictedSamples, MetricValues] | None = None

    def add(self, test: Test, name: str, samples: PredictedSamples | None) -> None:
        """Add the predictions for one client; None if they are undefined."""
        if samples is None:
            return
        is_part = test == "local_test" and not self._is_shared
        if is_part:
            self._num_local += len(samples.labels)
            # Too many are not kept.
            if self._num_local * self._num_classes <= MOST_PROBABILITIES:
                self._local.append(samples)
        if name not in self._listed:
            return
        if self._last is None or self._last[0] is not samples:
            # Clients that predict the same share the object.
            self._last = samples, self._measure(samples, is_part=is_part)
        self._values[test][name] = self._last[1]

    def tables(self, group: WorkerGroup | None) -> MetricTables:
        """Return the metrics over the clients of all processes."""
        values, local = self._values, PredictedSamples.join(self._local)
        count, is_shared = self._num_local, self._is_shared
        if group is not None:
            report = json.dumps([values, count, is_shared]).encode()
            found = [json.loads(part) for part in group.gather(report)]
            values = {
                test: {n: v for part in found for n, v in part[0][test].items()} for test in TESTS
            }
            count, is_shared = sum(part[1] for part in found), all(part[2] for part in found)
            tensors = {n: v for n, v in vars(local).items() if v is not None} if local else {}
            parts = [load(part) for part in group.gather(pack_tensors(tensors))]
            columns = [(p["classes"], p["labels"], p.get("probabilities")) for p in parts if p]
            local = PredictedSamples.join([PredictedSamples(*each) for each in columns])
        means = {test: mean_values(list(each.values())) for test, each in values.items()}
        if not is_shared:
            is_whole = local is not None and len(local.labels) == count
            means["local_test"] = self._measure(local) if local and is_whole else mean_values([])
        return MetricTables(**means, per_client=values["local_test"])

    def _measure(self, samples: PredictedSamples, *, is_part: bool = False) -> MetricValues:
        try:
            return measure(samples, self._num_classes, self._metric, self._own)
        except InvalidInput:
            if not is_part:
                raise
            # One client may have samples of one class only, where some functions fail.
            return {**measure(samples, self._num_classes, self._metric), self._metric: None}
