"""The run loop: round after round, with a checkpoint and a record of each."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput, LostWorker, RunCutShort
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.workers import WorkerGroup
from mpfedcl.gaussian import add_statistics
from mpfedcl.methods import OneShot, SharesPrototypes, is_built_in
from mpfedcl.privacy.ledger import ReleaseFolder
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine, StatePlace
from mpfedcl.rounds.loop import make_loop
from mpfedcl.rounds.metrics import ConfusionCounts
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.rounds.systems import SystemModel
from mpfedcl.runs.background_writer import BackgroundWriter
from mpfedcl.runs.checkpoint import (
    Checkpoint,
    PackedCheckpoint,
    checkpoint_from_bytes,
    checkpoint_to_bytes,
    load_checkpoint,
    pack_checkpoint,
)
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer, Record, RunResult
from mpfedcl.runs.statistics_files import (
    remove_statistics,
    write_client_statistics,
    write_pooled_statistics,
)
from mpfedcl.runs.summary import summarize_run


class RunLoop:
    """The rounds of a run, wherever its clients are; `run` leads, `follow` works along."""

    _group: WorkerGroup | None = None
    _writes_beside = False
    """Whether a round's checkpoint and record are written while the next one trains. A kill then
    returns to this round or to the one before, which all that takes part must be able to."""
    _has_personal_models = False
    """Whether the clients' own models are here; over a network they stay with the clients."""

    def __init__(
        self,
        assembly: Assembly,
        engine: Engine,
        class_names: Sequence[str],
        pace: SystemModel | None = None,
    ) -> None:
        self._assembly = assembly
        self._experiment = assembly.experiment
        self._method = assembly.method
        self._round_loop = make_loop(assembly, engine, pace)
        self._engine = engine
        self._clock = assembly.clock
        self._class_names = class_names
        self._is_slow = False
        """Whether it was said that clients train one after the other."""

    def run(self, directory: RunDirectory, observer: Observer) -> RunResult:
        """Run the rounds that are left and write down what came of them."""
        if self._round_loop.private is not None:
            self._round_loop.private.log = ReleaseFolder(directory.path)
        num_records = len(self._restore(directory, observer))
        rounds, done = self._experiment.rounds, self._round_loop.state.round
        # A round that was not run as the last one has left no models, and perhaps no predictors.
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
            with BackgroundWriter() as writer:
                while self._has_next_round(not observer.should_stop()):
                    for record in self._run_round(directory, observer, writer):
                        num_records += 1
                        observer.on_round(record)
                        for warning in [*_find_warnings(record), *self._find_slowness(record)]:
                            observer.on_warning(warning)
            for record in self._complete_records(directory):
                num_records += 1
                observer.on_round(record)
        except RunCutShort:
            # Over a network: its own words say what happened.
            raise
        except LostWorker as error:
            raise RunCutShort(
                f"a worker was lost in round {num_records + 1} ({error}); the rounds before are "
                f"kept. Resume with: mpfedcl run --resume {directory.path}"
            ) from None
        # Read again: kept meanwhile, they would grow in memory with the rounds.
        result = self._conclude(directory, directory.read_records())
        observer.on_finish(result)
        return result

    def _find_slowness(self, record: Record) -> list[str]:
        """Return why clients of a user's method train one after the other, once."""
        told = record["remarks"].get("training", {}).get("fallback", [])
        reasons = [each.partition(": ")[2] for each in told if "vmap" in each]
        if self._is_slow or not reasons or is_built_in(self._experiment.method):
            return []
        self._is_slow = True
        return [
            "Clients are trained one after the other, because the method cannot train many at once "
            f"({reasons[0]}): CONTRIBUTING.md, under Add a method, says "
            "what a loss may do under torch.func.vmap."
        ]

    def follow(self) -> None:
        """Run the same rounds as the leader, and hand it what it writes down."""
        assert self._group is not None
        if self._round_loop.private is not None:
            # The leader draws for all, and tells.
            self._round_loop.private.log = None
        folder = Path(os.fsdecode(self._group.broadcast()))
        # On another machine there may be no such folder: states then stay in memory.
        if folder.parent.is_dir():
            self._keep_states_in(folder)
        if checkpoint := self._group.broadcast():
            self._restore_checkpoint(checkpoint_from_bytes(checkpoint))
        while self._has_next_round(True):
            _, is_last = self._advance()
            if is_last:
                deque(self._personal_models(), maxlen=0)
            self._engine.state()

    def _has_next_round(self, wanted: bool) -> bool:
        """Tell whether there is another round; in a process group the leader decides for all."""
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

    def _run_round(
        self, directory: RunDirectory, observer: Observer, writer: BackgroundWriter
    ) -> Iterator[dict[str, Any]]:
        """Run a round; yield the records that are complete by it."""
        done, is_last = self._advance()
        record = done.to_json()
        # Of what is released under a budget, and of the round's end, nobody may be ahead.
        is_beside = self._writes_beside and not is_last and self._round_loop.private is None
        with self._clock.phase("checkpoint"):
            writer.wait()
            if is_last:
                # Before the checkpoint: a crash in between runs this round again and rewrites them.
                self._write_models(directory, done.round, observer)
                for warning in self._describe_models_left_out(len(done.clients.answered)):
                    observer.on_warning(warning)
                self._write_statistics(directory)
                if done.accuracy is not None:
                    self._write_confusion(directory, self._round_loop.confusion)
            packed = pack_checkpoint(
                Checkpoint(self._round_loop.state, self._engine.state(), record)
            )
            if not is_beside:
                self._save(directory, packed)
        # As long as the round has waited for it, and for the one of the round before.
        record["seconds"]["checkpoint"] = self._clock.lap()["checkpoint"]
        if not is_beside:
            yield from self._write_record(directory, record)
            return

        def write() -> None:
            self._save(directory, packed)
            directory.append_record(record)

        writer.begin(write)
        yield record

    def _save(self, directory: RunDirectory, packed: PackedCheckpoint) -> None:
        """Write a checkpoint, once all that it names is on disk."""
        self._engine.sync_state()
        packed.save(directory.checkpoints)

    def _write_record(
        self, directory: RunDirectory, record: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Write a round's record down; yield the records that are complete now."""
        directory.append_record(record)
        yield record

    def _complete_records(self, directory: RunDirectory) -> Iterator[dict[str, Any]]:
        """After the last round: yield the records that are complete only now."""
        return iter(())

    def _write_models(self, directory: RunDirectory, round_number: int, observer: Observer) -> None:
        """Write the models and the pool that the last round has left."""
        directory.write_models(self._round_loop.global_model, self._pool, ())

    def _describe_models_left_out(self, num_trained: int) -> list[str]:
        """Say where not all clients of the last round have left their model."""
        most = self._experiment.most_personal_models
        if not (self._has_personal_models and self._keeps_personal_models) or num_trained <= most:
            return []
        return [
            f"models/ has {most:,} personal models; {num_trained:,} clients trained in the last "
            "round: --most-personal-models says how many are written."
        ]

    def _write_statistics(self, directory: RunDirectory) -> None:
        """Write the sums that a one-shot method keeps, if anybody has sent some."""
        if not isinstance(self._method, OneShot):
            return
        path, pooled = directory.path, self._round_loop.statistics
        remove_statistics(path)
        encoder = (directory.read_json("partition.json") or {}).get("encoder")
        for name, sums in (self._round_loop.client_sums or {}).items():
            own = self._method.own_statistics(sums)
            if bool(own["counts"].any()):
                # Of the very numbers that are kept: whoever leaves is subtracted exactly.
                pooled = add_statistics(pooled, self._method.pool_of_one(own))
                write_client_statistics(path, name, own, encoder)
        if pooled:
            write_pooled_statistics(path, pooled, encoder)

    def _write_confusion(
        self, directory: RunDirectory, confusion: dict[str, ConfusionCounts]
    ) -> None:
        directory.write_confusion(
            confusion,
            round_number=self._experiment.rounds,
            predictor=self._method.predictor_on("local_test"),
            class_names=self._class_names,
        )

    @property
    def _pool(self) -> PrototypePool | None:
        return self._round_loop.pool if isinstance(self._method, SharesPrototypes) else None

    @property
    def _keeps_personal_models(self) -> bool:
        # Under a privacy budget they are each client's own affair: they know its samples by heart.
        return self._experiment.personal_models and not self._experiment.privacy.has_budget

    def _personal_models(self) -> Iterator[tuple[str, Tensors]]:
        """Yield the personal models that are written; all are passed, because processes share."""
        if self._keeps_personal_models:
            found = self._engine.personal_models(self._round_loop.shared_parameters)
            for number, each in enumerate(found):
                if number < self._experiment.most_personal_models:
                    yield each

    def _restore(self, directory: RunDirectory, observer: Observer) -> list[dict[str, Any]]:
        """Return to the newest sound checkpoint, if any, and to the records that belong to it."""
        checkpoint, problems = load_checkpoint(directory.checkpoints)
        for problem in problems:
            observer.on_warning(f"Checkpoint {problem}; returning to the one before.")
        if problems and checkpoint is None:
            observer.on_warning("No intact checkpoint is left; starting over from round 1.")
        folder = directory.checkpoints.absolute()
        self._keep_states_in(folder)
        if self._group is not None:
            self._group.broadcast(os.fsencode(folder))
            self._group.broadcast(checkpoint_to_bytes(checkpoint) if checkpoint else b"")
        if checkpoint is not None:
            self._restore_checkpoint(checkpoint, f"{directory.checkpoints}")
        is_over = self._round_loop.state.round >= self._experiment.rounds
        return directory.rewind_records(checkpoint.record if checkpoint else None, is_over=is_over)

    def _keep_states_in(self, folder: Path) -> None:
        self._engine.keep_states_in(StatePlace(folder, sorted(self._engine.sizes)))

    def _restore_checkpoint(self, checkpoint: Checkpoint, shown: str = "the checkpoint") -> None:
        try:
            if not self._fits(checkpoint):
                raise ValueError
            self._engine.restore(checkpoint.clients, checkpoint.record)
        # A run may come from a stranger, whose tensors can be of any name and shape.
        except (ValueError, KeyError, IndexError, TypeError, RuntimeError):
            raise InvalidInput(
                f"{shown} does not fit the experiment; it must be as the run wrote it, or the run "
                "must be started again in a new folder."
            ) from None
        self._round_loop.state = checkpoint.state.to(self._assembly.device)

    def _fits(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint is of this model: its parameters, and its prototypes' size."""

        def form(tensors: Tensors) -> dict[str, object]:
            if self._method.trains:
                return {name: (each.shape, each.dtype) for name, each in tensors.items()}
            # A classifier in closed form has as many parts per class, [C, parts, ...], as it needs.
            return {
                n: (*each.shape[:1], *each.shape[2:], each.dtype) for n, each in tensors.items()
            }

        now, width = self._round_loop.state.server.params, self._assembly.model.embedding_size
        rows = [rows for _, rows in checkpoint.state.prototypes.values()]
        if not self._round_loop.accepts(checkpoint.state):
            return False
        return form(checkpoint.state.server.params) == form(now) and all(
            each.dimension == width for each in rows
        )

    def _conclude(self, directory: RunDirectory, records: list[dict[str, Any]]) -> RunResult:
        """Sum up the run if its last round is done."""
        summary = None
        if self._round_loop.state.round == self._experiment.rounds:
            summary = summarize_run(self._method, records).to_json()
            directory.write_json("summary.json", summary)
        return RunResult(
            path=directory.path,
            experiment=self._experiment,
            accuracy=summary["accuracy"] if summary else None,
            history=records,
            pool=self._pool,
            summary=summary,
        )


def _find_warnings(record: Record) -> list[str]:
    """Return what a user should hear of a round at once."""
    told = [str(each) for each in record["remarks"].get("warnings", [])]
    if record["unchanged"]:
        reasons = record["clients"]["rejected"].values()
        why = f" ({next(iter(reasons))})" if reasons else ""
        told.append(f"Round {record['round']}: no client was accepted{why}.")
    return told
