"""Fixed-point numbers and cryptographic primitives of secure aggregation.

Values are integers modulo 2^64, whose sums are exact in any order: a real x is sent as
round(x 2^24). The values of n clients must lie in ±2^38/n, so that no sum leaves ±2^38; integers
are sent unchanged, in ±2^62/n. Larger values are rejected, never clipped.

The cryptography is from maintained libraries:
X25519 (key agreement), HKDF with SHA-256 (keys), ChaCha20 (streams), ChaCha20-Poly1305 (sealed
shares) and ECDSA (signatures by the clients' OpenSSH keys) come from `cryptography`, Shamir's
secret sharing from pycryptodome. Functions import them at the first use: they belong to the extra
`flower`, and every run imports this module.
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

Ring = NDArray[numpy.uint64]
"""Integers modulo 2^64."""
FRACTION_BITS = 24
"""The sum of n clients is exact to n 2^-25."""
_SUM_BITS = 62
"""Bits of the largest sum; of the other two, one is the sign and one detects impossible sums."""
SECRET_BYTES = 32
_HALF = 16
"""Bytes that pycryptodome splits at a time; a secret has two halves."""
_CHUNK = 2**17
"""Values of a stream generated at a time: one megabyte."""
_ZEROS = bytes(8 * _CHUNK)


def public_key(secret: bytes) -> bytes:
    """Return the public key that belongs to a secret key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the key that two parties share for a purpose."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    exchanged = X25519PrivateKey.from_private_bytes(secret).exchange(
        X25519PublicKey.from_public_bytes(public)
    )
    return derive(exchanged, purpose)


def is_usable(public: bytes) -> bool:
    """Return whether a public key is valid for key agreement (not of low order)."""
    try:
        agree(b"any secret will do for this test", public, b"")
    except ValueError:
        return False
    return True


def derive(secret: bytes, purpose: bytes) -> bytes:
    """Derive a key for one purpose from a secret."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=purpose).derive(secret)


def commit(secret: bytes, purpose: bytes) -> bytes:
    """Return a commitment to a random secret."""
    return hashlib.sha256(b"commitment" + purpose + secret).digest()


def add_stream(values: Ring, key: bytes, *, subtract: bool = False) -> None:
    """Add the stream of a key to values in place; use each key for one stream only."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    for first in range(0, len(values), _CHUNK):
        part = values[first : first + _CHUNK]
        stream = numpy.frombuffer(encryptor.update(_ZEROS[: 8 * len(part)]), dtype="<u8")
        if subtract:
            part -= stream
        else:
            part += stream


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt content with associated data; use each key once."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(12), content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Decrypt content; None if key, content or associated data do not match."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except InvalidTag:
        return None


def split_secret(secret: bytes, num_shares: int, threshold: int) -> list[bytes]:
    """Split a secret of 32 bytes into shares, any `threshold` of which recover it."""
    from Crypto.Protocol.SecretSharing import Shamir

    halves = [
        Shamir.split(threshold, num_shares, half, False)
        for half in (secret[:_HALF], secret[_HALF:])
    ]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """Recover a secret from exactly `threshold` shares, by client index.

    Wrong shares give a wrong secret, so the caller must check it.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    parts = [
        Shamir.combine([(place + 1, share[half]) for place, share in sorted(shares.items())], False)
        for half in (slice(_HALF), slice(_HALF, None))
    ]
    return b"".join(parts)


def _signature_algorithm() -> "ec.ECDSA":
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(hashes.SHA384())


def sign(key: "ec.EllipticCurvePrivateKey", content: bytes) -> tuple[bytes, bytes]:
    """Return a signature and the public key in OpenSSH's format."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return key.sign(content, _signature_algorithm()), public


def is_signed(public: bytes, signature: bytes, content: bytes) -> bool:
    """Return whether the owner of a public key has signed the content."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(public)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, content, _signature_algorithm())
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


# Fixed-point numbers


class OutOfRange(InvalidInput):
    """Raised for a value too large for secure aggregation."""


def largest(num_clients: int, *, is_whole: bool = False) -> float:
    """Return the largest value that each of `num_clients` clients may send.

    Example:
        >>> largest(4), largest(4, is_whole=True) == 2**60
        (68719476736.0, True)
    """
    bits = _SUM_BITS if is_whole else _SUM_BITS - FRACTION_BITS
    return 2.0**bits / num_clients


def encode(name: str, values: NDArray[Any], num_clients: int) -> Ring:
    """Return values as flat integers modulo 2^64; raise OutOfRange with the name."""
    is_whole = values.dtype.kind in "iub"
    flat = values.reshape(-1)
    bound = largest(num_clients, is_whole=is_whole)
    size = float(numpy.abs(flat.astype(numpy.float64)).max(initial=0.0))
    # Written so that NaN is rejected too.
    if not size <= bound:
        raise OutOfRange(
            f"{name} contains {size:.4g}; with secure aggregation of {num_clients} clients it must "
            f"be finite and at most {bound:.4g}."
        )
    if not is_whole:
        flat = numpy.rint(flat.astype(numpy.float64) * 2.0**FRACTION_BITS)
    return flat.astype(numpy.int64).view(numpy.uint64)


def decode(total: Ring, *, is_whole: bool = False) -> NDArray[Any]:
    """Return a sum as int64, or as float64 if reals were encoded."""
    signed = total.view(numpy.int64)
    return signed.copy() if is_whole else signed.astype(numpy.float64) / 2.0**FRACTION_BITS


def is_possible(total: Ring) -> bool:
    """Return whether this is a possible sum of values in range."""
    signed = total.view(numpy.int64)
    # Each client's bound is rounded to 53 bits.
    bound = 2**_SUM_BITS + 2**11
    return not len(signed) or bool((signed <= bound).all() and (signed >= -bound).all())
