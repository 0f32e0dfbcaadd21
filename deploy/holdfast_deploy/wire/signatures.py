"""What a member signs with the key of its certificate, for others who never talk to it directly."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast_deploy.wire.credentials import Credentials, subject_names


def signature_of(credentials: Credentials, text: bytes) -> bytes:
    """ECDSA with SHA-256 of ``text``; the same each time (RFC 6979), where the library can.

    A message that was damaged and is signed again is then the very same message.
    """
    own = serialization.load_pem_private_key(credentials.key, password=None)
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    try:
        algorithm = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
    except (TypeError, UnsupportedAlgorithm):  # before cryptography 43, or OpenSSL 3.2
        algorithm = ec.ECDSA(hashes.SHA256())
    return own.sign(text, algorithm)


def check_signature(
    credentials: Credentials, name: str, certificate: bytes, signature: bytes, text: bytes
) -> None:
    """Raises a ``ValueError`` unless ``certificate`` (PEM) is the member ``name``'s, and signed ``text``.

    So it does for one that is revoked, or by an authority that does not vouch for the member.
    """
    try:
        own = x509.load_pem_x509_certificate(certificate)
        authorities = x509.load_pem_x509_certificates(credentials.authority_of(name))
        if not any(_issued(own, authority) for authority in authorities):
            raise ValueError("another authority")
        credentials.check(name, certificate)  # it may be revoked
        key = own.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("another kind of key")
        key.verify(signature, text, ec.ECDSA(hashes.SHA256()))
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError(f"not signed by {name} for this federation") from None
    if subject_names(own) != [name]:
        raise ValueError(f"its certificate is not {name}'s")
    if not own.not_valid_before_utc <= datetime.now(UTC) <= own.not_valid_after_utc:
        raise ValueError(f"{name}'s certificate is not valid now")


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
