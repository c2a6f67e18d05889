"""A client's state on disk: between rounds, and the models of a finished run.

The client may be killed at any moment.
"""

import re
import shutil
from logging import getLogger
from pathlib import Path

import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import sync_folder, write_atomically
from mpfedcl.core.tensors import Tensors, load_tensors, pack_tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.methods import Method
from mpfedcl.network.transport import MessageError
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import AccuracyTable
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.file_schemas import Summary, versions

_RUNS_KEPT = 8
"""The state of older runs is deleted."""


class ClientStateStore:
    """The folder of one run, with a file for each round that the server may continue from.

    A client learns with the next request which of its updates was last accepted, and continues
    from the state after that round. A file name contains the round and the round that it started
    from: round-000007-after-000004.safetensors. Asynchronous methods use dispatch numbers.
    """

    def __init__(self, folder: Path, run: str) -> None:
        if not re.fullmatch("[0-9a-f]{32}", run):
            raise MessageError(f"run is {run[:40]!r}; it must be 32 hexadecimal digits")
        self._root = folder
        self.folder = folder / run
        """The folder of this run."""

    def load(self, round_number: int, device: torch.device) -> Tensors:
        """Return the state after a round; empty for round 0, or if the file is lost."""
        path = self._find(round_number)
        if path is None:
            return {}
        try:
            return {name: value.to(device) for name, value in load_tensors(path).items()}
        except InvalidInput:
            # A client with a damaged file starts again, and the run continues.
            return {}

    def save(self, round_number: int, kept: Tensors, *, after: int) -> None:
        """Save the state after a round that started from round `after`.

        The states of round `after` and of the round that it started from are kept, because the
        server may reject this round or return to its previous checkpoint.
        """
        self.make_folder()
        path = self.folder / f"round-{round_number:06d}-after-{after:06d}.safetensors"
        write_atomically(path, pack_tensors(kept))
        accepted = self._find(after)
        before = self._find(_began_from(accepted)) if accepted else None
        for each in self.folder.glob("round-*"):
            if each not in (path, accepted, before):
                each.unlink(missing_ok=True)

    def find_drawn(self, round_number: int) -> Tensors | None:
        """Return the noisy values of a round, or None."""
        path = self._drawn(round_number)
        # A damaged file is an error: drawing noise again would weaken the protection.
        return load_tensors(path) if path.is_file() else None

    def keep_drawn(self, round_number: int, drawn: Tensors) -> None:
        """Store the noisy values of a round, which are sent whenever it is repeated."""
        self.make_folder()
        write_atomically(self._drawn(round_number), pack_tensors(drawn))

    def _drawn(self, round_number: int) -> Path:
        return self.folder / f"released-{round_number:06d}.safetensors"

    def replace(self, round_number: int, kept: Tensors) -> None:
        """Replace the state after a round."""
        path = self._find(round_number)
        self.save(round_number, kept, after=_began_from(path) if path else 0)

    def make_folder(self) -> None:
        """Create the folder of this run, closed to other users; delete old runs."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            found = self._root.iterdir()
            runs = [each for each in found if re.fullmatch("[0-9a-f]{32}", each.name)]
            runs.sort(key=lambda each: each.stat().st_mtime_ns)
            for each in runs[:-_RUNS_KEPT]:
                shutil.rmtree(each, ignore_errors=True)
        self.folder.chmod(0o700)

    def _find(self, round_number: int) -> Path | None:
        return next(self.folder.glob(f"round-{round_number:06d}-after-*.safetensors"), None)


def _began_from(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


FINAL_FOLDER = "final"
"""Subfolder with the models of a finished run."""


FinalModels = tuple[Tensors | None, PrototypePool | None, Tensors]
"""The global model (None if clients keep a part of it), the prototype pool (None without
one), and the personalized model (empty if there is none)."""


def save_final_models(
    store: ClientStateStore,
    method: Method,
    data: FederatedData,
    models: FinalModels,
    last_round: int,
    table: AccuracyTable,
) -> None:
    """Write a run directory that `mpfedcl predict` and `export` can open; replace it atomically.

    Nothing in it leaves the machine.
    """
    final, old = store.folder / FINAL_FOLDER, store.folder / f".{FINAL_FOLDER}-old"
    new = store.folder / f".{FINAL_FOLDER}-new"
    try:
        store.make_folder()
        # Left by a killed process.
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        new.mkdir(mode=0o700)
        _write(RunDirectory(new), method, data, models, last_round, table)
        if final.exists():
            final.rename(old)
        new.rename(final)
        sync_folder(store.folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        # The server still needs this client's evaluation.
        getLogger("mpfedcl").error("The models are not saved: %s", error)


def _write(
    directory: RunDirectory,
    method: Method,
    data: FederatedData,
    models: FinalModels,
    last_round: int,
    table: AccuracyTable,
) -> None:
    experiment = method.experiment
    name, (counts,) = data.names[0], data.label_counts().tolist()
    directory.write_experiment(experiment)
    shapes = ("input_shape", "holds_tokens", "encoder", "image_shape", "columns", "model")
    directory.write_partition(
        {
            "classes": list(data.class_names),
            "clients": {name: {"train": counts, "test": len(data.test_labels)}},
            "network": True,
            **{each: data.partition[each] for each in shapes if each in data.partition},
        }
    )
    averaged, pool, personal = models
    directory.write_models(averaged, pool, [(name, personal)] if personal else [])
    own = method.predictor_on("local_test")
    summary = Summary(
        method=experiment.method,
        dataset=experiment.dataset.name,
        seed=experiment.seed,
        rounds=last_round,
        predictor=own,
        predictor_global=method.predictor_on("global_test"),
        accuracy=table["local_test"][own],
        accuracy_per_client={name: table["local_test"][own]},
        predictors=table,
        versions=versions(),
    )
    # Last, because it marks a run as finished.
    directory.write_json("summary.json", summary.to_json())
