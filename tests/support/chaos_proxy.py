"""A bad network: TCP proxies that drop, delay, cut, half-deliver and repeat what passes through them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Coroutine
from typing import Any

FATES = ("clean", "drop", "delay", "cut", "half", "repeat")
PIECE = 1 << 14  # bytes
LIFETIME = (4_000, 40_000)  # bytes, both ways, after which every connection is reset


class ChaosProxies:
    """Proxies in a thread of their own. What happens to which connection is drawn from ``seed``.

    Connections end after bytes, not after seconds, and of every six in a row each meets another fate. So how
    often each occurs depends on the rounds that are done, and not on how long they take.

    clean   passed on as it is, to the end of its life
    drop    accepted, then closed without a byte
    delay   every piece comes up to 30 ms late
    cut     reset, both ways, after some bytes in either direction
    half    falls silent after some bytes, in the middle of whatever is sent, and is reset 0.3 s later
    repeat  passed on; what the client has sent first is sent once more, over a connection of its own

    TLS lets nobody repeat a message inside a connection. Messages are asked for, and sent, twice because of
    ``cut`` and ``half``: the receiver asks again for what it had in part, or had but could not confirm.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fates: Counter[str] = Counter()
        self._next: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._thread.start()

    def __enter__(self) -> ChaosProxies:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, port: int, target: int) -> None:
        """Whoever connects to ``port`` gets to ``target``, or not."""

        async def begin() -> None:
            self._servers.append(
                await asyncio.start_server(lambda r, w: self._connection(target, r, w), "127.0.0.1", port)
            )

        self._run(begin())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(
        self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._next = self._next or self.random.sample(FATES, len(FATES))
        fate = self._next.pop()
        self.fates[fate] += 1
        writers = [writer]
        try:
            if fate == "drop":
                return
            there, back = await asyncio.open_connection("127.0.0.1", target)
            writers.append(back)
            # A handshake takes about 3000 bytes: some are cut in the midst of it, some long after.
            budget = [self.random.randint(*LIFETIME)]
            if fate in ("cut", "half"):
                budget = [self.random.choice([1_000, 10_000, 40_000])]
            copy: list[bytes] | None = [] if fate == "repeat" else None
            ways = [
                asyncio.ensure_future(self._pass_on(reader, back, fate, budget, copy)),
                asyncio.ensure_future(self._pass_on(there, writer, fate, budget, None)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if fate == "half":
                await asyncio.sleep(0.3)
            for way in ways:
                way.cancel()
            if copy:
                await self._repeat(target, b"".join(copy))
        except OSError:
            return  # the target is down, as it often is
        finally:
            for end in writers:
                end.transport.abort()

    async def _pass_on(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        fate: str,
        budget: list[int],
        copy: list[bytes] | None,
    ) -> None:
        """Until the connection ends, or its budget of bytes does."""
        while piece := await source.read(PIECE):
            if fate == "delay":
                await asyncio.sleep(self.random.uniform(0.0, 0.03))
            if copy is not None and sum(map(len, copy)) < PIECE:
                copy.append(piece)
            left, budget[0] = budget[0], max(budget[0] - len(piece), 0)
            sink.write(piece[:left] if fate in ("cut", "half") else piece)
            await sink.drain()
            if budget[0] == 0:
                return

    async def _repeat(self, target: int, content: bytes) -> None:
        _, again = await asyncio.open_connection("127.0.0.1", target)
        again.write(content)
        await again.drain()
        await asyncio.sleep(0.1)
        again.transport.abort()
