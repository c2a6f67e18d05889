"""The live page of one run: its records, read as they grow, and the blocks that show them."""

import time
from collections.abc import Sequence
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json, parse_json
from mpfedcl.inference.calibration import DRIFT_LOG, parse_drift_log
from mpfedcl.report.comparison import describe_seed_group, run_predictors_table
from mpfedcl.report.formatting import (
    choose_evenly,
    finite_values,
    round_significant,
    rounded,
)
from mpfedcl.report.html import (
    Markup,
    block,
    figure_block,
    show_absences,
    show_clients,
    show_confusion,
    show_costs,
    show_map,
    show_partition,
    show_rounds,
    show_settings,
    show_table,
    tag,
)
from mpfedcl.report.prototype_map import describe_prototype_map
from mpfedcl.report.run import (
    RunRecords,
    describe_run,
    describe_settings,
    find_absences,
)
from mpfedcl.report.run_figures import attendance_drawing, client_curves_drawing
from mpfedcl.report.watch.files import (
    MOST_BYTES,
    IncrementalRecords,
    RunLocation,
    Signature,
    file_signature,
    parse_experiment,
    read_regular_file,
)
from mpfedcl.report.watch.run_list import show_state
from mpfedcl.rounds.metrics import MOST_LISTED
from mpfedcl.rounds.record import Attendance, RoundRecord
from mpfedcl.runs.run_files import Confusion, Partition, Summary

_MOST_POINTS = 400
_MOST_LINES = 12
"""Clients that have their own line."""
_MANY_CLIENTS = 200
"""With more clients only the newest round keeps the values of each."""
_FIGURE_SHARE = 5.0
"""Times that figures took to draw until they are drawn again, while a run goes on."""
_MOST_NAMES = 50
_SCHEMAS = {"summary": Summary, "partition": Partition, "confusion": Confusion}
_TITLES = ("lower quartile", "median", "upper quartile")
_SHARES = (25, 50, 75)


class RunPage:
    """The files of a run, kept while its page is open."""

    def __init__(self, location: RunLocation) -> None:
        self._location = location
        self._reader = IncrementalRecords(location.path / "rounds.jsonl")
        self._lines: list[RoundRecord] = []
        self._attendance: list[tuple[int, int, int]] = []
        self._quartiles = _Quartiles()
        self._files: dict[str, tuple[Signature, Any]] = {}
        self._settings: tuple[Any, Json] | None = None
        self._names: tuple[Any, list[str]] = None, []
        self._troubles: dict[str, str] = {}
        self._described: Json | None = None
        self._figures: list[Markup] = []
        self._figures_of = -1
        self._drawn_at, self._drawing_seconds = float("-inf"), 0.0
        self.version = 0
        """Grows with each change of the files."""
        self.records: RunRecords | None = None

    def refresh(self) -> None:
        """Read what is new. A damaged file only costs its own content."""
        path, before = self._location.path, self._signatures()
        began, lines = self._reader.read_new()
        if began:
            self._lines, self._attendance, self._quartiles = [], [], _Quartiles()
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
            self._described = None
            self.version += 1

    def _signatures(self) -> Json:
        return {name: signature for name, (signature, _) in self._files.items()}

    def describe(self) -> Json:
        """Return the content of the page."""
        if self._described is None:
            self._described = self._describe()
        return self._described

    def show(self, entry: Json, folder: str) -> Markup:
        """Return the page: values of now, and figures that may be some seconds old."""
        content = self.describe()
        parts = [tag("p", each, class_="warning") for each in content["troubles"]]
        if "run" in content:
            parts = [*parts, *_show_latest(content), *self._show_figures(content)]
        place = "/".join(each for each in (folder, entry["folder"], entry["name"]) if each)
        about = f" {entry.get('method', '')}"
        if "dataset" in entry:
            about += f" on {entry['dataset']}, {entry['setting']}, seed {entry['seed']}"
        accuracy = "" if entry["accuracy"] is None else f", accuracy {entry['accuracy']:.1f} %"
        return tag(
            "div",
            tag("p", show_state(entry["state"]), about, id_="status"),
            tag("p", place, class_="folder"),
            tag("div", parts, class_="flow"),
            data_title=entry["name"],
            data_round=str(content["run"]["rounds"]) if "run" in content else "0",
            data_said=f"Round {entry['round']} of {entry.get('planned', '?')}{accuracy}",
        )

    def _show_figures(self, content: Json) -> list[Markup]:
        """Return the blocks with figures, drawn again if the files have changed.

        While a run goes on, drawing takes a bounded share of the time.
        """
        now = time.monotonic()
        is_due = content["run"]["finished"] or (
            now - self._drawn_at >= _FIGURE_SHARE * self._drawing_seconds
        )
        if self._figures_of != self.version and is_due:
            self._figures, self._figures_of = _show_blocks(content), self.version
            self._drawn_at = time.monotonic()
            self._drawing_seconds = self._drawn_at - now
        return self._figures

    def _add(self, line: RoundRecord) -> None:
        here = line.clients
        self._attendance.append((len(here.answered), len(here.missing), len(here.rejected)))
        self._quartiles.add(line)
        if self._lines:
            self._lines[-1] = self._without_clients(self._lines[-1])
        self._lines.append(line)

    def _without_clients(self, line: RoundRecord) -> RoundRecord:
        """Return a round without the values of its many clients, except for a few."""
        if len(line.clients.answered) <= _MANY_CLIENTS:
            return line
        # Clients that answered are counted already.
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
        """Return the clients that have their own line: the same in every round."""
        names = self._client_names()
        return [names[place] for place in choose_evenly(len(names), _MOST_LINES)]

    def _read(self, name: str, parse: Any) -> Any:
        """Return the parsed content of a file, read again only when it has changed."""
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
        # A method that is not installed, for example.
        try:
            run = describe_run(records)
            group = describe_seed_group(records.experiment.method, [records], [0], _MOST_POINTS)
            table = run_predictors_table(records)
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
            "map": self._describe_map(records),
            "drift": self._files.get(DRIFT_LOG, (None, None))[1] or [],
        }

    def _describe_map(self, records: RunRecords) -> Json:
        """Return the map of the final pool, without test images: data are not opened here."""
        file = self._location.path / "pool.safetensors"
        signature = file_signature(file)
        if records.partition is None:
            return {"missing": "The run has no partition.json, so there is no map."}
        if (signature is not None and signature[1] > MOST_BYTES) or file.is_symlink():
            return {"missing": "The pool is too large to be shown here."}
        path, classes = records.path, records.partition.classes
        return describe_prototype_map(path, records.experiment, None, classes, with_samples=False)

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
            return {"names": [], "left_out": 0}
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


def _show_latest(content: Json) -> list[Markup]:
    """Return where a run stands, and the clients that its last round lacks."""
    run, latest, group = content["run"], content["latest"], content["group"]
    read = run["fairness"]["clients"] if run["fairness"] else 0
    accuracy = f"{run['fairness']['mean']:.1f} %" if read else "-"
    of = f"{read:,} of {run['population']:,} " if read < run["population"] else ""
    facts = [
        ("Round", str(run["rounds"]), f"of {run['planned']}"),
        (
            "Accuracy",
            accuracy,
            f"mean over {of}clients, round {run['read_in']}" if read else "not evaluated yet",
        ),
    ]
    if latest:
        loss = "-" if latest["loss"] is None else f"{latest['loss']:.4g}"
        total = sum(group["seconds"].values())
        up = _bytes(latest["bytes"].get("up", 0))
        facts += [
            ("Loss", loss, "training"),
            (
                "Answered",
                str(latest["answered"]),
                f"of {latest['asked']} in round {latest['round']}",
            ),
            ("Last round", f"{latest['seconds']:.2f} s", f"{total:,.0f} s in total"),
            (
                "Sent",
                _bytes(sum(group["bytes"].values())),
                f"{up} up in the last round",
            ),
        ]
    items = [
        tag("div", tag("dt", name), tag("dd", value, " ", tag("small", note)))
        for name, value, note in facts
    ]
    absent = [
        tag("li", tag("strong", name), f" {what}{f': {why}' if why else ''}")
        for name, what, why in (latest["absent"] if latest else ())
    ]
    shown = [
        block(
            "Progress",
            tag("dl", items, class_="facts"),
            tag("ul", absent, class_="absent", aria_label="Not accepted") if absent else None,
            key="latest",
        )
    ]
    if content["drift"]:
        lines = [
            tag(
                "li",
                tag("strong", "Drift" if line["drift"] else "No drift"),
                f" {line['time'][:16].replace('T', ' ')}"
                f"{'' if line['client'] is None else ', ' + line['client']}: {line['flagged']} of "
                f"{line['images']} were far from the pool; at most {line['at_most']} by chance",
            )
            for line in content["drift"]
        ]
        about = tag("p", "Counted by mpfedcl predict --log, the newest first.", class_="about")
        shown.append(block("Drift", about, tag("ul", lines, class_="absent"), key="drift"))
    return shown


def _bytes(count: float) -> str:
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def _show_blocks(content: Json) -> list[Markup]:
    """Return the blocks of a run below its progress."""
    run, group = content["run"], content["group"]
    curves = client_curves_drawing(content["clients"])
    attendance = attendance_drawing(content["attendance"])
    return [
        show_rounds([group], key="rounds"),
        *([figure_block(curves, key="clients")] if curves else []),
        *([figure_block(attendance, key="attendance")] if attendance else []),
        show_absences(run, key="absences"),
        show_costs([group], key="costs"),
        block("Result", show_table(content["table"]), key="result"),
        show_clients(run, key="behind"),
        show_confusion(run, key="confusion"),
        show_partition(run, key="partition"),
        show_map(content["map"], key="map"),
        show_settings(run["settings"], key="settings"),
    ]


class _Quartiles:
    """Quartiles over clients of each round, kept when the clients of the round are dropped."""

    def __init__(self) -> None:
        self._accuracy: dict[int, list[float]] = {}
        self._loss: dict[int, list[float]] = {}

    def add(self, line: RoundRecord) -> None:
        """Add a round."""
        if line.accuracy_spread is not None:
            self._accuracy[line.round] = line.accuracy_spread.quartiles
        elif known := finite_values(list((line.accuracy_per_client or {}).values())):
            self._accuracy[line.round] = numpy.percentile(known, _SHARES).tolist()
        if losses := finite_values(list((line.loss_per_client or {}).values())):
            self._loss[line.round] = numpy.percentile(losses, _SHARES).tolist()

    def describe(self, num_clients: int, most_points: int) -> Json:
        """Return a line per quartile, with at most so many rounds."""
        return {
            "names": [],
            "left_out": num_clients,
            "accuracy": _quartile_lines(self._accuracy, most_points),
            "loss": _quartile_lines(self._loss, most_points),
        }


def _quartile_lines(by_round: dict[int, list[float]], most_points: int) -> list[Json]:
    rounds = [list(by_round)[place] for place in choose_evenly(len(by_round), most_points)]
    return [
        {
            "name": title,
            "x": rounds,
            "mean": [round_significant(by_round[number][place], 5) for number in rounds],
        }
        for place, title in enumerate(_TITLES)
        if rounds
    ]


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
