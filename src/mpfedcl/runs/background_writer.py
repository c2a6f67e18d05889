"""Files that are written while the next round trains."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


class BackgroundWriter:
    """Writes one thing at a time beside what goes on; leave its block to wait for the last.

    What is to be written must not change any more. What fails is raised by whoever waits for it,
    so that nothing is written after something that is not there.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._is_first = True

    def begin(self, write: Callable[[], None]) -> None:
        """Begin to write, once what was begun before is done; the first time, wait for it."""
        self.wait()
        self._pending = self._threads.submit(write)
        if self._is_first:
            # A disk that is full, or not ours, is told before another round is spent.
            self._is_first = False
            self.wait()

    def wait(self) -> None:
        """Wait until what was begun is written; raise what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Whatever ends a run early, the round that was over is kept, if it can be.
        self._threads.shutdown()
        if error is None:
            self.wait()
