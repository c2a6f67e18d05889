"""The ruler that all peers share: rounds, age of a process, memory of its tree (Linux)."""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SAMPLE_EVERY = 0.5
"""Seconds between two looks at the memory; reading it takes time from the peer."""


def age(pid: int) -> float:
    """Return the seconds since a process began, so that imports count as start-up."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def process_tree(root: int) -> list[int]:
    """Return a process and all its descendants that live now."""
    found = [root]
    for pid in found:
        try:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        except (OSError, ValueError):
            continue
    return found


class TreeMemory:
    """Watches the memory of a process tree in the background; pages that are shared count once."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Take a last look and return the peak in MB."""
        self._stop.set()
        self._thread.join()
        self._look()
        return round(self._peak / 1000, 1)

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY):
            self._look()

    def _look(self) -> None:
        self._peak = max(self._peak, sum(map(_proportional_kb, process_tree(self._root))))


def _proportional_kb(pid: int) -> int:
    """Return the proportional set size in kB (of 1000); 0 if the process has gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 // 1000
    except (OSError, ValueError):
        pass
    return 0


class Stopwatch:
    """Splits the time at the end of each round; the first round is the warm-up."""

    def __init__(self, root: int) -> None:
        self.startup = 0.0
        self._root = root
        self.accuracies: list[float] = []
        """In % after each round, where they are asked for."""
        self._laps: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Say that the next round begins now."""
        self._began = time.perf_counter()

    def lap(self, read: Callable[[], float] | None = None) -> None:
        """Say that a round has ended, and with it the next one begins.

        What is `read` in between, the accuracy, is not timed.
        """
        self._laps.append(time.perf_counter() - self._began)
        if len(self._laps) == 1:
            self.startup = age(self._root)
        if read is not None:
            self.accuracies.append(round(read(), 2))
        self.begin()

    @property
    def seconds(self) -> list[float]:
        """Seconds of all rounds so far."""
        return [round(lap, 6) for lap in self._laps]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all peers have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--data", required=True, help="the .npz that compare.py exports")
    made.add_argument("--rounds", type=int, default=20, help="rounds counted, after one warm-up")
    made.add_argument("--read", action="store_true", help="accuracy after each round, not timed")
    return made


def report(
    peer: str, version: str, watch: Stopwatch, memory_mb: float, accuracy: float, **more: Any
) -> None:
    """Print the one line that compare.py reads."""
    first, *others = watch.seconds
    line = {
        "peer": peer,
        "version": version,
        **more,
        "startup_seconds": round(watch.startup, 3),
        "startup_means": "start of the process to the end of the first round",
        "first_round_seconds": first,
        "round_seconds": others,
        "peak_memory_mb": memory_mb,
        "accuracy": round(accuracy, 2),
        "accuracies": watch.accuracies,
    }
    print(json.dumps(line), flush=True)
