"""The Flower apps, with all that accompanies a run.

`python -m mpfedcl.flower_app FEDERATION` is the server's executor: it waits for a run and runs it.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpfedcl.network.flower.apps import client_app, make_server_app

if TYPE_CHECKING:
    from mpfedcl.runs.observer import Callbacks

__all__ = ["client_app", "server_app"]


def _find_callbacks() -> "Callbacks":
    # Only when a run begins: whoever lists the apps must not wait for torch.
    from mpfedcl.api import COMPANIONS

    return COMPANIONS


server_app = make_server_app(_find_callbacks)


def main() -> None:
    """Wait for a run of a federation, and run it."""
    from mpfedcl.network.flower.server_executor import execute_next_run
    from mpfedcl.network.setup.folders import ServerFolder

    # Now, while nobody waits: torch takes seconds to load.
    _find_callbacks()
    code = execute_next_run(ServerFolder.open(Path(sys.argv[1])), _find_callbacks)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait for what a client has sent in half are not waited for.
    os._exit(code)


if __name__ == "__main__":
    main()
