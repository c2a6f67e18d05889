"""Calls that may hang, in the background: whoever waits for one waits for so long and no longer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_Result = TypeVar("_Result")
NAME = "mpfedcl call"
"""Of the threads."""


def call(work: Callable[[], _Result]) -> "Future[_Result]":
    """Start work in a thread of its own, which does not keep the process alive."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # An executor would be waited for when this process ends.
    threading.Thread(target=run, name=NAME, daemon=True).start()
    return future


def is_done(future: "Future[_Result]", seconds: float) -> bool:
    """Wait for a call for at most so many seconds; tell whether it has ended."""
    wait([future], max(0.0, seconds))
    return future.done()
