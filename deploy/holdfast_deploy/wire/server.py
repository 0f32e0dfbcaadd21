"""Requests of HTTP, handed to an ``Answerer``; its refusals become statuses with reasons."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace

from aiohttp import http_parser, web

from holdfast.core.errors import HoldfastError, printable
from holdfast_deploy.ops.events import Events
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.listener import Listener
from holdfast_deploy.wire.protocol import (
    AHEAD,
    AUDIT_KEY,
    MESSAGES,
    MODEL_KEY,
    NAME_KEY,
    READING_KEY,
    SILENCE,
    VERSION,
    Answerer,
    Kind,
    Peer,
    RefusedError,
    Wanted,
    pieces_of,
    whole_body,
)
from holdfast_deploy.wire.relayed import RelayedPort

IDLE = 75.0  # seconds that a connection is kept without a question; askers end theirs before
LINGERING = 5.0  # seconds in which the rest of a refused request is read, so that the reason arrives
SAID = (NAME_KEY, MODEL_KEY, READING_KEY, AUDIT_KEY)
MESSAGE = re.compile(f"{MESSAGES}/([0-9]{{1,10}})/([0-9]{{1,10}})")
RANGE = re.compile("bytes=([0-9]{1,18})-")
LIBRARY = (
    "aiohttp runs without its C parser (AIOHTTP_NO_EXTENSIONS?): unset that, or install its binary wheel"
)


class Server:
    """Answers on a port, and through the relay, with what ``answerer`` gives then."""

    def __init__(
        self, answerer: Callable[[], Answerer], credentials: Credentials | None, events: Events
    ) -> None:
        if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
            raise HoldfastError(LIBRARY)
        self.answerer = answerer
        self.http = web.Server(
            self._handle,
            access_log=None,
            logger=_complaining(events),
            keepalive_timeout=IDLE,
            lingering_time=LINGERING,
            auto_decompress=False,
            read_bufsize=1 << 20,
        )
        self.listener = Listener(self.http, credentials, events)
        self.credentials, self.events = credentials, events
        self.relayed: RelayedPort | None = None

    def open_at(self, relay: str, address: str) -> None:
        """Is reached through ``relay``, too, from now on."""
        if self.credentials is None:
            raise HoldfastError("a relay needs certificates: leave out --insecure")
        if self.relayed is None:
            self.relayed = RelayedPort(relay, address, self.credentials, self.listener, self.events)

    async def end_requests(self, grace: float = 0.0) -> None:
        """Ends all connections; what is being answered has ``grace`` seconds. Others may connect again."""
        await self.http.shutdown(max(grace / 2, 0.01))  # to end by itself, and to end when it is told to

    async def close(self, grace: float = 0.0) -> None:
        """Ends all connections; what is being answered has ``grace`` seconds."""
        if self.relayed is not None:
            self.relayed.close()
        self.listener.stop()
        await self.end_requests(grace)
        self.listener.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request; every problem has its status and its reason."""
        if request.transport is None:  # it has gone
            raise ConnectionResetError
        peer = self._peer(request)
        sent: list[web.StreamResponse] = []
        try:
            return await self._answer(peer, request, sent)
        except RefusedError as error:
            if not sent:
                return _problem(error.kind, str(error))
        except TimeoutError:
            if not sent:
                return _problem(Kind.TOO_SLOW, "too slow")
        except HoldfastError as error:
            self._complain(peer, str(error))
            if not sent:
                return _problem(Kind.MALFORMED, str(error))
        _abort(request)  # in the middle of a message: the asker sees that it ends early
        return sent[0]

    def _complain(self, peer: Peer, reason: str) -> None:
        """About what no ``Answerer`` has seen."""
        self.events.complain("refused", peer=peer.name[:80] or "somebody", reason=reason)

    def _peer(self, request: web.BaseRequest) -> Peer:
        assert request.transport is not None
        peer = self.listener.admit(request.transport)
        said = {key: values[0] for key in SAID if len(values := request.headers.getall(key, [])) == 1}
        name = peer.name if self.credentials is not None else said.get(NAME_KEY, "")
        return replace(peer, name=name, said=said)

    async def _answer(
        self, peer: Peer, request: web.BaseRequest, sent: list[web.StreamResponse]
    ) -> web.StreamResponse:
        answerer = self.answerer()
        question = f"{request.method} {request.path}"
        if (found := MESSAGE.fullmatch(request.path)) and request.method in ("GET", "PUT"):
            round, exchange = int(found[1]), int(found[2])
            if request.method == "GET":
                return await _send(answerer, peer, request, round, exchange, sent)
            body = await answerer.submit(peer, round, exchange, pieces_of(request.content))
        elif (answer := answerer.answers.get(question)) is not None:
            body = await answer(peer, await whole_body(request.content))
        else:
            reason = f"no such question in version {VERSION[2:]} of the wire"
            self._complain(peer, reason)
            raise RefusedError(Kind.UNKNOWN, reason)
        return web.Response(body=body, content_type="application/json")


async def _send(
    answerer: Answerer,
    peer: Peer,
    request: web.BaseRequest,
    round: int,
    exchange: int,
    sent: list[web.StreamResponse],
) -> web.StreamResponse:
    """A message, piece by piece."""
    ranged = request.headers.get("Range", "bytes=0-")
    if (found := RANGE.fullmatch(ranged)) is None:
        raise RefusedError(Kind.MALFORMED, "Range: expected bytes=FIRST-")
    wanted = Wanted(round, exchange, request.headers.get("If-Match", "").strip('"'), int(found[1]))
    async with answerer.message(peer, wanted) as sending:
        first, last = wanted.offset, sending.whole - 1
        headers = {"ETag": f'"{wanted.content}"', "Content-Type": "application/octet-stream"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{last}/{sending.whole}"
        if sending.size is not None:
            headers["Content-Length"] = str(sending.size)
        response = web.StreamResponse(status=206 if first else 200, headers=headers)
        sent.append(response)
        if request.transport is not None:
            request.transport.set_write_buffer_limits(high=AHEAD)
        async with asyncio.timeout(SILENCE):
            await response.prepare(request)
        for piece in sending.pieces:
            async with asyncio.timeout(SILENCE):
                await response.write(piece)
        async with asyncio.timeout(SILENCE):
            await response.write_eof()
        return response


def _problem(kind: Kind, reason: str) -> web.Response:
    """An error as RFC 9457 has it."""
    title = kind.name.lower().replace("_", " ")
    body = json.dumps({"title": title, "status": kind.value, "detail": reason}).encode()
    return web.Response(status=kind.value, body=body, content_type="application/problem+json")


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def _complaining(events: Events) -> logging.Logger:
    """What aiohttp has to say about broken requests, as lines of the log."""

    class Complaints(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            reason = f"{type(error).__name__}: {error}" if error else record.getMessage()
            events.complain("a request was refused", reason=printable(reason.split("\n")[0])[:200])

    logger = logging.Logger("holdfast.wire")
    logger.addHandler(Complaints())
    return logger
