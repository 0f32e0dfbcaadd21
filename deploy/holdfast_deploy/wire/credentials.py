"""What a member holds: its key, its certificate, and whom it trusts to vouch for others."""

from __future__ import annotations

import secrets
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast.core.errors import REFUSED, HoldfastError
from holdfast_deploy.keys import read_private_key
from holdfast_deploy.wire.revocations import (
    Known,
    SignedList,
    keep_seen,
    known_from,
    read_revocations,
)

CURVE = ec.SECP256R1  # the only kind of keys: short, fast, and enough
PEM = serialization.Encoding.PEM
ALPN = ["http/1.1", "h2"]  # the second is that of holdfast 0.1, which is told apart and refused


class RevokedError(HoldfastError):
    """The coordinator has revoked the certificate that a member would use."""

    exit_code = REFUSED


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
    revocations: Known = field(default_factory=Known)
    folder: Path | None = None  # where it was read
    name: str = ""
    read: tuple[tuple[int, int, int], ...] = ()  # the files as they were last
    version: int = 0  # how often something has changed since
    _contexts: dict[tuple[int, bytes], ssl.SSLContext] = field(default_factory=dict, repr=False)
    _contexts_of: int = -1  # version

    def server_context(self) -> ssl.SSLContext:
        """For those who dial this member: they must show a certificate of an authority."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER, b"".join([self.authority, *self.bound.values()]))
        context.num_tickets = 0  # each connection shows its certificate
        return context

    def client_context(self, peer: str) -> ssl.SSLContext:
        """For dialling ``peer``, which must show a certificate in its name, of an authority for it."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT, self.authority_of(peer))

    def _context(self, side: int, roots: bytes) -> ssl.SSLContext:
        """TLS 1.3 with this member's key and certificate; made once for each version of them."""
        if self._contexts_of != self.version:
            self._contexts, self._contexts_of = {}, self.version
        if (side, roots) not in self._contexts:
            self._contexts[side, roots] = context = ssl.SSLContext(side)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(cadata=roots.decode())
            context.set_alpn_protocols(ALPN)
            self._load_into(context)
        return self._contexts[side, roots]

    def _load_into(self, context: ssl.SSLContext) -> None:
        """Python reads keys from files only: from one that nobody else can open, encrypted, and soon gone."""
        password = secrets.token_hex(32)
        own = serialization.load_pem_private_key(self.key, password=None)
        hidden = serialization.BestAvailableEncryption(password.encode())
        with NamedTemporaryFile(suffix=".pem") as file:
            file.write(own.private_bytes(PEM, serialization.PrivateFormat.PKCS8, hidden) + self.certificate)
            file.flush()
            context.load_cert_chain(file.name, password=password)

    def authority_of(self, name: str) -> bytes:
        """Who vouches for the member ``name``."""
        return self.bound.get(name, self.authority)

    def check(self, name: str, pem: bytes) -> None:
        """Refuses the certificate ``pem`` of ``name`` if it is revoked, or another authority's."""
        why = self.revocations.why(serial_of(pem))
        if why is not None:
            raise HoldfastError(why)
        if self.bound and not is_issued_by(x509.load_pem_x509_certificate(pem), self.authority_of(name)):
            raise HoldfastError(f"the certificate of {name} is by an authority that does not vouch for it")

    def check_again(self, name: str, pem: bytes) -> None:
        """Likewise for an open connection: authorities may have changed since its handshake."""
        self.check(name, pem)
        if not is_issued_by(x509.load_pem_x509_certificate(pem), self.authority_of(name)):
            raise HoldfastError(f"the certificate of {name} is by an authority that holds no longer")

    @property
    def days_left(self) -> float:
        """Until the certificate, or the last of its authorities, expires."""
        ends = x509.load_pem_x509_certificates(self.authority_of(self.name))
        own = x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc
        last = min(own, max(certificate.not_valid_after_utc for certificate in ends))
        return (last - datetime.now(UTC)) / timedelta(days=1)

    def refresh(self, coordinator: str | None) -> bool:
        """Reads the files again if one was written; whether that changes anything. An error changes nothing.

        What was revoked stays so, whatever the files say now.
        """
        if self.folder is None or (now := _written(self.folder)) == self.read:
            return False
        self.read = now  # a file that will not do is complained about once
        fresh = load_credentials(self.folder, self.name, coordinator)
        signed = [*fresh.revocations.signed, *self.revocations.signed]
        fresh.revocations = known_from(signed, coordinator)
        before = (self.key, self.certificate, self.authority, self.bound, self.revocations)
        after = (fresh.key, fresh.certificate, fresh.authority, fresh.bound, fresh.revocations)
        if after == before:
            return False
        self.key, self.certificate, self.authority, self.bound, self.revocations = after
        self.version += 1
        return True

    def learn(self, signed: SignedList, coordinator: str | None) -> None:
        """Another member's list, which has to be the coordinator's."""
        known = known_from([*self.revocations.signed, signed], coordinator)
        if known != self.revocations:
            self.revocations, self.version = known, self.version + 1

    def keep_seen(self, coordinator: str | None) -> None:
        """Writes down which certificates are known to be revoked, for good."""
        if self.folder is not None and self.revocations.signed:
            keep_seen(self.folder, self.revocations, coordinator)


def _written(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """When each file that credentials are read from was written, which it is, and how long.

    A file that is read while it is being written may keep its time until it is complete.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".crt", ".key", ".json"))
    return tuple((at.st_mtime_ns, at.st_ino, at.st_size) for at in (path.stat() for path in paths))


def load_credentials(folder: Path, name: str, coordinator: str | None = None) -> Credentials:
    """The files ``ca.crt``, ``name.crt`` and ``name.key`` in ``folder``, checked, and what else is there.

    ``other.ca.crt``: authorities that vouch for the member ``other`` alone. ``revoked.json`` and
    ``revoked.seen.json``: certificates that the ``coordinator`` has revoked.
    """
    key_file, own, authority = folder / f"{name}.key", folder / f"{name}.crt", folder / "ca.crt"
    bound = {path.name.removesuffix(".ca.crt"): path for path in sorted(folder.glob("?*.ca.crt"))}
    try:
        read = _written(folder)
        private = own_key(key_file)
        key = private.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        found = Credentials(key, own.read_bytes(), authority.read_bytes())
        found.bound = {member: path.read_bytes() for member, path in bound.items()}
    except OSError as error:
        raise HoldfastError(
            f"{error.filename} cannot be read ({error.strerror}): make certificates with 'holdfast "
            "federation certs', or ask for one with 'holdfast federation csr', and name the folder (--certs)"
        ) from None
    found.folder, found.name, found.read = folder, name, read
    certificate = parse_certificate(found.certificate, own)
    for path, pem in ((authority, found.authority), *((bound[other], found.bound[other]) for other in bound)):
        parse_certificates(pem, path)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begin <= (now := datetime.now(UTC)) <= end:
        advice = "set the clock" if now < begin else "renew it with 'holdfast federation csr' and 'sign'"
        raise HoldfastError(
            f"{own} is not valid now: it is so from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, and "
            f"the clock of this machine says {now:%Y-%m-%d %H:%M}; {advice}"
        )
    if subject_names(certificate) != [name]:
        raise HoldfastError(f"{own} is for {subject_names(certificate)}, not for {name!r}")
    if not is_issued_by(certificate, found.authority_of(name)):
        raise HoldfastError(f"{own} was not signed by the authority in {bound.get(name, authority).name}")
    if private.public_key() != certificate.public_key():
        raise HoldfastError(f"{key_file} is not the key of {name}.crt")
    found.revocations = read_revocations(folder, coordinator)
    if (why := found.revocations.why(serial_of(found.certificate))) is not None:
        raise RevokedError(f"{own}: {why}; ask for a new one with 'holdfast federation csr'")
    return found


def is_issued_by(certificate: x509.Certificate, authorities: bytes) -> bool:
    """Whether one of the ``authorities`` has signed the certificate itself."""
    for authority in x509.load_pem_x509_certificates(authorities):
        with suppress(ValueError, TypeError, InvalidSignature):
            certificate.verify_directly_issued_by(authority)
            return True
    return False


def own_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key in ``path``, which has to be of the kind that federations use."""
    key = read_private_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise HoldfastError(f"{path}: expected a P-256 key; make it with 'holdfast federation csr'")
    return key


def parse_certificate(pem: bytes, path: Path) -> x509.Certificate:
    """What was read in ``path``: the first, where it holds several."""
    return parse_certificates(pem, path)[0]


def parse_certificates(pem: bytes, path: Path) -> list[x509.Certificate]:
    """What was read in ``path``: one or more, and none of them broken."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise HoldfastError(f"{path} is not a certificate in PEM format") from None


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


@lru_cache(256)
def name_in(pem: bytes) -> str:
    """The member whose certificate it is; "" if it is nobody's, or several members'."""
    try:
        names = subject_names(x509.load_pem_x509_certificate(pem))
    except (ValueError, x509.DuplicateExtension):  # an authority may sign what makes no sense
        return ""
    return names[0] if len(names) == 1 else ""
