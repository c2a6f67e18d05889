"""`python -m mpfedcl.runs.worker`: a worker process that the leader of a run has started."""

import os
import signal
import sys
import threading

from mpfedcl.core.processes import receive_at_end_of_parent


def main() -> int:
    """Work until the leader has finished; the leader reports, also this process's invalid input."""
    end_with_leader()
    # Only now: they take seconds to load, in which the leader may be killed.
    from mpfedcl.core.errors import InvalidInput, LostWorker
    from mpfedcl.engines.worker_group import LOST_ANOTHER, leave_fault
    from mpfedcl.runs.simulation import follow

    try:
        follow()
    except InvalidInput as error:
        leave_fault(str(error))
        return 2
    except LostWorker:
        return LOST_ANOTHER
    return 0


def end_with_leader() -> None:
    """End this process when the leader is gone, and ignore interrupts: they are for the leader."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    receive_at_end_of_parent(signal.SIGKILL)

    def watch() -> None:
        # The leader holds the other end of stdin. Not through sys.stdin, whose lock this thread
        # would hold when the interpreter ends.
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
