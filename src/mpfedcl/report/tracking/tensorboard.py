"""TensorBoard: scalars, and the settings as text."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from mpfedcl.core.files import unused_folder
from mpfedcl.experiment import Experiment
from mpfedcl.report.tracking import Tracker, read_notes, round_scalars, write_notes
from mpfedcl.report.wording import printable_name
from mpfedcl.runs.observer import Record, RunResult


class TensorBoardTracker(Tracker):
    """Writes a folder that TensorBoard reads.

    After a resume all recorded rounds are written again, into a new file that replaces the earlier
    one: no round is shown twice, and none is missing.
    """

    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        """Write a file of events with the settings and all rounds that are over."""
        self._folder = _find_folder(experiment, path)
        _wait_for_next_second(self._folder)
        # From this step on TensorBoard ignores earlier files. These stay, because a TensorBoard
        # that is open cannot handle the loss of the file it is reading.
        self._writer: Any = SummaryWriter(str(self._folder), purge_step=1)
        # TensorBoard shows texts as Markdown, and this as code in it.
        as_code = "".join(f"    {line}\n" for line in experiment.to_toml().splitlines())
        self._writer.add_text("experiment", as_code)
        # Records have no time, only durations.
        moment = time.time() - sum(sum(record["seconds"].values()) for record in done)
        for record in done:
            moment += sum(record["seconds"].values())
            self._write(record, moment)
        self._writer.flush()

    def round(self, record: Record) -> None:
        """Add a round's scalars."""
        self._write(record, time.time())
        self._writer.flush()

    def finish(self, result: RunResult) -> None:
        """Close the file of events."""
        self._writer.close()

    def _write(self, record: Record, moment: float) -> None:
        for name, value in round_scalars(record).items():
            self._writer.add_scalar(printable_name(name, 200), value, record["round"], moment)


def _wait_for_next_second(folder: Path) -> None:
    """Wait until a new file of events follows all others by name, the order of TensorBoard.

    Names begin with the second. Two of the same second differ in numbers that do not sort.
    """
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)


def _find_folder(experiment: Experiment, path: Path) -> Path:
    """Return the folder in the run directory, or the run's folder in the shared one."""
    if experiment.track_to is None:
        return path / "tensorboard"
    shared = experiment.track_to.resolve() / "tensorboard"
    noted = read_notes(path, "tensorboard").get("folder")
    if noted is not None and Path(noted).parent == shared:
        return Path(noted)
    folder = unused_folder(shared / path.resolve().name)
    # At once, so that no other run takes the name.
    folder.mkdir(parents=True)
    write_notes(path, "tensorboard", {"folder": str(folder)})
    return folder
