"""The server's secret: whoever shows it may start and run experiments; both ends of showing it.

Flower's server has three parts behind one port. Clients are known by their keys in the first,
/v1/fleet/; of everything else Flower itself asks nothing.
"""

import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from logging import getLogger
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx
    from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

FLEET = "/v1/fleet/"
"""The clients' part, in which each request is signed by a client's key."""
MOST_BODY = 8 * 2**20
"""Bytes of a client's request, which is read before its key is checked. Flower's are below 6 MB."""
_LOG_SECONDS = 1.0
"""Between two lines about strangers: they must not fill the disk either."""


class RequireSecret:
    """Lets nobody without the secret further than the clients' part (ASGI middleware)."""

    def __init__(self, app: _App, secret: str) -> None:
        self._app = app
        self._wanted = f"Bearer {secret}".encode()
        self._logged = 0.0

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        code = 0 if scope["type"] == "lifespan" else self._judge(scope)
        if not code:
            await self._app(scope, receive, send)
            return
        self._log(scope, code)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        if code == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _judge(self, scope: _Scope) -> int:
        """Return the code by which a request is refused; 0: it is not."""
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        shown = [value for name, value in headers if name == b"authorization"]
        # It takes as long whatever is shown, so that nobody can guess it piece by piece.
        if len(shown) == 1 and hmac.compare_digest(shown[0], self._wanted):
            return 0
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            return 401
        names = dict(headers)
        if b"transfer-encoding" in names:
            return 411
        length = names.get(b"content-length", b"0")
        return 0 if length.isdigit() and int(length[:20]) <= MOST_BODY else 413

    def _log(self, scope: _Scope, code: int) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            host = (scope.get("client") or ("somebody",))[0]
            getLogger("flwr").warning("Refused (%d): %s, %.80r", code, host, scope["path"])


class ShowSecret:
    """Shows the secret with every request of one of Flower's clients (an interceptor)."""

    def __init__(self, secret: str) -> None:
        self._shown = f"Bearer {secret}"

    def intercept(
        self, context: "ProtobufRequestContext", call_next: "ProtobufCall"
    ) -> "httpx.Response":
        """Add the header and send the request."""
        context.request.headers["Authorization"] = self._shown
        return call_next(context)
