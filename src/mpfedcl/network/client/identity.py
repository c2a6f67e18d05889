"""A client's private key for secure aggregation, and the known public keys of other clients.

A client trusts another client's key on first use, as ssh does, and stores it in a file. Operators
may compare fingerprints by telephone.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.privacy.secure_aggregation import ProtocolError
from mpfedcl.privacy.secure_aggregation.primitives import signature_algorithm


class Identity:
    """Signs with a client's private key, a file made by `mpfedcl federation init`."""

    def __init__(self, path: Path) -> None:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        try:
            key = load_ssh_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise InvalidInput(f"{path} cannot be read as a client's key: {error}.") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidInput(
                f"{path} must be a client's key as mpfedcl federation init makes it."
            )
        self._key = key

    @property
    def public(self) -> bytes:
        """The public key in OpenSSH format."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return self._key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)

    def sign(self, content: bytes) -> bytes:
        """Return a signature of the content."""
        return self._key.sign(content, signature_algorithm())


def fingerprint(public: bytes) -> str:
    """Return the fingerprint of a key as shown by `ssh-keygen -l`."""
    parts = public.split()
    blob = base64.b64decode(parts[1]) if len(parts) > 1 else public
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


class KnownClients:
    """The keys of other clients, as seen first by this client."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def meet(self, keys: Mapping[str, bytes]) -> list[str]:
        """Refuse clients whose key has changed; store new clients and return their names."""
        known = self._read()
        for name, key in keys.items():
            if known.get(name, key.decode()) != key.decode():
                raise ProtocolError(
                    f"{name} has another key than before; if that is intended, its line must be "
                    "removed from known-clients.json on the client"
                )
        new = [name for name in keys if name not in known]
        if new:
            known |= {name: keys[name].decode() for name in new}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(known, indent=1, sort_keys=True).encode())
        return new

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            # A damaged file must not count as empty: then any key would be accepted.
            raise InvalidInput(f"{self._path} cannot be read; it must be repaired or removed.")
        return found
