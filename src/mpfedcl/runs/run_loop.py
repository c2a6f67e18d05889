"""The run loop: round after round, with a checkpoint and a record of each."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput, LostWorker, RunCutShort
from mpfedcl.core.files import write_atomically
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.worker_group import WorkerGroup
from mpfedcl.gaussian import add_statistics
from mpfedcl.methods import OneShot, Server, SharesPrototypes, is_built_in
from mpfedcl.privacy.ledger import ReleaseLog
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.loop import make_loop
from mpfedcl.rounds.metrics import ConfusionCounts
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.rounds.state import RoundState
from mpfedcl.rounds.systems import SystemModel
from mpfedcl.runs.checkpoint import (
    Checkpoint,
    checkpoint_from_bytes,
    checkpoint_to_bytes,
    load_checkpoint,
    save_checkpoint,
)
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.file_schemas import (
    POOLED,
    STATISTICS,
    Confusion,
    client_file,
    pack_statistics,
    remove_statistics,
    summarize_run,
)
from mpfedcl.runs.observer import Observer, Record, RunResult


class RunLoop:
    """Runs the rounds of an experiment: `run` in the leading process, `follow` in the others."""

    _group: WorkerGroup | None = None

    def __init__(
        self,
        assembly: Assembly,
        engine: Engine,
        class_names: Sequence[str],
        systems: SystemModel | None = None,
    ) -> None:
        self._assembly = assembly
        self._experiment = assembly.experiment
        self._method = assembly.method
        self._round_loop = make_loop(assembly, engine, systems)
        self._engine = engine
        self._clock = assembly.clock
        self._class_names = class_names
        self._is_slow = False
        """Whether the user was warned that clients train one after the other."""

    def run(self, directory: RunDirectory, observer: Observer) -> RunResult:
        """Run the remaining rounds and write the results."""
        if self._round_loop.private is not None:
            self._round_loop.private.log = ReleaseLog(directory.path)
        recorded = len(self._restore(directory, observer))
        rounds, done = self._experiment.rounds, self._round_loop.state.round
        # Only the last round of a run leaves models and a complete evaluation.
        if done >= rounds and not done == rounds == directory.read_experiment().rounds:
            raise InvalidInput(
                f"rounds is {rounds}; this run has already done {done}, so it must be at least "
                f"{done + 1}, or left out."
            )
        if done < rounds:
            directory.remove_summary()
        directory.write_experiment(self._experiment)
        observer.on_start(self._experiment, done)
        try:
            while self._has_next_round(not observer.should_stop()):
                for record in self._run_round(directory, observer):
                    recorded = self._report(record, observer)
            for record in self._complete_records(directory):
                recorded = self._report(record, observer)
        except RunCutShort:
            # The network has its own message.
            raise
        except LostWorker as error:
            raise RunCutShort(
                f"a worker was lost in round {recorded + 1} ({error}); the rounds before are "
                f"kept. Resume with: mpfedcl run --resume {directory.path}"
            ) from None
        result = self._conclude(directory)
        observer.on_finish(result)
        return result

    def follow(self) -> None:
        """Run the same rounds as the leader, which writes the results."""
        assert self._group is not None
        if self._round_loop.private is not None:
            # The leader draws the noise for all processes.
            self._round_loop.private.log = None
        folder = Path(os.fsdecode(self._group.broadcast()))
        content = self._group.broadcast()
        checkpoint = checkpoint_from_bytes(content, self._assembly.device) if content else None
        # Another machine may not have the folder; states then stay in memory.
        self._restore_checkpoint(checkpoint, folder if folder.parent.is_dir() else None)
        while self._has_next_round(True):
            _, is_last = self._advance()
            if is_last:
                deque(self._personal_models(), maxlen=0)
            self._engine.state()

    def _has_next_round(self, wanted: bool) -> bool:
        """Return whether there is another round; the leader decides for all processes."""
        goes_on = wanted and self._round_loop.state.round < self._experiment.rounds
        return self._group.broadcast(b"on" if goes_on else b"") != b"" if self._group else goes_on

    def _advance(self) -> tuple[RoundRecord, bool]:
        """Run a round; return its record, and whether it was the last."""
        number = self._round_loop.state.round + 1
        is_last = number == self._experiment.rounds
        record = self._round_loop.run_round(
            evaluate=self._experiment.evaluates(number),
            keep_models=is_last and self._keeps_personal_models,
            with_confusion=is_last,
        )
        return record, is_last

    def _run_round(self, directory: RunDirectory, observer: Observer) -> Iterator[dict[str, Any]]:
        """Run a round; yield the records that are complete after it."""
        done, is_last = self._advance()
        record = done.to_json()
        with self._clock.phase("checkpoint"):
            if is_last:
                # Before the checkpoint: after a crash in between, this round runs again.
                self._write_models(directory, done, observer)
                self._write_statistics(directory)
                if done.accuracy is not None:
                    self._write_confusion(directory, self._round_loop.confusion)
            checkpoint = Checkpoint(self._round_loop.state, self._engine.state(), record)
            save_checkpoint(checkpoint, directory.checkpoints)
        record["seconds"]["checkpoint"] = self._clock.lap()["checkpoint"]
        yield from self._write_record(directory, record)

    # What a network does in another way

    def _write_record(
        self, directory: RunDirectory, record: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Write a round's record; yield the records that are complete now."""
        directory.append_record(record)
        yield record

    def _complete_records(self, directory: RunDirectory) -> Iterator[dict[str, Any]]:
        """Yield the records that are complete only after the last round."""
        return iter(())

    def _write_models(
        self, directory: RunDirectory, record: RoundRecord, observer: Observer
    ) -> None:
        """Write the models and the prototype pool of the last round."""
        directory.write_models(self._round_loop.global_model, self._pool, ())

    # Results

    def _write_statistics(self, directory: RunDirectory) -> None:
        """Write the statistics that a one-shot method keeps."""
        if not isinstance(self._method, OneShot):
            return
        path, pooled = directory.path, self._round_loop.statistics
        remove_statistics(path)
        encoder = (directory.read_json("partition.json") or {}).get("encoder")
        for name, sums in (self._round_loop.client_sums or {}).items():
            own = self._method.own_statistics(sums)
            if bool(own["counts"].any()):
                # The pool adds the values of the files, so that a client can be subtracted exactly.
                pooled = add_statistics(pooled, self._method.pool_of_one(own))
                (path / STATISTICS).mkdir(exist_ok=True)
                write_atomically(path / client_file(name), pack_statistics(own, encoder))
        if pooled:
            write_atomically(path / POOLED, pack_statistics(pooled, encoder))

    def _write_confusion(
        self, directory: RunDirectory, confusion: dict[str, ConfusionCounts]
    ) -> None:
        """Write the confusions of the last round."""
        predictor = self._method.predictor_on("local_test")
        found = Confusion.of(confusion, self._experiment.rounds, predictor, self._class_names)
        # On one line: one number per line would triple the size.
        directory.write_json("confusion.json", found.to_json(), indent=None)

    @property
    def _pool(self) -> PrototypePool | None:
        return self._round_loop.pool if isinstance(self._method, SharesPrototypes) else None

    @property
    def _keeps_personal_models(self) -> bool:
        # A personalized model memorizes its client's samples, which the budget does not cover.
        return self._experiment.personal_models and not self._experiment.privacy.has_budget

    def _personal_models(self) -> Iterator[tuple[str, Tensors]]:
        """Yield the personalized models to write; consume all, because processes exchange them."""
        if self._keeps_personal_models:
            found = self._engine.personal_models(self._round_loop.shared_parameters)
            for number, each in enumerate(found):
                if number < self._experiment.most_personal_models:
                    yield each

    def _conclude(self, directory: RunDirectory) -> RunResult:
        """Write the summary if the last round is done, and return the result."""
        # Read again instead of kept, to save memory in long runs.
        records, summary = directory.read_records(), None
        if self._round_loop.state.round == self._experiment.rounds:
            summary = summarize_run(self._method, records).to_json()
            directory.write_json("summary.json", summary)
        accuracy = summary["accuracy"] if summary else None
        return RunResult(directory.path, self._experiment, accuracy, records, self._pool, summary)

    # Checkpoints

    def _restore(self, directory: RunDirectory, observer: Observer) -> list[dict[str, Any]]:
        """Restore the newest valid checkpoint, if any, and the records up to it."""
        checkpoint, problems = load_checkpoint(directory.checkpoints, self._assembly.device)
        for problem in problems:
            observer.on_warning(f"Checkpoint {problem}; returning to the one before.")
        if problems and checkpoint is None:
            observer.on_warning("No intact checkpoint is left; starting over from round 1.")
        folder = directory.checkpoints.absolute()
        if self._group is not None:
            self._group.broadcast(os.fsencode(folder))
            self._group.broadcast(checkpoint_to_bytes(checkpoint) if checkpoint else b"")
        self._restore_checkpoint(checkpoint, folder, f"{directory.checkpoints}")
        is_over = self._round_loop.state.round >= self._experiment.rounds
        return directory.rewind_records(checkpoint.record if checkpoint else None, is_over=is_over)

    def _restore_checkpoint(
        self, checkpoint: Checkpoint | None, folder: Path | None, shown: str = "the checkpoint"
    ) -> None:
        """Continue from a checkpoint, or begin; `folder` is the place of large client states."""
        if checkpoint is None:
            self._engine.restore({}, {}, folder)
            return
        try:
            if not self._fits(checkpoint.state):
                raise ValueError
            self._engine.restore(checkpoint.clients, checkpoint.record, folder)
        # A run may come from a stranger, with tensors of any name and shape.
        except (ValueError, KeyError, IndexError, TypeError, RuntimeError):
            raise InvalidInput(
                f"{shown} does not fit the experiment; it must be as the run wrote it, or the run "
                "must be started again in a new folder."
            ) from None
        self._round_loop.state = checkpoint.state

    def _fits(self, state: RoundState) -> bool:
        """Return whether the shapes of a state are those of this model."""

        def form(server: Server) -> dict[str, object]:
            # The number of components of a closed-form classifier, [C, components, ...], varies.
            free = () if self._method.trains else (1,)
            return {
                name: ([n for axis, n in enumerate(each.shape) if axis not in free], each.dtype)
                for name, each in server.params.items()
            }

        width = self._assembly.model.embedding_size
        return (
            self._round_loop.accepts(state)
            and form(state.server) == form(self._round_loop.state.server)
            and all(rows.dimension == width for _, rows in state.prototypes.values())
        )

    # Reports

    def _report(self, record: Record, observer: Observer) -> int:
        """Tell the observer of a complete record, and return its round."""
        observer.on_round(record)
        for warning in record["remarks"].get("warnings", []):
            observer.on_warning(str(warning))
        if record["unchanged"]:
            reasons = record["clients"]["rejected"].values()
            why = f" ({next(iter(reasons))})" if reasons else ""
            observer.on_warning(f"Round {record['round']}: no client was accepted{why}.")
        fallbacks = record["remarks"].get("training", {}).get("fallback", [])
        reasons = [each.partition(": ")[2] for each in fallbacks if "vmap" in each]
        if reasons and not self._is_slow and not is_built_in(self._experiment.method):
            self._is_slow = True
            observer.on_warning(
                "Clients are trained one after the other, because the method cannot train many at "
                f'once ({reasons[0]}): see "Add a method" in CONTRIBUTING.md for losses under '
                "torch.func.vmap."
            )
        return int(record["round"])
