"""The run directory: the files that a run leaves behind."""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Self

from filelock import BaseFileLock, FileLock, Timeout

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import read_bounded, remove_leftovers, sync_folder, write_atomically
from mpfedcl.core.json_files import FileContent, load_json, validate_content
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.experiment import Experiment
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.record import LAST_ROUND_ONLY, parse_record
from mpfedcl.runs.file_schemas import SCHEMAS, Partition

_MOST_RECORD_BYTES = 2**31
"""Limit for all records of a run: a thousand rounds of ten thousand clients take 2 GB."""
_MOST_ON_LINES = 1000
"""Clients up to which partition.json has a line for each number."""
_CHANGE, _LIST = "change", "change.json"


class RunDirectory:
    """The folder of a run; `create` and `resume` open it, and it is locked until closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: BaseFileLock | None = None

    @classmethod
    def create(cls, path: Path, experiment: Experiment) -> Self:
        """Create the folder of a new run; reject a folder with other files."""
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
        """Open the folder of a run to resume it; `named` is the option that the user gave."""
        directory = cls(path)
        if not directory.holds_run():
            raise InvalidInput(f"{named} is {str(path)!r}; it must be a folder that holds a run.")
        if links := [entry for entry in sorted(path.iterdir()) if entry.is_symlink()]:
            # Written files would end up elsewhere.
            raise InvalidInput(
                f"{links[0]} is a link; a run that is written to must hold its files itself."
            )
        directory._acquire(named)
        try:
            for folder in path.glob("**/"):
                remove_leftovers(folder)
            finish_change(path)
        except BaseException:
            directory.close()
            raise
        return directory

    def settle(self) -> None:
        """Complete a change that a crash has interrupted, before files are read."""
        if (self.path / _CHANGE).is_dir():
            type(self).resume(self.path, "RUN").close()

    def holds_run(self) -> bool:
        """Return whether the folder holds a run."""
        return (self.path / "experiment.toml").is_file()

    def close(self) -> None:
        """Release the lock."""
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
        """Return the experiment of a finished run; reject any other folder."""
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
        """Return the records of rounds, in order; damaged lines are skipped."""
        records: list[dict[str, Any]] = []
        for line in self._read_record_bytes().splitlines():
            record = parse_record(line)
            if record and (not records or record["round"] > records[-1]["round"]):
                records.append(record)
        return records

    def count_records(self) -> int:
        """Return the number of records without parsing them."""
        return self._read_record_bytes().count(b"\n")

    def _read_record_bytes(self) -> bytes:
        path = self.path / "rounds.jsonl"
        return read_bounded(path, _MOST_RECORD_BYTES) if path.exists() else b""

    def append_record(self, record: dict[str, Any]) -> None:
        """Add a round's record."""
        with (self.path / "rounds.jsonl").open("ab") as file:
            file.write(_as_line(record))
            file.flush()
            # The checkpoint is on disk by now, and it holds only this record.
            os.fsync(file.fileno())

    def rewind_records(
        self, last: dict[str, Any] | None, *, is_over: bool = False
    ) -> list[dict[str, Any]]:
        """Drop the records after the checkpoint's round; later rounds will be run again."""
        keep = last["round"] if last else 0
        records = [record for record in self.read_records() if record["round"] <= keep]
        if last and (not records or records[-1]["round"] < keep):
            records.append(last)
        for record in [] if is_over else records:
            # These fields belong to the last round of a run only.
            for name in LAST_ROUND_ONLY:
                record.pop(name, None)
        write_atomically(self.path / "rounds.jsonl", b"".join(map(_as_line, records)))
        return records

    # Results

    def write_models(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        personal: Iterable[tuple[str, Tensors]],
    ) -> None:
        """Write the global model, the prototype pool and the personalized models, if any."""
        if averaged is not None:
            write_atomically(self.path / "model.safetensors", pack_tensors(averaged))
        if pool is not None:
            write_atomically(self.path / "pool.safetensors", pack_pool(pool))
        models = self.path / "models"
        if models.exists():
            shutil.rmtree(models)
        models.mkdir()
        for name, params in personal:
            write_atomically(models / f"{name}.safetensors", pack_tensors(params))

    def write_partition(self, content: dict[str, Any]) -> None:
        """Write the partition without unknown fields."""
        known = {name: value for name, value in content.items() if name in Partition.model_fields}
        # That of many clients on one line, to save megabytes of spaces.
        is_long = len(known["clients"]) > _MOST_ON_LINES
        self.write_json("partition.json", known, indent=None if is_long else 2)

    def write_json(self, name: str, content: dict[str, Any], indent: int | None = 2) -> None:
        """Write a JSON file."""
        text = json.dumps(content, indent=indent, allow_nan=False) + "\n"
        write_atomically(self.path / name, text.encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the content of a JSON file, or None if it does not exist."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = load_json(read_bounded(path))
        except ValueError as error:
            raise InvalidInput(f"{path} is not valid JSON: {error}.") from None
        # A run may come from a stranger.
        validate_content(content, SCHEMAS.get(name, FileContent), str(path), strict=True)
        return content

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary, or None if the run has not finished."""
        return self.read_json("summary.json")

    def remove_summary(self) -> None:
        """Delete the summary and the card before a finished run is resumed."""
        for name in ("summary.json", "CARD.md"):
            (self.path / name).unlink(missing_ok=True)

    def _acquire(self, named: str = "out") -> None:
        """Lock the folder; the system releases the lock when the process ends."""
        # Not a soft lock, which a killed process would leave behind.
        lock = FileLock(self.path / ".lock", timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            raise InvalidInput(
                f"{named} is {str(self.path)!r}; another process is writing this run: wait for it, "
                "or give another folder."
            ) from None
        self._lock = lock


def _as_line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def pack_pool(pool: PrototypePool) -> bytes:
    """Return the content of pool.safetensors."""
    columns = ("vectors", "labels", "counts", "owners")
    tensors = {name: getattr(pool, name) for name in columns}
    return pack_tensors(tensors, note=("names", json.dumps(pool.names)))


def change_files(path: Path, written: Mapping[str, bytes], removed: Collection[str] = ()) -> None:
    """Write and remove several files of a run at once; the caller holds the run's lock.

    After a crash either all files are the old ones or all are the new ones. The new files are
    written to a temporary folder, and the rename of this folder is the moment of the change. The
    files are then moved into place; after a crash, the next process that opens the run does it.
    """
    for place in [*written, *removed]:
        if not _lies_inside(path, place):
            raise InvalidInput(f"{place!r} is not in {path}; it must be a file of the run.")
    temporary = path / f".{_CHANGE}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    # Numbered, so that no client name collides with another file.
    places = sorted(written)
    for number, place in enumerate(places):
        write_atomically(temporary / str(number), written[place])
    content = json.dumps({"written": places, "removed": sorted(removed)})
    write_atomically(temporary / _LIST, content.encode())
    temporary.rename(path / _CHANGE)
    sync_folder(path)
    finish_change(path)


def finish_change(path: Path) -> None:
    """Complete a change that has begun; the caller holds the run's lock."""
    folder = path / _CHANGE
    if not folder.is_dir():
        return
    if (folder / _LIST).is_file():
        try:
            content = json.loads((folder / _LIST).read_bytes())
            written, removed = list(content["written"]), list(content["removed"])
            if not all(_lies_inside(path, place) for place in [*written, *removed]):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise InvalidInput(
                f"{folder / _LIST} is not as mpfedcl writes it; the change cannot be completed."
            ) from None
        for place in removed:
            (path / place).unlink(missing_ok=True)
        for number, place in enumerate(written):
            file = folder / str(number)
            # A missing file was moved before the crash.
            if file.is_file():
                (path / place).parent.mkdir(exist_ok=True)
                file.replace(path / place)
                sync_folder((path / place).parent)
        (folder / _LIST).unlink()
    shutil.rmtree(folder)
    sync_folder(path)


def _lies_inside(path: Path, place: str) -> bool:
    """Return whether a place is in the run's folder: a run may come from a stranger."""
    parts = PurePosixPath(place).parts
    inside = 1 <= len(parts) <= 2 and ".." not in parts and parts[0] != "/"
    return inside and not (path / place).parent.is_symlink()
