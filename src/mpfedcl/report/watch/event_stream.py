"""Server-sent events that tell open pages what has changed: files are read once for all pages."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mpfedcl.report.watch.watched_runs import WatchedRuns

_SECONDS_BETWEEN_READS = 0.25
_STILL_HERE = 15.0
"""Seconds of silence after which a stream says that it is still there."""

_Found = TypeVar("_Found")


@dataclass(eq=False)
class _Page:
    """An open page: what it has not been told yet. It cannot grow beyond the number of runs."""

    changed: dict[str, None] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class EventStream:
    """The watched runs in a thread of their own, and the pages that listen."""

    def __init__(self, runs: WatchedRuns) -> None:
        self._runs = runs
        # One thread: calls wait their turn, and the runs need no locks.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watched-runs")
        self._pages: set[_Page] = set()
        self._has_pages = asyncio.Event()
        self._is_closing = False

    async def call(self, function: Callable[..., _Found], *arguments: Any) -> _Found:
        """Call a function of the runs in their thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    async def run(self) -> None:
        """Read what is new and tell the pages, for as long as there are any."""
        while not self._is_closing:
            await self._has_pages.wait()
            if self._is_closing:
                return
            await self._refresh()
            await asyncio.sleep(_SECONDS_BETWEEN_READS)

    async def _refresh(self) -> None:
        changed, gone = await self.call(self._runs.refresh)
        if not changed and not gone:
            return
        for page in self._pages:
            page.changed.update(dict.fromkeys(changed))
            page.gone.update(dict.fromkeys(gone))
            page.wake.set()

    def close(self) -> None:
        """End all streams: a server that waits for them would never end."""
        self._is_closing = True
        self._has_pages.set()
        for page in self._pages:
            page.wake.set()

    def stop(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def stream(self) -> AsyncIterator[str]:
        """Say what there is, then whatever changes, as server-sent events."""
        page = _Page()
        self._pages.add(page)
        self._has_pages.set()
        try:
            await self._refresh()
            page.changed.clear()
            yield "retry: 1000\n\n" + _event("runs", await self.call(self._runs.overview))
            while not self._is_closing:
                try:
                    await asyncio.wait_for(page.wake.wait(), _STILL_HERE)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if not self._is_closing:
                    yield await self._next_events(page)
        finally:
            self._pages.discard(page)
            if not self._pages:
                self._has_pages.clear()

    async def _next_events(self, page: _Page) -> str:
        page.wake.clear()
        changed, gone = list(page.changed), list(page.gone)
        page.changed.clear()
        page.gone.clear()
        said = _event("gone", gone) if gone else ""
        if changed:
            said += _event("changed", await self.call(self._runs.entries, changed))
        return said


def _event(name: str, content: Any) -> str:
    # JSON has no line breaks of its own, so one line is all of it.
    return f"event: {name}\ndata: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n"
