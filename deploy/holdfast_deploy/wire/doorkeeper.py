"""Too many connections of one member, or without a member: the oldest have to go, so that others get in.

gRPC bounds how many connections there are and how long a handshake takes, but not how many one address or
member may hold, nor which ones make room. It has no hook for that, so the open files of this process are
looked through.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from holdfast_deploy.ops.events import Events

MOST_FROM_ONE_ADDRESS = 32  # connections on which nobody has asked anything with a certificate yet
MOST_OF_ONE_MEMBER = 32  # connections of its processes, and of people who ask in its name
CALM, BUSY = 1.0, 0.1  # seconds between two looks

Place = tuple[str, int]  # the other end: address and port


@dataclass
class Doorkeeper:
    """Looks after the connections to a port; ``most`` of them may be without a member."""

    most: int
    events: Events
    port: int = 0  # not known yet
    members: dict[Place, str] = field(default_factory=dict)  # whose each is; where a call began last is last
    strangers: list[Place] = field(default_factory=list)  # the oldest first
    # What a call's certificate says; None: nothing that could be a member's name, "": there are none at all.
    name_of: Callable[[Any], str | None] = lambda _: ""

    def welcome(self, peer: str, name: str | None) -> None:
        """Whoever calls as ``peer``, in gRPC's notation, has shown a certificate in that name."""
        if name is not None and (place := _place_of(peer)) is not None:
            self.members.pop(place, None)
            self.members[place] = name

    def drop(self, peer: str) -> None:
        """Ends the connection of whoever calls as ``peer``, in gRPC's notation."""
        wanted = _place_of(peer)
        for place, connection in self._connections():
            if place == wanted:
                with suppress(OSError):  # it has just ended
                    connection.shutdown(socket.SHUT_RDWR)

    def seen(self, answer: Callable[[Any, Any], Awaitable[bytes]]) -> Any:
        """``answer``, a gRPC handler, after whose first call its caller is no stranger."""

        async def call(frames: Any, context: Any) -> bytes:
            self.welcome(context.peer(), self.name_of(context))
            return await answer(frames, context)

        return call

    def seen_streaming(self, answer: Callable[[Any, Any], AsyncGenerator[bytes, None]]) -> Any:
        """``seen`` for a handler whose answer is a stream."""

        async def call(frames: Any, context: Any) -> AsyncIterator[bytes]:
            self.welcome(context.peer(), self.name_of(context))
            async with aclosing(answer(frames, context)) as answers:
                async for frame in answers:
                    yield frame

        return call

    async def keep(self, port: int) -> None:
        """Looks at the connections to ``port`` for ever; more often when there is much to do."""
        self.port = port
        while True:
            before, dropped = time.monotonic(), 0
            with suppress(OSError):  # no file left to look with: gRPC's own limits make room soon
                dropped = self.look()
            took = time.monotonic() - before
            await asyncio.sleep(max(BUSY if dropped else CALM, 10 * took))

    def look(self) -> int:
        """Ends connections where a member, or strangers, have too many; how many."""
        present = {place for place, _ in self._connections()}
        self.members = {place: name for place, name in self.members.items() if place in present}
        unknown = present - self.members.keys()
        kept = [place for place in self.strangers if place in unknown]
        self.strangers = kept + sorted(unknown.difference(kept))
        surplus, crowd = self._surplus(), self._crowd()
        if surplus or crowd:
            for place, connection in self._connections():
                if place in surplus or place in crowd:
                    with suppress(OSError):  # it has just ended
                        connection.shutdown(socket.SHUT_RDWR)
        if surplus:
            address = next(iter(surplus))[0]
            reason = "too many without a certificate: the oldest were closed"
            self.events.complain("idle connections", peer=address, reason=reason)
        for name in set(crowd.values()):
            reason = f"more than {MOST_OF_ONE_MEMBER}: the ones unused for longest were closed"
            self.events.complain("too many connections", peer=name, reason=reason)
        return len(surplus) + len(crowd)

    def _crowd(self) -> dict[Place, str]:
        """Of members that have too many connections, those that were unused for longest, with the name."""
        count: Counter[str] = Counter()
        crowd = {}
        for place, name in reversed(self.members.items()):
            count[name] += 1
            if name and count[name] > MOST_OF_ONE_MEMBER:
                crowd[place] = name
        return crowd

    def _surplus(self) -> set[Place]:
        """The oldest strangers: of each address, and in all."""
        of_address: dict[str, int] = {}
        kept = []
        for place in reversed(self.strangers):
            of_address[place[0]] = of_address.get(place[0], 0) + 1
            if of_address[place[0]] <= MOST_FROM_ONE_ADDRESS:
                kept.append(place)
        return set(self.strangers) - set(kept[: self.most])

    def _connections(self) -> Iterator[tuple[Place, socket.socket]]:
        """Everybody who is connected to our port. The sockets are duplicates: gRPC may close its own."""
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):  # not connected, or closed meanwhile
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and connection.getsockname()[1] == self.port:
                        yield _place(*connection.getpeername()[:2]), connection


def _place_of(peer: str) -> Place | None:
    """Where a caller is, in gRPC's notation such as ``ipv4:127.0.0.1:7001``; None: nowhere in a network."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _place(host.strip("[]"), int(port)) if port.isdigit() else None


def _place(host: str, port: int) -> Place:
    """IPv4 addresses are written the same, whatever kind of socket they come from."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), port
