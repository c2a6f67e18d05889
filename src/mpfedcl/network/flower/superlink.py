"""Flower's server (SuperLink), guarded: `python -m mpfedcl.network.flower.superlink SECRET FLAGS`.

It is Flower's own app with one middleware more, around all others: whoever does not show the
secret in the file SECRET reaches the clients' part alone. Flower's flags follow.

It is also made for many clients at a time. By itself it works on forty requests at once; they keep
each other from writing to the database, and those that have waited for five seconds are answered
500, after which a client's answer is lost.
"""

import sys
from logging import getLogger
from pathlib import Path

import uvicorn
from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app
from sqlalchemy.exc import OperationalError

from mpfedcl.network.flower.access import RequireSecret
from mpfedcl.network.setup.folders import read_secret

_THREADS = 4
"""Requests that are worked on at a time; the others wait for their turn."""


class _Lifespan(SuperLinkLifespan):
    """Flower's own, with few threads."""

    def startup(self) -> None:
        """Start what Flower starts."""
        # Of the event loop in which this is called.
        to_thread.current_default_thread_limiter().total_tokens = _THREADS
        super().startup()


def add_guards(app: FastAPI, secret: str) -> None:
    """Add what is ours to Flower's app."""
    app.add_exception_handler(OperationalError, _say_busy)
    app.add_middleware(RequireSecret, secret=secret)


async def _say_busy(_: Request, error: Exception) -> JSONResponse:
    """Answer that a request must be made again, as clients and runs then do by themselves."""
    getLogger("flwr").warning("Busy: %.200s", error)
    return JSONResponse({"detail": "The database is busy."}, status_code=503)


def main() -> None:
    """Serve until ended."""
    # Read from a file: others can read the words that a process was started with.
    secret = read_secret(Path(sys.argv.pop(1)))
    config = _parse_superlink_lifespan_config()
    app = create_app(config, _Lifespan)
    add_guards(app, secret)
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        # Clients ask for messages every few seconds, for months.
        access_log=False,
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ws="none",
        # What its state is kept in may have one process.
        workers=1,
    )


if __name__ == "__main__":
    main()
