"""The cryptography that the protocol is made of, all of it from kept libraries.

X25519 (key agreement), HKDF with SHA-256 (keys), ChaCha20 (streams), ChaCha20-Poly1305 (sealed
shares) are those of `cryptography`; Shamir's secret sharing is pycryptodome's. Both are imported
where they are used: they belong to the extra `flower`, and every run imports this module.
"""

import hashlib
from collections.abc import Mapping

import numpy

from mpfedcl.privacy.secure_aggregation.fixed_point import Ring

SECRET_BYTES = 32
_HALF = 16
"""What pycryptodome shares at a time: a secret is two of them."""
_CHUNK = 2**17
"""Numbers that a stream is made of at a time: a megabyte."""
_ZEROS = bytes(8 * _CHUNK)


def public_key(secret: bytes) -> bytes:
    """Return the public key of a secret one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the key that two parties share for a purpose, and nobody else."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    exchanged = X25519PrivateKey.from_private_bytes(secret).exchange(
        X25519PublicKey.from_public_bytes(public)
    )
    return derive(exchanged, purpose)


def is_usable(public: bytes) -> bool:
    """Tell whether keys can be agreed on with a public key: with some all keys come out alike."""
    try:
        agree(b"any secret will do for this test", public, b"")
    except ValueError:
        return False
    return True


def derive(secret: bytes, purpose: bytes) -> bytes:
    """Return a key made from a secret for one purpose."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=purpose).derive(secret)


def commit(secret: bytes, purpose: bytes) -> bytes:
    """Return what binds to a random secret without showing it."""
    return hashlib.sha256(b"commitment" + purpose + secret).digest()


def add_stream(numbers: Ring, key: bytes, *, subtract: bool = False) -> None:
    """Add the stream of a key to numbers, in place; a key serves for one stream only."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    for first in range(0, len(numbers), _CHUNK):
        part = numbers[first : first + _CHUNK]
        stream = numpy.frombuffer(encryptor.update(_ZEROS[: 8 * len(part)]), dtype="<u8")
        if subtract:
            part -= stream
        else:
            part += stream


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt content, bound to what it is about; a key seals once."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(12), content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Return the content; None where it is not what was sealed under this key about this."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except InvalidTag:
        return None


def split_secret(secret: bytes, num_shares: int, threshold: int) -> list[bytes]:
    """Return shares of a secret of 32 bytes, of which any `threshold` give it back."""
    from Crypto.Protocol.SecretSharing import Shamir

    halves = [
        Shamir.split(threshold, num_shares, half, False)
        for half in (secret[:_HALF], secret[_HALF:])
    ]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of exactly as many shares as its threshold, by place from 0.

    Shares of something else give something else: who knows how to check it must.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    parts = [
        Shamir.combine([(place + 1, share[half]) for place, share in sorted(shares.items())], False)
        for half in (slice(_HALF), slice(_HALF, None))
    ]
    return b"".join(parts)
