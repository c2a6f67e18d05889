"""Signs of life between the processes of a group, so that one that hangs is noticed in time.

Every few seconds each process writes down how long its working thread has computed so far. A
process that is stopped, stuck in a lock, switched off or out of reach writes nothing new; one that
works or waits for others always does, however long its evaluation takes.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from mpfedcl.core.errors import LostWorker

LOOK_SECONDS = 0.5
"""Whoever waits for others looks so often whether they are alive."""
_BEAT_SECONDS = 2.0
_PAUSE_SECONDS = 5.0
"""Whoever sleeps so much longer than asked for was stopped meanwhile, and heard nobody."""

_Result = TypeVar("_Result")


class Signs(Protocol):
    """Where processes write down their signs of life, and read those of others."""

    def write(self, rank: int, sign: int) -> None:
        """Write down a process's newest sign."""

    def read(self, rank: int) -> int:
        """Return a process's newest sign; 0: there is none yet."""


class Heartbeat:
    """This process's signs of life, and those of the processes that it watches."""

    def __init__(self, signs: Signs, rank: int, watched: Iterable[int], timeout: float) -> None:
        self.timeout = timeout
        """Seconds without a sign of life after which a process is taken for lost."""
        self._signs = signs
        self._rank = rank
        self._last = dict.fromkeys(watched, 0)
        self._heard = dict.fromkeys(self._last, time.monotonic())
        self._looked = time.monotonic()
        self._read_clock = _working_time_of_this_thread()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def wait(self, outcome: Future[_Result]) -> _Result:
        """Return an outcome that needs the others; raise LostWorker once one of them is silent."""
        while True:
            self.begin_to_wait()
            try:
                return outcome.result(timeout=LOOK_SECONDS)
            except TimeoutError:
                if outcome.done():
                    raise
            self.look()

    def begin_to_wait(self) -> None:
        """Note down when a wait of LOOK_SECONDS begins, after which `look` is to be called."""
        self._looked = time.monotonic()

    def look(self) -> None:
        """Raise LostWorker if somebody has been silent for too long."""
        self._excuse_after_pause(self._looked, LOOK_SECONDS)
        now = self._looked = time.monotonic()
        silent = [rank for rank, at in self._heard.items() if now - at > self.timeout]
        if silent:
            raise LostWorker(
                f"process {silent[0]} has given no sign of life for {self.timeout:g} s"
            )

    def close(self) -> None:
        """Give no more signs."""
        self._over.set()
        self._thread.join(timeout=1)

    def _beat(self) -> None:
        # A place that is gone is no news: whoever kept it is then missed, here or by others.
        with contextlib.suppress(RuntimeError, ConnectionError):
            while not self._over.is_set():
                self._signs.write(self._rank, self._read_clock())
                for rank, before in self._last.items():
                    if (now := self._signs.read(rank)) != before:
                        self._last[rank], self._heard[rank] = now, time.monotonic()
                began = time.monotonic()
                self._over.wait(_BEAT_SECONDS)
                self._excuse_after_pause(began, _BEAT_SECONDS)

    def _excuse_after_pause(self, began: float, asked: float) -> None:
        """Count silence anew if it was this process that was stopped, as by Ctrl-Z."""
        now = time.monotonic()
        if now - began > asked + _PAUSE_SECONDS:
            self._heard = dict.fromkeys(self._heard, now)


def _working_time_of_this_thread() -> Callable[[], int]:
    """Return a function that any thread may ask how long the present one has computed."""
    if not hasattr(time, "pthread_getcpuclockid"):
        # Not on macOS: there only a process that is stopped as a whole is noticed.
        return time.monotonic_ns
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime_ns(clock)
