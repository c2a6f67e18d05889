"""The run directory: all that a run leaves behind, in plain files."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from filelock import BaseFileLock, FileLock, Timeout

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import read_bounded, remove_leftovers, write_atomically
from mpfedcl.core.json_files import load_json, validate_content
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.data.client_split import compact_table, expand_table
from mpfedcl.experiment import Experiment
from mpfedcl.methods import PredictorName
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.metrics import ConfusionCounts
from mpfedcl.rounds.record import LAST_ROUND_ONLY, parse_record
from mpfedcl.runs.change import finish_change, is_changing
from mpfedcl.runs.run_files import SCHEMAS, AnyTable, Confusion, Partition

_MOST_RECORD_BYTES = 2**31
"""Of all records of a run: two megabytes per round for ten thousand clients, a thousand rounds."""


class RunDirectory:
    """One run's folder. Open it with `create` or `resume`; it is locked until closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: BaseFileLock | None = None

    @classmethod
    def create(cls, path: Path, experiment: Experiment) -> Self:
        """Make the folder of a new run; one that holds anything else is refused."""
        if path.exists() and not path.is_dir():
            raise InvalidInput(f"out is {str(path)!r}; it must be a folder, and this is a file.")
        path.mkdir(parents=True, exist_ok=True)
        directory = cls(path)
        if not directory.holds_run() and any(not e.name.startswith(".") for e in path.iterdir()):
            raise InvalidInput(f"out is {str(path)!r}; it must be a new or an empty folder.")
        directory._acquire()
        try:
            if directory.holds_run():
                raise InvalidInput(
                    f"out is {str(path)!r}; it already holds a run: give another folder, or "
                    f"resume it by --resume {path}."
                )
            directory.write_experiment(experiment)
        except BaseException:
            directory.close()
            raise
        return directory

    @classmethod
    def resume(cls, path: Path, named: str = "resume") -> Self:
        """Open the folder of a run to resume it; `named` is what the user gave it as."""
        directory = cls(path)
        if not directory.holds_run():
            raise InvalidInput(f"{named} is {str(path)!r}; it must be a folder that holds a run.")
        directory._refuse_links()
        directory._acquire(named)
        try:
            for folder in (path, *path.iterdir()):
                remove_leftovers(folder)
            finish_change(path)
        except BaseException:
            directory.close()
            raise
        return directory

    def settle(self, named: str = "RUN") -> None:
        """Complete what a crash has left half done, before files are read that belong together."""
        if is_changing(self.path):
            type(self).resume(self.path, named).close()

    def holds_run(self) -> bool:
        """Tell whether a run was started here."""
        return (self.path / "experiment.toml").is_file()

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Experiment and records

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoint"

    def read_experiment(self) -> Experiment:
        """Return the experiment of this run."""
        return Experiment.from_toml(self.path / "experiment.toml", complete=True)

    def read_finished(self) -> Experiment:
        """Return the experiment of a run that has ended, before its other files are read."""
        if not self.holds_run():
            raise InvalidInput(f"RUN is {str(self.path)!r}; it must be a folder that holds a run.")
        self.settle()
        if self.read_summary() is None:
            raise InvalidInput(
                f"RUN is {str(self.path)!r}, a run that has not ended; resume it by "
                f"mpfedcl run --resume {self.path}."
            )
        return self.read_experiment()

    def write_experiment(self, experiment: Experiment) -> None:
        """Write the complete experiment."""
        write_atomically(self.path / "experiment.toml", experiment.to_toml().encode())

    def read_records(self) -> list[dict[str, Any]]:
        """Return the records of rounds, each later than the one before.

        A line that was cut off by a crash, is damaged or was never ours is left out.
        """
        records: list[dict[str, Any]] = []
        for line in self._read_record_bytes().splitlines():
            record = parse_record(line)
            if record and (not records or record["round"] > records[-1]["round"]):
                records.append(record)
        return records

    def count_records(self) -> int:
        """Return how many lines the records have, unread: for whoever looks twice a second."""
        return self._read_record_bytes().count(b"\n")

    def _read_record_bytes(self) -> bytes:
        path = self.path / "rounds.jsonl"
        return read_bounded(path, _MOST_RECORD_BYTES) if path.exists() else b""

    def append_record(self, record: dict[str, Any]) -> None:
        """Add a round's record."""
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            # The checkpoint is on disk by now and holds this record alone, not those before it.
            os.fsync(file.fileno())

    def rewind_records(
        self, last: dict[str, Any] | None, *, is_over: bool = False
    ) -> list[dict[str, Any]]:
        """Make the records end with the checkpoint's own; later rounds will be run again."""
        keep = last["round"] if last else 0
        records = [record for record in self.read_records() if record["round"] <= keep]
        if last and (not records or records[-1]["round"] < keep):
            records.append(last)
        if not is_over:
            # Measured in the last round alone, which that one is no more.
            for record in records:
                for name in LAST_ROUND_ONLY:
                    record.pop(name, None)
        lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        write_atomically(self.path / "rounds.jsonl", lines.encode())
        return records

    # What a finished run leaves

    def write_models(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        personal: Iterable[tuple[str, Tensors]],
    ) -> None:
        """Write the global model, the pool and the personal models, as far as there are any."""
        for name, content in (
            ("model.safetensors", None if averaged is None else pack_tensors(averaged)),
            ("pool.safetensors", None if pool is None else pack_pool(pool)),
        ):
            if content is not None:
                write_atomically(self.path / name, content)
        models = self.path / "models"
        if models.exists():
            shutil.rmtree(models)
        models.mkdir()
        for name, params in personal:
            write_atomically(models / f"{name}.safetensors", pack_tensors(params))

    def write_confusion(
        self,
        confusion: Mapping[str, ConfusionCounts],
        *,
        round_number: int,
        predictor: PredictorName,
        class_names: Sequence[str],
    ) -> None:
        """Write the confusion matrix: for each client [C][C] counts, rows = truth.

        Images that no prototype answers for stand under `unanswered`, by true class, of the
        clients that have any.
        """
        silent = {name: [row[-1] for row in counts] for name, counts in confusion.items()}
        content = Confusion(
            round=round_number,
            predictor=predictor,
            classes=list(class_names),
            clients={name: [row[:-1] for row in each] for name, each in confusion.items()},
            unanswered={name: each for name, each in silent.items() if any(each)},
        )
        # On one line: a number a line would make it three times as long.
        text = json.dumps(content.to_json(), allow_nan=False) + "\n"
        write_atomically(self.path / "confusion.json", text.encode())

    def write_partition(self, content: dict[str, Any]) -> None:
        """Write who holds what; what is not known is left out."""
        if "table" in (compact := compact_table(content)):
            # On one line: a number a line would make megabytes of blanks.
            text = json.dumps(compact, allow_nan=False) + "\n"
            write_atomically(self.path / "partition.json", text.encode())
            return
        partition = Partition.model_validate(content)
        self.write_json("partition.json", partition.model_dump(mode="json", exclude_unset=True))

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file for people and programs."""
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        write_atomically(self.path / name, text.encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return what `write_json` wrote, or None where there is no such file."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = load_json(read_bounded(path))
        except ValueError as error:
            raise InvalidInput(f"{path} is not valid JSON: {error}.") from None
        # What others have written gets the same sentence here as in a report.
        validate_content(content, SCHEMAS.get(name, AnyTable), str(path), strict=True)
        return expand_table(content) if name == "partition.json" else content

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary of a finished run, else None."""
        return self.read_json("summary.json")

    def remove_summary(self) -> None:
        """Remove the mark of a finished run, and what else sums it up, before it is resumed."""
        for name in ("summary.json", "CARD.md"):
            (self.path / name).unlink(missing_ok=True)

    def _refuse_links(self) -> None:
        """Refuse a run whose files are elsewhere: what is written to it would go there."""
        for entry in sorted(self.path.iterdir()):
            if entry.is_symlink():
                raise InvalidInput(
                    f"{entry} is a link; a run that is written to must hold its files itself."
                )

    def _acquire(self, named: str = "out") -> None:
        """Lock the folder; the system lets go when the process ends, however it ends."""
        # No soft lock, which a killed process would leave behind.
        lock = FileLock(self.path / ".lock", timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            raise InvalidInput(
                f"{named} is {str(self.path)!r}; another process is writing this run: wait for it, "
                "or give another folder."
            ) from None
        self._lock = lock


def pack_pool(pool: PrototypePool) -> bytes:
    """Return a pool as pool.safetensors has it."""
    tensors = {
        "vectors": pool.vectors,
        "labels": pool.labels,
        "counts": pool.counts,
        "owners": pool.owners,
    }
    return pack_tensors(tensors, note=("names", json.dumps(pool.names)))
