"""Questions to one other member over HTTP, however it is reached."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler

from holdfast.core.errors import HoldfastError, printable
from holdfast_deploy.storage.messages import CHUNK
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.dial import LONGEST_REASON, NO_ANSWER, Unreachable, Way, dial
from holdfast_deploy.wire.protocol import AHEAD, SILENCE, Kind, RefusedError, whole_body

KEPT = 30.0  # seconds that an unused connection is kept; who answers keeps it longer
MOST_ANSWERS = 16  # that nobody has read; provisional ones (1xx) may come before an answer
LONGEST_PROBLEM = 1 << 16  # bytes of what is said about an error

Headers = Mapping[str, str]


class Line:
    """HTTP with one other member, over connections that are made when they are needed.

    Each connection shows a certificate before anything is asked over it; it must be the peer's, and not be
    revoked. Whenever our own credentials change, the connections are made again.
    """

    def __init__(self, way: Way, credentials: Credentials | None) -> None:
        self.way, self.credentials = way, credentials
        self.shown = b""  # the peer's certificate, in PEM, on the latest connection
        self._open: dict[asyncio.Transport, bytes] = {}  # connections, and the certificates that they showed
        self._http: aiohttp.ClientSession | None = None
        self._version = 0  # of the credentials that the connections were made with

    async def ask(
        self,
        question: str,
        body: bytes | None = None,
        headers: Headers | None = None,
        *,
        timeout: float | None = None,
        most: int = 1 << 18,
    ) -> bytes:
        """What the peer answers to a ``question`` such as ``SYNC``, at most ``most`` bytes.

        ``timeout``: seconds; by default ``SILENCE``.
        """
        method, _, path = question.partition(" ")
        async with (
            asyncio.timeout(SILENCE if timeout is None else timeout),
            self.request(method, path, body, headers) as answer,
        ):
            return await whole_body(answer.content, most)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Headers | None = None,
        silence: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request, while its answer is read; ``silence``: seconds without a byte of that, or ``SILENCE``.

        Raises ``Unreachable``, also when the connection breaks; ``RefusedError``; ``HoldfastError`` where the
        peer does not speak HTTP.
        """
        http = await self._session()
        patience = aiohttp.ClientTimeout(total=None, sock_read=SILENCE if silence is None else silence)
        try:
            async with http.request(
                method,
                f"http://member{path}",
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=patience,
            ) as answer:
                if answer.status not in (200, 206):
                    raise await _refusal(answer)
                yield answer
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Unreachable(_why(error)) from None
        except aiohttp.ClientError as error:
            raise HoldfastError(f"no answer in HTTP: {printable(str(error))[:LONGEST_REASON]}") from None

    async def _session(self) -> aiohttp.ClientSession:
        version = 0 if self.credentials is None else self.credentials.version
        if self._http is None or version != self._version:
            before, self._version = self._http, version
            self._http = aiohttp.ClientSession(
                connector=_Connector(self),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=CHUNK,
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            )
            if before is not None:
                self._abort()
                await before.close()
        return self._http

    async def connect(self, factory: Any) -> ResponseHandler:
        """A new connection, for ``_Connector``."""
        protocol: ResponseHandler
        protocol, self.shown = await dial(self.way, factory, self.credentials)
        assert protocol.transport is not None
        self._open = {open: pem for open, pem in self._open.items() if not open.is_closing()}
        self._open[protocol.transport] = self.shown
        protocol.transport.set_write_buffer_limits(high=AHEAD)
        return protocol

    def drop_if_revoked(self) -> str:
        """Ends connections whose certificates hold no longer; why, "" if there are none."""
        why = ""
        for transport, shown in list(self._open.items()):
            try:
                if self.credentials is not None and not transport.is_closing():
                    self.credentials.check(self.way.peer, shown)
            except HoldfastError as error:
                why = str(error)
                transport.abort()
        return why

    def _abort(self) -> None:
        for transport in self._open:
            transport.abort()
        self._open.clear()

    async def close(self) -> None:
        self._abort()
        if self._http is not None:
            await self._http.close()


class _Connector(aiohttp.BaseConnector):
    """Connections of a ``Line``, kept and used again as aiohttp does; one at a time for each request."""

    def __init__(self, line: Line) -> None:
        super().__init__(limit=0, keepalive_timeout=KEPT)
        self.line = line

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:
        return await self.line.connect(partial(_Answers, self._loop))


class _Answers(ResponseHandler):
    """What comes over a connection. Nobody has asked for more than one answer at a time."""

    def feed_data(self, data: Any, size: int = 0) -> None:
        if len(self) < MOST_ANSWERS:
            super().feed_data(data, size)
        elif self.transport is not None:
            self.transport.abort()


class Body(aiohttp.Payload):
    """What is submitted, in pieces; each has to be taken within ``SILENCE``. ``size``: None if not known.

    aiohttp may send it twice, where a connection turns out to have ended, so ``pieces`` makes them each time.
    """

    def __init__(self, pieces: Callable[[], Iterator[bytes]], size: int | None) -> None:
        super().__init__(None, content_type="application/octet-stream")
        self.pieces, self._size = pieces, size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("numbers are no text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self.pieces():
            async with asyncio.timeout(SILENCE):
                await writer.write(piece)


async def _refusal(answer: aiohttp.ClientResponse) -> Exception:
    """What the peer says about an error."""
    try:
        kind = Kind(answer.status)
        said = json.loads(await whole_body(answer.content, LONGEST_PROBLEM))["detail"]
        reason = printable(" ".join(str(said).split()))[:LONGEST_REASON]
    except (ValueError, TypeError, KeyError, RecursionError):
        return HoldfastError(f"answers with status {answer.status}")
    return RefusedError(kind, reason or kind.name.lower())


def _why(error: Exception) -> str:
    """A broken connection in a few words: a peer that does not accept our certificate says so in TLS."""
    return f"{NO_ANSWER} (certificate)" if "CERTIFICATE" in str(error).upper() else NO_ANSWER
