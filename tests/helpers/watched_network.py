"""`mpfedcl` in a process that tells of every attempt to reach another machine."""

import os
import sys

from mpfedcl.cli.main import main

_TELEMETRY = ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE", "CI")
"""What would keep MLflow silent without our doing."""


def in_view_of_the_network(words: list[str]) -> None:
    """Be `mpfedcl`; the first line of errors is "watched", and others are attempts."""
    for name in [*os.environ]:
        if name in _TELEMETRY or name.startswith("PYTEST"):
            del os.environ[name]
    # It looks around when it is imported.
    assert not {"mlflow", "tensorboard"} & sys.modules.keys()
    sys.addaudithook(_tell)
    print("watched", file=sys.stderr, flush=True)
    main(words)


def _tell(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        print("NETWORK", event, arguments[1:], file=sys.stderr, flush=True)
