"""TensorBoard: scalars, the settings as text, and at the end the pool in the projector.

Only the package `tensorboard` is needed, neither TensorFlow nor torch's writer. No file stays open
between rounds.
"""

import io
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from mpfedcl.core.files import unused_folder, write_atomically
from mpfedcl.experiment import Experiment
from mpfedcl.report.prototype_map import embed_test_images
from mpfedcl.report.tracking import (
    Tracker,
    client_scalars,
    read_notes,
    round_scalars,
    write_notes,
)
from mpfedcl.report.wording import printable_name
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Record, RunResult


class TensorBoardTracker(Tracker):
    """Writes a folder that TensorBoard reads.

    After a resume all recorded rounds are written again, into a new file that replaces the earlier
    one: no round is shown twice, and none is missing.
    """

    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        """Write a file of events with the settings and all rounds that are over."""
        self._folder = _find_folder(experiment, path)
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        self._file = self._folder / f"events.out.tfevents.{time.time_ns():020d}.mpfedcl"
        now = time.time()
        # TensorBoard shows texts as Markdown, and this as code in it.
        as_code = "".join(f"    {line}\n" for line in experiment.to_toml().splitlines())
        events = [
            Event(wall_time=now, file_version="brain.Event:2"),
            # TensorBoard then ignores earlier files from this step on. These stay, because a
            # TensorBoard that is open cannot handle the loss of the file it is reading.
            Event(wall_time=now, step=1, session_log=SessionLog(status=SessionLog.START)),
            Event(wall_time=now, summary=text_pb("experiment", as_code)),
        ]
        # Records have no time, only durations.
        moment = now - sum(sum(record["seconds"].values()) for record in done)
        for record in done:
            moment += sum(record["seconds"].values())
            events.append(_describe_round(record, moment))
        write_atomically(self._file, _pack(events))

    def round(self, record: Record) -> None:
        """Add a round's scalars."""
        with self._file.open("ab") as file:
            file.write(_pack([_describe_round(record, time.time())]))

    def finish(self, result: RunResult) -> None:
        """Write the pool and test images for the projector."""
        if result.summary is None or result.pool is None or not len(result.pool):
            return
        vectors, rows = _list_projector_points(result)
        config = ProjectorConfig()
        config.embeddings.add(
            tensor_name="prototypes",
            tensor_path="prototypes.tsv",
            metadata_path="prototypes-metadata.tsv",
        )
        for name, lines in (
            ("prototypes.tsv", [[f"{value:.6g}" for value in vector] for vector in vectors]),
            ("prototypes-metadata.tsv", rows),
        ):
            text = "".join("\t".join(line) + "\n" for line in lines)
            write_atomically(self._folder / name, text.encode())
        written: str = text_format.MessageToString(config)
        write_atomically(self._folder / "projector_config.pbtxt", written.encode())


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
    write_notes(path, "tensorboard", folder=str(folder))
    return folder


def _describe_round(record: Record, moment: float) -> Any:
    clients = {
        f"clients/{printable_name(name)}": value for name, value in client_scalars(record).items()
    }
    scalars = round_scalars(record) | clients
    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    return Event(wall_time=moment, step=record["round"], summary=Summary(value=values))


def _list_projector_points(result: RunResult) -> tuple[list[Sequence[float]], list[list[str]]]:
    """Return vectors, and the rows of a table about them under a row of titles."""
    pool, partition = result.pool, RunDirectory(result.path).read_json("partition.json")
    assert pool is not None
    assert partition is not None
    pool, classes = pool.to("cpu"), [printable_name(name) for name in partition["classes"]]
    columns = zip(pool.labels.tolist(), pool.owners.tolist(), pool.counts.tolist(), strict=True)
    rows = [
        ["prototype", classes[label], printable_name(pool.names[owner]), str(count)]
        for label, owner, count in columns
    ]
    vectors: list[Sequence[float]] = pool.vectors.tolist()
    samples, _ = embed_test_images(result.path, result.experiment, partition)
    if samples is not None:
        vectors += samples.vectors.tolist()
        rows += [
            ["test image", classes[label], printable_name(owner or "several"), "1"]
            for label, owner in zip(samples.labels, samples.owners, strict=True)
        ]
    return vectors, [["kind", "class", "client", "count"], *rows]


def _pack(events: Iterable[Any]) -> bytes:
    packed = io.BytesIO()
    writer = RecordWriter(packed)
    for event in events:
        writer.write(event.SerializeToString())
    return packed.getvalue()
