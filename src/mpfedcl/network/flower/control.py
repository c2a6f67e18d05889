"""Calls to the server's control API: register keys, start and stop runs.

Each request carries the server's secret.
"""

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.proto import control_pb2, fab_pb2, node_pb2, transport_pb2
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.flower.programs import read_address
from mpfedcl.network.setup.folders import ServerFolder, write_app
from mpfedcl.network.setup.keys import write_public_key

if TYPE_CHECKING:
    from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext


def register_clients(folder: ServerFolder) -> list[node_pb2.NodeInfo]:
    """Register the keys of all clients, and unregister all others; return the nodes known before.

    Flower refuses every request of an unregistered key, also of a client that is connected.
    """
    keys = {name: folder.public_key(name) for name in folder.clients}
    wanted = {_read_public_key(path): name for name, path in keys.items() if path.is_file()}
    with _connect(folder) as client:
        listed = client.ListNodes(control_pb2.ListNodesRequest()).nodes_info
        nodes = [node for node in listed if node.status != NodeStatus.UNREGISTERED]
        for node in nodes:
            if node.public_key not in wanted:
                client.UnregisterNode(control_pb2.UnregisterNodeRequest(node_id=node.node_id))
        for key in wanted.keys() - {node.public_key for node in nodes}:
            request = control_pb2.RegisterNodeRequest(public_key=key, name=wanted[key])
            try:
                client.RegisterNode(request)
            except httpx.HTTPStatusError as error:
                found = FlowerError.from_json(error.response.text)
                # Flower's list may be incomplete.
                if found is None or found.code != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                    raise
    return nodes


def list_nodes(folder: ServerFolder) -> list[node_pb2.NodeInfo]:
    """Return the nodes with a registered key."""
    with _connect(folder) as client:
        nodes = client.ListNodes(control_pb2.ListNodesRequest()).nodes_info
    return [node for node in nodes if node.status != NodeStatus.UNREGISTERED]


def _read_public_key(path: Path) -> bytes:
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InvalidInput(f"{path} cannot be read as a public key: {error}.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidInput(f"{path} must be a client's public key as mpfedcl writes it.")
    return write_public_key(key)


def read_revoked_keys(folder: Path) -> dict[bytes, str]:
    """Return the names of clients by revoked key, as Flower's clients show their keys."""
    found = {}
    for path in folder.glob("*@*.pub"):
        with contextlib.suppress(InvalidInput):
            found[_read_public_key(path)] = path.name.rpartition("@")[0]
    return found


def admits(folder: ServerFolder, name: str, public_key: bytes) -> bool:
    """Return whether a node's key is the present one of the client with its name."""
    with contextlib.suppress(InvalidInput):
        return _read_public_key(folder.public_key(name)) == public_key
    return False


def submit(folder: ServerFolder, run_config: Mapping[str, str]) -> int:
    """Submit a run to the server; return its Flower run id."""
    # Flower requires an app with a run. Ours contains no code, and is never unpacked.
    write_app(folder.app)
    with warnings.catch_warnings():
        # Flower's packer uses a deprecated function.
        warnings.simplefilter("ignore", DeprecationWarning)
        packed = build_fab_from_disk(folder.app)
    app = fab_pb2.Fab(hash_str=hashlib.sha256(packed).hexdigest(), content=packed)
    config = {name: transport_pb2.Scalar(string=value) for name, value in run_config.items()}
    with _connect(folder) as client:
        request = control_pb2.StartRunRequest(fab=app, override_config=config)
        return int(client.StartRun(request).run_id)


def stop_run(folder: ServerFolder, number: int) -> None:
    """Stop a run at once."""
    with _connect(folder) as client:
        client.StopRun(control_pb2.StopRunRequest(run_id=number))


@contextmanager
def _connect(folder: ServerFolder) -> Iterator[ControlHttpClient]:
    address = read_address(folder)
    client = open_client(ControlHttpClient, folder)
    try:
        with client:
            yield client
    except httpx.TransportError as error:
        raise InvalidInput(
            f"the server of {folder.root} does not answer at {address}; it must be running "
            f"(mpfedcl federation server {folder.root}): {error}"
        ) from None
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise InvalidInput(
                f"the server at {address} does not accept the secret in {folder.secret}; it must "
                "be the one that the server was started with."
            ) from None
        found = FlowerError.from_json(error.response.text)
        why = error if found is None else f"{found.message} {found.public_details or ''}".strip()
        raise InvalidInput(
            f"the server of {folder.root} refuses {error.request.url.path}: {why}"
        ) from None


_Client = TypeVar("_Client", bound=ProtobufClient)


def open_client(kind: type[_Client], folder: ServerFolder) -> _Client:
    """Return a Flower client for the server of a folder, with the secret on every request."""
    return kind.from_server_address(
        read_address(folder),
        insecure=False,
        root_certificates=folder.authority.read_bytes(),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="mpfedcl"),
            ShowSecret(folder.read_secret()),
        ],
    )


class ShowSecret:
    """Adds the secret to every request of a Flower client (an interceptor)."""

    def __init__(self, secret: str) -> None:
        self._shown = f"Bearer {secret}"

    def intercept(
        self, context: "ProtobufRequestContext", call_next: "ProtobufCall"
    ) -> "httpx.Response":
        """Add the header and send the request."""
        context.request.headers["Authorization"] = self._shown
        return call_next(context)
