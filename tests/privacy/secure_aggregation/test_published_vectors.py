"""The primitives against published vectors and against oracles written out by hand."""

import struct
from itertools import combinations

import numpy
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.privacy.secure_aggregation.primitives import (
    add_stream,
    agree,
    derive,
    is_signed,
    join_shares,
    public_key,
    seal,
    sign,
    split_secret,
    unseal,
)

_hex = bytes.fromhex

# X25519: RFC 7748, section 6.1
ALICE = _hex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
ALICE_PUBLIC = _hex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
BOB = _hex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
BOB_PUBLIC = _hex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
SHARED = _hex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")


def test_key_agreement() -> None:
    assert (public_key(ALICE), public_key(BOB)) == (ALICE_PUBLIC, BOB_PUBLIC)
    agreed = derive(SHARED, b"purpose")
    assert agree(ALICE, BOB_PUBLIC, b"purpose") == agree(BOB, ALICE_PUBLIC, b"purpose") == agreed


def test_derived_keys() -> None:
    """RFC 5869, test case 3: no salt and no purpose; the first of its 42 bytes."""
    expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    assert derive(bytes([0x0B] * 22), b"") == _hex(expected)


# ChaCha20 and Poly1305 by hand: RFC 8439, sections 2.3 and 2.5


def _rotate(value: int, count: int) -> int:
    return (value << count | value >> 32 - count) & 0xFFFFFFFF


def _quarter(state: list[int], a: int, b: int, c: int, d: int) -> None:
    for first, second, third, count in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[first] = (state[first] + state[second]) & 0xFFFFFFFF
        state[third] = _rotate(state[third] ^ state[first], count)


def chacha(key: bytes, nonce: bytes, counter: int, size: int) -> bytes:
    stream = b""
    while len(stream) < size:
        words = struct.unpack("<4I", b"expand 32-byte k") + struct.unpack("<8I", key)
        words += (counter, *struct.unpack("<3I", nonce))
        state = list(words)
        for _ in range(10):
            for place in range(4):
                _quarter(state, place, 4 + place, 8 + place, 12 + place)
            for place in range(4):
                columns = [4 * row + (place + row) % 4 for row in range(4)]
                _quarter(state, *columns)
        total = [(x + y) & 0xFFFFFFFF for x, y in zip(words, state, strict=True)]
        stream, counter = stream + struct.pack("<16I", *total), counter + 1
    return stream[:size]


def poly(key: bytes, content: bytes) -> bytes:
    r = int.from_bytes(key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    total = 0
    for first in range(0, len(content), 16):
        block = content[first : first + 16] + b"\1"
        total = (total + int.from_bytes(block, "little")) * r % (2**130 - 5)
    return ((total + int.from_bytes(key[16:], "little")) % 2**128).to_bytes(16, "little")


def sealed_by_hand(key: bytes, nonce: bytes, content: bytes, about: bytes) -> bytes:
    stream = chacha(key, nonce, 1, len(content))
    hidden = bytes(x ^ y for x, y in zip(content, stream, strict=True))
    padded = b"".join(each + bytes(-len(each) % 16) for each in (about, hidden))
    sizes = struct.pack("<QQ", len(about), len(hidden))
    return hidden + poly(chacha(key, nonce, 0, 32), padded + sizes)


def test_oracles_reproduce_the_published_vectors() -> None:
    first = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    # Appendix A.1, vector 1.
    assert chacha(bytes(32), bytes(12), 0, 32) == _hex(first)
    # Section 2.8.2.
    text = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for "
    text += b"the future, sunscreen would be it."
    key, nonce = bytes(range(0x80, 0xA0)), _hex("070000004041424344454647")
    sealed = sealed_by_hand(key, nonce, text, _hex("50515253c0c1c2c3c4c5c6c7"))
    assert sealed == _hex(
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d6"
        "3dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b36"
        "92ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
        "3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691"
    )


@settings(max_examples=5)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 40))
def test_streams_are_those_of_chacha20(key: bytes, size: int) -> None:
    stream = numpy.frombuffer(chacha(key, bytes(12), 0, 8 * size), dtype="<u8")
    values = numpy.zeros(size, dtype=numpy.uint64)
    add_stream(values, key)
    assert numpy.array_equal(values, stream)
    add_stream(values, key, subtract=True)
    assert not values.any()


@settings(max_examples=5)
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=80), st.binary(max_size=40))
def test_sealed_shares_are_those_of_chacha20_poly1305(
    key: bytes, content: bytes, about: bytes
) -> None:
    sealed = seal(key, content, about)
    assert sealed == sealed_by_hand(key, bytes(12), content, about)
    assert unseal(key, sealed, about) == content
    assert unseal(key, sealed, about + b"x") is None
    for place in range(0, len(sealed), 7):
        changed = bytearray(sealed)
        changed[place] ^= 1
        assert unseal(key, bytes(changed), about) is None


# ECDSA on P-384 with SHA-384: RFC 6979, appendix A.2.6

PUBLIC = (
    0xEC3A4E415B4E19A4568618029F427FA5DA9A8BC4AE92E02E06AAE5286B300C64DEF8F0EA9055866064A254515480BC13,
    0x8015D9B72D7D57244EA8EF9AC0C621896708A59367F9DFB9F54CA84B3F1C9DB1288B231C3AE0D4FE7344FD2533264720,
)
SIGNATURE = (
    0x94EDBB92A5ECB8AAD4736E56C691916B3F88140666CE9FA73D64C4EA95AD133C81A648152E44ACF96E36DD1E80FABE46,
    0x99EF4AEB15F178CEA1FE40DB2603138F130E740A19624526203B6351D0A3A94FA329C145786E679E7B82C71A38628AC8,
)


def test_signatures_are_verified_as_published() -> None:
    numbers = ec.EllipticCurvePublicNumbers(*PUBLIC, ec.SECP384R1())
    public = numbers.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    r, s = SIGNATURE
    assert is_signed(public, encode_dss_signature(r, s), b"sample")
    assert not is_signed(public, encode_dss_signature(r, s), b"test")
    assert not is_signed(public, encode_dss_signature(r, s + 1), b"sample")
    signature, identity = sign(ec.generate_private_key(ec.SECP384R1()), b"sample")
    assert is_signed(identity, signature, b"sample")
    assert not is_signed(public, signature, b"sample")


# Shamir's secret sharing in GF(2^128), modulo x^128 + x^7 + x^2 + x + 1, by hand


def _times(left: int, right: int) -> int:
    found = 0
    while right:
        found ^= left * (right & 1)
        left, right = left << 1, right >> 1
        if left >> 128:
            left ^= 1 << 128 | 0x87
    return found


def _inverse(value: int) -> int:
    found, power = 1, value
    # value^(2^128 - 2)
    for _ in range(127):
        power = _times(power, power)
        found = _times(found, power)
    return found


def _at_zero(points: dict[int, int]) -> int:
    """Return the value at 0 of the polynomial through these points."""
    total = 0
    for place, value in points.items():
        top = bottom = 1
        for other in points.keys() - {place}:
            top, bottom = _times(top, other), _times(bottom, place ^ other)
        total ^= _times(value, _times(top, _inverse(bottom)))
    return total


def _halves(value: bytes) -> tuple[int, int]:
    return int.from_bytes(value[:16], "big"), int.from_bytes(value[16:], "big")


@pytest.mark.parametrize(("count", "threshold"), [(3, 3), (5, 4), (7, 5)])
def test_shares_are_points_of_a_polynomial(count: int, threshold: int) -> None:
    secret = bytes(range(7, 39))
    shares = split_secret(secret, count, threshold)
    points = {place + 1: _halves(share) for place, share in enumerate(shares)}
    for chosen in combinations(points, threshold):
        for half in (0, 1):
            assert (
                _at_zero({place: points[place][half] for place in chosen}) == _halves(secret)[half]
            )
    assert join_shares(dict(enumerate(shares[:threshold]))) == secret


def test_shares_made_by_hand_are_joined() -> None:
    """Secret + a x + b x^2 for both halves, at x = 1, 2, 3."""
    secret = bytes(range(32))
    shares = {}
    for place in (1, 2, 3):
        values = []
        for half, (a, b) in zip(_halves(secret), ((5, 2**100 + 1), (2**127, 77)), strict=True):
            value = half ^ _times(a, place) ^ _times(b, _times(place, place))
            values.append(value.to_bytes(16, "big"))
        shares[place - 1] = b"".join(values)
    assert join_shares(shares) == secret
