"""Certificates for others: a private authority of one federation signs one for each member."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast_deploy.keys import write_private_key
from holdfast_deploy.wire.credentials import CURVE, PEM, own_key, parse_certificate

AUTHORITY_DAYS = 3650
SKEW = timedelta(hours=1)  # clocks may differ


def make_authority(folder: Path, federation: str) -> None:
    """``ca.key`` and ``ca.crt`` in ``folder``, unless they are there."""
    if (folder / "ca.key").exists():
        return
    if (folder / "ca.crt").exists():  # somebody else's, on which this member's own certificate rests
        raise HoldfastError(
            f"{folder / 'ca.key'} is missing: only the holder of the authority's key can sign; to be an "
            "authority yourself, take another folder (--certs)"
        )
    key, subject = ec.generate_private_key(CURVE()), _name(f"holdfast {federation}")
    certificate = _builder(subject, subject, key.public_key(), AUTHORITY_DAYS, signs=True).add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_private_key(folder / "ca.key", key)
    write_atomic(folder / "ca.crt", certificate.sign(key, hashes.SHA256()).public_bytes(PEM))


def make_request(folder: Path, name: str, *, encrypt: bool = False) -> Path:
    """``name.key``, which stays at home, and ``name.csr``, which is to be signed; the path of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.key"
    if not path.exists():
        write_private_key(path, ec.generate_private_key(CURVE()), encrypt=encrypt)
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_name(name))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(own_key(path), hashes.SHA256())
    )
    target = folder / f"{name}.csr"
    write_atomic(target, request.public_bytes(PEM))
    return target


@dataclass(frozen=True)
class Request:
    """Somebody's wish to be the member called ``name``, with a key that it has proved to hold."""

    name: str
    key: ec.EllipticCurvePublicKey

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key, for people to compare, over the telephone for example."""
        encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        return hashlib.sha256(self.key.public_bytes(encoding, form)).digest().hex(":", 2)


def check_request(folder: Path, path: Path, members: list[str], *, replace: bool = False) -> Request:
    """The request in ``path``, if the authority in ``folder`` may sign it; ``members`` are the names allowed.

    Whoever sent the request has chosen the name in it, and may have chosen another member's. So it must not
    contradict the name of the file, and no other key may have a certificate for it, unless ``replace``.
    """
    try:
        content = x509.load_pem_x509_csr(path.read_bytes())
        names = [a.value for a in content.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        key, proved = content.public_key(), content.is_signature_valid
    except (ValueError, UnsupportedAlgorithm):
        raise HoldfastError(f"{path} is not a certificate request in PEM format") from None
    name = str(names[0]) if len(names) == 1 else ""
    if name not in members:
        raise HoldfastError(f"{path} is for {names}; the federation has {', '.join(members)}")
    if not proved:
        raise HoldfastError(f"{path}: its signature is wrong; ask for a new one")
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != CURVE.name:
        raise HoldfastError(f"{path}: expected a P-256 key; make it with 'holdfast federation csr'")
    request = Request(name, key)
    if path.stem in members and path.stem != name:
        raise HoldfastError(
            f"{path} asks for the name {name!r}, not {path.stem!r}: whoever sent it would become {name}. "
            f"If it is really {name}'s, with the key {request.fingerprint}, rename it to {name}.csr"
        )
    signed = folder / f"{name}.crt"
    if signed.exists() and not replace and parse_certificate(signed.read_bytes(), signed).public_key() != key:
        raise HoldfastError(
            f"{path} asks for the name {name!r}, for which {signed} is there with another key. "
            f"If {name} really has a new key, {request.fingerprint}, add --replace"
        )
    return request


def sign_request(folder: Path, path: Path, members: list[str], days: float, *, replace: bool = False) -> Path:
    """The certificate for the request in ``path``, by the authority in ``folder``; see ``check_request``."""
    request = check_request(folder, path, members, replace=replace)
    name, authority = request.name, parse_certificate((folder / "ca.crt").read_bytes(), folder / "ca.crt")
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    key = own_key(folder / "ca.key")
    certificate = (
        _builder(_name(name), authority.subject, request.key, days, signs=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(_key_of(authority, key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    target = folder / f"{name}.crt"
    write_atomic(target, certificate.public_bytes(PEM))
    return target


def make_certificates(folder: Path, federation: str, members: list[str], days: float) -> None:
    """The authority, and a key and a certificate for every member."""
    for name in members:
        if (folder / f"{name}.crt").exists() and not (folder / f"{name}.key").exists():
            raise HoldfastError(
                f"{folder / f'{name}.crt'} is there without its key, which is {name}'s own; to make keys for "
                "everybody, take another folder (--certs)"
            )
    make_authority(folder, federation)
    for name in members:
        request = make_request(folder, name)
        sign_request(folder, request, members, days)
        request.unlink()


def _key_of(authority: x509.Certificate, public: ec.EllipticCurvePublicKey) -> x509.AuthorityKeyIdentifier:
    """Which key signs. Strict checks of certificates, which Python makes from 3.13 on, ask for it."""
    try:
        named = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound:  # an authority that was not made by holdfast
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(public)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(named.value)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float, *, signs: bool
) -> x509.CertificateBuilder:
    """What the certificates of authority (``signs``) and members have in common."""
    now, end = datetime.now(UTC), datetime.now(UTC) + timedelta(days=days)
    usage = x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
    )
