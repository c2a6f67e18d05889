"""The process of a client, forked from one that has torch and Flower loaded.

From nothing a client needs four seconds of a processor and 330 MB before it does anything.
"""

import sys

# For the client's first message, which would load it.
import mpfedcl.network.client.client  # noqa: F401
from command_processes import FORKS, PRELOADED
from mpfedcl.network.flower import client as flower_client


def preload() -> None:
    """Have it loaded where clients are forked from; before the first process is."""
    FORKS.set_forkserver_preload([*PRELOADED, __name__])


def take_part(words: list[str]) -> None:
    """Be the process of a client, as its command starts it."""
    sys.argv[1:] = words
    flower_client.main()
