"""The page of one run: all its records, read as they grow, and what is shown of them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json, parse_json
from mpfedcl.experiment import Experiment
from mpfedcl.inference.calibration import DRIFT_LOG, parse_drift_log
from mpfedcl.methods import SharesPrototypes, find_method, is_built_in
from mpfedcl.report.number_formatting import (
    choose_evenly,
    finite_values,
    round_significant,
    rounded,
)
from mpfedcl.report.run_description import (
    RunRecords,
    describe_run,
    describe_settings,
    find_absences,
)
from mpfedcl.report.seed_groups import describe_seed_group, run_readings_table
from mpfedcl.report.watch.incremental_records import IncrementalRecords
from mpfedcl.report.watch.prototype_history_map import PrototypeHistoryMap
from mpfedcl.report.watch.quartiles import Quartiles
from mpfedcl.report.watch.regular_files import (
    Signature,
    file_signature,
    parse_experiment,
    read_regular_file,
)
from mpfedcl.report.watch.run_discovery import RunLocation
from mpfedcl.rounds.listed_clients import MOST_LISTED
from mpfedcl.rounds.record import Attendance, RoundRecord
from mpfedcl.runs.run_files import Confusion, Partition, Summary

_MOST_POINTS = 400
_MOST_LINES = 12
"""Clients that have a line of their own."""
_MANY_CLIENTS = 200
"""Clients from which on only the newest round keeps what each of them did."""
_MOST_NAMES = 50
_SCHEMAS = {"summary": Summary, "partition": Partition, "confusion": Confusion}


class RunPage:
    """One run's files, read and kept for as long as it is looked at."""

    def __init__(self, location: RunLocation) -> None:
        self._location = location
        self._reader = IncrementalRecords(location.path / "rounds.jsonl")
        self._lines: list[RoundRecord] = []
        self._attendance: list[tuple[int, int, int]] = []
        self._quartiles = Quartiles()
        self._files: dict[str, tuple[Signature, Any]] = {}
        self._settings: tuple[Any, Json] | None = None
        self._names: tuple[Any, list[str]] = None, []
        self._troubles: dict[str, str] = {}
        self._map = PrototypeHistoryMap(location.path)
        self._encoded: dict[str, bytes] = {}
        self.records: RunRecords | None = None

    def refresh(self) -> None:
        """Read what is new. Damage to one file costs what that file would have told."""
        path, before = self._location.path, self._signatures()
        began, lines = self._reader.read_new()
        if began:
            self._lines, self._attendance, self._quartiles = [], [], Quartiles()
        for line in lines:
            self._add(line)
        experiment = self._read("experiment.toml", parse_experiment)
        found = {
            name: self._read(
                f"{name}.json",
                lambda content, file, schema=schema: parse_json(content, schema, file),
            )
            for name, schema in _SCHEMAS.items()
        }
        self._read(DRIFT_LOG, lambda content, _: parse_drift_log(content))
        self.records = experiment and RunRecords(
            path, experiment, self._lines, self._reader.damaged, **found
        )
        if began or lines or before != self._signatures():
            self._encoded.clear()

    def _signatures(self) -> Json:
        return {name: signature for name, (signature, _) in self._files.items()}

    def to_json(self) -> bytes:
        """Return all that the page of a run shows, but the map, as JSON."""
        return self._encode_once("run", self._describe)

    def map_to_json(self) -> bytes:
        """Return the map of the prototypes over rounds as JSON."""
        if self._map.refresh(self._lines[-1].round if self._lines else 0):
            self._encoded.pop("map", None)
        return self._encode_once("map", self._describe_map)

    def _encode_once(self, name: str, describe: Callable[[], Json]) -> bytes:
        # Made once, however many pages ask for it.
        if name not in self._encoded:
            self._encoded[name] = encode(describe())
        return self._encoded[name]

    def _add(self, line: RoundRecord) -> None:
        here = line.clients
        self._attendance.append((len(here.answered), len(here.missing), len(here.rejected)))
        self._quartiles.add(line)
        if self._lines:
            self._lines[-1] = self._without_clients(self._lines[-1])
        self._lines.append(line)

    def _without_clients(self, line: RoundRecord) -> RoundRecord:
        """Return a round without what thousands of clients did in it, but for a few of them."""
        if len(line.clients.answered) <= _MANY_CLIENTS:
            return line
        # Who answered is counted already; who did not stays.
        here = Attendance(answered=[], missing=line.clients.missing, rejected=line.clients.rejected)
        changes: Json = {"clients": here}
        for field in ("accuracy_per_client", "loss_per_client"):
            values = getattr(line, field) or {}
            changes[field] = {
                name: values[name] for name in self._choose_clients() if name in values
            }
        return line.model_copy(update=changes)

    def _client_names(self) -> list[str]:
        signature, partition = self._files.get("partition.json", (None, None))
        if partition is None:
            return sorted(self._lines[-1].accuracy_per_client or {})
        if self._names[0] != signature:
            self._names = signature, sorted(partition.clients)
        return self._names[1]

    def _choose_clients(self) -> list[str]:
        """Return the clients that have a line each: the same in every round."""
        names = self._client_names()
        return [names[place] for place in choose_evenly(len(names), _MOST_LINES)]

    def _read(self, name: str, parse: Any) -> Any:
        """Return a file's content, parsed anew only when it has changed."""
        file = self._location.path / name
        signature = file_signature(file)
        if signature is None:
            self._files.pop(name, None)
            self._troubles.pop(name, None)
            return None
        if name not in self._files or self._files[name][0] != signature:
            self._troubles.pop(name, None)
            try:
                self._files[name] = signature, parse(read_regular_file(file), file)
            except InvalidInput as error:
                self._files[name] = signature, None
                self._troubles[name] = str(error)
        return self._files[name][1]

    def _describe(self) -> Json:
        records = self.records
        if records is None:
            return {"troubles": list(self._troubles.values()) or ["The run has no settings."]}
        # A method that is not here, say, leaves the rest to be shown.
        try:
            run = describe_run(records)
            group = describe_seed_group(records.experiment.method, [records], [0], _MOST_POINTS)
            table = run_readings_table(records)
        except InvalidInput as error:
            return {"troubles": [*self._troubles.values(), str(error)]}
        return {
            "troubles": list(self._troubles.values()),
            "run": run | {"settings": self._describe_settings(records)},
            "group": group,
            "table": table,
            "clients": self._describe_clients(),
            "attendance": self._describe_attendance(),
            "latest": self._describe_latest(),
            "drift": self._files.get(DRIFT_LOG, (None, None))[1] or [],
        }

    def _describe_map(self) -> Json:
        partition = self._files.get("partition.json", (None, None))[1]
        if partition is None:
            return {"missing": "The run has no partition.json, so there is no map."}
        found = self._map.describe(partition.classes)
        if "missing" in found and self.records is not None:
            found["missing"] = _why_no_map(self.records.experiment) or found["missing"]
        return found

    def _describe_settings(self, records: RunRecords) -> Json:
        # They change when these files do.
        files = ("experiment.toml", "summary.json", "partition.json")
        key = [self._files.get(name, (None,))[0] for name in files]
        if self._settings is None or self._settings[0] != key:
            self._settings = key, describe_settings(records)
        return self._settings[1]

    def _describe_clients(self) -> Json:
        """Return accuracy and loss of some clients by round."""
        if not self._lines:
            return {"lines": [], "left_out": 0}
        if len(self._client_names()) > MOST_LISTED:
            return self._quartiles.describe(len(self._client_names()), _MOST_POINTS)
        chosen = self._choose_clients()
        return {
            "names": chosen,
            "left_out": len(self._client_names()) - len(chosen),
            "accuracy": _curves(self._lines, "accuracy_per_client", chosen),
            "loss": _curves(self._lines, "loss_per_client", chosen),
        }

    def _describe_attendance(self) -> Json:
        places = choose_evenly(len(self._lines), _MOST_POINTS)
        return {"rounds": [self._lines[place].round for place in places]} | {
            name: [self._attendance[place][column] for place in places]
            for column, name in enumerate(("answered", "missing", "rejected"))
        }

    def _describe_latest(self) -> Json | None:
        if not self._lines:
            return None
        line = self._lines[-1]
        return {
            "round": line.round,
            "asked": sum(self._attendance[-1]),
            "answered": len(line.clients.answered),
            "absent": [list(each) for each in find_absences(line)][:_MOST_NAMES],
            "loss": round_significant(line.loss),
            "seconds": rounded(sum(line.seconds.values()), 4),
            "bytes": line.bytes,
        }


def _why_no_map(experiment: Experiment) -> str | None:
    """Return why a run will never have a map, None where it may."""
    try:
        # A method from outside is not asked: whoever only looks at a run runs nothing it names.
        name = experiment.method
        if is_built_in(name) and not issubclass(find_method(name), SharesPrototypes):
            return f"{experiment.method} shares no prototypes, so there is no map."
    except InvalidInput:
        return None
    if not experiment.trail:
        return (
            "The run keeps no prototype history (--no-trail); its map is there once it has ended."
        )
    return None


def encode(content: Json) -> bytes:
    """Return JSON; what is not a number in it would be a mistake of ours."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _curves(lines: Sequence[RoundRecord], field: str, names: Sequence[str]) -> list[Json]:
    """Return a line per client: the rounds in which it has a number, and the numbers."""
    read = [line for line in lines if getattr(line, field)]
    read = [read[place] for place in choose_evenly(len(read), _MOST_POINTS)]
    curves = []
    for name in names:
        points = [(line.round, getattr(line, field).get(name)) for line in read]
        points = [(number, value) for number, value in points if finite_values([value])]
        if points:
            curves.append({
                "name": name,
                "x": [number for number, _ in points],
                "mean": [round_significant(value, 5) for _, value in points],
            })  # fmt: skip
    return curves
