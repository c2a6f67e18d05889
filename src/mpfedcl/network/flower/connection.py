"""The connection to a server, tried before Flower's programs do: they would try for ever."""

import socket
import ssl
from pathlib import Path

from mpfedcl.core.errors import InvalidInput

_SECONDS = 5.0


def check_connection(server: str, authority: Path | None) -> str | None:
    """Refuse a server that is not the one wanted; return why it cannot be reached, or None.

    Without an authority the connection must be plain text.
    """
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise InvalidInput(f"server is {server!r}; it must be host:port.")
    context = _trust_anybody() if authority is None else _trust_authority(authority)
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), _SECONDS) as opened,
            context.wrap_socket(opened, server_hostname=host.strip("[]")),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        raise InvalidInput(
            f"server is {server!r}; its certificate must be vouched for by {authority}: "
            f"{error.verify_message}."
        ) from None
    except ssl.SSLError:
        if authority is None:
            return None
        raise InvalidInput(
            f"server is {server!r}; what answers there does not speak TLS."
        ) from None
    except OSError as error:
        # A server that speaks plain text may hang up or be silent when greeted by TLS.
        is_plain = authority is None and isinstance(error, (ConnectionResetError, TimeoutError))
        return None if is_plain else error.strerror or str(error)
    if authority is None:
        raise InvalidInput(f"server is {server!r}; it speaks TLS: --insecure must be left out.")
    return None


def _trust_authority(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(f"{authority} cannot be read as a certificate: {error}.") from None


def _trust_anybody() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
