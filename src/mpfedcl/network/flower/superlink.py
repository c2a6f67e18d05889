"""Flower's server (SuperLink) with access control.

    python -m mpfedcl.network.flower.superlink SECRET FLAGS

One more middleware in Flower's own app: requests without the secret in the file SECRET reach only
/v1/fleet/, where Flower authenticates clients by their keys. Flower itself protects nothing else.
FLAGS are Flower's.
"""

import contextlib
import hmac
import sys
import threading
import time
from base64 import b64encode
from logging import getLogger
from pathlib import Path

import uvicorn
from anyio import to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app
from sqlalchemy.exc import OperationalError
from starlette.types import ASGIApp, Receive, Scope, Send

from mpfedcl.core.processes import end_with_parent
from mpfedcl.network.audit import AUDIT_FILE, AuditLog
from mpfedcl.network.flower.control import read_revoked_keys
from mpfedcl.network.logs import configure_logs
from mpfedcl.network.setup.folders import read_secret

FLEET = "/v1/fleet/"
"""The clients' API, in which each request is signed with a client's key."""
REVOKED = 410
"""HTTP code for a client whose key was revoked; no proxy uses it."""
MOST_BODY = 8 * 2**20
"""Maximum bytes of a client's request, which is read before its signature is checked. Requests of
Flower stay below 6 MB."""
_LOG_SECONDS = 1.0
"""Minimum seconds between two log lines about refusals, so that they cannot fill the disk."""
_CERTIFICATE_SECONDS = 5.0
"""Interval of checks for a renewed certificate."""
_THREADS = 4
"""Requests that are handled at the same time; others wait. Flower's forty block each other's writes
to the database, and after five seconds requests fail with 500, which loses clients' answers."""


class _Lifespan(SuperLinkLifespan):
    def startup(self) -> None:
        """Limit the threads and start Flower."""
        to_thread.current_default_thread_limiter().total_tokens = _THREADS
        super().startup()


def add_guards(app: FastAPI, secret: str, server: Path | None = None) -> None:
    """Add our middleware and error handler to Flower's app; `server` is the server's folder."""
    app.add_exception_handler(OperationalError, _say_busy)
    revoked = RevokedKeys(server) if server is not None else None
    app.add_middleware(RequireSecret, secret=secret, revoked=revoked)


async def _say_busy(_: Request, error: Exception) -> JSONResponse:
    """Answer 503, after which clients and runs repeat the request."""
    getLogger("flwr").warning("Busy: %.200s", error)
    return JSONResponse({"detail": "The database is busy."}, status_code=503)


def main() -> None:
    """Serve until ended."""
    end_with_parent()
    # From a file, because other users can read command lines.
    path = Path(sys.argv.pop(1))
    secret = read_secret(path)
    config = _parse_superlink_lifespan_config()
    log_config = configure_logs(get_uvicorn_log_config(console_handler.level))
    app = create_app(config, _Lifespan)
    add_guards(app, secret, path.parent)
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        # Clients poll every few seconds.
        access_log=False,
        log_config=log_config,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ws="none",
        # The database allows one process.
        workers=1,
    )
    settings.load()
    threading.Thread(target=_reload_certificate, args=(settings,), daemon=True).start()
    uvicorn.Server(settings).run()


def _reload_certificate(settings: uvicorn.Config) -> None:
    """Use a renewed certificate for new connections."""
    certificate, context = Path(str(settings.ssl_certfile)), settings.ssl
    assert context is not None
    known = certificate.stat().st_mtime_ns
    while True:
        time.sleep(_CERTIFICATE_SECONDS)
        # The file may be missing or incomplete for a moment.
        with contextlib.suppress(OSError):
            if (now := certificate.stat().st_mtime_ns) != known:
                context.load_cert_chain(certificate, settings.ssl_keyfile)
                known = now
                getLogger("flwr").info("The renewed certificate is used.")


class RevokedKeys:
    """The revoked keys in a folder, which may change while the server runs."""

    def __init__(self, server: Path) -> None:
        self._folder = server / "revoked"
        self._audit = AuditLog(server / AUDIT_FILE)
        self._keys: dict[bytes, str] = {}
        self._read = 0
        self._seen: set[bytes] = set()

    def contains(self, header: bytes) -> bool:
        """Return whether a request shows a revoked key; record the first of each key."""
        with contextlib.suppress(OSError):
            if (now := self._folder.stat().st_mtime_ns) != self._read:
                keys = read_revoked_keys(self._folder)
                self._keys = {b64encode(key): name for key, name in keys.items()}
                self._read = now
        if header not in self._keys:
            return False
        if header not in self._seen:
            self._seen.add(header)
            self._audit.append("refused", client=self._keys[header], reason="its key was revoked")
        return True


class RequireSecret:
    """Restricts requests without the secret to the clients' API (ASGI middleware)."""

    def __init__(self, app: ASGIApp, secret: str, revoked: RevokedKeys | None = None) -> None:
        self._app, self._revoked = app, revoked
        self._wanted = f"Bearer {secret}".encode()
        self._logged = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        code = 0 if scope["type"] == "lifespan" else self._find_refusal(scope)
        if not code:
            await self._app(scope, receive, send)
            return
        self._log(scope, code)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {"Connection": "close", **({"WWW-Authenticate": "Bearer"} if code == 401 else {})}
        await Response(status_code=code, headers=headers)(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> int:
        """Return the HTTP code of a refusal; 0 if the request is allowed."""
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        shown = [value for name, value in headers if name == b"authorization"]
        # Constant time, so that the secret cannot be guessed piece by piece.
        if len(shown) == 1 and hmac.compare_digest(shown[0], self._wanted):
            return 0
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            return 401
        names = dict(headers)
        shown_key = names.get(FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), b"")
        if self._revoked is not None and self._revoked.contains(shown_key):
            return REVOKED
        if b"transfer-encoding" in names:
            return 411
        length = names.get(b"content-length", b"0")
        return 0 if length.isdigit() and int(length[:20]) <= MOST_BODY else 413

    def _log(self, scope: Scope, code: int) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            host = (scope.get("client") or ("unknown",))[0]
            getLogger("flwr").warning("Refused (%d): %s, %.80r", code, host, scope["path"])


if __name__ == "__main__":
    main()
