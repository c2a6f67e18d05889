"""The live page of one run: the report of its records so far, read as they grow."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json, parse_json
from mpfedcl.inference.calibration import DRIFT_LOG, parse_drift_log
from mpfedcl.report.comparison import describe_seed_group, run_predictors_table
from mpfedcl.report.drawings import attendance_drawing, client_curves_drawing
from mpfedcl.report.figures import style_of
from mpfedcl.report.html import (
    Markup,
    block,
    number_figures,
    section_blocks,
    show_figure,
    show_table,
    tag,
    text_cells,
)
from mpfedcl.report.prototype_map import describe_prototype_map
from mpfedcl.report.run import RunRecords, describe_settings
from mpfedcl.report.watch.files import (
    MOST_BYTES,
    IncrementalRecords,
    Signature,
    file_signature,
    parse_experiment,
    read_regular_file,
)
from mpfedcl.report.wording import choose_evenly
from mpfedcl.rounds.metrics import MOST_LISTED
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.runs.run_files import Confusion, Partition, Summary

_MOST_POINTS = 400
_MOST_LINES = 12
"""Clients that have their own line."""
_FIGURE_SHARE = 5.0
"""Times that figures took to draw until they are drawn again, while a run goes on."""
_SCHEMAS: dict[str, Any] = {"summary": Summary, "partition": Partition, "confusion": Confusion}
_QUARTILES = {"lower quartile": 25, "median": 50, "upper quartile": 75}


def show_state(state: str) -> Markup:
    """Return the state of a run as a word with a sign."""
    return tag("span", state, class_=f"state {state}")


class LiveBlocks:
    """Blocks with figures, drawn again when the files have changed.

    While runs go on, drawing takes a bounded share of the time.
    """

    def __init__(self) -> None:
        self._shown: list[Markup] = []
        self._shown_of: Any = None
        self._drawn_at, self._seconds = float("-inf"), 0.0

    def update(
        self, version: Any, draw: Callable[[], list[Markup]], *, is_final: bool
    ) -> list[Markup]:
        """Return the blocks of a version, or of an earlier one if they were drawn just now."""
        now = time.monotonic()
        is_due = is_final or now - self._drawn_at >= _FIGURE_SHARE * self._seconds
        if self._shown_of != version and is_due:
            # The browser replaces single blocks: a figure must not change the names in another.
            self._shown = [number_figures(each, f"figure-{n}") for n, each in enumerate(draw())]
            self._shown_of, self._drawn_at = version, time.monotonic()
            self._seconds = self._drawn_at - now
        return self._shown


class RunPage:
    """The files of a run, kept while its page is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = IncrementalRecords(path / "rounds.jsonl")
        self._rounds: list[RoundRecord] = []
        self._files: dict[str, tuple[Signature, Any, str]] = {}
        """The signature, the parsed content and the error of each file."""
        self._described: Json | None = None
        self._blocks = LiveBlocks()
        self.version = 0
        """Grows with each change of the files."""
        self.records: RunRecords | None = None

    def refresh(self) -> None:
        """Read what is new. A damaged file only costs its own content."""
        before = dict(self._files)
        began, lines = self._reader.read_new()
        self._rounds = [*([] if began else self._rounds), *lines]
        experiment = self._read("experiment.toml", parse_experiment)
        found = {
            name: self._read(
                f"{name}.json",
                lambda content, file, schema=schema: parse_json(content, schema, file),
            )
            for name, schema in _SCHEMAS.items()
        }
        self._read(DRIFT_LOG, lambda content, _: parse_drift_log(content))
        if began or lines or before != self._files:
            self._described = None
            self.version += 1
            self.records = experiment and RunRecords(
                self.path, experiment, self._rounds, self._reader.damaged, **found
            )

    def _read(self, name: str, parse: Callable[..., Any]) -> Any:
        """Return the parsed content of a file, read again only when it has changed."""
        file = self.path / name
        signature = file_signature(file)
        if signature is None:
            self._files.pop(name, None)
            return None
        if name not in self._files or self._files[name][0] != signature:
            try:
                self._files[name] = signature, parse(read_regular_file(file), file), ""
            except InvalidInput as error:
                self._files[name] = signature, None, str(error)
        return self._files[name][1]

    def describe(self) -> Json:
        """Return the content of the page."""
        if self._described is None:
            self._described = self._describe()
        return self._described

    def _describe(self) -> Json:
        records = self.records
        troubles = [trouble for _, _, trouble in self._files.values() if trouble]
        if records is None:
            return {"troubles": troubles or ["The run has no settings."]}
        try:
            run = records.described | {"settings": describe_settings(records)}
            method = records.experiment.method
            group = describe_seed_group(method, [records], style_of(method))
            table = run_predictors_table(records)
        # A method that is not installed, for example.
        except InvalidInput as error:
            return {"troubles": [*troubles, str(error)]}
        return {
            "troubles": troubles,
            "run": run | {"map": _describe_map(records)},
            "group": group,
            "table": table,
            "clients": _describe_clients(records),
            "attendance": _describe_attendance(records.rounds),
            "drift": self._files[DRIFT_LOG][1] or [] if DRIFT_LOG in self._files else [],
        }

    def show(self, entry: Json, folder: str) -> Markup:
        """Return the page: values of now, and figures that may be some seconds old."""
        content = self.describe()
        parts = [tag("p", each, class_="warning") for each in content["troubles"]]
        rounds = 0
        if "run" in content:
            run = content["run"]
            rounds = run["rounds"]
            parts += [_show_progress(content, self._rounds[-1:]), *_show_drift(content["drift"])]
            parts += self._blocks.update(
                self.version, lambda: _show_blocks(content), is_final=run["finished"]
            )
        place = "/".join(each for each in (folder, entry["folder"], entry["name"]) if each)
        about = f" {entry['method']} on {entry['about']}" if entry["method"] else ""
        accuracy = "" if entry["accuracy"] is None else f", accuracy {entry['accuracy']:.1f} %"
        return tag(
            "div",
            tag("p", show_state(entry["state"]), about),
            tag("p", place, class_="folder"),
            tag("div", parts, class_="flow"),
            data_title=entry["name"],
            data_round=str(rounds),
            data_said=f"Round {entry['round']} of {entry['planned']}{accuracy}",
        )


def _show_blocks(content: Json) -> list[Markup]:
    """Return curves of clients and answers per round, and what the report shows of a run."""
    drawings = client_curves_drawing(content["clients"]), attendance_drawing(content["attendance"])
    section = {"kind": "run", "tables": [content["table"]]}
    section |= {"groups": [content["group"]], "details": [content["run"]]}
    return [*map(show_figure, filter(None, drawings)), *section_blocks(section)]


def _show_progress(content: Json, last: Sequence[RoundRecord]) -> Markup:
    """Return the values of the last round, and the totals so far."""
    run, group = content["run"], content["group"]
    fairness = run["fairness"] or {"clients": 0, "mean": math.nan}
    evaluated, population = fairness["clients"], run["population"]
    over = f"{evaluated:,} of {population:,} clients" if evaluated < population else "clients"
    facts = [("Round", str(run["rounds"]), f"of {run['planned']}")]
    if evaluated:
        note = f"mean over {over}, round {run['read_in']}"
        facts.append(("Accuracy", f"{fairness['mean']:.1f} %", note))
    else:
        facts.append(("Accuracy", "-", "not evaluated yet"))
    for line in last:
        here = line.clients
        sampled = len(here.answered) + len(here.missing) + len(here.rejected)
        up, total = line.bytes.get("up", 0) / 1e6, sum(group["bytes"].values()) / 1e6
        seconds = sum(line.seconds.values()), sum(group["seconds"].values())
        facts += [
            ("Loss", "-" if line.loss is None else f"{line.loss:.4g}", "training"),
            ("Answered", str(len(here.answered)), f"of {sampled} in round {line.round}"),
            ("Last round", f"{seconds[0]:.2f} s", f"{seconds[1]:,.0f} s in total"),
            ("Sent", f"{total:,.4g} MB", f"{up:,.4g} MB up in the last round"),
        ]
    items = [
        tag("div", tag("dt", name), tag("dd", value, " ", tag("small", note)))
        for name, value, note in facts
    ]
    return block("Progress", tag("dl", items, class_="facts"))


def _show_drift(drift: Sequence[Json]) -> list[Markup]:
    """Return the newest calls of `predict --log`, if there are any."""
    rows = [
        (
            line["time"][:16].replace("T", " "),
            line["client"] or "-",
            "drift" if line["drift"] else "no drift",
            f"{line['flagged']} of {line['images']}",
            str(line["at_most"]),
        )
        for line in drift
    ]
    columns = ["time", "client", "result", "far from the pool", "at most by chance"]
    caption = "Images counted by mpfedcl predict --log, the newest call first"
    return [block("Drift", show_table(text_cells(caption, columns, rows)))] if rows else []


def _describe_map(records: RunRecords) -> Json:
    """Return the map of the final pool, without test images: no data set is opened here."""
    file = records.path / "pool.safetensors"
    signature = file_signature(file)
    if records.partition is None:
        return {"missing": "The run has no partition.json, so there is no map."}
    if (signature is not None and signature[1] > MOST_BYTES) or file.is_symlink():
        return {"missing": "The pool is too large to be shown here."}
    classes = records.partition.classes
    return describe_prototype_map(
        records.path, records.experiment, None, classes, with_samples=False
    )


def _describe_clients(records: RunRecords) -> Json:
    """Return accuracy and loss per round of some clients, or quartiles over many."""
    last = records.rounds[-1:]
    known = records.partition.clients if records.partition else {}
    names = sorted(known or (last and last[0].accuracy_per_client) or {})
    places = choose_evenly(len(names), _MOST_LINES) if len(names) <= MOST_LISTED else []
    chosen = [names[place] for place in places]
    return {
        "names": chosen,
        "left_out": len(names) - len(chosen),
        "accuracy": _curves(records.rounds, "accuracy_per_client", chosen),
        "loss": _curves(records.rounds, "loss_per_client", chosen),
    }


def _curves(rounds: Sequence[RoundRecord], field: str, names: Sequence[str]) -> list[Json]:
    """Return a line per client, or per quartile if no client is named."""
    known = [line for line in rounds if getattr(line, field) or line.accuracy_spread]
    points: dict[str, list[tuple[int, float]]] = {}
    for place in choose_evenly(len(known), _MOST_POINTS):
        line = known[place]
        found: dict[str, float | None] = getattr(line, field) or {}
        values = {name: value for name, value in found.items() if value is not None}
        if not names:
            values = _quartiles(line, field, list(values.values()))
        for name in names or values:
            if name in values:
                points.setdefault(name, []).append((line.round, values[name]))
    return [
        {
            "name": name,
            "x": [number for number, _ in line],
            "mean": [value for _, value in line],
        }
        for name, line in points.items()
    ]


def _quartiles(line: RoundRecord, field: str, values: Sequence[float]) -> dict[str, float]:
    if field == "accuracy_per_client" and line.accuracy_spread is not None:
        # Over all evaluated clients; the record does not list them all.
        return dict(zip(_QUARTILES, line.accuracy_spread.quartiles, strict=True))
    if not values:
        return {}
    found = numpy.percentile(values, list(_QUARTILES.values())).tolist()
    return dict(zip(_QUARTILES, found, strict=True))


def _describe_attendance(rounds: Sequence[RoundRecord]) -> Json:
    shown = [rounds[place] for place in choose_evenly(len(rounds), _MOST_POINTS)]
    return {"rounds": [line.round for line in shown]} | {
        name: [len(getattr(line.clients, name)) for line in shown]
        for name in ("answered", "missing", "rejected")
    }
