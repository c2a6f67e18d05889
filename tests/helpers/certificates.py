"""Certificates of a federation with any validity."""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from mpfedcl.network.setup.folders import ServerFolder

DAY = datetime.timedelta(days=1)


def replace_certificate(folder: ServerFolder, days: float, *, authority: bool = False) -> None:
    """Replace the certificate of the server, or of the authority, by one that ends in `days`."""
    path = folder.authority if authority else folder.server / "server.pem"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    signer = load_pem_private_key((folder.server / "ca.key").read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    end = datetime.datetime.now(datetime.UTC) + days * DAY
    made = x509.CertificateBuilder(
        issuer_name=old.issuer,
        subject_name=old.subject,
        public_key=old.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=end - 400 * DAY,
        not_valid_after=end,
        extensions=list(old.extensions),
    )
    path.write_bytes(made.sign(signer, hashes.SHA384()).public_bytes(Encoding.PEM))
