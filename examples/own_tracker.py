"""A tracker of your own in one file: a line of a CSV file a round, for a spreadsheet.

Run it from this folder:  mpfedcl run --track own_tracker:CsvTracker --rounds 10

A tracker is told when a run starts or goes on, of each round, and of the end. If it fails, the run
says so once and goes on without it.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from mpfedcl import Experiment, Tracker
from mpfedcl.tracking import Record

COLUMNS = ("round", "loss", "bytes up", "clients answered", "worst client", "its accuracy")


class CsvTracker(Tracker):
    """Writes curve.csv into the run's folder, or where --track-to says."""

    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        """Begin the file; after a resume, with the rounds that are over, so that none is twice."""
        folder = experiment.track_to or path
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "curve.csv"
        with self.file.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)
        for record in done:
            self.round(record)

    def round(self, record: Record) -> None:
        """Add a line; a round that was not evaluated has no accuracies."""
        read = [(v, k) for k, v in (record["accuracy_per_client"] or {}).items() if v is not None]
        accuracy, worst = min(read, default=("", ""))
        answered = len(record["clients"]["answered"])
        line = (record["round"], record["loss"], record["bytes"]["up"], answered, worst, accuracy)
        with self.file.open("a", newline="") as file:
            csv.writer(file).writerow(line)
