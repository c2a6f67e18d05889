"""Telling open pages what has changed: one look at the files for all of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mpfedcl.watch.watcher import Watcher

_BETWEEN_LOOKS = 0.25
_STILL_HERE = 15.0
"""Seconds of silence after which a stream says that it is still there."""

_Found = TypeVar("_Found")


@dataclass(eq=False)
class _Page:
    """An open page: what it has not been told yet. It cannot grow beyond the number of runs."""

    changed: dict[str, None] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Live:
    """The watcher in a thread of its own, and the pages that listen to it."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        # One thread: whoever asks waits his turn, and the watcher needs no locks.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watcher")
        self._pages: set[_Page] = set()
        self._someone = asyncio.Event()
        self._is_closing = False

    async def ask(self, function: Callable[..., _Found], *arguments: Any) -> _Found:
        """Call a function of the watcher in its thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    async def run(self) -> None:
        """Look and tell, for as long as somebody listens."""
        while not self._is_closing:
            await self._someone.wait()
            if self._is_closing:
                return
            await self._look()
            await asyncio.sleep(_BETWEEN_LOOKS)

    async def _look(self) -> None:
        changed, gone = await self.ask(self._watcher.look)
        if not changed and not gone:
            return
        for page in self._pages:
            page.changed.update(dict.fromkeys(changed))
            page.gone.update(dict.fromkeys(gone))
            page.wake.set()

    def close(self) -> None:
        """End all streams: a server that waits for them would never end."""
        self._is_closing = True
        self._someone.set()
        for page in self._pages:
            page.wake.set()

    def end(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def stream(self) -> AsyncIterator[str]:
        """Say what there is, then whatever changes, as server-sent events."""
        page = _Page()
        self._pages.add(page)
        self._someone.set()
        try:
            await self._look()
            page.changed.clear()
            yield "retry: 1000\n\n" + _event("runs", await self.ask(self._watcher.overview))
            while not self._is_closing:
                try:
                    await asyncio.wait_for(page.wake.wait(), _STILL_HERE)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if not self._is_closing:
                    yield await self._tell(page)
        finally:
            self._pages.discard(page)
            if not self._pages:
                self._someone.clear()

    async def _tell(self, page: _Page) -> str:
        page.wake.clear()
        changed, gone = list(page.changed), list(page.gone)
        page.changed.clear()
        page.gone.clear()
        said = _event("gone", gone) if gone else ""
        if changed:
            said += _event("changed", await self.ask(self._watcher.entries, changed))
        return said


def _event(name: str, content: Any) -> str:
    # JSON has no line breaks of its own, so one line is all of it.
    return f"event: {name}\ndata: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n"
