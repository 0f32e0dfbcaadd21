"""Lines between members that can be cut, one by one: TCP proxies in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Literal

PIECE = 1 << 14  # bytes
How = Literal["silent", "reset"]


class Line:
    """From one member to another: who dials ``port`` gets to ``target``, unless the line is cut."""

    def __init__(self, port: int, target: int) -> None:
        self.port, self.target = port, target
        self.whole = asyncio.Event()
        self.whole.set()
        self.cuts = 0  # under way
        self.refusing = False
        self.open: set[asyncio.StreamWriter] = set()

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._connection, "127.0.0.1", self.port)

    async def cut(self, seconds: float, how: How) -> None:
        """``silent``: nothing passes, and then connections go on. ``reset``: they break, and none is made."""
        self.whole.clear()
        self.cuts += 1
        self.refusing = self.refusing or how == "reset"
        for writer in list(self.open) if self.refusing else []:
            writer.transport.abort()
        await asyncio.sleep(seconds)
        self.cuts -= 1
        if not self.cuts:
            self.refusing = False
            self.whole.set()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            if self.refusing:
                return
            await self.whole.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
            ends.append(back)
            self.open.update(ends)
            ways = [asyncio.ensure_future(self._pass_on(*way)) for way in ((reader, back), (there, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
        except OSError:
            return  # the target is down
        finally:
            for end in ends:
                self.open.discard(end)
                end.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while piece := await source.read(PIECE):
            await self.whole.wait()
            sink.write(piece)
            await sink.drain()


class Lines:
    """All of them; ``cuts`` counts what was cut."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, str], Line] = {}
        self.cuts = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lines", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, source: str, target: str, port: int, real: int) -> None:
        async def begin() -> None:
            line = self.lines[source, target] = Line(port, real)
            await line.serve()

        self._run(begin())

    def cut(self, one: str, other: str, seconds: float, how: How) -> None:
        """Both ways, for so long; returns at once."""
        for way in ((one, other), (other, one)):
            if way in self.lines:
                asyncio.run_coroutine_threadsafe(self.lines[way].cut(seconds, how), self._loop)
        self.cuts += 1

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
