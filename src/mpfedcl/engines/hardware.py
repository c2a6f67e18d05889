"""The machine: cores, threads, memory and device."""

import os
from pathlib import Path

import joblib
import psutil
import torch

from mpfedcl.core.errors import InvalidInput

PROCESS_BYTES = 230 * 2**20
"""Memory of a process of a run besides its samples, measured with the default model."""


def usable_cores() -> int:
    """Return the cores that affinity and the container's quota allow this process."""
    return int(joblib.cpu_count())


def usable_memory() -> int:
    """Return the free bytes of the machine or of the container."""
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
    """Use one thread, unless OMP_NUM_THREADS is set.

    Batches of 32 gain little from a second thread, and two processes that spin on the same cores
    are tens of times slower. Sums also round differently with each number of threads: with one, an
    experiment has the same bits for any number of cores and of simultaneous runs.
    """
    # Libraries loaded later, such as scikit-learn, read it when they start.
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if not asked.isdecimal() or int(asked) < 1:
        asked = os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(int(asked))


def find_device(name: str) -> torch.device:
    """Return a device after a test that it computes."""
    # Each process of torchrun on one machine takes a card of its own.
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        # Some devices exist in name only, and mps has no double precision, which sums need.
        torch.zeros(1, device=device, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        raise InvalidInput(
            f"device is {name!r}; it must be a device that the installed torch supports, also for "
            "float64, such as cpu."
        ) from None
    return device
