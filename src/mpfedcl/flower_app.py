"""The server's executor: it waits for a run of a federation, and executes it.

python -m mpfedcl.flower_app FEDERATION
"""

import os
import sys
from pathlib import Path

from mpfedcl.api import CALLBACKS
from mpfedcl.core.processes import end_with_parent
from mpfedcl.network.flower.server import execute_next_run
from mpfedcl.network.logs import log_to_file
from mpfedcl.network.setup.folders import ServerFolder


def main() -> None:
    """Wait for a run of a federation, and execute it."""
    end_with_parent()
    log_to_file()
    code = execute_next_run(ServerFolder.open(Path(sys.argv[1])), CALLBACKS)
    sys.stdout.flush()
    sys.stderr.flush()
    # Do not wait for threads that fetch incomplete answers.
    os._exit(code)


if __name__ == "__main__":
    main()
