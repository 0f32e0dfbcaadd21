"""A member as a process that records what it does to its files, and what leaves it, in one order.

Nothing of the member is replaced: files are written as ever, and gRPC sends what it is given.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import grpc
from disk_events import Left, Renamed, Written
from federation_runs import _run_member
from forks import FORKS
from recorded_files import Recorder, record_files

SHOWN = 1 << 16  # bytes of a frame that are kept: what comes first says which message it is


def _record_leaving(recorder: Recorder) -> None:
    server, channels = (
        grpc.aio.server,
        {n: getattr(grpc.aio, n) for n in ("secure_channel", "insecure_channel")},
    )

    def serving(*given: Any, **named: Any) -> Any:
        return server(*given, **named, interceptors=[Answers(recorder)])

    def connecting(name: str) -> Callable[..., Any]:
        return lambda *given, **named: Asking(channels[name](*given, **named), recorder)

    grpc.aio.server = serving
    for name in channels:
        setattr(grpc.aio, name, connecting(name))


class Answers(grpc.aio.ServerInterceptor):
    """Between what a member answers and gRPC."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler, method = await continuation(details), details.method.rpartition("/")[2]
        if handler is None:
            return handler

        def left(asked: list[bytes], frame: bytes) -> bytes:
            question = asked[0] if asked else b""
            self.recorder.note(Left(method, True, question, frame[:SHOWN], {}))
            return frame

        if handler.response_streaming:

            async def answer_in_pieces(frames: Any, context: Any) -> AsyncIterator[bytes]:
                asked: list[bytes] = []
                async for frame in handler.stream_stream(_heard(frames, asked), context):
                    yield left(asked, frame)

            return grpc.stream_stream_rpc_method_handler(answer_in_pieces)

        async def answer(frames: Any, context: Any) -> bytes:
            asked: list[bytes] = []
            return left(asked, await handler.stream_unary(_heard(frames, asked), context))

        return grpc.stream_unary_rpc_method_handler(answer)


async def _heard(frames: AsyncIterator[bytes], asked: list[bytes]) -> AsyncIterator[bytes]:
    async for frame in frames:
        asked.append(frame[:SHOWN])
        yield frame


class Asking:
    """A channel that notes what is asked."""

    def __init__(self, channel: Any, recorder: Recorder) -> None:
        self.channel, self.recorder = channel, recorder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return found

        def call_of(path: str) -> Callable[..., Any]:
            method, call = path.rpartition("/")[2], found(path)

            def left(frame: bytes, beside: Any) -> bytes:
                self.recorder.note(Left(method, False, b"", frame[:SHOWN], dict(beside or ())))
                return frame

            async def pieces(frames: Any, beside: Any) -> AsyncIterator[bytes]:
                async for frame in frames:
                    yield left(frame, beside)

            def asked(question: Any, *given: Any, metadata: Any = None, **named: Any) -> Any:
                said = left(question, metadata) if name.startswith("unary") else pieces(question, metadata)
                return call(said, *given, metadata=metadata, **named)

            return asked

        return call_of


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
