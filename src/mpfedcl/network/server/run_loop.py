"""The run loop over a network: a round's record is complete when clients have read the round."""

from collections.abc import Iterator
from typing import Any

from mpfedcl.core.errors import RunCutShort
from mpfedcl.network.server.engine import NetworkEngine
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer
from mpfedcl.runs.run_loop import RunLoop


class NetworkRunLoop(RunLoop):
    """Clients read a round with the message of the next one, and the last one when it is over.

    So rounds.jsonl is a round behind the checkpoint, which holds the record that waits.
    """

    def __init__(
        self, assembly: Assembly, engine: NetworkEngine, class_names: tuple[str, ...]
    ) -> None:
        super().__init__(assembly, engine, class_names)
        self._network = engine
        self._unread: dict[str, Any] | None = None
        """The record of a round that clients have not read yet."""

    def _write_record(
        self, directory: RunDirectory, record: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Write the record of the round before; this one's waits if the round is evaluated."""
        if self._unread is not None:
            yield self._complete(directory, self._unread, self._network.previous_predictors)
        if self._waits_to_be_read(record):
            self._unread = record
        else:
            yield from super()._write_record(directory, record)

    def _complete_records(self, directory: RunDirectory) -> Iterator[dict[str, Any]]:
        """Let clients read the last round, and complete its record."""
        if self._unread is None or self._round_loop.state.round < self._experiment.rounds:
            return
        record = self._unread
        predictors, remarks = self._network.read_last_round(self._round_loop.broadcast())
        if predictors is None:
            raise RunCutShort(f"no client has evaluated the last round, {record['round']}.")
        if remarks:
            record["remarks"]["closing"] = remarks
        self._write_confusion(directory, predictors.confusion)
        yield self._complete(directory, record, predictors)

    def _restore(self, directory: RunDirectory, observer: Observer) -> list[dict[str, Any]]:
        """Return to the newest sound checkpoint, and to the record that waits to be read."""
        records = super()._restore(directory, observer)
        if records and self._waits_to_be_read(records[-1]):
            self._unread = records.pop()
            directory.rewind_records(records[-1] if records else None)
        return records

    def _waits_to_be_read(self, record: dict[str, Any]) -> bool:
        return self._experiment.evaluates(record["round"]) and record["accuracy"] is None

    def _complete(
        self, directory: RunDirectory, record: dict[str, Any], predictors: RoundEvaluation | None
    ) -> dict[str, Any]:
        """Complete the record of a round by what clients read of it, and write it down."""
        if predictors is not None:
            if versions := self._network.read_versions:
                record["remarks"]["read_versions"] = list(versions)
            record["accuracy"] = predictors.table()
            record["accuracy_per_client"] = predictors.per_client(
                self._method.predictor_on("local_test")
            )
        directory.append_record(record)
        self._unread = None
        return record
