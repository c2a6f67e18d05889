"""The evaluation of a round, a table of predictors x test sets, and when a run is evaluated."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor

from mpfedcl.experiment import Experiment
from mpfedcl.methods import (
    PREDICTORS,
    TESTS,
    Method,
    PredictorKind,
    PredictorName,
    Test,
    prototype_rule,
)
from mpfedcl.rounds.metrics import (
    BinSums,
    ConfusionCounts,
    MetricTables,
    MetricValues,
    expected_calibration_error,
    join_metrics,
    list_accuracies,
)
from mpfedcl.rounds.scoring import Column

AccuracyTable = dict[str, dict[str, float | None]]
"""Percent correct by test set and predictor; None if the method has no such predictor, and no entry
if it was not evaluated."""
PredictorColumns = dict[Test, dict[PredictorName, Column]]
WantedPredictors = Mapping[Test, Collection[PredictorName]]
"""The predictors to evaluate on each test set."""

MANY_CLIENTS = 1000
"""Of a larger population, not all personal models are evaluated."""
SOME_CLIENTS = 100
"""The number that are by default."""
_TRAINING_FACTOR = 1.5
"""Time of a multiplication in training, in small batches, relative to one in evaluation."""


def wanted_predictors(method: Method, *, is_complete: bool) -> WantedPredictors:
    """Return all predictors, or only the primary one on each test set.

    All if the evaluation is complete, as in the last round, or if settings ask for it.
    """
    if is_complete or method.experiment.evaluate_predictors == "all":
        return dict.fromkeys(TESTS, PREDICTORS)
    return {test: (method.predictor_on(test),) for test in TESTS}


def is_wanted(wanted: WantedPredictors, tests: Sequence[Test] = TESTS, **parts: str) -> bool:
    """Return whether a predictor with these parts (model, rule, prior) is wanted on some test."""
    kinds = (PredictorKind.of(name) for test in tests for name in wanted[test])
    return any(all(getattr(kind, part) == value for part, value in parts.items()) for kind in kinds)


@dataclass(frozen=True)
class RoundEvaluation:
    """The clients' accuracies after a round."""

    names: Sequence[str]
    columns: PredictorColumns
    """Percent correct of each client, in the order of names."""
    trained: Collection[str]
    """The clients that trained in this round, whose personal models count."""
    confusion: dict[str, ConfusionCounts] = field(default_factory=dict)
    """Only if asked for: of the primary predictor on each client's local test set."""
    bins: dict[Test, BinSums] = field(default_factory=dict)
    """Only if asked for: calibration bins of the primary predictor, of all clients together."""
    metrics: MetricTables | None = None
    """Only if asked for: the metrics of the primary predictors."""

    @classmethod
    def of_tables(
        cls,
        tables: Mapping[str, AccuracyTable],
        trained: Collection[str],
        confusion: dict[str, ConfusionCounts],
        values: dict[str, MetricValues],
    ) -> Self:
        """Join tables and metrics that clients have made one by one, on their own test sets."""
        columns: PredictorColumns = {
            test: {r: [table[test].get(r) for table in tables.values()] for r in PREDICTORS}
            for test in TESTS
        }
        metrics = None
        if values:
            joined = join_metrics(confusion, values)
            metrics = MetricTables(
                local_test=joined, global_test=dict.fromkeys(joined), per_client=values
            )
        return cls(list(tables), columns, trained, confusion, metrics=metrics)

    def table(self) -> AccuracyTable:
        """Average over clients: global models over all, personal models over the trained."""
        return {test: {r: self._mean(test, r) for r in self.columns[test]} for test in TESTS}

    def per_client(self, predictor: PredictorName) -> dict[str, float | None]:
        """Return one predictor on each client's local test set."""
        return dict(zip(self.names, self.columns["local_test"][predictor], strict=True))

    def only(self, released: Collection[PredictorName]) -> Self:
        """Return the evaluation with all other predictors undefined."""
        hidden: Column = [None] * len(self.names)
        columns: PredictorColumns = {
            test: {r: column if r in released else hidden for r, column in row.items()}
            for test, row in self.columns.items()
        }
        return replace(self, columns=columns)

    def to_record(
        self, primary: PredictorName, took_part: Collection[str], metric: str, *, is_last: bool
    ) -> dict[str, Any]:
        """Return the fields of a round's record.

        `primary` is the predictor listed per client. The value of `metric` is recorded in every
        evaluated round unless it is accuracy, and all metrics in the last one.
        """
        rows, spread = list_accuracies(self.per_client(primary), took_part)
        fields: dict[str, Any] = {
            "accuracy": self.table(),
            "accuracy_per_client": rows,
            "accuracy_spread": spread,
        }
        if is_last:
            fields["calibration_error"] = {
                test: expected_calibration_error(self.bins.get(test, [])) for test in TESTS
            }
        fields |= self.metric_fields(metric, is_last=is_last)
        if (found := fields.get("metrics")) is not None:
            listed = {name: each for name, each in found.per_client.items() if name in rows}
            fields["metrics"] = found.model_copy(update={"per_client": listed})
        return fields

    def metric_fields(self, metric: str, *, is_last: bool) -> dict[str, Any]:
        """Return the fields of a record that hold metrics other than accuracy."""
        if self.metrics is None:
            return {}
        fields: dict[str, Any] = {"metrics": self.metrics} if is_last else {}
        if metric != "accuracy":
            fields["metric"] = {test: getattr(self.metrics, test).get(metric) for test in TESTS}
        return fields

    def _mean(self, test: Test, predictor: PredictorName) -> float | None:
        column = self.columns[test][predictor]
        if PredictorKind.of(predictor).model == "personal":
            trained = set(self.trained)
            column = [c for n, c in zip(self.names, column, strict=True) if n in trained]
        known = [value for value in column if value is not None]
        return sum(known) / len(known) if known else None


# When a run is evaluated


@dataclass(frozen=True)
class Workload:
    """The sizes that determine the cost of a run.

    The evaluation schedule depends on these counts and never on seconds, so that an experiment is
    evaluated in the same rounds on every machine.
    """

    num_clients: int
    train_samples: int
    test_images: int
    """Of the global test set."""
    own_images: int
    """Of all local test sets, added up."""
    parameters: int
    """About as many as multiplications to pass a sample through the model."""
    prototype_numbers: int
    """Values of the prototype pool: multiplications to compare one embedding with it."""

    @classmethod
    def of(
        cls,
        method: Method,
        label_counts: Tensor,
        tests: tuple[int, int],
        parameters: int,
        width: int,
    ) -> "Workload":
        """Count; `label_counts` are [N, C], `tests` images of the global and of all local tests."""
        settings = method.experiment.prototypes
        held = int((label_counts > 0).sum()) * (prototype_rule(method).num_prototypes or 1)
        most = held if settings.pool_size is None else settings.pool_size * label_counts.shape[1]
        total = int(label_counts.sum())
        return cls(len(label_counts), total, *tests, parameters, min(held, most) * width)

    def participants(self, experiment: Experiment) -> int:
        """Return the number of clients of a round."""
        drawn = max(experiment.min_clients, round(experiment.fraction * self.num_clients))
        return min(self.num_clients, drawn)

    def training(self, method: Method) -> float:
        """Return the cost of training in a round: forward, and twice as much backward."""
        share = self.participants(method.experiment) / max(1, self.num_clients)
        size = self.train_samples / max(1, self.num_clients)
        training, batch_size = method.local_training(1), method.experiment.train.batch_size
        passes = 3 * training.passes(size, batch_size) if method.trains else 1
        return _TRAINING_FACTOR * passes * share * self.train_samples * self.parameters

    def evaluation(self, experiment: Experiment, wanted: WantedPredictors) -> float:
        """Return the cost of an evaluation of the wanted predictors."""
        part, whole = self.participants(experiment), self.num_clients * self.test_images
        evaluated = min(part, experiment.evaluate_clients or part)
        is_global = is_wanted(wanted, ["global_test"], model="personal")
        own = whole if is_global else min(self.own_images, whole)
        images = {
            "global": self.test_images,
            "personal": evaluated * own / max(1, self.num_clients),
        }
        cost = 0.0
        for model, count in images.items():
            if is_wanted(wanted, model=model):
                compares = is_wanted(wanted, model=model, rule="prototype")
                cost += count * (self.parameters + compares * self.prototype_numbers)
        return cost


def settle_evaluation(experiment: Experiment, method: Method, work: Workload) -> Experiment:
    """Return the experiment with `evaluate_clients` and `evaluate_every` filled in."""
    if experiment.evaluate_clients is None and work.num_clients > MANY_CLIENTS:
        experiment = experiment.replace(evaluate_clients=SOME_CLIENTS)
    if experiment.evaluate_every != "auto":
        return experiment
    between, last = (
        work.evaluation(experiment, wanted_predictors(method, is_complete=is_complete))
        for is_complete in (False, True)
    )
    every = choose_spacing(experiment.rounds, work.training(method), between, last)
    return experiment.replace(evaluate_every=every)


def choose_spacing(rounds: int, training: float, between: float, last: float) -> int:
    """Return the least of 1, 2, 3, 5, 10, 20, ... rounds between evaluations that is cheap enough.

    All evaluations together cost at most a fifth of the run, which is a quarter of its training. If
    the last one costs (nearly) that much by itself, the others get a twentieth of the training.
    `training` is the cost of a round, `between` that of an evaluation before the last round, `last`
    that of the complete one in the last round.

    Example:
        >>> choose_spacing(60, training=9.0, between=10.0, last=60.0)
        10
        >>> choose_spacing(60, training=1.0, between=10.0, last=60.0)
        60
    """
    budget = max(rounds * training / 4 - last, rounds * training / 20)
    spacings = (digit * 10**power for power in range(len(str(rounds))) for digit in (1, 2, 3, 5))
    cheap = (n for n in spacings if n < rounds and (rounds - 1) // n * between <= budget)
    return next(cheap, rounds)
