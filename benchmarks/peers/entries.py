"""All ways to do the works: what is to be run, and what its runs have reported."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from contestants import METHODS, NoNumbersError, Peer, Work
from programs import Report, run_mpfedcl, run_peer

MPFEDCL_SETTINGS: tuple[tuple[str, ...], ...] = (
    ("--engine", "loop", "--workers", "1"),
    ("--engine", "auto", "--workers", "1"),
    ("--engine", "auto", "--workers", "2"),
)
"""Ways to run mpfedcl, each with a row of its own; ratios are to the fastest."""


@dataclass
class Entry:
    """One way to do one work, and what its runs have reported."""

    work: Work
    peer: Peer | None
    """None is mpfedcl."""
    method: str
    setting: tuple[str, ...]
    reports: list[Report] = field(default_factory=list)
    failure: str = ""
    """Of the first run that failed; there are none after it."""

    @property
    def name(self) -> str:
        """Whose program it is."""
        return self.peer.name if self.peer else "mpfedcl"

    @property
    def laps(self) -> list[float]:
        """The rounds of all runs, in ms."""
        return [1000 * lap for report in self.reports for lap in report["round_seconds"]]

    @property
    def median_ms(self) -> float:
        """The median of all rounds in ms; infinite without any."""
        return median(self.laps) if self.reports else float("inf")

    def run(self, rounds: int, limit: float) -> None:
        """Run once more, unless it has failed: what hangs once is not waited for again."""
        if self.failure:
            return
        load = round(os.getloadavg()[0], 2)
        try:
            report = (
                run_peer(self.peer.command(self.work, self.method, rounds, self.setting), limit)
                if self.peer
                else run_mpfedcl(self.work, self.method, rounds, self.setting, limit)
            )
        except (NoNumbersError, OSError, ValueError, KeyError) as error:
            self.failure = str(error) or type(error).__name__
        else:
            self.reports.append({"load_before": load, **report})

    def as_json(self) -> dict[str, Any]:
        """Return all that is known, for the results."""
        known: dict[str, Any] = {
            "work": self.work.name,
            "clients": self.work.clients,
            "peer": self.name,
            "method": self.method,
            "setting": " ".join(self.setting),
        }
        if self.failure:
            known["failure"] = self.failure
        if self.reports:
            known |= {
                "median_ms": round(self.median_ms, 2),
                "min_ms": round(min(self.laps), 2),
                "max_ms": round(max(self.laps), 2),
                "startup_seconds": median(each["startup_seconds"] for each in self.reports),
                "peak_memory_mb": max(each["peak_memory_mb"] for each in self.reports),
                "reports": self.reports,
            }
        return known


def plan(works: Sequence[Work], peers: Sequence[Peer]) -> list[Entry]:
    """Return all that is to be run, in order."""
    entries = []
    for work in works:
        for method in METHODS:
            entries += [Entry(work, None, method, setting) for setting in MPFEDCL_SETTINGS]
        for peer in peers:
            settings = peer.settings + (peer.only_few if work.name == "few" else ())
            entries += [
                Entry(work, peer, method, setting)
                for method in peer.methods
                for setting in settings
            ]
    return entries
