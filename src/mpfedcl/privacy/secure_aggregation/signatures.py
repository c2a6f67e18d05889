"""Signatures by the keys that clients have in a federation: ECDSA, as OpenSSH writes them."""

from typing import TYPE_CHECKING

# `cryptography` belongs to an extra, and every run imports this module.
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec


def signature_algorithm() -> "ec.ECDSA":
    """Return the algorithm that clients sign with."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(hashes.SHA384())


def is_signed(public: bytes, signature: bytes, content: bytes) -> bool:
    """Tell whether the owner of a public key has signed the content."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(public)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, content, signature_algorithm())
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True
