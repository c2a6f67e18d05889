"""Certificates and keys of a federation: a CA, the server's certificate, a key per client."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically

_CURVE = ec.SECP384R1()
_YEARS_OF_AUTHORITY, _YEARS_OF_SERVER = 10, 2
_WARNING = datetime.timedelta(days=30)
"""Remaining time at which warnings about a certificate begin."""


def make_authority(certificate: Path, key: Path) -> None:
    """Create the certificate authority (CA)."""
    private = _find_key(key, PrivateFormat.PKCS8)
    name = _name("mpfedcl federation")
    # path_length 0: it may sign servers, but no other CA.
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    extensions = [(constraints, True), (_usage(signs_certificates=True), True)]
    signed = _sign(name, private, name, private, _YEARS_OF_AUTHORITY, extensions)
    write_atomically(certificate, signed)


def make_server_certificate(
    certificate: Path, key: Path, authority: Path, authority_key: Path, hosts: list[str]
) -> None:
    """Create the server's certificate for host names and addresses."""
    issuer = x509.load_pem_x509_certificate(authority.read_bytes())
    signer = load_pem_private_key(authority_key.read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    private = _find_key(key, PrivateFormat.PKCS8)
    extensions = [
        (x509.SubjectAlternativeName([_alternative(host) for host in hosts]), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
    ]
    if issuer.public_key() != signer.public_key():
        raise InvalidInput(f"{authority_key} is not the key of {authority}; it must be.")
    name, last = _name(hosts[0]), issuer.not_valid_after_utc
    signed = _sign(name, private, issuer.subject, signer, _YEARS_OF_SERVER, extensions, last)
    write_atomically(certificate, signed)


def find_certificate_end(certificate: Path | str) -> datetime.datetime:
    """Return when a certificate, in a file or in PEM, expires."""
    try:
        text = certificate.encode() if isinstance(certificate, str) else certificate.read_bytes()
        return x509.load_pem_x509_certificate(text).not_valid_after_utc
    except (OSError, ValueError) as error:
        name = "the certificate" if isinstance(certificate, str) else certificate
        raise InvalidInput(f"{name} cannot be read as a certificate: {error}.") from None


def has_expired(end: datetime.datetime) -> bool:
    """Return whether a certificate that ends then has expired."""
    return end <= datetime.datetime.now(datetime.UTC)


def describe_end(what: str, end: datetime.datetime, remedy: str) -> str | None:
    """Return a sentence about a certificate that has expired or will within 30 days, or None."""
    left = end - datetime.datetime.now(datetime.UTC)
    if left > _WARNING:
        return None
    if has_expired(end):
        return f"{what} expired on {end:%Y-%m-%d}; {remedy}."
    days = f"{left.days} days" if left.days != 1 else "1 day"
    return f"{what} expires on {end:%Y-%m-%d}, in {days}; {remedy}."


def make_node_key(private: Path, public: Path) -> None:
    """Create the key that authenticates a client."""
    key = _find_key(private, PrivateFormat.OpenSSH)
    text = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_atomically(public, text + b"\n")


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a client's private key."""
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InvalidInput(f"{path} cannot be read as a client's key: {error}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidInput(f"{path} must be a client's key as mpfedcl federation init makes it.")
    return key


def write_public_key(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a client's public key as Flower's server compares it."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def write_private(path: Path, content: bytes) -> None:
    """Create a file atomically; only its owner can read it at any moment."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        # Unlike a rename, a link never replaces an existing file.
        os.link(temporary, path)
    finally:
        temporary.unlink()


def is_private(path: Path) -> bool:
    """Return whether only its owner can access a file."""
    return path.stat().st_mode & 0o077 == 0


def find_open(folder: Path) -> tuple[Path | None, bool]:
    """Return a path in a folder that others can change, and whether they can read the folder."""
    mode = folder.stat().st_mode
    if not mode & 0o077:
        return None, False
    places = (folder, *sorted(folder.iterdir()))
    changeable = (each for each in places if each.lstat().st_mode & 0o022 and not each.is_symlink())
    return next(changeable, None), bool(mode & 0o055)


def _find_key(path: Path, form: PrivateFormat) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file, created if the file does not exist."""
    if not path.is_file():
        made = ec.generate_private_key(_CURVE)
        write_private(path, made.private_bytes(Encoding.PEM, form, NoEncryption()))
    load = load_ssh_private_key if form is PrivateFormat.OpenSSH else load_pem_private_key
    found = load(path.read_bytes(), password=None)
    assert isinstance(found, ec.EllipticCurvePrivateKey)
    return found


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    years: int,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
    last: datetime.datetime | None = None,
) -> bytes:
    """Return a certificate; each extension comes with whether it is critical.

    It ends at `last` at the latest: no certificate outlives that of its authority.
    """
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    # Clocks of clients may be wrong.
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    end = now + datetime.timedelta(days=365 * years)
    builder = builder.not_valid_after(end if last is None else min(end, last))
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    for extension, is_critical in ((identifier, False), *extensions):
        builder = builder.add_extension(extension, is_critical)
    return builder.sign(signer, hashes.SHA384()).public_bytes(Encoding.PEM)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    # A common name has at most 64 characters; the alternative names hold the full host name.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
