"""One run: its records, and the content that a report shows of it."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json, read_json_file, validate_content
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.descriptions import describe_data
from mpfedcl.experiment.names import metric_sign
from mpfedcl.methods import TESTS, Method, PredictorName, Test, find_method, is_built_in
from mpfedcl.report.prototype_map import describe_prototype_map
from mpfedcl.report.wording import tests_differ
from mpfedcl.rounds.metrics import Fairness, MetricValues, measure_fairness
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.file_schemas import Confusion, Partition, Summary

_MOST_CLIENTS = 1000
"""Clients of a run that a page lists by name."""
_MOST_ABSENCES = 100
ALL_EQUAL = "all equal"
"""The name of the worst client if all have the same accuracy, as with one model on one test set."""


@dataclass(frozen=True)
class RunRecords:
    """The files of a run, validated."""

    path: Path
    experiment: Experiment
    rounds: list[RoundRecord]
    damaged: int
    """Lines of rounds.jsonl that could not be read."""
    summary: Summary | None
    partition: Partition | None
    confusion: Confusion | None

    @classmethod
    def read(cls, path: Path, *, with_rounds: bool = True) -> "RunRecords":
        """Read a run directory; a model card needs no rounds, which may take gigabytes."""
        directory = RunDirectory(path)
        experiment = directory.read_experiment()
        lines = directory.read_records() if with_rounds else []
        file = path / "rounds.jsonl"
        if with_rounds and not lines:
            raise InvalidInput(f"{file} holds no round; a report needs a run of at least one.")
        rounds = [
            validate_content(line, RoundRecord, f"round {number} of {file}")
            for number, line in enumerate(lines, 1)
        ]
        return cls(
            path,
            experiment,
            rounds,
            # A line that is being written is not damaged.
            max(0, directory.count_records() - len(lines)) if with_rounds else 0,
            _read_optional(path / "summary.json", Summary),
            _read_optional(path / "partition.json", Partition),
            _read_optional(path / "confusion.json", Confusion),
        )

    @cached_property
    def predictors(self) -> dict[Test, PredictorName]:
        """The predictor of the primary metric on each test set."""
        if self.summary:
            local = self.summary.predictor
            return {"local_test": local, "global_test": self.summary.predictor_global or local}
        if is_built_in(self.experiment.method):
            num_classes = len(self.partition.classes) if self.partition else 1
            method = find_method(self.experiment.method)(self.experiment, num_classes)
            return {test: method.predictor_on(test) for test in TESTS}
        # A report imports no foreign method.
        return dict.fromkeys(TESTS, Method.primary_predictor)

    @cached_property
    def has_shared_test(self) -> bool:
        """Whether all clients share one test set; clients of a network have their own."""
        if self.experiment.partition.test != "shared" or self.is_network:
            return False
        found = self.last_evaluated.accuracy if self.last_evaluated else None
        return not found or not tests_differ(found["local_test"], found["global_test"])

    @property
    def has_diverged(self) -> bool:
        """Whether the run ended without finite values."""
        is_over = self.rounds and self.rounds[-1].round >= self.experiment.rounds
        if not is_over and self.summary is None:
            return False
        return bool(self.rounds) and self.rounds[-1].has_diverged(self.predictors["local_test"])

    @property
    def method_name(self) -> str:
        """Name of the method, as a finished run records it."""
        recorded = self.summary.method_name if self.summary else ""
        return recorded or self.experiment.method.rpartition(":")[2]

    @property
    def is_network(self) -> bool:
        """Whether the clients ran on their own machines with their own data."""
        return self.partition is not None and self.partition.network

    @property
    def is_one_shot(self) -> bool:
        """Whether clients send sufficient statistics once, without training."""
        if is_built_in(self.experiment.method):
            return not find_method(self.experiment.method).trains
        # A report imports no foreign method; a method without training has no loss.
        return self.experiment.rounds == 1 and all(line.loss is None for line in self.rounds)

    @property
    def privacy(self) -> Json | None:
        """The privacy budget and its spending by the last round, if there is one."""
        return self.rounds[-1].privacy if self.rounds else None

    @cached_property
    def last_evaluated(self) -> RoundRecord | None:
        """The last round that was evaluated; in a finished run the last one."""
        return next((line for line in reversed(self.rounds) if line.accuracy), None)

    @property
    def last_evaluated_round(self) -> int:
        """The number of that round; 0 if there is none."""
        return self.last_evaluated.round if self.last_evaluated else 0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all rounds by phase."""
        return add_costs(line.seconds for line in self.rounds)

    @property
    def bytes(self) -> dict[str, float]:
        """Bytes of all rounds by direction."""
        return add_costs(line.bytes for line in self.rounds)

    @property
    def data(self) -> tuple[str, str]:
        """What the data are, and how they are split between clients."""
        return describe_data(self.experiment, {"network": self.is_network})

    @property
    def num_clients(self) -> int:
        """Number of clients of the run, as far as it is known."""
        last = self.last_evaluated
        known = self.partition.clients if self.partition else (last and last.accuracy_per_client)
        return len(known or ())

    def value(self, test: Test, predictor: PredictorName) -> float | None:
        """Return the accuracy of a predictor in the last evaluated round."""
        table = self.last_evaluated.accuracy if self.last_evaluated else None
        return (table or {}).get(test, {}).get(predictor)

    def accuracy(self, test: Test) -> float | None:
        """Return the accuracy of the primary predictor in the last evaluated round."""
        return self.value(test, self.predictors[test])

    def primary_metric(self, test: Test) -> float | None:
        """Return the primary metric of the primary predictor in the last evaluated round."""
        if self.experiment.metric == "accuracy":
            return self.accuracy(test)
        line = self.last_evaluated
        return (line.metric or {}).get(test) if line else None

    def rank_value(self, test: Test) -> float | None:
        """Return the primary metric, negative if smaller values are better."""
        value = self.primary_metric(test)
        return None if value is None else metric_sign(self.experiment.metric) * value

    @property
    def metrics(self) -> dict[Test, MetricValues] | None:
        """All metrics on both test sets, if the run has them."""
        last = self.rounds[-1] if self.rounds else self.summary
        found = last.metrics if last else None
        if found is None:
            return None
        return {"local_test": found.local_test, "global_test": found.global_test}

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().name or str(self.path)

    @cached_property
    def described(self) -> Json:
        """Clients, classes, confusion and absences, as a page shows them."""
        last = self.last_evaluated
        fairness = measure_spread(last)
        return {
            "rounds": self.rounds[-1].round if self.rounds else 0,
            "planned": self.experiment.rounds,
            "finished": self.summary is not None,
            "predictor": self.predictors["local_test"],
            "read_in": self.last_evaluated_round,
            "clients": _describe_clients(self),
            "population": self.num_clients,
            "fairness": fairness.to_json() if fairness else None,
            "confusion": _describe_confusion(self),
            "absences": _describe_absences(self),
        }


def add_costs(rounds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of costs by part."""
    total: Any = Counter[str]()
    for costs in rounds:
        total.update(costs)
    return dict(total)


def _read_optional(path: Path, schema: Any) -> Any:
    return read_json_file(path, schema) if path.is_file() else None


def _describe_clients(run: RunRecords) -> list[Json]:
    """Return the accuracy of each client on its local test set; of many clients the lowest."""
    accuracy = (run.last_evaluated.accuracy_per_client if run.last_evaluated else None) or {}
    # Under a privacy budget the data of clients are not shown.
    partition = run.partition if run.privacy is None else None
    names = list(partition.clients if partition else ()) or list(accuracy)
    if len(names) > _MOST_CLIENTS:
        known = sorted((value, name) for name, value in accuracy.items() if value is not None)
        listed = {name for _, name in known[:_MOST_CLIENTS]}
        names = [name for name in names if name in listed]
    return [{"name": name, "accuracy": accuracy.get(name)} for name in names]


def measure_spread(line: RoundRecord | None) -> Fairness | None:
    """Return the spread of accuracy over all clients evaluated in a round, listed or not."""
    if line is None:
        return None
    return line.accuracy_spread or measure_fairness((line.accuracy_per_client or {}).values())


def _find_absences(line: RoundRecord) -> Iterator[tuple[str, str, str]]:
    """Return each client whose answer was not used in a round: name, event and reason."""
    for name, reason in line.clients.rejected.items():
        yield name, "rejected", reason
    reasons = _reasons(line.remarks, "missing")
    for name in line.clients.missing:
        yield name, "did not answer", reasons.get(name, "")
    for name, reason in _reasons(line.remarks, "refused").items():
        yield name, "not admitted", reason
    # Over a network clients evaluate the last round after it.
    closing = line.remarks.get("closing")
    for kind in ("missing", "rejected"):
        for name, reason in _reasons(closing, kind).items():
            yield name, "did not evaluate the last round", reason


def _reasons(remarks: Any, kind: str) -> dict[str, str]:
    """Return the reasons by client that an engine has remarked."""
    found = remarks.get(kind) if isinstance(remarks, dict) else None
    reasons = found.items() if isinstance(found, dict) else ()
    return {str(name): str(why) for name, why in reasons}


def describe_settings(records: RunRecords) -> Json:
    """Return all settings of a run, the command that reproduces it, and versions."""
    file = records.path / "experiment.toml"
    return {
        "toml": records.experiment.to_toml(),
        "command": federation_command(file) if records.is_network else run_command(file),
        "versions": records.summary.versions if records.summary else {},
        "threads": records.summary.threads if records.summary else None,
    }


def run_command(file: Path) -> str:
    """Return the command of a run with the settings in a file."""
    return _join(["run", str(file)])


def federation_command(file: Path) -> str:
    """Return the command of a run over a network; a run does not record its federation's folder."""
    return _join(["federation", "start", "FEDERATION", str(file)])


def _join(words: Sequence[str]) -> str:
    return f"mpfedcl {shlex.join(words)}"


def find_worst_client_and_class(run: Json) -> tuple[Json | None, Json | None]:
    """Return the client and the class with the lowest accuracy, as far as they are known."""
    clients = [each for each in run["clients"] if each["accuracy"] is not None]
    classes = [each for each in run["confusion"].get("by_class", []) if each["tested"]]
    return _lowest(clients), _lowest(classes)


def _lowest(several: list[Json]) -> Json | None:
    if len(several) > 1 and len({each["accuracy"] for each in several}) == 1:
        return {**several[0], "name": ALL_EQUAL}
    return min(several, key=lambda each: each["accuracy"], default=None)


def _describe_confusion(records: RunRecords) -> Json:
    found = records.confusion
    if found is None and records.summary is None:
        missing = "The confusion matrix is written at the end of a run, and this run has not ended."
    elif found is None:
        missing = "The run has no confusion.json."
    elif not records.rounds or records.rounds[-1].round != found.round:
        missing = f"The confusion matrix is of round {found.round}, not of the last round."
    elif not found.clients:
        missing = "No client of this run has test samples."
    else:
        total = numpy.sum(list(found.clients.values()), axis=0)
        silent = numpy.sum(list(found.unanswered.values()) or [[0] * len(total)], axis=0)
        tested = total.sum(axis=1) + silent
        by_class = [
            {"name": name, "tested": int(of), "accuracy": 100 * float(right) / max(1, int(of))}
            for name, of, right in zip(found.classes, tested, total.diagonal(), strict=True)
        ]
        counts = {"all": total.tolist(), "unanswered": silent.tolist()}
        return {"classes": found.classes, "by_class": by_class, **counts}
    return {"missing": missing}


def describe_run_prototypes(records: RunRecords) -> Json:
    """Return the prototype map of a run, or the reason why there is none."""
    if records.partition is None:
        return {"missing": "The run has no partition.json, so there is no map."}
    return describe_prototype_map(records.path, records.experiment, records.partition.classes)


def _describe_absences(records: RunRecords) -> Json:
    """Return rejected and missing clients with reasons and rounds."""
    absences: dict[tuple[str, str, str], list[int]] = {}
    for line in records.rounds:
        for name, what, why in _find_absences(line):
            absences.setdefault((name, what, why), []).append(line.round)
    rows: list[Json] = [
        {"client": name, "what": what, "why": why}
        | {"times": len(rounds), "first": rounds[0], "last": rounds[-1]}
        for (name, what, why), rounds in absences.items()
    ]
    rows.sort(key=lambda row: (-row["times"], row["what"] != "rejected"))
    return {"rows": rows[:_MOST_ABSENCES], "left_out": max(0, len(rows) - _MOST_ABSENCES)}
