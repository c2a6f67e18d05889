"""The course of a run: rounds, checkpoints and records, wherever the clients are."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpfedcl.runs.checkpoint import (
    Checkpoint,
    checkpoint_from_bytes,
    checkpoint_to_bytes,
    load_checkpoint,
    save_checkpoint,
)
from mpfedcl.rounds.clock import Clock
from mpfedcl.convergence import summarize_convergence
from mpfedcl.deployment.join import warn_of_joined
from mpfedcl.engines import Engine
from mpfedcl.errors import InvalidInput, LostWorker, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.rounds.round_loop import Federation, RoundRecord
from mpfedcl.methods import Method
from mpfedcl.models import Tensors
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import Counts, Readings
from mpfedcl.runs.directory import RunDirectory, summarize_run
from mpfedcl.engines.process_group import Team
from mpfedcl.tracking.base import Record
from mpfedcl.runs.prototype_history import leave_trail, rewind_trail


@dataclass(frozen=True)
class RunResult:
    """What `run` gives back; everything else is in the run directory at `path`."""

    path: Path
    experiment: Experiment
    accuracy: float | None
    """The headline: the method's reading on the clients' own tests in the last round, in %."""
    history: list[dict[str, Any]]
    """The rounds' records."""
    pool: PrototypePool | None
    summary: dict[str, Any] | None
    """None where the run was stopped before its last round."""


@dataclass(frozen=True)
class Observer:
    """How a run is watched and stopped from outside."""

    on_start: Callable[[Experiment, int], None] = lambda *_: None
    on_round: Callable[[Record], None] = lambda *_: None
    on_warning: Callable[[str], None] = lambda *_: None
    should_stop: Callable[[], bool] = lambda: False
    on_finish: Callable[[RunResult], None] = lambda *_: None
    """Called when the rounds are over, whether or not they were stopped early."""


class Course:
    """The course of a run: rounds, checkpoints and records, wherever the clients are."""

    _team: Team | None = None

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        federation: Federation,
        engine: Engine,
        clock: Clock,
        device: torch.device,
        class_names: Sequence[str],
    ) -> None:
        self._experiment = experiment
        self._method = method
        self._federation = federation
        self._engine = engine
        self._clock = clock
        self._device = device
        self._class_names = class_names
        self._unread: dict[str, Any] | None = None
        """The record of a round that clients have not read yet: over a network they do so later."""

    def go(self, directory: RunDirectory, observer: Observer) -> RunResult:
        """Run the rounds that are left and write down what came of them."""
        records = self._restore(directory, observer)
        rounds, done = self._experiment.rounds, self._federation.state.round
        # A round that was not run as the last one has left no models, and perhaps no readings.
        if done >= rounds and not done == rounds == directory.read_experiment().rounds:
            raise InvalidInput(
                f"rounds is {rounds}; this run has already done {done}, so it must be at least "
                f"{done + 1}, or left out."
            )
        if done < rounds:
            directory.remove_summary()
            warn_of_joined(directory.path, observer.on_warning)
        directory.write_experiment(self._experiment)
        observer.on_start(self._experiment, self._federation.state.round)
        try:
            while self._goes_on(not observer.should_stop()):
                for record in self._round(directory):
                    records.append(record)
                    observer.on_round(record)
                    if record["unchanged"]:
                        observer.on_warning(_say_unchanged(record))
        except RunCutShort:
            # Over a network: its own words say what happened.
            raise
        except LostWorker as error:
            raise RunCutShort(
                f"a worker was lost in round {len(records) + 1} ({error}); the rounds before are "
                f"kept. Go on with: mpfedcl run --resume {directory.path}"
            ) from None
        if self._unread is not None and self._federation.state.round == rounds:
            records.append(self._read_last(directory, self._unread))
            observer.on_round(records[-1])
        result = self._conclude(directory, records, observer)
        observer.on_finish(result)
        return result

    def follow(self) -> None:
        """Run the same rounds as the leader, and hand it what it writes down."""
        assert self._team is not None
        if checkpoint := self._team.share():
            self._take_up(checkpoint_from_bytes(checkpoint))
        while self._goes_on(True):
            _, is_last = self._advance()
            if is_last:
                deque(self._personal_models(), maxlen=0)
            self._engine.state()

    def _goes_on(self, wanted: bool) -> bool:
        """Tell whether there is another round; in a team the leader decides for all."""
        goes_on = wanted and self._federation.state.round < self._experiment.rounds
        return self._team.share(b"on" if goes_on else b"") != b"" if self._team else goes_on

    def _advance(self) -> tuple[RoundRecord, bool]:
        """Run a round; return its record, and whether it was the last."""
        number = self._federation.state.round + 1
        is_last = number == self._experiment.rounds
        is_read = self._experiment.reads(number)
        keeps = is_last and self._experiment.personal_models
        record = self._federation.run_round(evaluate=is_read, keep_models=keeps, confuse=is_last)
        return record, is_last

    def _round(self, directory: RunDirectory) -> Iterator[dict[str, Any]]:
        """Run a round; yield the records that are complete by it."""
        done, is_last = self._advance()
        is_late = self._experiment.reads(done.round) and done.accuracy is None
        record = done.to_json()
        with self._clock.phase("checkpoint"):
            if self._experiment.trail and self._method.shares_prototypes:
                leave_trail(directory.path, done.round, self._federation.pool)
            if is_last:
                # Before the checkpoint: a crash in between runs this round again and rewrites them.
                self._write_models(directory, done.round)
                if not is_late:
                    self._write_confusion(directory, self._federation.confusion)
            save_checkpoint(
                directory.checkpoints,
                Checkpoint(self._federation.state, self._engine.state(), record),
            )
        record["seconds"]["checkpoint"] = self._clock.lap()["checkpoint"]
        if self._unread is not None:
            yield self._note(directory, self._unread, self._federation.late)
        self._unread = record if is_late else None
        if not is_late:
            directory.append_record(record)
            yield record

    def _read_last(self, directory: RunDirectory, record: dict[str, Any]) -> dict[str, Any]:
        """Let clients read the last round, over a network, and complete its record."""
        readings, remarks = self._federation.close()
        if readings is None:
            raise RunCutShort(f"nobody has read the last round, {record['round']}.")
        if remarks:
            record["remarks"]["closing"] = remarks
        self._write_confusion(directory, readings.confusion)
        return self._note(directory, record, readings)

    def _note(
        self, directory: RunDirectory, record: dict[str, Any], readings: Readings | None
    ) -> dict[str, Any]:
        """Complete the record of a round by what clients read of it, and write it down."""
        if readings is not None:
            record["accuracy"] = readings.table()
            record["accuracy_per_client"] = readings.per_client(self._method.reading)
        directory.append_record(record)
        self._unread = None
        return record

    def _write_models(self, directory: RunDirectory, number: int) -> None:
        """Write the models and the pool that the last round has left."""
        directory.write_models(self._federation.averaged_model, self._pool, ())

    def _write_confusion(self, directory: RunDirectory, confusion: dict[str, Counts]) -> None:
        directory.write_confusion(
            confusion,
            round_number=self._experiment.rounds,
            reading=self._method.reading,
            class_names=self._class_names,
        )

    @property
    def _pool(self) -> PrototypePool | None:
        return self._federation.pool if self._method.shares_prototypes else None

    def _personal_models(self) -> Iterator[tuple[str, Tensors]]:
        if self._experiment.personal_models:
            yield from self._engine.personal_models(self._federation.shared_parameters)

    def _restore(self, directory: RunDirectory, observer: Observer) -> list[dict[str, Any]]:
        checkpoint, problems = load_checkpoint(directory.checkpoints)
        for problem in problems:
            observer.on_warning(f"Checkpoint {problem}; going back to the one before.")
        if problems and checkpoint is None:
            observer.on_warning("No sound checkpoint is left; starting over from round 1.")
        if self._team is not None:
            self._team.share(checkpoint_to_bytes(checkpoint) if checkpoint else b"")
        if checkpoint is not None:
            self._take_up(checkpoint)
        rewind_trail(directory.path, checkpoint.state.round if checkpoint else 0)
        records = directory.rewind_records(checkpoint.record if checkpoint else None)
        if records and self._is_unread(records[-1]):
            self._unread = records.pop()
            directory.rewind_records(records[-1] if records else None)
        return records

    def _is_unread(self, record: dict[str, Any]) -> bool:
        """Tell whether a round has still to be read by clients that do so later."""
        return self._experiment.reads(record["round"]) and record["accuracy"] is None

    def _take_up(self, checkpoint: Checkpoint) -> None:
        self._federation.take_up(checkpoint.state.to(self._device), checkpoint.record)
        self._engine.load_state(checkpoint.clients)

    def _conclude(
        self, directory: RunDirectory, records: list[dict[str, Any]], observer: Observer
    ) -> RunResult:
        summary = None
        pool = self._federation.pool if self._method.shares_prototypes else None
        if self._federation.state.round == self._experiment.rounds:
            if self._experiment.diagnostics:
                found = summarize_convergence(self._experiment, records)
                directory.write_json("convergence.json", found)
            summary = summarize_run(self._experiment, self._method.reading, records)
            directory.write_json("summary.json", summary)
            # Only now, because what writes about runs knows how they are made.
            from mpfedcl.report.card import leave_card

            leave_card(directory, self._method.summary, pool, observer.on_warning)
        return RunResult(
            path=directory.path,
            experiment=self._experiment,
            accuracy=summary["accuracy"] if summary else None,
            history=records,
            pool=pool,
            summary=summary,
        )


def _say_unchanged(record: Record) -> str:
    reasons = record["clients"]["rejected"].values()
    why = f" ({next(iter(reasons))})" if reasons else ""
    return f"Round {record['round']}: no client was accepted{why}."
