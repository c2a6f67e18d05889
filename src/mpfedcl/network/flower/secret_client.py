"""Flower's clients for what only the server's owner may ask: each request shows the secret."""

from typing import TypeVar

from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient

from mpfedcl.network.flower.access import ShowSecret
from mpfedcl.network.flower.programs import read_connection
from mpfedcl.network.setup.folders import ServerFolder

_Client = TypeVar("_Client", bound=ProtobufClient)


def open_client(kind: type[_Client], folder: ServerFolder) -> _Client:
    """Return a client of the server of a folder, to be closed after use."""
    address, authority = read_connection(folder)
    return kind.from_server_address(
        address,
        insecure=authority is None,
        root_certificates=authority,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="mpfedcl"),
            ShowSecret(folder.read_secret()),
        ],
    )
