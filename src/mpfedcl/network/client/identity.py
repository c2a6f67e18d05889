"""A client's key in the federation: it signs what it shows the others, who know it again.

Whose key is whose is learnt when a client first takes part in a sum with another (as ssh does), and
kept in a file that the client's operator may compare with the others' by telephone.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.privacy.secure_aggregation import ProtocolError
from mpfedcl.privacy.secure_aggregation.signatures import signature_algorithm


class Identity:
    """Signs by a client's private key, a file as `mpfedcl federation init` makes it."""

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
        """The public key, in the form of OpenSSH."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return self._key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)

    def sign(self, content: bytes) -> bytes:
        """Return a signature of the content."""
        return self._key.sign(content, signature_algorithm())


def fingerprint(public: bytes) -> str:
    """Return what people compare of a key, as `ssh-keygen -l` shows it."""
    parts = public.split()
    blob = base64.b64decode(parts[1]) if len(parts) > 1 else public
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


class KnownClients:
    """The keys of other clients, as they were when this client first met them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def meet(self, keys: Mapping[str, bytes]) -> list[str]:
        """Refuse a client whose key is not the one it had; return the names of those now met."""
        known = self._read()
        for name, key in keys.items():
            if known.get(name, key.decode()) != key.decode():
                raise ProtocolError(
                    f"{name} shows another key than before; if that is intended, its line must be "
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
            # Damaged, it must not be taken for an empty one: then anybody could be met anew.
            raise InvalidInput(f"{self._path} cannot be read; it must be repaired or removed.")
        return found
