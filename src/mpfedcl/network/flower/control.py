"""Calls to the server's control path: let keys in, start a run, stop one; each shows the secret."""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.cli.constant import (
    ACCESS_TOKEN_STORE_KEY,
    AUTHN_TYPE_STORE_KEY,
    REFRESH_TOKEN_STORE_KEY,
)
from flwr.common.constant import AuthnType
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.flower.programs import read_connection
from mpfedcl.network.flower.secret_client import open_client
from mpfedcl.network.setup.folders import ServerFolder, write_app


def register_clients(folder: ServerFolder) -> list[str]:
    """Let the keys of all clients in; return the names of those that were not in before."""
    with _connect(folder) as client:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
        known = {node.name for node in nodes}
        new = [name for name in folder.clients if name not in known]
        for name in new:
            key = load_ssh_public_key(folder.public_key(name).read_bytes())
            assert isinstance(key, ec.EllipticCurvePublicKey)
            request = RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name)
            try:
                client.RegisterNode(request)
            except httpx.HTTPStatusError as error:
                # Flower does not list all that it knows at any moment.
                if _find_error(error)[0] != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                    raise
    return new


def lend_secret(folder: ServerFolder) -> None:
    """Let Flower's own command show the secret too: it has a store for what it shows."""
    address, _ = read_connection(folder)
    store = FileCredentialStore(folder.flower_home / "credentials.yaml")
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    for key in (ACCESS_TOKEN_STORE_KEY, REFRESH_TOKEN_STORE_KEY):
        store.set(key % address, folder.read_secret().encode())


def submit(folder: ServerFolder, run_config: Mapping[str, str]) -> int:
    """Hand a run to the server; return Flower's number for it."""
    with _connect(folder) as client:
        request = StartRunRequest(
            fab=fab_to_proto(_pack_app(folder)),
            override_config=user_config_to_proto(dict(run_config)),
        )
        return int(client.StartRun(request).run_id)


def _pack_app(folder: ServerFolder) -> Fab:
    """Return the app without which Flower starts no run: it names ours, and nobody unpacks it."""
    write_app(folder.app)
    with warnings.catch_warnings():
        # Flower's own packer uses what another library will drop.
        warnings.simplefilter("ignore", DeprecationWarning)
        packed = build_fab_from_disk(folder.app)
    return Fab(hashlib.sha256(packed).hexdigest(), packed, {})


def stop_run(folder: ServerFolder, number: int) -> None:
    """End a run at once."""
    with _connect(folder) as client:
        client.StopRun(StopRunRequest(run_id=number))


@contextmanager
def _connect(folder: ServerFolder) -> Iterator[ControlHttpClient]:
    address, _ = read_connection(folder)
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
                "be the one that it was started with."
            ) from None
        raise InvalidInput(
            f"the server of {folder.root} refuses {error.request.url.path}: {_find_error(error)[1]}"
        ) from None


def _find_error(error: httpx.HTTPStatusError) -> tuple[int, str]:
    """Return Flower's number of an error, and its words."""
    found = FlowerError.from_json(error.response.text)
    if found is None:
        return 0, str(error)
    return int(found.code), f"{found.message} {found.public_details or ''}".strip()
