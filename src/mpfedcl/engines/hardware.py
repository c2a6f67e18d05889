"""The machine: how many cores and threads, how much memory, which device, how large a cache."""

import os
from functools import cache
from pathlib import Path

import joblib
import psutil
import torch

from mpfedcl.core.errors import InvalidInput

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE = 16 * 2**20
"""Bytes of the largest cache, where the system does not tell: as laptops and servers have it."""
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity and its container's quota."""
    return int(joblib.cpu_count())


def usable_memory() -> int:
    """Return how many bytes are free for this process: the machine's, or its container's."""
    free = psutil.virtual_memory().available
    container = Path("/sys/fs/cgroup")
    try:
        limit = int((container / "memory.max").read_text())
        used = int((container / "memory.current").read_text())
    except (OSError, ValueError):
        # No container, or one without a limit.
        return int(free)
    return int(min(free, max(0, limit - used)))


def cap_threads() -> None:
    """Use one thread, unless OMP_NUM_THREADS says otherwise.

    Batches of 32 gain little from a second one, two processes that spin on the same cores are tens
    of times slower, and sums come out differently with every number of threads: with one, the same
    experiment gives the same bits whatever the number of cores and of runs at the same time.
    """
    # Libraries loaded later, such as scikit-learn, read it when they start.
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if not asked.isdecimal() or int(asked) < 1:
        asked = os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(int(asked))


def find_device(name: str) -> torch.device:
    """Return the device that tensors live on, once it has shown that it computes."""
    # A group's processes on one machine take a card each.
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        # Some devices exist in name only, some (mps) know no double precision, which sums are
        # taken in; a number that comes back shows that this one computes.
        torch.zeros(1, device=device, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        raise InvalidInput(
            f"device is {name!r}; it must be a device that the installed torch supports, also for "
            "float64, such as cpu."
        ) from None
    return device


@cache
def largest_cache(folder: Path = CACHES) -> int:
    """Return the bytes of the largest cache that a core reads through."""
    sizes = [_read_size(path) for path in folder.glob("index*/size")]
    return max(sizes, default=0) or USUAL_CACHE


def _read_size(path: Path) -> int:
    """Read `32768K`; 0 where it cannot be read."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return 0
    number, unit = text.rstrip("KMG"), text[-1:]
    return int(number) * _UNITS.get(unit, 1) if number.isdecimal() else 0
