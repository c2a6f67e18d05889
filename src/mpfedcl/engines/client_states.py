"""The states that clients keep between rounds: in memory, or in a file each if they are too large.

A round writes new files and never changes those of earlier rounds, and each checkpoint has the
round and the checksum of every client's file. A kill at any moment therefore leaves a checkpoint
with all its states, and the cost of a round depends on its participants, not on the population.
"""

import os
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import read_bounded, sync_folder, write_atomically
from mpfedcl.core.tensors import Tensors, pack_tensors, take_group

MOST_IN_MEMORY = 2**28
"""Bytes that the states of all clients may take before they are kept in files."""
_RESTING = 8
"""If only some clients train in a round, files pay from 1 / _RESTING of these bytes on: a
checkpoint has all states that are in memory again, and the files have only the new ones."""
FILES = "files"
"""The prefix of the tensors in a checkpoint that list the files."""
_FOLDER = "clients"
_ROUNDS_KEPT = 2
"""Rounds after which a replaced file is removed: the newest two checkpoints are kept."""
_MOST_BYTES = 2**40
_RESTART = "it must be as the run wrote it, or the run must be started again in a new folder."


class ClientStates(MutableMapping[str, Tensors]):
    """The states of one kind of this process's clients, by name."""

    def __init__(self, kind: str, clients: Collection[str], device: torch.device) -> None:
        self.kind = kind
        """The prefix of the states' names in a checkpoint."""
        self._clients = clients
        self._device = device
        self._memory: dict[str, Tensors] = {}
        self._folder: Path | None = None
        self._names: Sequence[str] = ()
        self._most = MOST_IN_MEMORY
        self._in_files = False
        self._files: dict[str, tuple[int, int]] = {}
        """Round and checksum of each client's file."""
        self._round = 0
        self._replaced: deque[list[Path]] = deque([[]])
        """Files by the round in which they were replaced; the last is the current round."""

    def keep_in(self, folder: Path, names: Sequence[str], *, some_rest: bool) -> None:
        """Keep states in files from now on, if they are too large for the memory.

        `folder` has the checkpoints of the run, `names` are all its clients in name order, and
        `some_rest` tells whether only some of them train in a round.
        """
        self._folder, self._names = folder / _FOLDER / self.kind, names
        self._most = MOST_IN_MEMORY // _RESTING if some_rest else MOST_IN_MEMORY

    def begin_round(self) -> None:
        """Remove the files that no checkpoint needs any more."""
        self._round += 1
        self._replaced.append([])
        if len(self._replaced) > _ROUNDS_KEPT:
            for path in self._replaced.popleft():
                path.unlink(missing_ok=True)

    def __getitem__(self, name: str) -> Tensors:
        if name not in self._files:
            return self._memory[name]
        path, (_, checksum) = self._path(name), self._files[name]
        try:
            content = read_bounded(path, _MOST_BYTES)
        except FileNotFoundError:
            raise InvalidInput(f"{path} is missing; {_RESTART}") from None
        try:
            if zlib.crc32(content) == checksum:
                return {each: value.to(self._device) for each, value in load(content).items()}
        except SafetensorError:
            # Its checksum is right, but a run may come from a stranger.
            pass
        raise InvalidInput(f"{path} is damaged; {_RESTART}")

    def __setitem__(self, name: str, state: Tensors) -> None:
        self._in_files = self._in_files or self._is_too_large(state)
        if not self._in_files:
            self._memory[name] = state
            return
        self._release(name)
        self._memory.pop(name, None)
        content = pack_tensors(state)
        self._files[name] = self._round, zlib.crc32(content)
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, durable=False)

    def __delitem__(self, name: str) -> None:
        if name not in self._files:
            del self._memory[name]
        self._release(name)

    def __contains__(self, name: object) -> bool:
        return name in self._memory or name in self._files

    def __iter__(self) -> Iterator[str]:
        yield from self._memory
        yield from self._files

    def __len__(self) -> int:
        return len(self._memory) + len(self._files)

    # For checkpoints

    def snapshot(self) -> Tensors:
        """Return the states in memory, and a list of the files that hold the others."""
        found = {
            f"{self.kind}/{client}/{name}": value
            for client, state in self._memory.items()
            for name, value in state.items()
        }
        if not self._in_files:
            return found
        index = torch.full((len(self._names), 2), -1, dtype=torch.int64)
        if self._files:
            numbers = torch.tensor([self._number(name) for name in self._files])
            index[numbers] = torch.tensor(list(self._files.values()))
        return {**found, f"{FILES}/{self.kind}": index}

    def restore(self, state: Tensors, number: int) -> None:
        """Continue from the checkpoint of a round, which may also have other kinds of states.

        The states of other processes' clients are skipped.
        """
        self._memory = {}
        for key, value in take_group(state, f"{self.kind}/").items():
            client, name = key.split("/", 1)
            if client in self._clients:
                self._memory.setdefault(client, {})[name] = value.to(self._device)
        index = state.get(f"{FILES}/{self.kind}")
        self._files, self._in_files, self._round = {}, index is not None, number
        self._replaced = deque([[]])
        if index is None:
            return
        if self._folder is None:
            raise InvalidInput(
                "workers is too many: the clients' states are in the run's folder, which every "
                "worker must be able to reach; if one cannot, workers must be 1."
            )
        if index.shape != (len(self._names), 2) or index.dtype != torch.int64:
            raise ValueError("not the clients of this run")
        for name in self._clients:
            written, checksum = index[self._number(name)].tolist()
            if written >= 0:
                self._files[name] = written, checksum
        used = {self._path(name) for name in self._files}
        found = set(self._folder.glob("*.safetensors"))
        if missing := used - found:
            raise InvalidInput(f"{min(missing)} is missing; {_RESTART}")
        own = {self._number(name) for name in self._clients}
        for path in found - used:
            owner, written = _parse(path)
            if owner in own and written > number:
                # Written by a round that is run again.
                path.unlink()
            elif owner in own:
                # The checkpoint before may need it: kept as if it were replaced just now.
                self._replaced[-1].append(path)

    def _is_too_large(self, state: Tensors) -> bool:
        size = sum(value.numel() * value.element_size() for value in state.values())
        return size * len(self._names) > self._most

    def _release(self, name: str) -> None:
        if name in self._files:
            path = self._path(name)
            written, _ = self._files.pop(name)
            if written == self._round:
                # No checkpoint needs it.
                path.unlink(missing_ok=True)
            else:
                self._replaced[-1].append(path)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._number(name)}-{self._files[name][0]}.safetensors"

    def _number(self, name: str) -> int:
        return bisect_left(self._names, name)


def sync_states(folder: Path, number: int) -> None:
    """Wait until the files of a round are on disk, before the checkpoint that names them is."""
    for kind in (folder / _FOLDER).glob("*"):
        found = list(kind.glob(f"*-{number}.safetensors"))
        for path in found:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if found:
            sync_folder(kind)


def _parse(path: Path) -> tuple[int, int]:
    """Return the client's number and the round in a file's name, or (-1, -1)."""
    client, _, written = path.stem.partition("-")
    is_ours = client.isdecimal() and written.isdecimal()
    return (int(client), int(written)) if is_ours else (-1, -1)
