"""The live page of one run: the report of its records so far, read as they grow."""

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json, parse_json
from mpfedcl.inference.calibration import DRIFT_LOG, parse_drift_log
from mpfedcl.report.document import describe_seed_group, run_predictors_table
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
    Signature,
    file_signature,
    read_experiment,
    read_records,
    read_regular_file,
)
from mpfedcl.report.wording import choose_evenly, known_values
from mpfedcl.rounds.metrics import MOST_LISTED
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.runs.file_schemas import Confusion, Partition, Summary

MOST_OPEN = 24
_MOST_POINTS = 400
_MOST_MAP_BYTES = 64 * 2**20
_MOST_LINES = 12
"""Clients that have their own line."""
_FIGURE_SHARE = 5.0
"""Times that figures took to draw until they are drawn again, while a run goes on."""
_READERS: dict[str, Callable[[Path], Any]] = {
    "experiment.toml": read_experiment,
    "rounds.jsonl": read_records,
    "summary.json": lambda file: parse_json(read_regular_file(file), Summary, file),
    "partition.json": lambda file: parse_json(read_regular_file(file), Partition, file),
    "confusion.json": lambda file: parse_json(read_regular_file(file), Confusion, file),
    DRIFT_LOG: lambda file: parse_drift_log(read_regular_file(file)),
}
FILES = tuple(_READERS)
_QUARTILES = ("lower quartile", "median", "upper quartile")


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
    """The files of a run at one moment. A damaged file only costs its own content."""

    def __init__(self, path: Path) -> None:
        self.troubles: list[str] = []
        """What is wrong with damaged files."""
        found = {name: self._read(path / name, read) for name, read in _READERS.items()}
        self._drift = found[DRIFT_LOG]
        experiment = found["experiment.toml"]
        rounds, damaged = found["rounds.jsonl"] or ([], 0)
        others = found["summary.json"], found["partition.json"], found["confusion.json"]
        self.records = experiment and RunRecords(path, experiment, rounds, damaged, *others)
        self.last: RoundRecord | None = rounds[-1] if rounds else None

    def _read(self, file: Path, read: Callable[[Path], Any]) -> Any:
        if file_signature(file) is None and file.name != "experiment.toml":
            return None
        try:
            return read(file)
        except InvalidInput as error:
            self.troubles.append(str(error))
            return None

    @cached_property
    def content(self) -> Json:
        """What the page shows."""
        records = self.records
        if records is None:
            return {"troubles": self.troubles}
        try:
            run = records.described | {"settings": describe_settings(records)}
            method = records.experiment.method
            group = describe_seed_group(method, [records], style_of(method))
            table = run_predictors_table(records)
        # A method that is not installed, for example.
        except InvalidInput as error:
            return {"troubles": [*self.troubles, str(error)]}
        return {
            "troubles": self.troubles,
            "run": run | {"map": _describe_map(records)},
            "group": group,
            "table": table,
            "clients": _describe_clients(records),
            "attendance": _describe_attendance(records.rounds),
            "drift": self._drift or [],
        }

    def show(self, entry: Json, folder: str, blocks: LiveBlocks, version: Any) -> Markup:
        """Return the page: values of now, and figures that may be some seconds old."""
        content = self.content
        parts = [tag("p", each, class_="warning") for each in content["troubles"]]
        run = content.get("run")
        if run:
            parts += [_show_progress(content, self.last), *_show_drift(content["drift"])]
            parts += blocks.update(version, lambda: _show_blocks(content), is_final=run["finished"])
        place = "/".join(each for each in (folder, entry["folder"], entry["name"]) if each)
        about = f" {entry['method']} on {entry['about']}" if entry["method"] else ""
        accuracy = "" if entry["accuracy"] is None else f", accuracy {entry['accuracy']:.1f} %"
        return tag(
            "div",
            tag("p", show_state(entry["state"]), about),
            tag("p", place, class_="folder"),
            tag("div", parts, class_="flow"),
            data_title=entry["name"],
            data_round=str(run["rounds"] if run else 0),
            data_said=f"Round {entry['round']} of {entry['planned']}{accuracy}",
        )


@lru_cache(MOST_OPEN)
def open_page(path: Path, _signatures: tuple[Signature | None, ...]) -> RunPage:
    """Return the page of a run; it is read again when the signatures of its files change."""
    return RunPage(path)


def _show_blocks(content: Json) -> list[Markup]:
    """Return curves of clients and answers per round, and what the report shows of a run."""
    drawings = client_curves_drawing(content["clients"]), attendance_drawing(content["attendance"])
    section = {"kind": "run", "tables": [content["table"]]}
    section |= {"groups": [content["group"]], "details": [content["run"]]}
    return [*map(show_figure, filter(None, drawings)), *section_blocks(section)]


def _show_progress(content: Json, last: RoundRecord | None) -> Markup:
    """Return the values of the last round, and the totals so far."""
    run, group = content["run"], content["group"]
    facts = [("Round", str(run["rounds"]), f"of {run['planned']}")]
    if fairness := run["fairness"]:
        evaluated, population = fairness["clients"], run["population"]
        over = f"{evaluated:,} of {population:,} clients" if evaluated < population else "clients"
        note = f"mean over {over}, round {run['read_in']}"
        facts.append(("Accuracy", f"{fairness['mean']:.1f} %", note))
    else:
        facts.append(("Accuracy", "-", "not evaluated yet"))
    if last is not None:
        here = last.clients
        sampled = len(here.answered) + len(here.missing) + len(here.rejected)
        up, total = last.bytes.get("up", 0) / 1e6, sum(group["bytes"].values()) / 1e6
        seconds = sum(last.seconds.values()), sum(group["seconds"].values())
        facts += [
            ("Loss", "-" if last.loss is None else f"{last.loss:.4g}", "training"),
            ("Answered", str(len(here.answered)), f"of {sampled} in round {last.round}"),
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
    if (signature is not None and signature[1] > _MOST_MAP_BYTES) or file.is_symlink():
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
    fields = {"accuracy": "accuracy_per_client", "loss": "loss_per_client"}
    curves = {name: _curves(records.rounds, field, chosen) for name, field in fields.items()}
    return {"names": chosen, "left_out": len(names) - len(chosen), **curves}


def _curves(rounds: Sequence[RoundRecord], field: str, names: Sequence[str]) -> list[Json]:
    """Return a line per client, or per quartile if no client is named."""
    known = [line for line in rounds if getattr(line, field) or line.accuracy_spread]
    lines: list[Json] = [{"name": name, "x": [], "mean": []} for name in names or _QUARTILES]
    for place in choose_evenly(len(known), _MOST_POINTS):
        record = known[place]
        values = getattr(record, field) or {}
        if not names:
            spread = record.accuracy_spread if field == "accuracy_per_client" else None
            listed = known_values(values.values()) or [math.nan]
            # The record does not list all clients; the spread is over all evaluated ones.
            quartiles = spread.quartiles if spread else numpy.percentile(listed, (25, 50, 75))
            values = dict(zip(_QUARTILES, map(float, quartiles), strict=True))
        for line in lines:
            value = values.get(line["name"])
            if value is not None and math.isfinite(value):
                line["x"].append(record.round)
                line["mean"].append(value)
    return [line for line in lines if line["x"]]


def _describe_attendance(rounds: Sequence[RoundRecord]) -> Json:
    shown = [rounds[place] for place in choose_evenly(len(rounds), _MOST_POINTS)]
    return {"rounds": [line.round for line in shown]} | {
        name: [len(getattr(line.clients, name)) for line in shown]
        for name in ("answered", "missing", "rejected")
    }
