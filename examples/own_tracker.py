"""A tracker of your own in one file: one line of a CSV file per round, for a spreadsheet.

Run it from this folder:  mpfedcl run --track own_tracker:CsvTracker --rounds 10

A tracker is called when a run starts or is resumed, after each round, and at the end. If it fails,
there is one warning and the run continues without it.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from mpfedcl import Experiment, Tracker
from mpfedcl.report.tracking import Record

COLUMNS = ("round", "loss", "bytes up", "clients answered", "worst client", "its accuracy")


class CsvTracker(Tracker):
    """Writes curve.csv into the run's folder, or where --track-to says."""

    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        """Start the file; after a resume, with the rounds so far, so that none is there twice."""
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
