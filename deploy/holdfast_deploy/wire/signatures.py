"""What a member signs with the key of its certificate, for others that never talk to it directly."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast_deploy.wire.credentials import Credentials, is_issued_by, subject_names


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
    """Raises a ``ValueError`` unless ``name`` signed ``text``, and its ``certificate`` (PEM) holds now.

    It does not hold if it is revoked or expired.
    """
    own = check_past_signature(credentials, name, certificate, signature, text)
    try:
        credentials.check(name, certificate)
    except ValueError:
        raise _not_signed(name) from None
    if not own.not_valid_before_utc <= datetime.now(UTC) <= own.not_valid_after_utc:
        raise ValueError(f"{name}'s certificate is not valid now")


def check_past_signature(
    credentials: Credentials, name: str, certificate: bytes, signature: bytes, text: bytes
) -> x509.Certificate:
    """Raises a ``ValueError`` unless ``certificate`` (PEM) is the member ``name``'s, and signed ``text``.

    An authority that vouches for the member has to have issued it. It may be revoked or expired since: a
    signature says nothing about its time.
    """
    try:
        own = x509.load_pem_x509_certificate(certificate)
        key = own.public_key()
        if not is_issued_by(own, credentials.authority_of(name)):
            raise _not_signed(name)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise _not_signed(name)
        key.verify(signature, text, ec.ECDSA(hashes.SHA256()))
    except (ValueError, TypeError, InvalidSignature):
        raise _not_signed(name) from None
    if subject_names(own) != [name]:
        raise ValueError(f"its certificate is not {name}'s")
    return own


def _not_signed(name: str) -> ValueError:
    return ValueError(f"not signed by {name} for this federation")
