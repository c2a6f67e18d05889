"""A node of Flower's fleet: a client's connection to its server, with Flower's HTTP client."""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.message_pb2 import Message as ProtobufMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from mpfedcl.network.flower.records import LONGEST_TEXT, open_answer
from mpfedcl.network.transport import MOST_BYTES, AnswerLimit, Message, MessageError

_Answer = TypeVar("_Answer")

LIMIT = AnswerLimit(num_arrays=10_000, array_bytes=MOST_BYTES, text_bytes=LONGEST_TEXT)
"""Size limit of a request."""

_LONGEST_WAIT = 20
"""Maximum seconds between two attempts of a call."""
_PULL_SECONDS = 60.0
"""Time limit for the objects of a message."""
_UNSIGNED, _REFUSED, _BUSY = 401, 412, (502, 503, 504)
"""HTTP codes: wrong signature, unknown or used key, errors of proxies."""


class RefusedError(Exception):
    """The server refuses this client."""

    def __init__(self, *, is_unsigned: bool) -> None:
        super().__init__()
        self.is_unsigned = is_unsigned
        """Whether the signature is wrong; otherwise the key is unknown or in use."""


class RejectedError(Exception):
    """The server does not accept a message, or no longer has it."""


@dataclass(frozen=True)
class Request:
    """A message from the server. The server sends it once, so it must be answered."""

    header: FlowerMessage
    """The message without its content."""
    tree: ObjectTree
    """The objects of its content."""


class FleetNode:
    """One client's connection; calls are repeated after network errors."""

    def __init__(self, address: str, key: Path | None, authority: Path | None) -> None:
        self.address = address
        self.number = 0
        """The node number assigned by the server."""
        self.look_seconds = 0.0
        """Response time of the last poll."""
        self._has_key = key is not None
        private, public = generate_key_pairs() if key is None else _load(key)
        self._public = public_key_to_bytes(public)
        self._client = FleetHttpClient.from_server_address(
            address,
            insecure=authority is None,
            root_certificates=None if authority is None else authority.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, public),
            ],
        )
        self._insist = RetryInvoker(
            lambda: exponential(max_delay=_LONGEST_WAIT),
            httpx.HTTPError,
            max_tries=None,
            max_time=None,
            should_giveup=_is_final,
        ).invoke
        self._heartbeat: HeartbeatSender | None = None

    def enter(self, lost: int | None) -> int:
        """Register with the server; `lost` is the node number of a killed process to take over."""
        try:
            if lost is None or not self._show_alive(lost):
                lost = self._activate()
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if code not in (_UNSIGNED, _REFUSED):
                # A proxy answers while the server is down.
                raise httpx.ConnectError(f"the answer is {code}") from None
            raise RefusedError(is_unsigned=code == _UNSIGNED) from None
        self.number = lost
        self._stop_heartbeat()
        self._heartbeat = HeartbeatSender(self._beat)
        self._heartbeat.start()
        return lost

    def leave(self) -> None:
        """Tell the server that this client disconnects."""
        if self.number:
            self._stop_heartbeat()
            with contextlib.suppress(httpx.HTTPError):
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.number))
            self.number = 0

    def close(self) -> None:
        """Leave, and close the connection."""
        self.leave()
        self._client.close()

    def is_known_as(self, number: int) -> bool:
        """Return whether the server knows this client's key by a node number."""
        try:
            # Any signed request will do; there is no such run.
            self._client.GetRun(GetRunRequest(node=Node(node_id=number), run_id=0))
        except httpx.HTTPStatusError as error:
            return error.response.status_code != _UNSIGNED
        except httpx.TransportError:
            pass
        return True

    def receive(self) -> Request | None:
        """Return the next request, without its content, or None if there is none."""

        def look(request: PullMessagesRequest) -> PullMessagesResponse:
            began = time.monotonic()
            found = self._client.PullMessages(request)
            self.look_seconds = time.monotonic() - began
            return found

        found = self._call(look, PullMessagesRequest(node=Node(node_id=self.number)))
        if not found.messages_list:
            return None
        return Request(message_from_proto(found.messages_list[0]), found.message_object_trees[0])

    def open(self, request: Request) -> Message:
        """Fetch and read a request within the size limit."""
        node, run = Node(node_id=self.number), request.header.metadata.run_id
        root = request.tree.object_id
        identities = list({each.object_id for each in iterate_object_tree(request.tree)})
        left = LIMIT.array_bytes + LIMIT.text_bytes

        def pull(wanted: PullObjectRequest) -> PullObjectResponse:
            nonlocal left
            found = self._call(self._client.PullObject, wanted)
            left -= len(found.object_content)
            if left < 0:
                raise MessageError("the request is too large")
            return found

        try:
            objects = pull_objects(
                identities,
                make_pull_object_fn_protobuf(pull, node, run),
                max_time=_PULL_SECONDS,
            )
            self._call(
                self._client.ConfirmMessageReceived,
                ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=root),
            )
        except (ObjectPullError, RejectedError) as error:
            print(f"A request was lost: {error}", file=sys.stderr, flush=True)
            raise MessageError("it did not get the whole request") from None
        return open_answer(root, lambda identity, _: objects[identity], LIMIT)

    def reply(self, message: FlowerMessage) -> None:
        """Send an answer."""
        message.metadata.__dict__["_message_id"] = message.object_id
        node, run = Node(node_id=self.number), message.metadata.run_id
        with no_object_id_recompute():
            request = PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[get_object_tree(message)],
                clientapp_runtime_list=[0.0],
            )
            taken = self._call(self._client.PushMessages, request)
            try:
                push_objects(
                    get_all_nested_objects(message),
                    make_push_object_fn_protobuf(
                        lambda request: self._call(self._client.PushObject, request),
                        node,
                        run,
                        taken.session_id,
                    ),
                    object_ids_to_push=set(taken.objects_to_push),
                )
            except ObjectPushError as error:
                raise RejectedError(str(error)) from None

    def _call(self, method: Callable[..., _Answer], request: object) -> _Answer:
        try:
            return self._insist(method, request)  # type: ignore[no-any-return]
        except httpx.HTTPStatusError as error:
            if error.response.status_code == _UNSIGNED:
                raise RefusedError(is_unsigned=False) from None
            raise RejectedError(
                f"{error.response.status_code}, {error.response.text[:300]}"
            ) from None

    def _activate(self) -> int:
        if not self._has_key:
            with contextlib.suppress(httpx.HTTPStatusError):
                self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public))
        request = ActivateNodeRequest(
            public_key=self._public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        return int(self._client.ActivateNode(request).node_id)

    def _show_alive(self, number: int) -> bool:
        request = SendNodeHeartbeatRequest(
            node=Node(node_id=number), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        try:
            return bool(self._client.SendNodeHeartbeat(request).success)
        except httpx.HTTPStatusError:
            return False

    def _beat(self) -> bool:
        """Send a heartbeat."""
        with contextlib.suppress(httpx.TransportError):
            return self._show_alive(self.number)
        return False

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None and self._heartbeat.is_running:
            self._heartbeat.stop()


def write_request(request: FlowerMessage) -> bytes:
    """Return a request without its content, as needed for an answer."""
    return bytes(message_to_proto(remove_content_from_message(request)).SerializeToString())


def read_request(content: bytes) -> FlowerMessage:
    """Read the result of `write_request`; raise ValueError on anything else."""
    message = ProtobufMessage()
    try:
        message.ParseFromString(content)
        return message_from_proto(message)
    except Exception as error:
        raise ValueError(f"this is not a request: {type(error).__name__}") from None


def _load(key: Path) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    private = load_ssh_private_key(key.read_bytes(), password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    return private, private.public_key()


def _is_final(error: Exception) -> bool:
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _BUSY
