"""A run that somebody looks at: all its records, read as they grow."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method, is_built_in
from mpfedcl.report.group_content import describe_group, run_table
from mpfedcl.report.numbers import known, rounded, significant, thin
from mpfedcl.report.records import (
    Attendance,
    Confusion,
    Partition,
    RoundLine,
    Summary,
    parse_content,
)
from mpfedcl.report.run_content import RunRecords, describe_run, describe_settings
from mpfedcl.watch.folder import Place
from mpfedcl.watch.growing_records import GrowingRecords
from mpfedcl.watch.plain_files import Signature, read_plain, sign_file
from mpfedcl.watch.prototype_history_map import TrailMap

Json = dict[str, Any]
_MOST_POINTS = 400
_MOST_LINES = 12
"""Clients that have a line of their own."""
_MANY = 200
"""Clients from which on only the newest round keeps what each of them did."""
_MOST_NAMES = 50
_FORMS = {"summary": Summary, "partition": Partition, "confusion": Confusion}


class OpenRun:
    """One run's files, read and kept for as long as it is looked at."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._growing = GrowingRecords(place.path / "rounds.jsonl")
        self._lines: list[RoundLine] = []
        self._attendance: list[tuple[int, int, int]] = []
        self._files: dict[str, tuple[Signature, Any]] = {}
        self._settings: tuple[Any, Json] | None = None
        self._troubles: dict[str, str] = {}
        self._map = TrailMap(place.path)
        self._told: dict[str, bytes] = {}
        self.records: RunRecords | None = None

    def refresh(self) -> None:
        """Read what is new. Damage to one file costs what that file would have told."""
        path, before = self._place.path, self._signatures()
        began, lines = self._growing.read_new()
        if began:
            self._lines, self._attendance = [], []
        for line in lines:
            self._add(line)
        experiment = self._read("experiment.toml", self._parse_settings)
        found = {
            name: self._read(
                f"{name}.json", lambda content, file, form=form: parse_content(content, form, file)
            )
            for name, form in _FORMS.items()
        }
        self.records = experiment and RunRecords(
            path, experiment, self._lines, self._growing.damaged, **found
        )
        if began or lines or before != self._signatures():
            self._told.clear()

    def _signatures(self) -> Json:
        return {name: signature for name, (signature, _) in self._files.items()}

    def tell(self) -> bytes:
        """Return all that the page of a run shows, but the map, as JSON."""
        return self._encoded("run", self._describe)

    def tell_map(self) -> bytes:
        """Return the map of the prototypes over rounds as JSON."""
        if self._map.refresh(self._lines[-1].round if self._lines else 0):
            self._told.pop("map", None)
        return self._encoded("map", self._describe_map)

    def _encoded(self, name: str, describe: Callable[[], Json]) -> bytes:
        # Made once, however many pages ask for it.
        if name not in self._told:
            self._told[name] = encode(describe())
        return self._told[name]

    def _add(self, line: RoundLine) -> None:
        here = line.clients
        self._attendance.append((len(here.answered), len(here.missing), len(here.rejected)))
        if self._lines:
            self._lines[-1] = self._shrink(self._lines[-1])
        self._lines.append(line)

    def _shrink(self, line: RoundLine) -> RoundLine:
        """Return a round without what thousands of clients did in it, but for a few of them."""
        if len(line.clients.answered) <= _MANY:
            return line
        # Who answered is counted already; who did not stays.
        here = Attendance(answered=[], missing=line.clients.missing, rejected=line.clients.rejected)
        changes: Json = {"clients": here}
        for field in ("accuracy_per_client", "loss_per_client"):
            values = getattr(line, field) or {}
            changes[field] = {name: values[name] for name in self._chosen() if name in values}
        return line.model_copy(update=changes)

    def _chosen(self) -> list[str]:
        """Return the clients that have a line each: the same in every round."""
        partition = self._files.get("partition.json", (None, None))[1]
        values = partition.clients if partition else self._lines[-1].accuracy_per_client or {}
        names = sorted(values)
        return [names[place] for place in thin(len(names), _MOST_LINES)]

    def _read(self, name: str, parse: Any) -> Any:
        """Return a file's content, parsed anew only when it has changed."""
        file = self._place.path / name
        signature = sign_file(file)
        if signature is None:
            self._files.pop(name, None)
            self._troubles.pop(name, None)
            return None
        if name not in self._files or self._files[name][0] != signature:
            self._troubles.pop(name, None)
            try:
                self._files[name] = signature, parse(read_plain(file), file)
            except InvalidInput as error:
                self._files[name] = signature, None
                self._troubles[name] = str(error)
        return self._files[name][1]

    def _parse_settings(self, content: bytes, file: Any) -> Experiment:
        try:
            return Experiment.parse_toml(content.decode(), file)
        except UnicodeDecodeError:
            raise InvalidInput(f"{file} is not text.") from None

    def _describe(self) -> Json:
        records = self.records
        if records is None:
            return {"troubles": list(self._troubles.values()) or ["The run has no settings."]}
        # Each troubles nobody but itself: a method that is not here, say, is still shown by name.
        try:
            run = describe_run(records)
            group = describe_group(records.experiment.method, [records], [0], _MOST_POINTS)
            table = run_table(records)
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
        # Trying a command before it is shown takes a while; it changes when these files do.
        key = [self._files.get(name, (None,))[0] for name in ("experiment.toml", "summary.json")]
        if self._settings is None or self._settings[0] != key:
            self._settings = key, describe_settings(records)
        return self._settings[1]

    def _describe_clients(self) -> Json:
        """Return accuracy and loss of some clients by round."""
        if not self._lines:
            return {"lines": [], "left_out": 0}
        chosen = self._chosen()
        everybody = self._files.get("partition.json", (None, None))[1]
        count = len(everybody.clients if everybody else self._lines[-1].accuracy_per_client or {})
        return {
            "names": chosen,
            "left_out": max(0, count - len(chosen)),
            "accuracy": _curves(self._lines, "accuracy_per_client", chosen),
            "loss": _curves(self._lines, "loss_per_client", chosen),
        }

    def _describe_attendance(self) -> Json:
        places = thin(len(self._lines), _MOST_POINTS)
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
            "missing": line.clients.missing[:_MOST_NAMES],
            "rejected": [list(pair) for pair in line.clients.rejected.items()][:_MOST_NAMES],
            "loss": significant(line.loss),
            "seconds": rounded(sum(line.seconds.values()), 4),
            "bytes": line.bytes,
        }


def _why_no_map(experiment: Experiment) -> str | None:
    """Return why a run will never have a map, None where it may."""
    try:
        # A method from outside is not asked: whoever only looks at a run runs nothing it names.
        if is_built_in(experiment.method) and not find_method(experiment.method).shares_prototypes:
            return f"{experiment.method} shares no prototypes, so there is no map."
    except InvalidInput:
        return None
    if not experiment.trail:
        return "The run keeps no trail (--no-trail); its map is there once it has ended."
    return None


def encode(content: Json) -> bytes:
    """Return JSON; what is not a number in it would be a mistake of ours."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _curves(lines: Sequence[RoundLine], field: str, names: Sequence[str]) -> list[Json]:
    """Return a line a client: the rounds in which it has a number, and the numbers."""
    read = [line for line in lines if getattr(line, field)]
    read = [read[place] for place in thin(len(read), _MOST_POINTS)]
    curves = []
    for name in names:
        points = [(line.round, getattr(line, field).get(name)) for line in read]
        points = [(number, value) for number, value in points if known([value])]
        if points:
            curves.append({
                "name": name,
                "x": [number for number, _ in points],
                "mean": [significant(value, 5) for _, value in points],
            })  # fmt: skip
    return curves
