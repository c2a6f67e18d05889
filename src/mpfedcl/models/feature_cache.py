"""The cache of features and large inputs: one `.npy` file per array, mapped by all processes.

A file name contains the SHA-256 of everything the array was computed from (the encoder with its
weights and preprocessing, the samples, the precision), so a changed sample or another encoder never
matches an old file. Files are written atomically, and a process that needs an array waits while
another one computes it. Processes that map the same file share one copy in memory.
"""

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from filelock import FileLock
from numpy.lib import format as numpy_format
from numpy.typing import NDArray
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import open_atomically

FOLDER_VARIABLE = "MPFEDCL_CACHE"
SIZE_VARIABLE = "MPFEDCL_CACHE_SIZE"
DEFAULT_SIZE = 2 * 1024**3
MAPPED_FROM = 2**30
"""Bytes from which inputs are mapped instead of held in memory."""
SHARED_FROM = 2**24
"""The same if other processes on this machine load the same inputs."""
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_LEFTOVER_SECONDS = 86_400
"""Age at which a half-written file of a killed process is removed."""

Array = NDArray[Any]


def cache_folder() -> Path:
    """Return $MPFEDCL_CACHE/arrays, or `arrays` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mpfedcl"
    return Path(os.environ.get(FOLDER_VARIABLE) or default).expanduser() / "arrays"


def cache_limit() -> int:
    """Return the size limit in bytes: $MPFEDCL_CACHE_SIZE, or 2 GiB; 0 disables the cache."""
    text = os.environ.get(SIZE_VARIABLE) or str(DEFAULT_SIZE)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise InvalidInput(
            f"${SIZE_VARIABLE} is {text!r}; it must be a number of bytes such as 500M or 2G, or 0 "
            "for no cache."
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass
class CachedArrays:
    """The files of one encoder, or of inputs that need none."""

    files: int = 0
    samples: int = 0
    bytes: int = 0


class FeatureCache:
    """Arrays by content digest. A cache that cannot be used costs a warning, never the run."""

    def __init__(
        self,
        folder: Path | None = None,
        limit: int | None = None,
        warn: Callable[[str], None] = lambda sentence: print(sentence, file=sys.stderr),
    ) -> None:
        self.folder = cache_folder() if folder is None else folder
        self.limit = cache_limit() if limit is None else limit
        self._warn = warn

    def find_or_make(
        self,
        name: str,
        signature: str,
        make: Callable[[], Array],
        *,
        smallest: int = 0,
        may_exceed_limit: bool = False,
    ) -> Array:
        """Return the cached array of a signature, or compute and store it.

        Args:
            name: Groups arrays in listings, such as the encoder's name.
            signature: Text that identifies everything the array is computed from.
            make: Computes the array.
            smallest: Bytes below which the array is not stored.
            may_exceed_limit: Whether an array above the size limit is stored nevertheless.
        """
        if not self.limit:
            return make()
        digest = hashlib.sha256(signature.encode()).hexdigest()
        path = self.folder / f"{re.sub(r'[^A-Za-z0-9._]+', '-', name)[:80]}-{digest}.npy"
        if (found := _map(path)) is not None:
            return found
        with _lock(path):
            # Another process may have written the file in the meantime.
            if (found := _map(path)) is not None:
                return found
            made = make()
            if not made.size or made.nbytes < smallest:
                return made
            if made.nbytes > self.limit and not may_exceed_limit:
                self._warn(
                    f"These features need {made.nbytes / 1024**2:,.0f} MiB, but the feature cache "
                    f"holds {self.limit / 1024**2:,.0f} MiB; ${SIZE_VARIABLE} raises the limit."
                )
                return made
            self._store(path, made)
        found = _map(path)
        return made if found is None else found

    def describe(self) -> dict[str, CachedArrays]:
        """Return the content by name."""
        content: dict[str, CachedArrays] = {}
        for path in sorted(self.folder.glob("*.npy")):
            with suppress(OSError):
                entry = content.setdefault(path.name.rpartition("-")[0], CachedArrays())
                entry.files, entry.bytes = entry.files + 1, entry.bytes + path.stat().st_size
                array = _map(path, mark_used=False)
                entry.samples += 0 if array is None else len(array)
        return content

    def clear(self) -> None:
        """Remove all files."""
        for path in self.folder.glob("*.npy"):
            path.unlink(missing_ok=True)

    def _store(self, path: Path, array: Array) -> None:
        try:
            self._make_room(array.nbytes)
            with open_atomically(path) as file:
                ordered = numpy.ascontiguousarray(array)
                numpy_format.write_array(file, ordered, allow_pickle=False)
        except OSError as error:
            self._warn(
                f"The feature cache {self.folder} cannot be used ({error.strerror or error}); "
                f"{array.nbytes / 1024**2:,.0f} MiB were computed but not stored. "
                f"${FOLDER_VARIABLE} names another folder."
            )

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used files; processes that have mapped one keep its content."""
        files = []
        for path in self.folder.iterdir():
            # Another process may remove the same file.
            with suppress(OSError):
                status = path.stat()
                if path.suffix == ".npy":
                    files.append((status.st_mtime, status.st_size, path))
                elif path.suffix == ".tmp" and time.time() - status.st_mtime > _LEFTOVER_SECONDS:
                    path.unlink()
        room = self.limit - num_bytes
        for _, size, path in sorted(files, reverse=True):
            room -= size
            if room < 0:
                path.unlink(missing_ok=True)


def _map(path: Path, *, mark_used: bool = True) -> Array | None:
    """Map a file copy-on-write; return None if it is missing or not whole."""
    try:
        array = numpy_format.open_memmap(path, mode="c")
        if path.stat().st_size != array.offset + array.nbytes:
            return None
    # A damaged header raises nearly anything: ValueError, OverflowError, tokenize.TokenError, ...
    except Exception:
        return None
    if mark_used:
        with suppress(OSError):
            os.utime(path)
    return array


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process compute a file while others wait; without locks, each computes its own."""
    lock_path = path.with_suffix(".lock")
    lock = FileLock(lock_path, thread_local=False, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()
        with suppress(OSError):
            lock_path.unlink(missing_ok=True)


_shares = False


@contextmanager
def shared_inputs(shared: bool = True) -> Iterator[None]:
    """Map smaller inputs too, because other processes on this machine load the same ones."""
    global _shares
    before, _shares = _shares, shared or _shares
    try:
        yield
    finally:
        _shares = before


def keep_inputs(
    sign: Callable[[], str], num_bytes: int | None, make: Callable[[], Tensor]
) -> Tensor:
    """Return inputs made before for the same signature, or make them; map them if they are large.

    `num_bytes` is None if only the encoder knows the size, which would have to be loaded for it.
    """
    smallest = SHARED_FROM if _shares else MAPPED_FROM
    may_be_large = _shares if num_bytes is None else num_bytes >= smallest
    if not may_be_large or not cache_limit():
        return make()
    array = FeatureCache().find_or_make(
        "inputs", sign(), lambda: make().numpy(), smallest=smallest, may_exceed_limit=True
    )
    return torch.from_numpy(array)
