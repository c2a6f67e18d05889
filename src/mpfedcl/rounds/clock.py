"""Where the time of a round goes."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PHASES = (
    "broadcast",
    "train",
    "embed",
    "cluster",
    "exchange",
    "aggregate",
    "evaluate",
    "checkpoint",
)
"""exchange: between the processes of one run, and waiting for the slowest of them."""
NOT_TRAINING = ("evaluate", "checkpoint")
"""Phases that are no part of the algorithm."""


def training_seconds(phases: Mapping[str, float]) -> float:
    """Return the seconds of the phases that belong to the algorithm."""
    return sum(seconds for name, seconds in phases.items() if name not in NOT_TRAINING)


class Clock:
    """Seconds by phase; `with clock.phase("train"):` adds to one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + passed

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap and start anew."""
        seconds = {name: round(value, 6) for name, value in self._seconds.items()}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return seconds
