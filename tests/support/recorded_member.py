"""A member as a process that records what it does to its files, and what leaves it, in one order.

Nothing of the member is replaced: files are written as ever, and aiohttp sends what it is given.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from disk_events import Left, Renamed, Written
from federation_runs import _run_member
from forks import FORKS
from recorded_files import Recorder, record_files

from holdfast_deploy.storage.messages import LENGTH
from holdfast_deploy.wire import server
from holdfast_deploy.wire.line import Body
from holdfast_deploy.wire.server import Server

SHOWN = 1 << 16  # bytes of a body that are kept: what comes first says which message it is


ASKED: ContextVar[list[bytes]] = ContextVar("ASKED")  # how the body of the request under way begins


def _record_leaving(recorder: Recorder) -> None:
    """Questions before they are sent, and answers before their first byte is."""
    request, prepare, answered = aiohttp.ClientSession.request, web.StreamResponse.prepare, Server._answer
    pieces_of = server.pieces_of

    def asking(
        session: aiohttp.ClientSession, method: str, url: str, *, data: Any, headers: Any, **named: Any
    ) -> Any:
        body = data if isinstance(data, bytes) else b""
        if isinstance(data, Body):
            body = next(iter(data.pieces()))[LENGTH.size :]
        recorder.note(Left(f"{method} {urlsplit(url).path}", False, b"", body[:SHOWN], dict(headers or ())))
        return request(session, method, url, data=data, headers=headers, **named)

    async def answering(self: Server, peer: Any, request: web.BaseRequest, sent: Any) -> Any:
        ASKED.set([])
        return await answered(self, peer, request, sent)

    async def heard(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        async for piece in pieces_of(content):
            ASKED.get().append(piece[:SHOWN])
            yield piece

    async def preparing(response: web.StreamResponse, request: web.BaseRequest) -> Any:
        body = response.body if isinstance(response, web.Response) else b""
        if response.status < 300 and request.method in ("GET", "POST", "PUT"):
            question = _header_in(b"".join(ASKED.get([])))
            frame = bytes(body or b"")[:SHOWN]  # type: ignore[arg-type]
            recorder.note(Left(f"{request.method} {request.path}", True, question, frame, {}))
        return await prepare(response, request)

    aiohttp.ClientSession.request = asking  # type: ignore[method-assign, assignment]
    web.StreamResponse.prepare = preparing  # type: ignore[method-assign]
    Server._answer = answering  # type: ignore[method-assign]
    server.pieces_of = heard


def _header_in(body: bytes) -> bytes:
    """Of a message that was submitted."""
    if len(body) < LENGTH.size:
        return b""
    return body[LENGTH.size : LENGTH.size + LENGTH.unpack_from(body)[0]]


# --- the process -----------------------------------------------------------------------------------------


def is_never(_: Any) -> bool:
    """Nothing is the end."""
    return False


def is_renamed(name: str, what: Any) -> bool:
    """Whether a file has got a name like this just now, for good only when its folder is synced."""
    return isinstance(what, Renamed) and re.fullmatch(name, what.name) is not None


def is_written(start: bytes, what: Any) -> bool:
    """Whether bytes that begin like this were written just now, for good only when the file is synced."""
    return isinstance(what, Written) and what.content.startswith(start)


def _run_recorded(path: Path, name: str, own: str, target: Path, killed: Callable[[Any], bool]) -> None:
    recorder = Recorder(path.parent, own, target, killed)
    record_files(recorder)
    _record_leaving(recorder)
    _run_member(path, name, None)


@contextmanager
def recorded_member(
    path: Path, name: str, own: str, target: Path, killed: Callable[[Any], bool] = is_never
) -> Iterator[ForkServerProcess]:
    """The member, whose events go to ``target``; ``own``: its folder beside ``path``.

    ``killed``: right after which event it is.
    """
    process = FORKS.Process(target=_run_recorded, args=(path, name, own, target, killed), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
