"""Inputs that are made once: in a process from run to run, on a machine as files that are mapped.

Inputs above a gigabyte lie in a file beside the feature cache and are mapped from there: the system
has one copy of them in memory for all processes, and takes back what it needs. Where several
processes want the same inputs, smaller ones do too. A file's name is a digest of what it was made
from, so that a changed file or another encoder is never mistaken for it, and nothing is read twice.
"""

import hashlib
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from filelock import FileLock
from torch import Tensor

from mpfedcl.core.files import open_atomically
from mpfedcl.models.encoders.feature_cache import cache_limit, cache_path

MAPPED_FROM = 2**30
"""Bytes from which inputs are mapped by a process alone."""
MAPPED_AMONG_OTHERS_FROM = 2**24
_MOST_REUSED = 4
"""Two runs' inputs and formats."""
_SECONDS_TO_WRITE = 86_400
"""What a killed process has left half written is removed after a day."""

_reused: OrderedDict[str, Any] = OrderedDict()
_is_reusing = False
_is_among_others = False
_Result = TypeVar("_Result")


def inputs_folder() -> Path:
    """Return where mapped inputs lie."""
    return cache_path().parent / "inputs"


def begin_reuse(*, among_others: bool = False) -> None:
    """Keep what the last runs of this process had loaded for the next, until `end_reuse`."""
    global _is_reusing, _is_among_others
    _is_reusing, _is_among_others = True, among_others


def end_reuse() -> None:
    """Keep nothing any more."""
    global _is_reusing, _is_among_others
    _is_reusing = _is_among_others = False
    _reused.clear()


@contextmanager
def among_others(others: bool = True) -> Iterator[None]:
    """Map smaller inputs too: other processes of this machine want them at the same time."""
    global _is_among_others
    before, _is_among_others = _is_among_others, others or _is_among_others
    try:
        yield
    finally:
        _is_among_others = before


def reuse(sign: Callable[[], str], make: Callable[[], _Result]) -> _Result:
    """Return what one of the last runs of this process has made of the same, or make it."""
    if not _is_reusing:
        return make()
    signature = sign()
    if signature not in _reused:
        # The oldest goes first: it need not be in memory beside the new one.
        while len(_reused) >= _MOST_REUSED:
            _reused.popitem(last=False)
        _reused[signature] = make()
    _reused.move_to_end(signature)
    found: _Result = _reused[signature]
    return found


def keep_inputs(
    sign: Callable[[], str], num_bytes: int | None, make: Callable[[], Tensor]
) -> Tensor:
    """Return inputs that were made of the same before, or make and keep them.

    Args:
        sign: Returns a text that tells all that they are made from.
        num_bytes: Their size; None where only the encoder could tell, which is kept asleep.
        make: Makes them.
    """
    least = MAPPED_AMONG_OTHERS_FROM if _is_among_others else MAPPED_FROM
    may_be_large = _is_among_others if num_bytes is None else num_bytes >= least
    if not may_be_large or not cache_limit():
        return reuse(sign, make)
    return reuse(sign, lambda: _map_or_make(_file_for(sign()), least, make))


def _file_for(signature: str) -> Path:
    return inputs_folder() / f"{hashlib.sha256(signature.encode()).hexdigest()}.npy"


def _map_or_make(path: Path, least: int, make: Callable[[], Tensor]) -> Tensor:
    with _only_one(path):
        found = _map(path)
        if found is not None:
            return found
        made = make()
        if made.nbytes < least:
            return made
        try:
            _make_room(path.parent, made.nbytes)
            with open_atomically(path) as file:
                numpy.save(file, made.numpy(), allow_pickle=False)
        except OSError as error:
            print(
                f"Inputs of {made.nbytes / 2**20:,.0f} MiB cannot be kept in {path.parent} "
                f"({error.strerror or error}); each process has them in its own memory.",
                file=sys.stderr,
            )
            return made
        found = _map(path)
        return made if found is None else found


def _map(path: Path) -> Tensor | None:
    """Map a file; None where it is not there, or not as it was written."""
    with suppress(OSError, ValueError, EOFError):
        # Pages that nobody writes to are one for all processes; whoever does gets its own.
        array = numpy.load(path, mmap_mode="c", allow_pickle=False)
        os.utime(path)
        return torch.from_numpy(array)
    return None


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Let one process at a time make a file; the others wait and find it.

    Where no lock can be had, each makes its own, which costs time and nothing else.
    """
    beside = path.with_name(f"{path.name}.lock")
    lock = FileLock(beside, thread_local=False, fallback_to_soft=False)
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
            beside.unlink(missing_ok=True)


def _make_room(folder: Path, num_bytes: int) -> None:
    """Drop the files that were not used for the longest time; whoever maps one keeps it."""
    listed = []
    for path in folder.iterdir():
        # Others may drop the same.
        with suppress(OSError):
            status = path.stat()
            if path.suffix == ".npy":
                listed.append((status.st_mtime, status.st_size, path))
            elif path.suffix == ".tmp" and time.time() - status.st_mtime > _SECONDS_TO_WRITE:
                path.unlink()
    room = cache_limit() - num_bytes
    for _, size, path in sorted(listed, reverse=True):
        room -= size
        if room < 0:
            path.unlink(missing_ok=True)


def describe_kept_inputs() -> tuple[int, int]:
    """Return how many files of inputs there are, and their bytes."""
    sizes = [path.stat().st_size for path in inputs_folder().glob("*.npy")]
    return len(sizes), sum(sizes)


def clear_kept_inputs() -> None:
    """Drop all files of inputs."""
    for path in inputs_folder().glob("*.npy"):
        path.unlink(missing_ok=True)
