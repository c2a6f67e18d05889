"""A process that ends with the one that started it, even if that is killed."""

import ctypes
import os
import signal
import sys
import threading
import time

PARENT = "MPFEDCL_PARENT"
"""The number of the process that has started this one and with which it ends."""
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS, _GRACE_SECONDS = 1.0, 20.0


def receive_at_end_of_parent(number: int) -> None:
    """Let the kernel send a signal when the parent ends (Linux), even to a hung process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent(seconds: float = _GRACE_SECONDS) -> None:
    """End when the process is gone that `PARENT` in the environment names.

    SIGTERM comes first; a process that is still there after `seconds` is ended at once.
    """
    parent = int(os.environ.pop(PARENT, 0))
    if not parent:
        return
    receive_at_end_of_parent(signal.SIGTERM)
    # Once: a second signal would interrupt what the first one began.
    is_signaled = sys.platform == "linux" and os.getppid() == parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        if not is_signaled:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
