"""What a client keeps on its own disk between rounds, so that it may be killed at any moment."""

import re
import shutil
from pathlib import Path

import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.tensors import Tensors, load_tensors, pack_tensors
from mpfedcl.experiment.settings import PrivacySettings
from mpfedcl.network.message import MessageError
from mpfedcl.privacy.ledger import Ledger, ReleaseFolder

_NO_LIMIT = 1e9
"""Epsilon of a client whose operator has set none: it is counted all the same."""
_RUNS_KEPT = 8
"""The state of older runs is deleted: the disk is not endless."""


class ClientStateStore:
    """A folder of one run, with a file for each round that the server may still ask for.

    The client does not know whether the server accepted an update; with the next request it is
    told which of its rounds was the last accepted, and continues from there. A file's name says
    which round it began from: round-000007-after-000004.safetensors. Asynchronous methods have the
    number of the sending in the round's place.
    """

    def __init__(self, folder: Path, run: str) -> None:
        if not re.fullmatch("[0-9a-f]{32}", run):
            raise MessageError(f"run is {run[:40]!r}; it must be 32 hexadecimal digits")
        self._root = folder
        self.folder = folder / run
        """Of this run."""

    def load(self, round_number: int, device: torch.device) -> Tensors:
        """Return the state after a round; empty for round 0, or where it is gone."""
        path = self._find(round_number)
        if path is None:
            return {}
        try:
            return {name: value.to(device) for name, value in load_tensors(path).items()}
        except InvalidInput:
            # Damaged: as if the disk were new. The client begins afresh, and the run continues.
            return {}

    def save(self, round_number: int, kept: Tensors, *, after: int) -> None:
        """Save the state after a round that began from round `after`.

        Beside it stay that round, which counts until the server says otherwise, and the one that
        it began from in turn: a server that has lost its newest checkpoint goes back one.
        """
        self.make_folder()
        path = self.folder / f"round-{round_number:06d}-after-{after:06d}.safetensors"
        write_atomically(path, pack_tensors(kept))
        accepted = self._find(after)
        before = self._find(_began_from(accepted)) if accepted else None
        for each in self.folder.glob("round-*"):
            if each not in (path, accepted, before):
                each.unlink(missing_ok=True)

    def keep_release(
        self,
        round_number: int,
        drawn: Tensors,
        multiplier: float,
        privacy: PrivacySettings,
        most: float | None,
    ) -> Tensors:
        """Return what was sent in a round before, else keep and charge what is drawn now.

        All runs together may cost `most`; what they have cost stands beside their folders, and
        outlives them.
        """
        path = self._release_path(round_number)
        if not path.is_file():
            budget = ReleaseFolder(self._root)
            unit = privacy.unit_for(trains=False)
            limit = most or _NO_LIMIT
            budget.begin(Ledger(unit, limit, privacy.delta, multiplier))
            budget.charge(multiplier, limit)
        return self.keep_drawn(round_number, drawn)

    def keep_drawn(self, round_number: int, drawn: Tensors) -> Tensors:
        """Return what was sent in a round before, else keep what is drawn now."""
        path = self._release_path(round_number)
        if path.is_file():
            # Damaged, it is refused: noise that is drawn twice protects half as much.
            return load_tensors(path)
        self.make_folder()
        write_atomically(path, pack_tensors(drawn))
        return drawn

    def _release_path(self, round_number: int) -> Path:
        return self.folder / f"released-{round_number:06d}.safetensors"

    def replace(self, round_number: int, kept: Tensors) -> None:
        """Save the state after a round anew, as what the round has brought becomes known."""
        path = self._find(round_number)
        self.save(round_number, kept, after=_began_from(path) if path else 0)

    def make_folder(self) -> None:
        """Make the folder of this run, which nobody else may enter."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            self._delete_old_runs()
        self.folder.chmod(0o700)

    def _find(self, round_number: int) -> Path | None:
        return next(self.folder.glob(f"round-{round_number:06d}-after-*.safetensors"), None)

    def _delete_old_runs(self) -> None:
        runs = [each for each in self._root.iterdir() if re.fullmatch("[0-9a-f]{32}", each.name)]
        runs.sort(key=lambda each: each.stat().st_mtime_ns)
        for each in runs[:-_RUNS_KEPT]:
            shutil.rmtree(each, ignore_errors=True)


def _began_from(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
