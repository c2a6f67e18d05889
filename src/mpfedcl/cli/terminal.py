"""The terminal of a command: consoles, JSON on standard output, and Ctrl-C."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console

_LOST_SECONDS = 5.0
"""Time limit of a second Ctrl-C, after which the process ends: torch swallows some of them."""


def stdout_console() -> Console:
    """Return a console on standard output, with 100 columns if it is no terminal."""
    width = None if Console().is_terminal else 100
    # Names of files and classes are no markup, and a wrapped path could not be copied.
    return Console(highlight=False, markup=False, soft_wrap=True, width=width)


def print_json(content: Any) -> None:
    """Print a result as JSON on standard output."""
    print(json.dumps(content, indent=2))


@contextmanager
def stop_after_round(console: Console) -> Iterator[Callable[[], bool]]:
    """Stop after the current round on the first Ctrl-C, and at once on the second.

    Yields a function that returns whether a stop was requested.
    """
    is_asked = False
    # Files are written atomically, so the process may end at any moment.
    lost = threading.Timer(_LOST_SECONDS, os._exit, [130])
    lost.daemon = True

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            if not lost.is_alive():
                lost.start()
            raise KeyboardInterrupt
        is_asked = True
        console.print("Stopping after the current round; Ctrl-C again stops at once.")

    before: Any = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: is_asked
    finally:
        lost.cancel()
        signal.signal(signal.SIGINT, before)
