"""The secret of the server: requests without it reach only the clients' API."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from flwr.superlink.main import create_app
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.network.flower.superlink import MOST_BODY, RequireSecret

SECRET = "s3cret-of-this-server"


def ask(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> int:
    """Return the code of the answer; 200 is from behind the guard."""
    codes: list[int] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the body of a refused request must not be read")

    async def send(message: MutableMapping[str, Any]) -> None:
        codes.append(message.get("status") or message.get("code") or 0)

    scope = {"type": kind, "path": path, "headers": list(headers), "client": ("127.0.0.1", 1)}
    asyncio.run(RequireSecret(app, SECRET)(scope, receive, send))
    return codes[0]


def shown(words: str) -> tuple[bytes, bytes]:
    return (b"authorization", words.encode())


GOOD = shown(f"Bearer {SECRET}")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/",
        "",
        "/docs",
        "/openapi.json",
        "/v1/fleet",
        "/V1/FLEET/pull-messages",
        "//v1/fleet/pull-messages",
        "/x/v1/fleet/",
    ],
)
def test_everything_outside_the_fleet_api_requires_the_secret(path: str) -> None:
    assert ask(path) == 401
    assert ask(path, GOOD) == 200
    assert ask("/v1/fleet/pull-messages") == 200


@pytest.mark.parametrize(
    "headers",
    [
        (shown(SECRET),),
        (shown(f"bearer {SECRET}"),),
        (shown(f"Bearer {SECRET} "),),
        (shown(f"Bearer {SECRET[:-1]}"),),
        (shown(f"Bearer {SECRET}x"),),
        (shown("Bearer "),),
        (shown(""),),
        (shown("Basic " + SECRET),),
        (GOOD, shown("Bearer other")),
        (GOOD, GOOD),
        ((b"x-authorization", GOOD[1]),),
        ((b"cookie", GOOD[1]),),
    ],
)
def test_almost_correct_secrets_are_rejected(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    assert ask("/v1/control/start-run", *headers) == 401


@given(st.text(alphabet=st.characters(max_codepoint=255)))
def test_other_authorization_headers_are_rejected(words: str) -> None:
    header = (b"authorization", words.encode("latin-1"))
    assert ask("/v1/control/stop-run", header) == (200 if words == f"Bearer {SECRET}" else 401)


def test_websockets_are_refused() -> None:
    assert ask("/v1/fleet/x", kind="websocket") == 1008
    assert ask("/v1/control/x", kind="websocket") == 1008


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([(b"content-length", str(MOST_BODY).encode())], 200),
        ([(b"content-length", str(MOST_BODY + 1).encode())], 413),
        ([(b"content-length", b"9" * 5000)], 413),
        ([(b"content-length", b"-1")], 413),
        ([(b"content-length", b"x")], 413),
        ([(b"transfer-encoding", b"chunked")], 411),
        ([(b"transfer-encoding", b"chunked"), (b"content-length", b"1")], 411),
    ],
)
def test_request_body_is_measured_before_reading(
    headers: list[tuple[bytes, bytes]], code: int
) -> None:
    """Flower reads all of it before it looks at the key."""
    assert ask("/v1/fleet/push-object", *headers) == code
    assert ask("/v1/runtime/push-object", *headers, GOOD) == 200


def test_every_flower_path_outside_fleet_requires_the_secret() -> None:
    app = create_app()
    app.add_middleware(RequireSecret, secret=SECRET)
    paths = {str(vars(each.route)["path"]) for each in iter_route_contexts(app.routes)}
    ours = {path for path in paths if path.startswith("/v1/fleet/")}
    assert {"/v1/control/start-run", "/v1/control/register-node"} < paths - ours
    assert {"/v1/runtime/acquire-task", "/v1/runtime/push-messages"} < paths - ours
    assert len(ours) >= 10
    kind = {"content-type": "application/protobuf"}

    async def post(path: str, **headers: str) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.post(path, content=b"", headers={**kind, **headers})).status_code

    for path in sorted(paths):
        # In the clients' part a key is asked for, by Flower.
        assert asyncio.run(post(path)) == 401, path
    assert asyncio.run(post("/v1/control/list-runs", authorization=f"Bearer {SECRET}")) == 200
