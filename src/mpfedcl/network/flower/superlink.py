"""Flower's server (SuperLink), guarded: `python -m mpfedcl.network.flower.superlink SECRET FLAGS`.

It is Flower's own app with one middleware more, around all others: whoever does not show the
secret in the file SECRET reaches the clients' part alone. Flower's flags follow.
"""

import sys
from pathlib import Path

import uvicorn
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app

from mpfedcl.network.flower.access import RequireSecret
from mpfedcl.network.setup.folders import read_secret


def main() -> None:
    """Serve until ended."""
    # Read from a file: others can read the words that a process was started with.
    secret = read_secret(Path(sys.argv.pop(1)))
    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    app.add_middleware(RequireSecret, secret=secret)
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
