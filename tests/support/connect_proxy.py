"""An HTTP proxy that knows CONNECT only, as firewalls have them; it can cut connections after some bytes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class ConnectProxy:
    """In a thread of its own. ``cut``: bytes from the target after which a connection ends; None: never."""

    def __init__(self, cut: int | None = None, target: int | None = None) -> None:
        self.cut, self.target = cut, target  # with a ``target`` port it is a plain TCP proxy to it
        self.elsewhere: dict[int, int] = {}  # whoever asks for this port gets that one
        self.demand = ""  # what a request must contain
        self.requests: list[str] = []
        self.cuts = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def open(self, port: int) -> None:
        begin = asyncio.start_server(self._connection, "127.0.0.1", port)
        self._server = asyncio.run_coroutine_threadsafe(begin, self._loop).result(30)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back = None
        try:
            port = self.target
            if port is None:
                request = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, place, _ = request.split("\r\n")[0].split()
                self.requests.append(f"{method} {place}")
                if method != "CONNECT":
                    writer.write(b"HTTP/1.1 405 Method Not Allowed\r\n\r\n")
                    return
                if self.demand not in request:
                    writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                    return
                port = int(place.rpartition(":")[2])
            there, back = await asyncio.open_connection("127.0.0.1", self.elsewhere.get(port, port))
            if self.target is None:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            ways = [self._pass_on(reader, back, None), self._pass_on(there, writer, self.cut)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            for end in filter(None, (writer, back)):
                end.transport.abort()

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: int | None
    ) -> None:
        with suppress(OSError):
            while piece := await source.read(1 << 16):
                if left is not None:
                    left -= len(piece)
                    if left < 0:
                        self.cuts += 1
                        return
                sink.write(piece)
                await sink.drain()
