"""The list of all runs: what is known of each, little enough for thousands, and its rows."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_data
from mpfedcl.inference.calibration import DRIFT_LOG
from mpfedcl.report.formatting import (
    choose_evenly,
    finite_values,
    mean,
    round_significant,
    rounded,
)
from mpfedcl.report.html import Markup, join, sentence, tag
from mpfedcl.report.watch.files import (
    IncrementalRecords,
    RunLocation,
    Signature,
    file_signature,
    parse_experiment,
    read_regular_file,
)
from mpfedcl.rounds.record import RoundRecord

State = Literal["running", "finished", "stopped", "damaged"]
_CURVE_POINTS = 40
"""Points of the small curve in the list."""
_QUIET_SECONDS = 5.0
"""A run without a lock and without a new round for this long counts as stopped."""


class RunListEntry:
    """One run in the list, with the state of reading its files."""

    def __init__(self, location: RunLocation) -> None:
        self.location = location
        self.entry: Json = {}
        self.is_active = True
        self._seen: tuple[Any, ...] = ()
        self._settings: tuple[Signature | None, Experiment | None, str] = (None, None, "unread")
        self._records = IncrementalRecords(location.path / "rounds.jsonl")
        self._reset_rounds()

    def _reset_rounds(self) -> None:
        self._curve: list[tuple[int, float]] = []
        self._last: RoundRecord | None = None
        self._rejected = self._missing = 0

    def refresh(self, locked: set[int]) -> bool:
        """Read what is new; return whether anything is."""
        path = self.location.path
        experiment, trouble = self._read_settings()
        began, lines = self._records.read_new()
        if began:
            self._reset_rounds()
        for line in lines:
            self._last = line
            known = finite_values(list((line.accuracy_per_client or {}).values()))
            spread = line.accuracy_spread
            if (value := rounded(spread.mean if spread else mean(known))) is not None:
                self._curve.append((line.round, value))
            self._rejected += len(line.clients.rejected)
            self._missing += len(line.clients.missing)
        signature = file_signature(path / "rounds.jsonl")
        summary = file_signature(path / "summary.json")
        predicted = file_signature(path / DRIFT_LOG)
        signed = [each for each in (signature, summary, self._settings[0], predicted) if each]
        changed = max((each[2] for each in signed), default=0)
        state = self._find_state(trouble, summary is not None, signature, locked)
        self.is_active = state == "running"
        seen = (began, state, trouble, changed, self._records.damaged)
        if self.entry and not lines and seen == self._seen:
            return False
        self._seen = seen
        self.entry = self._describe(experiment, state, trouble, changed)
        return True

    def mark_damaged(self, error: Exception) -> bool:
        """Mark the run as unreadable; return whether that is new."""
        before, self.is_active = self.entry, False
        trouble = f"It cannot be read ({type(error).__name__}: {error})."
        self.entry = self._describe(None, "damaged", trouble, 0)
        return self.entry != before

    def _read_settings(self) -> tuple[Experiment | None, str]:
        file = self.location.path / "experiment.toml"
        signature = file_signature(file)
        if signature is None or signature != self._settings[0]:
            try:
                content = read_regular_file(file, 2**20)
                self._settings = signature, parse_experiment(content, file), ""
            except InvalidInput as error:
                self._settings = signature, None, str(error)
        return self._settings[1:]

    def _find_state(
        self, trouble: str, is_finished: bool, records: Signature | None, locked: set[int]
    ) -> State:
        if trouble:
            return "damaged"
        if is_finished:
            return "finished"
        if locked and (lock := file_signature(self.location.path / ".lock")) and lock[0] in locked:
            return "running"
        # Locks of another machine or container are not visible, but growth is.
        took = sum(self._last.seconds.values()) if self._last else 0.0
        since = time.time() - records[2] / 1e9 if records else float("inf")
        return "running" if since < max(_QUIET_SECONDS, 3 * took) else "stopped"

    def _describe(
        self, experiment: Experiment | None, state: State, trouble: str, changed: int
    ) -> Json:
        places = choose_evenly(len(self._curve), _CURVE_POINTS)
        last = self._last
        parts = self.location.parts
        entry: Json = {
            "id": self.location.id,
            "name": parts[-1] if parts else self.location.path.resolve().name,
            "folder": "/".join(parts[:-1]),
            "state": state,
            "trouble": trouble.replace(f"{self.location.path}/", ""),
            "changed": changed // 10**6,
            "round": last.round if last else 0,
            "accuracy": self._curve[-1][1] if self._curve else None,
            "loss": round_significant(last.loss) if last else None,
            "curve": [list(self._curve[place]) for place in places],
            "rejected": self._rejected,
            "missing": self._missing,
            "damaged": self._records.damaged,
        }
        if experiment is not None:
            # Written before the first round, only by runs over a network.
            is_network = file_signature(self.location.path / "federation.json") is not None
            data, split = describe_data(experiment, {"network": is_network}, with_seed=False)
            entry |= {
                "method": experiment.method,
                "dataset": data,
                "setting": split,
                "seed": experiment.seed,
                "planned": experiment.rounds,
            }
        return entry


def show_list(
    entries: Sequence[Json], *, words: str = "", state: str = "", most: int = 300, note: str = ""
) -> Markup:
    """Return the table of the runs that match, running ones first, then the newest."""
    counts = {each: sum(e["state"] == each for e in entries) for each in get_args(State)}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    wanted = sorted((each for each in entries if _matches(each, words, state)), key=_order)
    heads = ("", "run", "state", "method", "rounds", "accuracy", "", "changed")
    hidden = {0: "compare", 6: "curve"}
    head = [
        tag(
            "th",
            name or tag("span", hidden[place], class_="unseen"),
            scope="col",
            class_="number" if name in ("accuracy", "changed") else None,
        )
        for place, name in enumerate(heads)
    ]
    table = tag(
        "table",
        tag("thead", tag("tr", head)),
        tag("tbody", (_show_row(each) for each in wanted[:most])),
        aria_label="Runs",
    )
    empty = "No run matches." if entries else "There is no run here yet. Start one: mpfedcl run"
    left = len(wanted) - most
    return tag(
        "div",
        tag("p", f"{len(entries)} {'run' if len(entries) == 1 else 'runs'}{': ' if told else ''}{told}.",
            class_="about", id_="counted", role="status"),
        sentence(note) if note else None,
        tag(
            "section",
            table,
            None if wanted else sentence(empty),
            tag("button", f"Show more ({left} left)", type="button", id_="more") if left > 0 else None,
            class_="block runs",
            id_="runs",
            aria_label="Runs",
        ),
        data_title="Runs",
    )  # fmt: skip


def _matches(entry: Json, words: str, state: str) -> bool:
    if state and entry["state"] != state:
        return False
    known = ("folder", "name", "method", "dataset", "setting")
    text = " ".join([*(str(entry.get(key, "")) for key in known), f"seed {entry.get('seed')}"])
    return all(word in text.lower() for word in words.lower().split())


def _order(entry: Json) -> tuple[bool, int, str]:
    # The order of running ones must not change with each round.
    is_running = entry["state"] == "running"
    return (
        not is_running,
        0 if is_running else -entry["changed"],
        f"{entry['folder']}/{entry['name']}",
    )


def _show_row(entry: Json) -> Markup:
    name, run = entry["name"], entry["id"]
    about = (
        f"{entry['dataset']}, {entry['setting']}, seed {entry['seed']}"
        if "dataset" in entry
        else ""
    )
    planned = entry.get("planned")
    progress = [
        tag("progress", max=str(planned or 1), value=str(entry["round"]), aria_label="rounds done"),
        tag("small", f"{entry['round']} of {planned}"),
    ]
    accuracy = "-" if entry["accuracy"] is None else f"{entry['accuracy']:.1f} %"
    return tag(
        "tr",
        tag("td", tag("input", type="checkbox", id_=f"box-{run}", value=run, aria_label=f"Compare {name}"),
            class_="chosen-cell"),
        tag("th", tag("a", name, href=f"#run={run}", id_=f"link-{run}"), tag("small", entry["folder"]),
            tag("small", entry["trouble"] or _warn(entry), class_="trouble"), scope="row", class_="where"),
        tag("td", show_state(entry["state"]), class_="state-cell"),
        tag("td", entry.get("method", ""), tag("small", about), class_="method-cell"),
        tag("td", progress if planned else None, class_="progress-cell"),
        tag("td", accuracy, class_="number accuracy-cell"),
        tag("td", _show_curve(entry["curve"]), class_="curve-cell"),
        tag("td", _since(entry["changed"]), class_="number changed-cell"),
    )  # fmt: skip


def show_state(state: str) -> Markup:
    """Return the state of a run as a word with a sign."""
    return tag("span", state, class_=f"state {state}")


def _warn(entry: Json) -> str:
    counted = {
        "update rejected": entry["rejected"],
        "answer missing": entry["missing"],
        "damaged record": entry["damaged"],
    }
    plural = {"update rejected": "updates rejected", "answer missing": "answers missing"}
    return ", ".join(
        f"{count} {words if count == 1 else plural.get(words, f'{words}s')}"
        for words, count in counted.items()
        if count
    )


def _since(milliseconds: int) -> str:
    seconds = max(0.0, time.time() - milliseconds / 1000)
    if seconds < 90:
        return "just now"
    for least, size, unit in ((172_800, 86_400, "days"), (7200, 3600, "hours"), (0, 60, "minutes")):
        if seconds >= least:
            return f"{int(seconds // size)} {unit} ago"
    return ""


def _show_curve(points: Iterable[Sequence[float]]) -> Markup:
    """Return accuracy per round as a small line."""
    known = list(points)
    if len(known) < 2:
        return join()
    (first, _), (last, _) = known[0], known[-1]
    low = min(value for _, value in known)
    # A curve that hardly changes must look flat.
    high = max(low + 20, *(value for _, value in known))
    drawn = " ".join(
        f"{2 + 88 * (at - first) / (last - first):.1f},{24 - 22 * (value - low) / (high - low):.1f}"
        for at, value in known
    )
    line = tag("polyline", points=drawn, class_="spark")
    return tag("svg", line, viewBox="0 0 92 26", width="92", height="26", aria_hidden="true")
