"""Certificates: a private authority for one federation, and one key and certificate for each member."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast.engines.deploy.passphrase import passphrase, read_private_key, write_private_key
from holdfast.engines.deploy.wire.revocations import Revocations, read_revocations

AUTHORITY_DAYS = 3650
CURVE = ec.SECP256R1  # see __init__.py: other kinds of keys would let TLS 1.2 in
SKEW = timedelta(hours=1)  # clocks may differ
SIGHT = 10.0  # seconds in which the other end has to show a certificate
PEM = serialization.Encoding.PEM
SERVED: list[Any] = []  # kept: a late handshake may ask them for certificates after the server has ended


@dataclass
class Credentials:
    """A member's key, its certificate and the authorities that it trusts, all in PEM.

    ``refresh`` reads the files again while the member runs. An organisation may have an authority of its own:
    ``bound`` are those that vouch for one member only, by its name.
    """

    key: bytes = field(repr=False)
    certificate: bytes
    authority: bytes
    bound: dict[str, bytes] = field(default_factory=dict)
    revocations: Revocations = field(default_factory=Revocations)
    folder: Path | None = None  # where it was read
    name: str = ""
    read: tuple[float, ...] = ()  # when the files had last been written
    version: int = 0  # how often something has changed since

    def for_server(self) -> Any:
        """Clients must show a certificate of an authority; each handshake takes what is there by then."""
        served = grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=True
        )
        SERVED.append(served)
        return served

    def _configuration(self) -> Any:
        roots = b"".join([self.authority, *self.bound.values()])
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], roots)

    def for_client(self, trusted: bytes | None = None) -> Any:
        """``trusted``: the only certificates that the other end may show, or authorities of them."""
        return grpc.ssl_channel_credentials(trusted or self.authority, self.key, self.certificate)

    def authority_of(self, name: str) -> bytes:
        """Who vouches for the member ``name``."""
        return self.bound.get(name, self.authority)

    def check(self, name: str, pem: bytes) -> None:
        """Refuses the certificate ``pem`` of ``name`` if it is revoked, or another authority's."""
        why = self.revocations.why(serial_of(pem))
        if why is not None:
            raise HoldfastError(why)
        if self.bound and not _issued(x509.load_pem_x509_certificate(pem), self.authority_of(name)):
            raise HoldfastError(f"the certificate of {name} is by an authority that does not vouch for it")

    @property
    def days_left(self) -> float:
        """Until the certificate, or the last of its authorities, expires."""
        ends = x509.load_pem_x509_certificates(self.authority_of(self.name))
        own = x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc
        last = min(own, max(certificate.not_valid_after_utc for certificate in ends))
        return (last - datetime.now(UTC)) / timedelta(days=1)

    def refresh(self, coordinator: str | None) -> bool:
        """Reads the files again if one of them has changed; whether so. An error changes nothing."""
        if self.folder is None or (now := _written(self.folder)) == self.read:
            return False
        self.read = now  # a file that will not do is complained about once
        fresh = load_credentials(self.folder, self.name, coordinator)
        if fresh.revocations.number < self.revocations.number:
            raise HoldfastError(
                f"{self.folder / 'revoked.json'}: version {fresh.revocations.number} is older than "
                f"{self.revocations.number}, which was there before"
            )
        self.key, self.certificate, self.authority = fresh.key, fresh.certificate, fresh.authority
        self.bound, self.revocations, self.version = fresh.bound, fresh.revocations, self.version + 1
        return True


def _written(folder: Path) -> tuple[float, ...]:
    """When each file that credentials are read from was written."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".crt", ".key", ".json"))
    return tuple(path.stat().st_mtime_ns for path in paths)


def load_credentials(folder: Path, name: str, coordinator: str | None = None) -> Credentials:
    """The files ``ca.crt``, ``name.crt`` and ``name.key`` in ``folder``, checked, and what else is there.

    ``other.ca.crt``: authorities that vouch for the member ``other`` alone. ``revoked.json``: certificates
    that the ``coordinator`` has revoked.
    """
    own_key, own, authority = folder / f"{name}.key", folder / f"{name}.crt", folder / "ca.crt"
    bound = {path.name.removesuffix(".ca.crt"): path for path in sorted(folder.glob("?*.ca.crt"))}
    try:
        read = _written(folder)
        private = _private_key(own_key)
        key = private.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        found = Credentials(key, own.read_bytes(), authority.read_bytes())
        found.bound = {member: path.read_bytes() for member, path in bound.items()}
    except OSError as error:
        raise HoldfastError(
            f"{error.filename} cannot be read ({error.strerror}): make certificates with 'holdfast "
            "federation certs', or ask for one with 'holdfast federation csr', and name the folder (--certs)"
        ) from None
    found.folder, found.name, found.read = folder, name, read
    certificate = _certificate(found.certificate, own)
    for path, pem in ((authority, found.authority), *((bound[other], found.bound[other]) for other in bound)):
        _certificate(pem, path)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begin <= datetime.now(UTC) <= end:
        raise HoldfastError(f"{own} is not valid now, but until {end:%Y-%m-%d %H:%M} UTC")
    if subject_names(certificate) != [name]:
        raise HoldfastError(f"{own} is for {subject_names(certificate)}, not for {name!r}")
    if not _issued(certificate, found.authority_of(name)):
        raise HoldfastError(f"{own} was not signed by the authority in {bound.get(name, authority).name}")
    if private.public_key() != certificate.public_key():
        raise HoldfastError(f"{own_key} is not the key of {name}.crt")
    found.revocations = read_revocations(folder, coordinator)
    if (why := found.revocations.why(serial_of(found.certificate))) is not None:
        raise HoldfastError(f"{own}: {why}; ask for a new one with 'holdfast federation csr'")
    return found


def _issued(certificate: x509.Certificate, authorities: bytes) -> bool:
    """Whether one of the ``authorities`` has signed the certificate itself."""
    for authority in x509.load_pem_x509_certificates(authorities):
        with suppress(ValueError, TypeError, InvalidSignature):
            certificate.verify_directly_issued_by(authority)
            return True
    return False


async def speaks_tls_1_2(host: str, port: int) -> bool:
    """Whether whoever listens there goes on talking after a greeting in TLS 1.2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    greeting = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), greeting).do_handshake()
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        raise HoldfastError(f"cannot reach {host}:{port}, where this member listens: {error}") from None
    try:
        writer.write(greeting.read())
        answer = await asyncio.wait_for(reader.read(1), 10.0)
    except OSError:
        return False
    finally:
        writer.close()
    return answer == b"\x16"  # a handshake record; otherwise an alert, or the end


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
        .sign(_private_key(path), hashes.SHA256())
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
    if signed.exists() and not replace and _certificate(signed.read_bytes(), signed).public_key() != key:
        raise HoldfastError(
            f"{path} asks for the name {name!r}, for which {signed} is there with another key. "
            f"If {name} really has a new key, {request.fingerprint}, add --replace"
        )
    return request


def sign_request(folder: Path, path: Path, members: list[str], days: float, *, replace: bool = False) -> Path:
    """The certificate for the request in ``path``, by the authority in ``folder``; see ``check_request``."""
    request = check_request(folder, path, members, replace=replace)
    name, authority = request.name, _certificate((folder / "ca.crt").read_bytes(), folder / "ca.crt")
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(_name(name), authority.subject, request.key, days, signs=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .sign(_private_key(folder / "ca.key"), hashes.SHA256())
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


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = read_private_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise HoldfastError(f"{path}: expected a P-256 key; make it with 'holdfast federation csr'")
    return key


def _certificate(pem: bytes, path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise HoldfastError(f"{path} is not a certificate in PEM format") from None


async def see_certificate(host: str, port: int, peer: str, credentials: Credentials) -> bytes:
    """The certificate, in PEM, that whoever listens there shows in the name of ``peer``.

    It is checked as gRPC does, which does not tell us. Raises ``ssl.SSLError`` if it will not do.
    """
    assert credentials.folder is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=credentials.authority_of(peer).decode())
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    own, key = (credentials.folder / f"{credentials.name}{ending}" for ending in (".crt", ".key"))
    context.load_cert_chain(own, key, lambda: passphrase(key))
    _, writer = await asyncio.open_connection(
        host, port, ssl=context, server_hostname=peer, ssl_handshake_timeout=SIGHT
    )
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return x509.load_der_x509_certificate(shown).public_bytes(PEM)


@lru_cache(256)
def serial_of(pem: bytes) -> str:
    """The serial number of a certificate, in hexadecimal digits as ``openssl x509 -serial`` prints it."""
    return f"{x509.load_pem_x509_certificate(pem).serial_number:X}"


def subject_names(certificate: x509.Certificate) -> list[str]:
    """Whose certificate it is."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)
