"""What a client keeps on its own disk between rounds, so that it may be killed at any moment."""

import re
from pathlib import Path

import torch

from mpfedcl.errors import InvalidInput
from mpfedcl.files import write_atomically
from mpfedcl.models import Tensors
from mpfedcl.network.wire import ParcelError
from mpfedcl.storage import load_tensors, pack_tensors

_KEPT = 3
"""Rounds: a server that has lost its newest checkpoint goes back one, and one is under way."""


class SiteMemory:
    """A folder of one run, with a file for each of the latest rounds that the client trained in.

    The client does not know whether the server took an update; with the next request it is told
    which of its rounds was the last that counted, and goes on from there.
    """

    def __init__(self, folder: Path, run: str) -> None:
        if not re.fullmatch("[0-9a-f]{32}", run):
            raise ParcelError(f"run is {run[:40]!r}; it must be 32 hexadecimal digits")
        self._folder = folder / run

    def load(self, round_number: int, device: torch.device) -> Tensors:
        """Return what was kept after a round; nothing for round 0, or where it is gone."""
        path = self._path(round_number)
        if round_number == 0 or not path.is_file():
            return {}
        try:
            return {name: value.to(device) for name, value in load_tensors(path).items()}
        except InvalidInput:
            # Damaged: as if the disk were new. The client begins afresh, and the run goes on.
            return {}

    def save(self, round_number: int, kept: Tensors) -> None:
        """Keep what a round has left, and drop what no server will ask for again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        write_atomically(self._path(round_number), pack_tensors(kept))
        for path in sorted(self._folder.glob("round-*.safetensors"))[:-_KEPT]:
            path.unlink(missing_ok=True)

    def _path(self, round_number: int) -> Path:
        return self._folder / f"round-{round_number:06d}.safetensors"
