"""What a report says of one run, as plain values."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json, read_json_file, validate_content
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_data
from mpfedcl.methods import PREDICTORS, TESTS, Method, PredictorName, Test, find_method, is_built_in
from mpfedcl.report.client_description import (
    describe_clients,
    describe_holdings,
    measure_spread,
)
from mpfedcl.report.number_formatting import finite_values, mean, rounded
from mpfedcl.report.prototype_map import describe_prototype_map
from mpfedcl.report.reproduction import (
    federation_commands,
    federation_start,
    file_command,
    run_command,
)
from mpfedcl.report.tables import tests_differ
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.run_files import Confusion, Partition, Summary

_MOST_COUNTS = 60_000
"""Numbers of confusion matrices a run may bring; beyond it the worst clients' are kept."""
_MOST_ABSENCES = 100


@dataclass(frozen=True)
class RunRecords:
    """A run's files, read and found sound."""

    path: Path
    experiment: Experiment
    rounds: list[RoundRecord]
    damaged: int
    """Lines of rounds.jsonl that could not be read."""
    summary: Summary | None
    partition: Partition | None
    confusion: Confusion | None

    @classmethod
    def read(cls, path: Path) -> "RunRecords":
        """Read a run directory."""
        directory = RunDirectory(path)
        experiment = directory.read_experiment()
        lines = directory.read_records()
        file = path / "rounds.jsonl"
        if not lines:
            raise InvalidInput(f"{file} holds no round; a report needs a run of at least one.")
        rounds = [
            validate_content(line, RoundRecord, f"round {number} of {file}")
            for number, line in enumerate(lines, 1)
        ]
        return cls(
            path,
            experiment,
            rounds,
            len(file.read_bytes().splitlines()) - len(lines),
            _read_optional(path / "summary.json", Summary),
            _read_optional(path / "partition.json", Partition),
            _read_optional(path / "confusion.json", Confusion),
        )

    @cached_property
    def predictors(self) -> dict[Test, PredictorName]:
        """The reading by which the method is judged on each test."""
        if self.summary:
            own = self.summary.predictor
            return {"local_test": own, "global_test": self.summary.predictor_global or own}
        if is_built_in(self.experiment.method):
            num_classes = len(self.partition.classes) if self.partition else 1
            method = find_method(self.experiment.method)(self.experiment, num_classes)
            return {test: method.predictor_on(test) for test in TESTS}
        return dict.fromkeys(TESTS, self._recognize_reading())

    @cached_property
    def has_shared_test(self) -> bool:
        """Whether all clients are tested on one test; clients of a network bring their own."""
        if self.experiment.partition.test != "shared" or self.is_network:
            return False
        read = self.last_evaluated.accuracy if self.last_evaluated else None
        return not read or not tests_differ(read["local_test"], read["global_test"])

    @property
    def has_diverged(self) -> bool:
        """Whether the run ended in numbers that are none."""
        is_over = self.rounds and self.rounds[-1].round >= self.experiment.rounds
        if not is_over and self.summary is None:
            return False
        return bool(self.rounds) and self.rounds[-1].has_diverged(self.predictors["local_test"])

    @property
    def method_name(self) -> str:
        """What the method is called; one whose run is not finished has not told it yet."""
        told = self.summary.method_name if self.summary else ""
        return told or self.experiment.method.rpartition(":")[2]

    @property
    def is_network(self) -> bool:
        """Whether clients were on machines of their own, with data of their own."""
        return self.partition is not None and self.partition.network

    @property
    def is_one_shot(self) -> bool:
        """Whether clients send sums once and nobody trains."""
        if is_built_in(self.experiment.method):
            return not find_method(self.experiment.method).trains
        # Somebody else's method is not asked; what does not train has no loss.
        return self.experiment.rounds == 1 and all(line.loss is None for line in self.rounds)

    @property
    def privacy(self) -> Json | None:
        """The budget and what was spent of it by the last round, where there is one."""
        return self.rounds[-1].privacy if self.rounds else None

    @cached_property
    def last_evaluated(self) -> RoundRecord | None:
        """The last round that was evaluated; in a finished run the last one."""
        return next((line for line in reversed(self.rounds) if line.accuracy), None)

    @property
    def num_clients(self) -> int:
        """How many clients the run has, as far as it is known."""
        last = self.last_evaluated
        known = self.partition.clients if self.partition else (last and last.accuracy_per_client)
        return len(known or ())

    def _recognize_reading(self) -> PredictorName:
        """Tell by the numbers: those of the clients are of the predictor that is judged by."""
        # Somebody else's method is not asked: a report runs no code that a run names.
        read = [(line.accuracy, line.accuracy_per_client) for line in self.rounds if line.accuracy]
        spreads = [line.accuracy_spread for line in self.rounds if line.accuracy]
        means = [
            spread.mean if spread else mean(finite_values(list((each or {}).values())))
            for spread, (_, each) in zip(spreads, read, strict=True)
        ]
        for predictor in PREDICTORS:
            shown = [(table or {}).get("local_test", {}).get(predictor) for table, _ in read]
            if means and all(
                a is not None and b is not None and math.isclose(a, b, abs_tol=1e-6)
                for a, b in zip(shown, means, strict=True)
            ):
                return predictor
        return Method.primary_predictor

    def value(self, test: str, predictor: str) -> float | None:
        """Return a predictor of the last evaluated round."""
        table = self.last_evaluated.accuracy if self.last_evaluated else None
        return rounded((table or {}).get(test, {}).get(predictor), 4)  # type: ignore[call-overload]

    @property
    def name(self) -> str:
        """The folder's name, whatever way the path was written."""
        return self.path.resolve().name or str(self.path)


def _read_optional(path: Path, schema: Any) -> Any:
    return read_json_file(path, schema) if path.is_file() else None


def describe_run(records: RunRecords) -> Json:
    """Return what the records of one run tell: clients, classes, confusion, partition, absences."""
    experiment = records.experiment
    is_told = records.privacy is None
    clients = describe_clients(records.partition if is_told else None, records.last_evaluated)
    confusion = _describe_confusion(records, clients)
    fairness = measure_spread(records.last_evaluated)
    return {
        "name": records.name,
        "method": records.method_name,
        "seed": experiment.seed,
        "setting": ", ".join(describe_data(experiment, {"network": records.is_network})),
        "rounds": records.rounds[-1].round if records.rounds else 0,
        "planned": experiment.rounds,
        "finished": records.summary is not None,
        "damaged": records.damaged,
        "predictor": records.predictors["local_test"],
        "read_in": records.last_evaluated.round if records.last_evaluated else None,
        "clients": clients,
        "population": records.num_clients,
        "fairness": fairness.to_json() if fairness else None,
        "confusion": confusion,
        "partition": describe_holdings(records.partition, is_told=is_told),
        "absences": _describe_absences(records),
    }


def find_absences(line: RoundRecord) -> Iterator[tuple[str, str, str]]:
    """Return each client whose answer was not used in a round: its name, what happened, and why."""
    for name, reason in line.clients.rejected.items():
        yield name, "rejected", reason
    reasons = _reasons(line.remarks, "missing")
    for name in line.clients.missing:
        yield name, "did not answer", reasons.get(name, "")
    for name, reason in _reasons(line.remarks, "refused").items():
        yield name, "not let in", reason
    # Over a network clients read the last round after it.
    closing = line.remarks.get("closing")
    for kind in ("missing", "rejected"):
        for name, reason in _reasons(closing, kind).items():
            yield name, "did not read the last round", reason


def _reasons(remarks: Any, kind: str) -> dict[str, str]:
    """Return why, by client, as an engine remarks it; whatever else is there is no reason."""
    found = remarks.get(kind) if isinstance(remarks, dict) else None
    reasons = found.items() if isinstance(found, dict) else ()
    return {str(name): str(why) for name, why in reasons}


def describe_settings(records: RunRecords) -> Json:
    """Return every setting of a run, how to get it again, and what it was made with."""
    file = records.path / "experiment.toml"
    how, command = "In one command:", run_command(records.experiment)
    if records.is_network:
        assert records.partition is not None
        how = "A federation is a command for the server, one for each client, and one for the run:"
        clients = list(records.partition.clients)
        command = federation_commands(records.experiment, clients, str(file))
    return {
        "toml": records.experiment.to_toml(),
        "file": "experiment.toml",
        "file_command": federation_start(str(file))
        if records.is_network
        else file_command(records.path),
        "how": how,
        "command": command,
        "versions": records.summary.versions if records.summary else {},
        "threads": records.summary.threads if records.summary else None,
    }


def find_worst_client_and_class(run: Json) -> tuple[Json | None, Json | None]:
    """Return the client and the class with the lowest accuracy, as far as they are known."""
    clients = [each for each in run["clients"] if each["accuracy"] is not None]
    classes = [each for each in run["confusion"].get("by_class", []) if each["tested"]]
    return _lowest(clients), _lowest(classes)


def _lowest(several: list[Json]) -> Json | None:
    if len(several) > 1 and len({each["accuracy"] for each in several}) == 1:
        # As with one model on one test: nobody is behind.
        return {**several[0], "name": "all alike"}
    return min(several, key=lambda each: each["accuracy"], default=None)


def _describe_confusion(records: RunRecords, clients: list[Json]) -> Json:
    found = records.confusion
    if found is None:
        why = (
            "This run was made before confusion matrices were recorded; run it again to see them."
            if records.summary
            else "The confusion matrix is made at the end of a run, and this one has not ended."
        )
        return {"missing": why}
    if not records.rounds or records.rounds[-1].round != found.round:
        return {"missing": f"The confusion matrix is of round {found.round}, not of the last one."}
    if not found.clients:
        return {"missing": "No client of this run has test images of its own."}
    size = range(len(found.classes))
    total = [[sum(each[i][j] for each in found.clients.values()) for j in size] for i in size]
    silent = [sum(each[i] for each in found.unanswered.values()) for i in size]
    most = max(1, _MOST_COUNTS // max(1, len(found.classes) ** 2))
    accuracies = {each["name"]: each["accuracy"] for each in clients}
    # The worst first, where not all fit: they are what one looks for.
    ranked = sorted(found.clients, key=lambda name: (accuracies.get(name) or 0.0, name))
    kept = set(ranked[:most])
    return {
        "classes": found.classes,
        "all": total,
        "unanswered": silent,
        "clients": [
            {"name": name, "counts": counts, "unanswered": found.unanswered.get(name)}
            for name, counts in found.clients.items()
            if name in kept
        ],
        "left_out": len(found.clients) - len(kept),
        "by_class": [
            {
                "name": name,
                "tested": sum(total[i]) + silent[i],
                "accuracy": rounded(100 * total[i][i] / max(1, sum(total[i]) + silent[i])),
            }
            for i, name in enumerate(found.classes)
        ],
    }


def describe_run_prototypes(records: RunRecords, *, with_map: bool) -> Json:
    """Return the prototype map of a run, or why there is none here."""
    if records.partition is None:
        return {"missing": "The run has no partition.json, so there is no map."}
    if not with_map and (records.path / "pool.safetensors").is_file():
        return {
            "missing": "In a comparison only the first seed of each method has a map; a report of "
            "this run alone shows its own."
        }
    partition = RunDirectory(records.path).read_json("partition.json")
    return describe_prototype_map(
        records.path, records.experiment, partition, records.partition.classes
    )


def _describe_absences(records: RunRecords) -> Json:
    """Return who was rejected, who did not answer, and why, each with the rounds."""
    absences: dict[tuple[str, str, str], list[int]] = {}
    for line in records.rounds:
        for name, what, why in find_absences(line):
            absences.setdefault((name, what, why), []).append(line.round)
    rows: list[Json] = [
        {"client": name, "what": what, "why": why}
        | {"times": len(rounds), "first": rounds[0], "last": rounds[-1]}
        for (name, what, why), rounds in absences.items()
    ]
    rows.sort(key=lambda row: (-row["times"], row["what"] != "rejected"))
    return {"rows": rows[:_MOST_ABSENCES], "left_out": max(0, len(rows) - _MOST_ABSENCES)}
