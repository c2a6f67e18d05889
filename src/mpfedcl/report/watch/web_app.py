"""The live page: the list of runs and the web server. It only reads; no request names a file."""

import asyncio
import hashlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_data
from mpfedcl.inference.calibration import DRIFT_LOG
from mpfedcl.report.document import compare_runs
from mpfedcl.report.html import Markup, page_style, read_page_file, section_blocks, sentence, tag
from mpfedcl.report.run import measure_spread
from mpfedcl.report.watch.files import (
    MOST_FOLDERS,
    IncrementalRecords,
    Signature,
    file_signature,
    find_locked_inodes,
    find_runs,
    parse_experiment,
    read_regular_file,
)
from mpfedcl.report.watch.run_page import LiveBlocks, RunPage, show_state
from mpfedcl.report.wording import choose_evenly
from mpfedcl.rounds.record import RoundRecord

State = Literal["running", "finished", "stopped", "damaged"]
_FILES = ("experiment.toml", "rounds.jsonl", "summary.json", DRIFT_LOG)
_COLUMNS = ("compare", "run", "state", "method", "rounds", "accuracy", "curve", "changed")
_MOST_ROWS = 500
_CURVE_POINTS = 40
"""Points of the small curve in the list."""
_QUIET_SECONDS = 5.0
"""A run without a lock and without a new round for this long counts as stopped."""
_AGES = ((172_800, 86_400, "days"), (7200, 3600, "hours"), (90, 60, "minutes"))
"""From how many seconds on, the seconds of a unit, and the unit."""


class ListedRun:
    """One run in the list, with the state of reading its files."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.entry: Json = {}
        """What the list shows of the run; empty until the first refresh."""
        self._parts = path.relative_to(root).parts
        # Requests name a run by this, never by its path.
        self.id = hashlib.sha256(os.fsencode("/".join(self._parts))).hexdigest()[:20]
        self._seen: Any = None
        self._settings: tuple[Signature | None, Experiment | None, str] = (None, None, "")
        self._records = IncrementalRecords(path / "rounds.jsonl")
        self._reset_rounds()

    def _reset_rounds(self) -> None:
        self._curve: list[tuple[int, float]] = []
        self._last: RoundRecord | None = None
        self._rejected = self._missing = 0

    def refresh(self, locked: set[int]) -> None:
        """Read what is new."""
        try:
            self._refresh(locked)
        # A damaged run must not affect the others.
        except Exception as error:
            trouble = f"It cannot be read ({type(error).__name__}: {error})."
            self.entry = self._describe(None, "damaged", trouble, 0)

    def _refresh(self, locked: set[int]) -> None:
        experiment, trouble = self._read_settings()
        began, lines = self._records.read_new()
        if began:
            self._reset_rounds()
        for line in lines:
            self._add(line)
        signatures = [file_signature(self.path / name) for name in _FILES]
        state = self._find_state(trouble, signatures, locked)
        # Rows of thousands of runs are described only when something has changed.
        if self._seen != (signatures, state):
            changed = max((each[2] for each in signatures if each), default=0)
            self.entry = self._describe(experiment, state, trouble, changed)
            self._seen = signatures, state

    def _add(self, line: RoundRecord) -> None:
        self._last = line
        if (spread := measure_spread(line)) is not None:
            self._curve.append((line.round, spread.mean))
        self._rejected += len(line.clients.rejected)
        self._missing += len(line.clients.missing)

    def _read_settings(self) -> tuple[Experiment | None, str]:
        file = self.path / "experiment.toml"
        signature = file_signature(file)
        if signature is None or signature != self._settings[0]:
            try:
                content = read_regular_file(file, 2**20)
                self._settings = signature, parse_experiment(content, file), ""
            except InvalidInput as error:
                self._settings = signature, None, str(error)
        return self._settings[1:]

    def _find_state(
        self, trouble: str, signatures: Sequence[Signature | None], locked: set[int]
    ) -> State:
        _, records, summary, _ = signatures
        if trouble:
            return "damaged"
        if summary:
            return "finished"
        if locked and (lock := file_signature(self.path / ".lock")) and lock[0] in locked:
            return "running"
        # Locks of another machine or container are not visible, but growth is.
        took = sum(self._last.seconds.values()) if self._last else 0.0
        since = time.time() - records[2] / 1e9 if records else float("inf")
        return "running" if since < max(_QUIET_SECONDS, 3 * took) else "stopped"

    def _describe(
        self, experiment: Experiment | None, state: State, trouble: str, changed: int
    ) -> Json:
        last = self._last
        entry: Json = {
            "id": self.id,
            "name": self._parts[-1] if self._parts else self.path.resolve().name,
            "folder": "/".join(self._parts[:-1]),
            "state": state,
            "trouble": trouble.replace(f"{self.path}/", ""),
            "changed": changed / 1e9,
            "round": last.round if last else 0,
            "accuracy": self._curve[-1][1] if self._curve else None,
            "curve": [self._curve[n] for n in choose_evenly(len(self._curve), _CURVE_POINTS)],
            "rejected": self._rejected,
            "missing": self._missing,
            "damaged": self._records.damaged,
            "method": "",
            "about": "",
            "planned": None,
        }
        if experiment is not None:
            # Written before the first round, only by runs over a network.
            is_network = file_signature(self.path / "federation.json") is not None
            data, split = describe_data(experiment, {"network": is_network}, with_seed=False)
            about = f"{data}, {split}, seed {experiment.seed}"
            entry |= {"method": experiment.method, "about": about, "planned": experiment.rounds}
        return entry


def show_list(entries: Sequence[Json], words: str = "", note: str = "") -> Markup:
    """Return the table of the runs that match, running ones first, then the newest."""
    counts = {each: sum(e["state"] == each for e in entries) for each in get_args(State)}
    states = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    wanted = sorted((each for each in entries if _matches(each, words)), key=_order)
    head = [
        tag(
            "th",
            tag("span", name, class_="unseen") if name in ("compare", "curve") else name,
            scope="col",
            class_="number" if name in ("accuracy", "changed") else None,
        )
        for name in _COLUMNS
    ]
    rows = tag("tbody", map(_show_row, wanted[:_MOST_ROWS]))
    left = len(wanted) - _MOST_ROWS
    if left > 0:
        note += f" {left:,} more runs match; add words to find them."
    if not wanted:
        note += " No run matches." if entries else " There is no run here yet: mpfedcl run."
    shown = f" ({states})" if states else ""
    return tag(
        "div",
        tag("p", f"Runs: {len(entries)}{shown}.", class_="about", role="status"),
        tag(
            "section",
            tag("table", tag("thead", tag("tr", head)), rows, aria_label="Runs"),
            sentence(note),
            class_="block runs",
            aria_label="Runs",
        ),
        data_title="Runs",
    )  # fmt: skip


def _matches(entry: Json, words: str) -> bool:
    known = ("folder", "name", "state", "method", "about")
    text = " ".join(entry[key] for key in known).lower()
    return all(word in text for word in words.lower().split())


def _order(entry: Json) -> tuple[bool, float, str]:
    # The order of running ones must not change with each round.
    is_running = entry["state"] == "running"
    newest_first = 0.0 if is_running else -entry["changed"]
    return not is_running, newest_first, f"{entry['folder']}/{entry['name']}"


def _show_row(entry: Json) -> Markup:
    name, run, planned = entry["name"], entry["id"], entry["planned"]
    box = tag("input", type="checkbox", id_=f"box-{run}", value=run, aria_label=f"Compare {name}")
    counted = {
        "updates rejected": entry["rejected"],
        "answers missing": entry["missing"],
        "damaged lines": entry["damaged"],
    }
    trouble = ", ".join(f"{noun}: {count:,}" for noun, count in counted.items() if count)
    done = tag("progress", max=str(planned), value=str(entry["round"]), aria_label="rounds done")
    accuracy = "-" if entry["accuracy"] is None else f"{entry['accuracy']:.1f} %"
    progress = (done, tag("small", f"{entry['round']} of {planned}")) if planned else None
    cells = {
        "state-cell": show_state(entry["state"]),
        "method-cell": (entry["method"], tag("small", entry["about"])),
        "progress-cell": progress,
        "number accuracy-cell": accuracy,
        "curve-cell": _show_curve(entry["curve"]),
        "number changed-cell": _describe_age(entry["changed"]),
    }
    heading = tag(
        "th",
        tag("a", name, href=f"#run={run}", id_=f"link-{run}"),
        tag("small", entry["folder"]),
        tag("small", entry["trouble"] or trouble, class_="trouble"),
        scope="row",
        class_="where",
    )
    others = [tag("td", content, class_=kind) for kind, content in cells.items()]
    return tag("tr", tag("td", box, class_="chosen-cell"), heading, others)


def _describe_age(changed: float) -> str:
    seconds = time.time() - changed
    for least, size, unit in _AGES:
        if seconds >= least:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def _show_curve(points: Sequence[tuple[int, float]]) -> Markup | None:
    """Return accuracy per round as a small line."""
    if len(points) < 2:
        return None
    first, last = points[0][0], points[-1][0]
    low = min(value for _, value in points)
    # A curve that hardly changes must look flat.
    high = max(low + 20, *(value for _, value in points))
    drawn = " ".join(
        f"{2 + 88 * (at - first) / (last - first):.1f},{24 - 22 * (value - low) / (high - low):.1f}"
        for at, value in points
    )
    line = tag("polyline", points=drawn, class_="spark")
    return tag("svg", line, viewBox="0 0 92 26", width="92", height="26", aria_hidden="true")


# The web server


_SHUTDOWN_SECONDS = 2
_SECONDS_BETWEEN_SEARCHES = 1.0
"""Between two reads of all runs; those that are running are read at every request."""
_MOST_OPEN = 24
MOST_COMPARED = 20
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an unused port."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise InvalidInput(
            f"host is {host!r}; it must be an address of this machine, such as 127.0.0.1 or ::1."
        ) from None
    if not 0 <= port <= 65535:
        raise InvalidInput(f"port is {port}; it must be from 0 (any that is free) to 65535.")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        return socket.create_server((str(address), port), family=family, backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InvalidInput(
            f"port is {port}; it cannot be used on {host} ({reason}): give another by "
            "--port, or 0 for any that is free."
        ) from None


def serve(folder: Path, listener: socket.socket) -> None:
    """Serve the runs below a folder until Ctrl-C."""
    config = uvicorn.Config(
        make_app(WatchedRuns(folder)),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        http="h11",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


class WatchedRuns:
    """All runs below a folder, read once however many pages are open. For one thread only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[str, ListedRun] = {}
        self.searched_at = float("-inf")
        self._search_seconds = 0.0
        self._is_too_large = False
        self._open = lru_cache(_MOST_OPEN)(RunPage)
        self._comparison_of = lru_cache(_MOST_OPEN)(lambda _: LiveBlocks())

    def refresh(self) -> None:
        """Read what is new: of all runs if it is time to search again, else of running ones."""
        began = time.monotonic()
        # A folder that takes long to search is searched less often.
        pause = max(_SECONDS_BETWEEN_SEARCHES, 20 * self._search_seconds)
        is_due = began - self.searched_at >= pause
        if is_due:
            self.find_runs()
            self.searched_at, self._search_seconds = began, time.monotonic() - began
        locked = find_locked_inodes()
        for run in self.runs.values():
            if is_due or run.entry["state"] == "running":
                run.refresh(locked)

    def find_runs(self) -> None:
        """Search for runs below the root; forget those that were deleted."""
        paths, self._is_too_large = find_runs(self.root)
        found = {run.id: run for run in (ListedRun(path, self.root) for path in paths)}
        self.runs = {name: self.runs.get(name, run) for name, run in found.items()}

    def show_list(self, words: str) -> Markup:
        """Return the list of the runs that match."""
        self.refresh()
        too_many = f"There are more than {MOST_FOLDERS:,} folders; runs beyond them are not shown."
        entries = [run.entry for run in self.runs.values()]
        return show_list(entries, words, too_many if self._is_too_large else "")

    def show_run(self, name: str) -> Markup | None:
        """Return the page of a run; None if there is no such run."""
        self.refresh()
        opened = self.open_run(name)
        return None if opened is None else opened.show(self.runs[name].entry, str(self.root))

    def open_run(self, name: str) -> RunPage | None:
        """Return the page of a run with its newest records; None if there is no such run."""
        if name not in self.runs:
            return None
        page = self._open(self.runs[name].path)
        page.refresh()
        return page

    def compare(self, ids: Sequence[str]) -> Json:
        """Return known runs as a section of the report, and the runs that it leaves out."""
        found, troubles = [], []
        for page in filter(None, map(self.open_run, dict.fromkeys(ids[:MOST_COMPARED]))):
            try:
                if page.records is None or not page.records.rounds:
                    raise InvalidInput(f"{page.path.name} has no round yet.")
                # Fails for a method that is not installed, for example.
                _ = page.records.described
                found.append(page.records)
            except InvalidInput as error:
                troubles.append(str(error))
        return (compare_runs(found) if found else {"groups": []}) | {"troubles": troubles}

    def show_comparison(self, ids: Sequence[str]) -> Markup:
        """Return the page of chosen runs; unknown ones are left out."""
        self.refresh()
        opened = {
            name: page for name in ids[:MOST_COMPARED] if (page := self.open_run(name)) is not None
        }
        entries = [self.runs[name].entry for name in opened]
        links = [
            tag(
                "li",
                tag("a", each["name"], href=f"#run={each['id']}"),
                f" {each['state']}, round {each['round']}",
            )
            for each in entries
        ]
        blocks = self._comparison_of(tuple(opened)).update(
            [page.version for page in opened.values()],
            lambda: _comparison_blocks(self.compare(list(opened))),
            is_final=all(each["state"] != "running" for each in entries),
        )
        about = "Runs that differ only in their seed are one line with a band."
        return tag(
            "div",
            tag("p", about, class_="about"),
            tag("ul", links),
            tag("div", blocks, class_="flow"),
            data_title=f"{len(entries)} runs compared",
        )


def _comparison_blocks(section: Json) -> list[Markup]:
    """Return the blocks of the report's section, below the runs that it leaves out."""
    troubles = [sentence(each) for each in section["troubles"]]
    if not section["groups"]:
        return [*troubles, sentence("None of these runs can be shown.")]
    return troubles + section_blocks(section)


def make_app(runs: WatchedRuns) -> Starlette:
    """Return the application that shows the runs."""
    # One thread: requests wait their turn, and the runs need no locks.
    thread = ThreadPoolExecutor(1, thread_name_prefix="watched-runs")

    async def answer(request: Request, show: Callable[[], Markup | None]) -> Response:
        shown = await asyncio.get_running_loop().run_in_executor(thread, show)
        if shown is None:
            return PlainTextResponse("There is no such run.\n", 404)
        content = shown.encode("utf-8", "replace")
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()[:24]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="text/html", headers=headers)

    async def list_runs(request: Request) -> Response:
        words = request.query_params.get("words", "")[:200]
        return await answer(request, partial(runs.show_list, words))

    async def show_run(request: Request) -> Response:
        return await answer(request, partial(runs.show_run, request.query_params.get("id", "")))

    async def compare(request: Request) -> Response:
        ids = request.query_params.getlist("id")
        return await answer(request, partial(runs.show_comparison, ids))

    return Starlette(
        routes=[
            *(Route(path, page, methods=["GET"]) for path, page in _static_pages(runs).items()),
            Route("/runs", list_runs),
            Route("/run", show_run),
            Route("/compare", compare),
        ],
        middleware=[Middleware(RestrictiveMiddleware)],
    )


class RestrictiveMiddleware:
    """Answers only requests for an address of this machine, with restrictive headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on."""
        app = self._app
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host") or [""]
            if not all(map(is_local_host, hosts)):
                app = PlainTextResponse("Use localhost or an address, not a host name.\n", 421)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        # A browser may close the connection at any time.
        with suppress(OSError):
            await app(scope, receive, send_with_headers)


def is_local_host(host: str) -> bool:
    """Return whether a Host header is an address or localhost.

    A foreign page can let its own host name point to this machine (DNS rebinding) and read the
    answers, but the browser then sends that name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return "@" not in host and (name == "localhost" or bool(ipaddress.ip_address(name)))
    except ValueError:
        return False


def _static_pages(runs: WatchedRuns) -> dict[str, Response]:
    """Return the parts of the page by address, read once."""
    read_own = partial(read_page_file, package="mpfedcl.report.watch")
    footer = tag(
        "p",
        f"mpfedcl {version('mpfedcl')}, watching ",
        tag("span", str(runs.root), class_="folder"),
        ". This page only reads. Accuracies are of the last evaluated round, not of the best one.",
    )
    page = read_own("watch.html").replace("@@BOTTOM@@", footer)
    script = f"{read_page_file('page.js')}\n{read_own('watch.js')}"
    style = f"{page_style()}\n{read_own('watch.css')}"
    return {
        "/": Response(page.encode("utf-8", "replace"), media_type="text/html"),
        "/watch.js": Response(script, media_type="text/javascript"),
        "/watch.css": Response(style, media_type="text/css"),
        "/icon.svg": Response(read_own("icon.svg"), media_type="image/svg+xml"),
    }
