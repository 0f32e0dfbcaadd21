"""The relay: members dial it, and it joins the connections of two of them into a pipe.

Who dials shows a certificate and says one line: LISTEN (call me here), CALL name, or ACCEPT token (the call
that a line to the listener has announced). Inside the pipe the two members speak TLS with one another, so
the relay sees neither what they say nor can it change it. It keeps nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, cast

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.events import Events
from holdfast_deploy.wire.certificate_watch import watch_certificates
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.listener import MOST_OF_ONE_MEMBER, Listener
from holdfast_deploy.wire.protocol import HANDSHAKE, PATIENCE, Peer

CALLS = 256  # of one member at a time
LONGEST_LINE = 200  # bytes of what is said first
HEARTBEAT = 20.0  # seconds between two signs of life to those who listen


class End(asyncio.Protocol):
    """One member's connection; from ``join`` on, all that comes goes to the ``other`` end."""

    def __init__(self, relay: Relay) -> None:
        self.relay, self.line = relay, b""
        self.other: End | None = None
        self.ended: Callable[[], None] = lambda: None  # called when the connection is lost
        self.said = self.announced = False  # its line; to the member that it calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.deadline = asyncio.get_running_loop().call_later(HANDSHAKE, self._too_late)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.relay.bytes += len(data)
            self.other.transport.write(data)
        elif self.said:
            self.refuse("wait for OK")
        else:
            self.line += data
            if b"\n" in self.line or len(self.line) > LONGEST_LINE:
                self.said = True
                self.deadline.cancel()
                line, _, more = self.line.partition(b"\n")
                if more:
                    self.refuse("wait for OK")
                else:
                    self.relay.begin(self, line.decode(errors="replace").strip())

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.deadline.cancel()
        self.ended()
        if self.other is not None:
            self.other.transport.close()  # after what is still on its way

    def join(self, other: End) -> None:
        """Makes a pipe of two connections."""
        self.other, other.other = other, self

    def refuse(self, reason: str) -> None:
        self.transport.write(f"NO {reason}\n".encode())
        self.transport.close()

    def _too_late(self) -> None:
        self.refuse("nothing was said")


class Relay:
    """Joins members of one federation; ``serve`` begins, ``close`` ends it."""

    def __init__(self, federation: Federation, events: Events) -> None:
        self.members, self.events = {member.name for member in federation.members}, events
        self.name = "" if federation.relay is None else federation.relay.name
        self.changing = federation.membership is not None
        self.coordinator = federation.coordinator
        self.listening: dict[str, End] = {}
        # By token: who is called, and what is called with the connection that accepts.
        self.announced: dict[str, tuple[str, Callable[[End], None]]] = {}
        self.calls: Counter[str] = Counter()
        self.announced_to: Counter[tuple[str, str]] = Counter()  # those of them that the other has heard of
        self.joined = self.bytes = 0  # so far
        self._arrived = asyncio.Event()  # somebody who listens
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, address: str, credentials: Credentials) -> int:
        """Listens on ``address``; the port."""
        self.credentials = credentials
        self.listener = Listener(self.end, credentials, self.events, of_member=2 * CALLS + 8)
        port = await self.listener.open(address)
        dropping = self.listener.drop_revoked
        self._start(watch_certificates(credentials, self.coordinator, self.events, dropping))
        self._start(self._show_signs_of_life())
        return port

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.listener.close()

    def end(self) -> End:
        """For one more connection."""
        return End(self)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _show_signs_of_life(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            for end in self.listening.values():
                end.transport.write(b"\n")

    # --- what is asked ------------------------------------------------------------------------------------

    def begin(self, end: End, line: str) -> None:
        """``end`` has said what it wants."""
        peer, (verb, _, word) = self.listener.admit(end.transport), line.partition(" ")
        reason = self._unwelcome(peer)
        if reason is not None:
            self.events.complain("refused", peer=peer.name[:80] or "somebody", reason=reason)
            end.refuse(reason)
        elif verb == "LISTEN":
            self._listen(end, peer.name)
        elif verb == "CALL":
            self._begin_call(end, peer.name, word)
        elif verb == "ACCEPT" and word in self.announced and self.announced[word][0] == peer.name:
            self.announced.pop(word)[1](end)
        else:
            end.refuse("no such call")

    def _listen(self, end: End, who: str) -> None:
        """Calls of ``who`` are announced to ``end`` from now on; it answers from one process at a time."""
        before, self.listening[who] = self.listening.get(who), end

        def ended() -> None:
            if self.listening.get(who) is end:
                del self.listening[who]

        end.ended = ended
        if before is not None:
            before.transport.close()
        end.transport.write(b"\n")  # it is heard
        self._arrived.set()
        self._arrived = asyncio.Event()

    def _begin_call(self, end: End, who: str, name: str) -> None:
        if self.calls[who] >= CALLS:
            end.refuse("too many calls at a time")
            return
        announcing = self._start(self._announce(end, who, name))
        self.calls[who] += 1

        def ended() -> None:
            self.calls[who] -= 1
            if end.announced:
                self.announced_to[who, name] -= 1
            announcing.cancel()

        end.ended = ended

    async def _announce(self, end: End, who: str, name: str) -> None:
        """Tells ``name``, once it is here, of the call of ``end``, and joins the two when it accepts.

        It is told of few calls of ``who`` at a time: others' calls would have to wait for handshakes of them.
        """
        token, accepted = secrets.token_hex(16), asyncio.Event()

        def accept(other: End) -> None:
            end.join(other)
            end.transport.write(b"OK\n")
            self.joined += 1
            accepted.set()

        try:
            async with asyncio.timeout(PATIENCE):
                while (listening := self.listening.get(name)) is None:
                    await self._arrived.wait()
            if self.announced_to[who, name] >= MOST_OF_ONE_MEMBER:
                end.refuse("too many calls at a time")
                return
            self.announced_to[who, name] += 1
            end.announced = True
            self.announced[token] = name, accept
            listening.transport.write(f"{token}\n".encode())
            async with asyncio.timeout(HANDSHAKE):
                await accepted.wait()
        except TimeoutError:
            end.refuse("it is not connected to the relay")
        finally:
            self.announced.pop(token, None)

    def _unwelcome(self, peer: Peer) -> str | None:
        """Why ``peer`` may not use the relay; None: it may.

        Where members may change, everybody may who has a certificate of the federation's authority: the relay
        does not know who takes part by now, and members talk to nobody else.
        """
        if peer.name not in self.members and (not self.changing or peer.name in ("", self.name)):
            return "not a member of the federation"
        try:
            self.credentials.check(peer.name, peer.certificate)
        except HoldfastError as error:
            return str(error)
        return None
