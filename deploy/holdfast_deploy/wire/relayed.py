"""A member that others reach through the relay: it dials the relay, and answers as on a port."""

from __future__ import annotations

import asyncio
import ssl

from holdfast.core.errors import printable
from holdfast_deploy.ops.events import Events
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.dial import Unreachable, reach_relay
from holdfast_deploy.wire.listener import GOODBYE, Listener, why_refused
from holdfast_deploy.wire.protocol import HANDSHAKE, SILENCE

PAUSES = (0.1, 5.0)  # seconds between attempts to reach the relay: the first, the longest
MOST_BEGINNING = 64  # calls whose handshake is under way


class RelayedPort:
    """Waits at a relay for those who call this member, and gives their connections to ``listener``."""

    def __init__(
        self, relay: str, address: str, credentials: Credentials, listener: Listener, events: Events
    ) -> None:
        self.relay, self.address, self.credentials = relay, address, credentials
        self.listener, self.events = listener, events
        self._accepting: set[asyncio.Task[None]] = set()
        self._waiting = asyncio.create_task(self._wait())

    def close(self) -> None:
        for task in [self._waiting, *self._accepting]:
            task.cancel()

    async def _wait(self) -> None:
        """Says LISTEN, again whenever the connection breaks; each line that comes is the token of a call."""
        pause = PAUSES[0]
        while True:
            reason = "the connection broke"
            try:
                transport, said = await reach_relay(self.relay, self.address, self.credentials, "LISTEN\n")
                try:
                    while True:
                        async with asyncio.timeout(SILENCE):  # it says something all the time
                            line = (await said.until(b"\n")).decode(errors="replace").strip()
                        pause = PAUSES[0]
                        if line.startswith("NO "):
                            reason = printable(line[3:])[:200]
                            break
                        self._begin(line)
                finally:
                    transport.abort()
            except Unreachable as error:
                reason = str(error)
            except (OSError, EOFError, TimeoutError):
                pass
            self.events.complain("the relay cannot be reached", reason=reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    def _begin(self, token: str) -> None:
        if token and len(self._accepting) < MOST_BEGINNING:  # "": it only shows that it is there
            task = asyncio.create_task(self._accept(token))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)

    async def _accept(self, token: str) -> None:
        """The call ``token``: inside, the caller does TLS with this member."""
        protocol = self.listener.factory()
        try:
            outer, _ = await reach_relay(self.relay, self.address, self.credentials, f"ACCEPT {token}\n")
            inner = await asyncio.get_running_loop().start_tls(
                outer,
                protocol,
                self.credentials.server_context(),
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE,
                ssl_shutdown_timeout=GOODBYE,
            )
        except ssl.SSLError as error:
            self.events.complain("handshake refused", reason=why_refused(error))
        except (Unreachable, OSError, TimeoutError):
            pass  # the caller tries again
        else:
            if inner is not None:
                self.listener.admit(inner, "relay")
                protocol.connection_made(inner)
