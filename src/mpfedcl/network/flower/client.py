"""The process of a federation's client.

It speaks to the server as Flower's SuperNode does, with Flower's own parts, and trains in the same
process. Unlike a SuperNode it fetches no app, starts no process and listens on no port, so that
neither the server nor another user can run code here.

    python -m mpfedcl.network.flower.client FOLDER
"""

import contextlib
import json
import os
import random
import signal
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.app import Error
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.processes import end_with_parent
from mpfedcl.network.audit import AUDIT_FILE, AuditLog, keep_audit
from mpfedcl.network.flower.programs import LAST_WORDS
from mpfedcl.network.flower.records import (
    LONGEST_TEXT,
    MESSAGE_TYPES,
    MOST_ARRAYS,
    NotYetError,
    open_answer,
    read_object,
    to_records,
)
from mpfedcl.network.logs import log_to_file, logger
from mpfedcl.network.setup.folders import ClientFolder, ClientSettings
from mpfedcl.network.setup.keys import (
    describe_end,
    find_certificate_end,
    has_expired,
    load_node_key,
    write_public_key,
)
from mpfedcl.network.transport import (
    KILLED,
    MOST_BYTES,
    AnswerLimit,
    Kind,
    Message,
    MessageError,
)

LIMIT = AnswerLimit(num_arrays=MOST_ARRAYS, array_bytes=MOST_BYTES, text_bytes=LONGEST_TEXT)
"""Size limit of a request."""
FAILED = 400
"""Our error code for a client that reports a failure in one sentence."""
_SHORTEST_POLL, _LONGEST_POLL, _POLL_GROWTH = 0.5, 3.0, 1.1
"""Seconds between two polls; the interval grows while there is no request."""
_LOAD_FACTOR = 10.0
"""The poll interval is at least this many times the server's response time, so that many clients
do not overload it."""
_REFUSED_SECONDS = 90.0
"""Time to retry after a refusal. The server needs up to 60 s to notice that a client was killed,
and until then refuses another process with the same key."""
_ASK_SECONDS = 2.0
_BUSY_SECONDS = 20.0
"""Maximum seconds between two attempts to reach the server."""
_HEARTBEAT_SECONDS = 30.0
"""The interval that the server is told; Flower's `HeartbeatSender` beats within it."""
_PULL_SECONDS = 60.0
"""Time limit for the objects of a message."""
_UNSIGNED, _REFUSED, _REVOKED, _BUSY = 401, 412, 410, (502, 503, 504)
"""HTTP codes: wrong signature, unknown or used key, revoked key, errors of proxies."""
_EXPIRED = 10
"""OpenSSL's code for an expired certificate."""
_LEAVE_SECONDS = 60.0
"""Time for leaving properly after the command has ended."""
_DAY, _HANDSHAKE_SECONDS = 86_400.0, 10.0
_REASONS = {
    _UNSIGNED: "it does not accept the signature of the client's key; the clocks of both machines "
    "must agree within minutes",
    _REFUSED: "it does not know the client's key (a new key is registered within seconds), or "
    "another process uses the key, or a process that used it was killed less than a minute ago",
}
_KINDS: dict[str, Kind] = {flower_type: kind for kind, flower_type in MESSAGE_TYPES.items()}

_Answer = TypeVar("_Answer")
RequestHandler = Callable[[Kind, Message], Message]
Report = Callable[[str], None]
"""Prints a sentence for the operator of the client."""


def answer(
    request: FlowerMessage, read: Callable[[], Message], handle: RequestHandler
) -> FlowerMessage:
    """Return a client's answer to a request, or an error with the reason."""
    try:
        kind = _KINDS.get(request.metadata.message_type)
        if kind is None:
            raise MessageError(f"it cannot answer {request.metadata.message_type[:40]!r}")
        return FlowerMessage(to_records(handle(kind, read())), reply_to=request)
    except (InvalidInput, MessageError) as error:
        reason = str(error)
    except Exception as error:
        # The server gets only the type of the error; the traceback stays in this log.
        logger.exception("A request failed.")
        reason = f"it failed with {type(error).__name__}"
    return FlowerMessage(Error(FAILED, reason), reply_to=request)


class RefusedError(Exception):
    """The server refuses this client; the text gives the reason."""


class RejectedError(Exception):
    """The server does not accept a message, or no longer has it."""


class SuperNode:
    """One client's connection to the SuperLink; calls are repeated after network errors."""

    def __init__(self, address: str, key: Path, authority: Path, report: Report = print) -> None:
        self.address = address
        self._authority, self._report = authority, report
        self._has_reported = False
        """Whether the operator knows of the certificate that made a request fail."""
        self.number = 0
        """The node number assigned by the server."""
        self.poll_seconds = 0.0
        """Response time of the last poll."""
        private = load_node_key(key)
        self._public = write_public_key(private.public_key())
        self._client = FleetHttpClient.from_server_address(
            address,
            insecure=False,
            root_certificates=authority.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
        )
        self._heartbeat: HeartbeatSender | None = None

    def enter(self, lost: int | None) -> int:
        """Register with the server; `lost` is the node number of a killed process to take over."""
        try:
            if lost is None or not self._is_known(lost):
                lost = self._activate()
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if code == _REVOKED:
                raise self._revoked() from None
            if code not in _REASONS:
                # A proxy answers while the server is down.
                raise httpx.ConnectError(f"the answer is {code}") from None
            raise RefusedError(_REASONS[code]) from None
        self.number = lost
        self._stop_heartbeat()
        self._heartbeat = HeartbeatSender(partial(self._beat, lost))
        self._heartbeat.start()
        return lost

    def close(self) -> None:
        """Leave, and close the connection."""
        self.leave()
        self._client.close()

    def leave(self) -> None:
        """Notify the server that this client disconnects."""
        if self.number:
            self._stop_heartbeat()
            with contextlib.suppress(httpx.HTTPError):
                self._client.DeactivateNode(fleet_pb2.DeactivateNodeRequest(node_id=self.number))
            self.number = 0

    def receive(self) -> FlowerMessage | None:
        """Return the next request, without its content, or None if there is none.

        The server sends each request once, so it must be answered.
        """

        def poll(request: fleet_pb2.PullMessagesRequest) -> Any:
            began = time.monotonic()
            found = self._client.PullMessages(request)
            self.poll_seconds = time.monotonic() - began
            return found

        found = self._call(poll, fleet_pb2.PullMessagesRequest(node=Node(node_id=self.number)))
        return message_from_proto(found.messages_list[0]) if found.messages_list else None

    def open(self, request: FlowerMessage) -> Message:
        """Fetch and read the content of a request within the size limit."""
        node, run = Node(node_id=self.number), request.metadata.run_id
        root, end = request.metadata.message_id, time.monotonic() + _PULL_SECONDS
        fetched: dict[str, bytes] = {}

        def fetch(identity: str, most: int) -> bytes:
            if identity not in fetched:
                wanted = message_pb2.PullObjectRequest(node=node, run_id=run, object_id=identity)
                found = self._call(self._client.PullObject, wanted)
                fetched[identity] = read_object(found, identity, most)
            return fetched[identity]

        received = message_pb2.ConfirmMessageReceivedRequest(
            node=node, run_id=run, message_object_id=root
        )
        while True:
            try:
                message = open_answer(root, fetch, LIMIT)
                self._call(self._client.ConfirmMessageReceived, received)
                return message
            except RejectedError as error:
                logger.warning("A request was lost: %s", error)
                raise MessageError("it did not get the whole request") from None
            except NotYetError:
                if time.monotonic() > end:
                    raise MessageError("it did not get the whole request in time") from None
                time.sleep(_SHORTEST_POLL)

    def reply(self, message: FlowerMessage) -> None:
        """Send an answer."""
        message.metadata.__dict__["_message_id"] = message.object_id
        node, run = Node(node_id=self.number), message.metadata.run_id
        with no_object_id_recompute():
            request = fleet_pb2.PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[get_object_tree(message)],
                clientapp_runtime_list=[0.0],
            )
            taken = self._call(self._client.PushMessages, request)
            push = partial(self._call, self._client.PushObject)
            try:
                push_objects(
                    get_all_nested_objects(message),
                    make_push_object_fn_protobuf(push, node, run, taken.session_id),
                    object_ids_to_push=set(taken.objects_to_push),
                )
            except ObjectPushError as error:
                raise RejectedError(str(error)) from None

    def _call(self, method: Callable[..., _Answer], request: object) -> _Answer:
        try:
            return self._insist(partial(method, request))
        except httpx.HTTPStatusError as error:
            if error.response.status_code == _REVOKED:
                raise self._revoked() from None
            if error.response.status_code == _UNSIGNED:
                raise RefusedError(_REASONS[_REFUSED]) from None
            raise RejectedError(
                f"{error.response.status_code}, {error.response.text[:300]}"
            ) from None

    def _activate(self) -> int:
        request = fleet_pb2.ActivateNodeRequest(
            public_key=self._public, heartbeat_interval=_HEARTBEAT_SECONDS
        )
        return int(self._client.ActivateNode(request).node_id)

    def _show_alive(self, number: int) -> bool:
        """Send a heartbeat of a node; return whether the server has accepted it."""
        request = SendNodeHeartbeatRequest(
            node=Node(node_id=number), heartbeat_interval=_HEARTBEAT_SECONDS
        )
        return bool(self._client.SendNodeHeartbeat(request).success)

    def _is_known(self, number: int) -> bool:
        """Return whether the server still knows the node; a lost database has other numbers."""
        try:
            return self._show_alive(number)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != _UNSIGNED:
                raise
            return False

    def _beat(self, number: int) -> bool:
        """Send a heartbeat; a server that cannot be reached has not accepted it."""
        with contextlib.suppress(httpx.HTTPError):
            return self._show_alive(number)
        return False

    def _revoked(self) -> InvalidInput:
        return InvalidInput(
            f"the server at {self.address} has revoked this client's key; only its operator can "
            "hand out a new one (mpfedcl federation rotate)."
        )

    def _insist(self, call: Callable[[], _Answer]) -> _Answer:
        """Repeat a call until the server has answered, with waits that grow and differ by client.

        An expired certificate is reported once.
        """
        longest = 1.0
        while True:
            try:
                found = call()
            except httpx.HTTPError as error:
                if _is_final(error):
                    raise
                why = None if self._has_reported else describe_expired(error, self._authority)
                if why:
                    self._has_reported = True
                    self._report(f"{why} Requests to {self.address} are repeated until then.")
            else:
                self._has_reported = False
                return found
            time.sleep(random.uniform(0, longest))
            longest = min(2 * longest, _BUSY_SECONDS)

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None and self._heartbeat.is_running:
            self._heartbeat.stop()


def _is_final(error: Exception) -> bool:
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _BUSY


def take_part(folder: ClientFolder, server: str, handle: RequestHandler, report: Report) -> None:
    """Answer the server's requests until this process ends."""
    place = _Place(folder)
    try:
        node = SuperNode(server, folder.key, folder.authority, report)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{folder.authority} cannot be read as a certificate: {error}."
        ) from None
    try:
        _enter(node, folder, place, report)
        if (request := place.unfinished()) is not None:
            # First, because answering again might kill this process, too.
            place.finish()
            killed = Error(FAILED, KILLED)
            _send(node, FlowerMessage(killed, reply_to=request))
        wait, warned = _SHORTEST_POLL, float("-inf")
        while True:
            if time.monotonic() - warned > _DAY:
                warned = time.monotonic()
                warn_about_certificates(server, folder.authority, report)
            if (request := _receive(node, folder, place, report)) is not None:
                place.begin(request)
                _send(node, answer(request, partial(node.open, request), handle))
                place.finish()
                wait = _SHORTEST_POLL
            else:
                time.sleep(max(wait, min(_LOAD_FACTOR * node.poll_seconds, _BUSY_SECONDS)))
                wait = min(wait * _POLL_GROWTH, _LONGEST_POLL)
    finally:
        node.close()
        place.leave()


class _Place:
    """Node number and current request on disk, for the next process after a kill."""

    def __init__(self, folder: ClientFolder) -> None:
        self._node = folder.flower_home / "node.json"
        self._request = folder.flower_home / "request"
        # A copy of the folder elsewhere must not replace this client, nor one before a reboot.
        number = ""
        with contextlib.suppress(OSError):
            number = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        self._here = {"folder": str(folder.root.resolve()), "boot": number}
        folder.flower_home.mkdir(exist_ok=True)

    def enter(self, node: int) -> None:
        """Store the node number that the server has assigned."""
        write_atomically(self._node, json.dumps({"node": node, **self._here}).encode())

    def leave(self) -> None:
        """Record that the client has left."""
        self._node.unlink(missing_ok=True)

    def lost_node(self) -> int | None:
        """Return the node number of a process of this folder that was killed."""
        # A damaged file may fail in any way.
        with contextlib.suppress(Exception):
            known = json.loads(self._node.read_bytes())
            if known == {**self._here, "node": int(known["node"])}:
                return int(known["node"])
        return None

    def begin(self, request: FlowerMessage) -> None:
        """Store the request that is being answered, without its content."""
        header = message_to_proto(remove_content_from_message(request))
        write_atomically(self._request, header.SerializeToString(), durable=False)

    def finish(self) -> None:
        """Record that the request was answered."""
        self._request.unlink(missing_ok=True)

    def unfinished(self) -> FlowerMessage | None:
        """Return the request during which the previous process was killed."""
        # A damaged file may fail in any way.
        with contextlib.suppress(Exception):
            return message_from_proto(message_pb2.Message.FromString(self._request.read_bytes()))
        return None


def _enter(node: SuperNode, folder: ClientFolder, place: _Place, report: Report) -> None:
    """Register with the server; report a refusal and retry for a while."""
    refused_since: float | None = None
    has_waited, wait = False, 1.0
    while True:
        try:
            place.enter(node.enter(place.lost_node()))
        except httpx.TransportError as error:
            # A client that was connected before waits until its server is back.
            if not node.number and (why := describe_expired(error, folder.authority)):
                raise InvalidInput(why) from None
            if not node.number and _is_wrong_server(error):
                raise InvalidInput(
                    f"server is {node.address!r}; it must use TLS, and its certificate must be "
                    f"signed by {folder.authority}: {error}."
                ) from None
            if not has_waited:
                report(f"No server at {node.address} yet ({error}); {folder.name} waits for it.")
            has_waited = True
            time.sleep(wait)
            wait = min(2 * wait, _BUSY_SECONDS)
        except RefusedError as error:
            now = time.monotonic()
            if refused_since is None:
                refused_since = now
                report(
                    f"The server refuses {folder.name}: {error}. "
                    f"Trying again for {_REFUSED_SECONDS:g} s."
                )
            elif now - refused_since > _REFUSED_SECONDS:
                raise InvalidInput(
                    f"the server at {node.address} refuses {folder.name}: {error}."
                ) from None
            time.sleep(_ASK_SECONDS)
        else:
            logger.info("SuperNode ID: %d", node.number)
            report(
                f"{folder.name} is connected to {node.address}; log: {folder.log}. Ctrl-C ends it."
            )
            return


def describe_expired(error: BaseException | None, authority: Path) -> str | None:
    """Return a sentence about the expired certificate behind a failed connection, or None."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    if error is None or error.verify_code != _EXPIRED:
        return None
    if has_expired(find_certificate_end(authority)):
        return f"{authority} has expired; the server's operator has a new one."
    return (
        "the server's certificate has expired; its operator renews it with mpfedcl federation "
        "renew."
    )


def warn_about_certificates(server: str, authority: Path, report: Report) -> None:
    """Report certificates that expire within 30 days."""
    host, _, port = server.rpartition(":")
    ends = {f"{authority}": find_certificate_end(authority)}
    with contextlib.suppress(OSError, ValueError, InvalidInput):
        found = ssl.get_server_certificate(
            (host, int(port)), ca_certs=str(authority), timeout=_HANDSHAKE_SECONDS
        )
        ends["the server's certificate"] = find_certificate_end(found)
    for what, end in ends.items():
        if sentence := describe_end(what, end, "the server's operator must renew it"):
            logger.warning("%s", sentence)
            report(sentence)


def _is_wrong_server(error: BaseException | None) -> bool:
    """Return whether a program has answered that uses no TLS, or another certificate."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    # A server that starts or ends may close the connection at any moment.
    return error is not None and not isinstance(error, ssl.SSLEOFError)


def _receive(
    node: SuperNode, folder: ClientFolder, place: _Place, report: Report
) -> FlowerMessage | None:
    try:
        return node.receive()
    except RefusedError:
        # The server has lost its state.
        _enter(node, folder, place, report)
    except RejectedError as error:
        logger.warning("The server did not accept the poll: %s", error)
    return None


def _send(node: SuperNode, reply: FlowerMessage) -> None:
    try:
        node.reply(reply)
    except (RejectedError, RefusedError) as error:
        # The run has ended, or the deadline has passed.
        logger.warning("An answer was not accepted: %s", error)


def main() -> None:
    """Run the client of a folder; messages for the operator go to stdout."""
    folder = ClientFolder.open(Path(sys.argv[1]), None)
    operator = os.dup(1)
    # Everything else that is printed goes to the log.
    os.dup2(2, 1)

    def report(words: str) -> None:
        with contextlib.suppress(OSError):
            os.write(operator, f"{words}\n".encode())

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    end_with_parent(_LEAVE_SECONDS)
    log_to_file()
    audit = AuditLog(folder.root / AUDIT_FILE)
    code = 0
    try:
        from mpfedcl.network.client.client import NetworkClient

        settings = ClientSettings.read(folder.settings)
        audit.append("start", server=settings.server)
        handle = keep_audit(NetworkClient(settings).answer, audit)
        take_part(folder, settings.server, handle, report)
    except (InvalidInput, MessageError) as error:
        logger.error("%s", error)
        report(f"{LAST_WORDS}{error}")
        code = 2
    except KeyboardInterrupt:
        pass
    with contextlib.suppress(OSError):
        audit.append("stop", code=code)
    sys.stdout.flush()
    # Do not wait for threads of an interrupted transfer.
    os._exit(code)


if __name__ == "__main__":
    main()
