"""The live page: the list of runs and the web server. It only reads; no request names a file."""

import asyncio
import hashlib
import ipaddress
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.experiment.wording import describe_data
from mpfedcl.report.document import compare_runs
from mpfedcl.report.html import Markup, page_style, read_page_file, section_blocks, sentence, tag
from mpfedcl.report.run import measure_spread
from mpfedcl.report.watch.files import (
    MOST_FOLDERS,
    Signature,
    file_signature,
    find_locked_inodes,
    find_runs,
)
from mpfedcl.report.watch.run_page import (
    FILES,
    MOST_OPEN,
    LiveBlocks,
    RunPage,
    open_page,
    show_state,
)
from mpfedcl.report.wording import choose_evenly
from mpfedcl.rounds.record import RoundRecord

State = Literal["running", "finished", "stopped", "damaged"]
_COLUMNS = ("compare", "run", "state", "method", "rounds", "accuracy", "curve", "changed")
_MOST_ROWS = 500
_CURVE_POINTS = 40
"""Points of the small curve in the list."""
_QUIET_SECONDS = 5.0
"""A run without a lock and without a new round for this long counts as stopped."""
_AGES = ((172_800, 86_400, "days"), (7200, 3600, "hours"), (90, 60, "minutes"))
"""From how many seconds on, the seconds of a unit, and the unit."""


class ListedRun:
    """A run in the list."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self._parts = path.relative_to(root).parts
        # Requests name a run by this, never by its path.
        self.id = hashlib.sha256(os.fsencode("/".join(self._parts))).hexdigest()[:20]
        self.signatures: tuple[Signature | None, ...] = ()
        self.entry: Json = {}
        """What the list shows of the run; empty until the first refresh."""

    @property
    def page(self) -> RunPage:
        """The page of the run."""
        return open_page(self.path, self.signatures)

    def refresh(self, locked: set[int]) -> None:
        """Read the files if they have changed."""
        signatures = tuple(file_signature(self.path / name) for name in FILES)
        try:
            if signatures != self.signatures:
                self.signatures = signatures
                self.entry = self._describe()
            self.entry["state"] = self._find_state(locked)
        # A damaged run must not affect the others.
        except Exception as error:
            trouble = f"It cannot be read ({type(error).__name__}: {error})."
            self.entry = self._make_entry([], trouble=trouble, state="damaged")

    def _find_state(self, locked: set[int]) -> State:
        if self.entry["trouble"]:
            return "damaged"
        if self.signatures[FILES.index("summary.json")]:
            return "finished"
        if locked and (lock := file_signature(self.path / ".lock")) and lock[0] in locked:
            return "running"
        # Locks of another machine or container are not visible, but growth is.
        records = self.signatures[FILES.index("rounds.jsonl")]
        since = time.time() - records[2] / 1e9 if records else float("inf")
        return "running" if since < max(_QUIET_SECONDS, 3 * self.entry["seconds"]) else "stopped"

    def _describe(self) -> Json:
        page = self.page
        if page.records is None:
            return self._make_entry([], trouble=page.troubles[0].replace(f"{self.path}/", ""))
        experiment, rounds = page.records.experiment, page.records.rounds
        # Written before the first round, only by runs over a network.
        is_network = file_signature(self.path / "federation.json") is not None
        data, split = describe_data(experiment, {"network": is_network}, with_seed=False)
        return self._make_entry(
            rounds,
            method=experiment.method,
            about=f"{data}, {split}, seed {experiment.seed}",
            planned=experiment.rounds,
            counts={
                "updates rejected": sum(len(each.clients.rejected) for each in rounds),
                "answers missing": sum(len(each.clients.missing) for each in rounds),
                "damaged lines": page.records.damaged,
            },
        )

    def _make_entry(self, rounds: Sequence[RoundRecord], **known: Any) -> Json:
        spreads = [(each.round, measure_spread(each)) for each in rounds]
        curve = [(number, spread.mean) for number, spread in spreads if spread is not None]
        return {
            "id": self.id,
            "name": self._parts[-1] if self._parts else self.path.resolve().name,
            "folder": "/".join(self._parts[:-1]),
            "changed": max((each[2] / 1e9 for each in self.signatures if each), default=0),
            "round": rounds[-1].round if rounds else 0,
            "seconds": sum(rounds[-1].seconds.values()) if rounds else 0.0,
            "accuracy": curve[-1][1] if curve else None,
            "curve": [curve[n] for n in choose_evenly(len(curve), _CURVE_POINTS)],
            "method": "",
            "about": "",
            "planned": None,
            "trouble": "",
            "counts": {},
            **known,
        }


def show_list(entries: Sequence[Json], words: str = "", note: str = "") -> Markup:
    """Return the table of the runs that match, running ones first, then the newest."""
    states = [f"{count} {state}" for state, count in Counter(e["state"] for e in entries).items()]
    wanted = sorted((each for each in entries if _matches(each, words)), key=_order)
    if (left := len(wanted) - _MOST_ROWS) > 0:
        note += f" {left:,} more runs match; add words to find them."
    if not wanted:
        note += " No run matches." if entries else " There is no run here yet: mpfedcl run."
    about = f"Runs: {len(entries)} ({', '.join(sorted(states))})." if states else "Runs: 0."
    table = tag(
        "table",
        tag("thead", tag("tr", map(_show_heading, _COLUMNS))),
        tag("tbody", map(_show_row, wanted[:_MOST_ROWS])),
        aria_label="Runs",
    )
    return tag(
        "div",
        tag("p", about, class_="about", role="status"),
        tag("section", table, sentence(note), class_="block runs", aria_label="Runs"),
        data_title="Runs",
    )


def _matches(entry: Json, words: str) -> bool:
    known = ("folder", "name", "state", "method", "about")
    text = " ".join(entry[key] for key in known).lower()
    return all(word in text for word in words.lower().split())


def _order(entry: Json) -> tuple[bool, float, str]:
    # The order of running ones must not change with each round.
    is_running = entry["state"] == "running"
    newest_first = 0.0 if is_running else -entry["changed"]
    return not is_running, newest_first, f"{entry['folder']}/{entry['name']}"


def _show_heading(name: str) -> Markup:
    shown = tag("span", name, class_="unseen") if name in ("compare", "curve") else name
    kind = "number" if name in ("accuracy", "changed") else None
    return tag("th", shown, scope="col", class_=kind)


def _show_row(entry: Json) -> Markup:
    name, run, planned = entry["name"], entry["id"], entry["planned"]
    box = tag("input", type="checkbox", id_=f"box-{run}", value=run, aria_label=f"Compare {name}")
    trouble = ", ".join(f"{noun}: {count:,}" for noun, count in entry["counts"].items() if count)
    heading = tag(
        "th",
        tag("a", name, href=f"#run={run}", id_=f"link-{run}"),
        tag("small", entry["folder"]),
        tag("small", entry["trouble"] or trouble, class_="trouble"),
        scope="row",
        class_="where",
    )
    done = tag("progress", max=str(planned), value=str(entry["round"]), aria_label="rounds done")
    cells = {
        "state-cell": show_state(entry["state"]),
        "method-cell": (entry["method"], tag("small", entry["about"])),
        "progress-cell": (done, tag("small", f"{entry['round']} of {planned}")) if planned else "",
        "number accuracy-cell": "-" if entry["accuracy"] is None else f"{entry['accuracy']:.1f} %",
        "curve-cell": _show_curve(entry["curve"]),
        "number changed-cell": _describe_age(entry["changed"]),
    }
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
    rounds, values = zip(*points, strict=True)
    # A curve that hardly changes must look flat.
    low, high = min(values), max(min(values) + 20, *values)
    x = numpy.interp(rounds, (rounds[0], rounds[-1]), (2, 90))
    y = numpy.interp(values, (low, high), (24, 2))
    drawn = " ".join(f"{left:.1f},{top:.1f}" for left, top in zip(x, y, strict=True))
    line = tag("polyline", points=drawn, class_="spark")
    return tag("svg", line, viewBox="0 0 92 26", width="92", height="26", aria_hidden="true")


# The web server


_SHUTDOWN_SECONDS = 2
_SECONDS_BETWEEN_SEARCHES = 1.0
"""Between two reads of all runs; those that are running are read at every request."""
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
        # The figures of an open page, by the runs that it shows.
        self._blocks_of = lru_cache(MOST_OPEN)(lambda _: LiveBlocks())

    def refresh(self) -> None:
        """Read what is new: of all runs if it is time to search again, else of running ones."""
        began = time.monotonic()
        # A folder that takes long to search is searched less often.
        pause = max(_SECONDS_BETWEEN_SEARCHES, 20 * self._search_seconds)
        is_due = began - self.searched_at >= pause
        if is_due:
            paths, self._is_too_large = find_runs(self.root)
            found = {run.id: run for run in (ListedRun(path, self.root) for path in paths)}
            self.runs = {name: self.runs.get(name, run) for name, run in found.items()}
            self.searched_at, self._search_seconds = began, time.monotonic() - began
        locked = find_locked_inodes()
        for run in self.runs.values():
            if is_due or run.entry["state"] == "running":
                run.refresh(locked)

    def show_list(self, words: str) -> Markup:
        """Return the list of the runs that match."""
        self.refresh()
        too_many = f"There are more than {MOST_FOLDERS:,} folders; runs beyond them are not shown."
        entries = [run.entry for run in self.runs.values()]
        return show_list(entries, words, too_many if self._is_too_large else "")

    def show_run(self, name: str) -> Markup | None:
        """Return the page of a run; None if there is no such run."""
        self.refresh()
        run = self.runs.get(name)
        if run is None:
            return None
        blocks = self._blocks_of(("run", name))
        return run.page.show(run.entry, str(self.root), blocks, run.signatures)

    def compare(self, runs: Iterable[ListedRun]) -> Json:
        """Return runs as a section of the report, and the runs that it leaves out."""
        found, troubles = [], []
        for run in runs:
            records = run.page.records
            try:
                if records is None or not records.rounds:
                    raise InvalidInput(f"{run.path.name} has no round yet.")
                # Fails for a method that is not installed, for example.
                _ = records.described
                found.append(records)
            except InvalidInput as error:
                troubles.append(str(error))
        return (compare_runs(found) if found else {"groups": []}) | {"troubles": troubles}

    def show_comparison(self, ids: Sequence[str]) -> Markup:
        """Return the page of chosen runs; unknown ones are left out."""
        self.refresh()
        chosen = {name: self.runs[name] for name in ids[:MOST_COMPARED] if name in self.runs}
        entries = [run.entry for run in chosen.values()]
        links = [
            tag(
                "li",
                tag("a", each["name"], href=f"#run={each['id']}"),
                f" {each['state']}, round {each['round']}",
            )
            for each in entries
        ]
        blocks = self._blocks_of(("comparison", *chosen)).update(
            [run.signatures for run in chosen.values()],
            lambda: _comparison_blocks(self.compare(chosen.values())),
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
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_restrict)],
    )


async def _restrict(request: Request, answer: RequestResponseEndpoint) -> Response:
    """Answer only requests for an address of this machine, with restrictive headers."""
    hosts = request.headers.getlist("host") or [""]
    if all(map(is_local_host, hosts)):
        response = await answer(request)
    else:
        response = PlainTextResponse("Use localhost or an address, not a host name.\n", 421)
    response.headers.update(_HEADERS)
    return response


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
