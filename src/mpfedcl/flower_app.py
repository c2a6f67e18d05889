"""The Flower apps of the package.

`python -m mpfedcl.flower_app FEDERATION` is the server's executor: it waits for a run and executes
it. In another Flower federation, `flwr run . NAME -c "settings='method=fedproto rounds=20'"` runs
the apps; `network/flower/run_config.py` lists the keys of the run configuration.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpfedcl.network.flower.client import client_app
from mpfedcl.network.flower.server import make_server_app

if TYPE_CHECKING:
    from mpfedcl.runs.observer import Callbacks

__all__ = ["client_app", "server_app"]


def _find_callbacks() -> "Callbacks":
    # Imported when a run starts, because listing the apps must not load torch.
    from mpfedcl.api import CALLBACKS

    return CALLBACKS


server_app = make_server_app(_find_callbacks)


def main() -> None:
    """Wait for a run of a federation, and execute it."""
    from mpfedcl.network.flower.server import execute_next_run
    from mpfedcl.network.setup.folders import ServerFolder

    # Load torch, which takes seconds, before the run is submitted.
    _find_callbacks()
    code = execute_next_run(ServerFolder.open(Path(sys.argv[1])), _find_callbacks)
    sys.stdout.flush()
    sys.stderr.flush()
    # Do not wait for threads that fetch incomplete answers.
    os._exit(code)


if __name__ == "__main__":
    main()
