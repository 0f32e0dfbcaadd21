"""A member's port: TLS before anything else, few connections of anybody, and reasons for refused ones."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from holdfast.core.errors import TRY_LATER, HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.disk_full import raise_file_limit
from holdfast_deploy.wire.credentials import Credentials, name_in
from holdfast_deploy.wire.protocol import HANDSHAKE, Peer

MOST_STRANGERS = 512  # connections that have not shown a certificate yet
MOST_FROM_ONE_ADDRESS = 32  # of these
MOST_OF_ONE_MEMBER = 32  # connections of its processes, and of people who ask in its name
GOODBYE = 1.0  # seconds in which the other end has to confirm that a connection ends
OLD_WIRE = "it speaks the wire of holdfast 0.1: both ends need the same version"

REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no certificate",
    "certificate has expired": "an expired certificate",
    "certificate is not yet valid": "a certificate that is not valid yet",
    "CERTIFICATE_VERIFY_FAILED": "a certificate of another authority",
    "UNSUPPORTED_PROTOCOL": "TLS older than 1.3",
    "HTTP_REQUEST": "no TLS",
    "WRONG_VERSION_NUMBER": "no TLS",
    "BAD_DECRYPT": "damaged or repeated bytes",
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": "damaged or repeated bytes",
}


class Listener:
    """Accepts connections, and gives each a protocol of ``factory``. All of it runs on the event loop.

    It may outlast those who answer: ``factory`` makes protocols that ask whoever answers by then.
    """

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        credentials: Credentials | None,
        events: Events,
        of_member: int = MOST_OF_ONE_MEMBER,
    ) -> None:
        self.factory, self.credentials, self.events = factory, credentials, events
        self.of_member = of_member
        self.most = min(raise_file_limit() // 4, MOST_STRANGERS)
        self.address, self.port = "", 0
        # By file descriptor, the oldest first: the connection, and the address that it is from.
        self.strangers: dict[int, tuple[socket.socket, str]] = {}
        self.members: dict[asyncio.Transport, Peer] = {}  # whose each is; the one used last is last
        self._invalid: set[asyncio.Transport] = set()  # those of them whose certificates did not hold
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._admitting: set[asyncio.Task[None]] = set()

    async def open(self, address: str) -> int:
        """Listens on ``address`` (host:port), and no longer where it did before; the port."""
        if address != self.address:
            self.stop()
            self._socket = _listen(address)
            self.address, self.port = address, int(self._socket.getsockname()[1])
            self._accepting = asyncio.create_task(self._accept(self._socket))
        return self.port

    def stop(self) -> None:
        """Accepts nobody any more; connections stay."""
        self.address = ""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._socket is not None:
            self._socket.close()

    def close(self) -> None:
        """Ends all connections, too."""
        self.stop()
        for task in self._admitting:
            task.cancel()
        for transport in self.members:
            transport.abort()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._admitting) > self.most:  # those that had to go are not closed yet
                await asyncio.sleep(0.01)
            try:
                connection, place = await loop.sock_accept(listening)
            except OSError:  # it has gone again, or no file is left for it
                await asyncio.sleep(0.1)
                continue
            address = _plain(place[0])
            self.strangers.pop(connection.fileno(), None)
            self.strangers[connection.fileno()] = connection, address
            self._make_room(address)
            task = asyncio.create_task(self._greet(connection, connection.fileno()))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)

    def _make_room(self, address: str) -> None:
        """If too many connections of ``address``, or in all, have shown no certificate, ends the oldest."""
        self.strangers = {n: known for n, known in self.strangers.items() if known[0].fileno() == n}
        own = [n for n, known in self.strangers.items() if known[1] == address]
        if len(own) > MOST_FROM_ONE_ADDRESS or len(self.strangers) > self.most:
            oldest = own[0] if len(own) > MOST_FROM_ONE_ADDRESS else next(iter(self.strangers))
            connection, _ = self.strangers.pop(oldest)
            with suppress(OSError):  # it has just ended
                connection.shutdown(socket.SHUT_RDWR)
            reason = "too many without a certificate: the oldest were closed"
            self.events.complain("idle connections", peer=address, reason=reason)

    async def _greet(self, connection: socket.socket, number: int) -> None:
        """The handshake of a connection, whose file descriptor is ``number``."""
        loop = asyncio.get_running_loop()
        try:
            keep_alive(connection)
            if self.credentials is None:  # a stranger until it says who it is
                await loop.connect_accepted_socket(self.factory, connection)
                return
            transport, _ = await loop.connect_accepted_socket(
                self.factory,
                connection,
                ssl=self.credentials.server_context(),
                ssl_handshake_timeout=HANDSHAKE,
                ssl_shutdown_timeout=GOODBYE,
            )
            self.admit(transport)
        except ssl.SSLError as error:
            self.events.complain("handshake refused", reason=why_refused(error))
        except OSError:  # it has gone, or said nothing for too long
            connection.close()
        self.strangers.pop(number, None)

    # --- who is there ------------------------------------------------------------------------------------

    def admit(self, transport: asyncio.BaseTransport, place: str = "") -> Peer:
        """Who is at the other end of a connection after its handshake; ``place``: where, if it is known."""
        assert isinstance(transport, asyncio.Transport)
        if (known := self.members.pop(transport, None)) is not None:
            self.members[transport] = known  # the one used last
            return known
        tls = transport.get_extra_info("ssl_object")
        if tls is None:
            self.strangers.pop(transport.get_extra_info("socket").fileno(), None)
            return Peer("", _place(transport.get_extra_info("peername")))
        if tls.selected_alpn_protocol() == "h2":
            self.events.complain("handshake refused", reason=OLD_WIRE)
            transport.abort()
        shown = ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True)).encode()
        peer = Peer(name_in(shown), place or _place(transport.get_extra_info("peername")), shown)
        self.members[transport] = peer
        self.members = {open: of for open, of in self.members.items() if not open.is_closing()}
        self._invalid = {open for open in self._invalid if open in self.members}
        if not self._holds(peer):
            self._invalid.add(transport)
        crowd = self._crowd(peer.name, transport in self._invalid)
        if len(crowd) > self.of_member:
            del self.members[crowd[0]]
            crowd[0].abort()
            reason = f"more than {self.of_member}: the ones unused for longest were closed"
            self.events.complain("too many connections", peer=peer.name, reason=reason)
        return peer

    def _crowd(self, name: str, invalid: bool) -> list[asyncio.Transport]:
        """The connections that share one member's number.

        All whose certificates do not hold share one: who stole a key that was revoked since, or has an
        authority that does not vouch for the name, must not end that member's own connections.
        """
        if invalid:
            return [open for open in self.members if open in self._invalid]
        return [open for open, of in self.members.items() if of.name == name and open not in self._invalid]

    def _holds(self, peer: Peer) -> bool:
        try:
            if self.credentials is not None:
                self.credentials.check(peer.name, peer.certificate)
        except HoldfastError:
            return False
        return True

    def drop_revoked(self) -> None:
        """Ends the connections of callers whose certificates hold no longer."""
        for transport, peer in list(self.members.items()):
            try:
                if self.credentials is not None:
                    self.credentials.check_again(peer.name, peer.certificate)
            except HoldfastError as error:
                if not transport.is_closing():
                    self.events.complain("refused", peer=peer.name[:80] or "somebody", reason=str(error))
                transport.abort()


def keep_alive(connection: socket.socket) -> None:
    """Notices within a minute that the other end has gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def why_refused(error: ssl.SSLError) -> str:
    """Why a handshake failed, without what differs from time to time, so that it is logged once."""
    text = f"{error.reason} {error}"
    known = next((reason for mark, reason in REASONS.items() if mark in text), None)
    return known or (error.reason or "TLS").replace("_", " ").lower()


def _place(address: Any) -> str:
    """Where the other end is, as host:port."""
    host, port = _plain(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _plain(host: str) -> str:
    """IPv4 addresses are written the same, whatever kind of socket they come from."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


# --- where to listen --------------------------------------------------------------------------------------


class PortTakenError(HoldfastError):
    """Another process listens there, perhaps the one before that is about to end."""

    exit_code = TRY_LATER


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    both = host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if host == "::" and not both:
            host, family = "0.0.0.0", socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=512, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"cannot listen on {address}: the port is taken; stop the program that has it, or listen "
                "elsewhere with --listen"
            ) from None
        raise HoldfastError(
            f"cannot listen on {address} ({error.strerror}): give another with --listen"
        ) from None
    listening.setblocking(False)
    return listening


def split_address(address: str) -> tuple[str, int]:
    """Host and port of host:port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# --- without certificates, a member talks to its own machine only ----------------------------------------


def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def bind_address(address: str) -> str:
    """Where to listen: loopback as it is, otherwise all interfaces, since names inside may differ."""
    if not address or is_loopback(address):
        return address
    return f"[::]:{address.rpartition(':')[2]}"


def require_loopback(federation: Federation, listen: str | None) -> None:
    """No unencrypted traffic leaves the machine."""
    for address in [*(member.address for member in federation.members if member.address), listen]:
        if address is not None and not is_loopback(address):
            raise HoldfastError(
                f"--insecure: only for loopback addresses such as 127.0.0.1:7001, not {address}"
            )
