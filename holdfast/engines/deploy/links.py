"""Asking other members: with patience, again and again, until the answer is there or the limit is reached."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from holdfast.engines.deploy.credentials import Credentials
from holdfast.engines.deploy.events import Events
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.incarnations import Dependencies, MixedRunsError
from holdfast.engines.deploy.incoming import check_header, receive
from holdfast.engines.deploy.messages import DamagedError, Header, MessageFile, TensorSpec, parse
from holdfast.engines.deploy.service import CONNECTION, FOR_GOOD, NAME_KEY, PATIENCE, SERVICE, Answer, Ask
from holdfast.engines.deploy.store import message_name, remove
from holdfast.errors import HoldfastError

T = TypeVar("T")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds between attempts
SILENCE = PATIENCE + 30.0  # seconds without a byte after which an attempt is given up

RECONNECTION = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 5000),
]


class WaitLimitError(HoldfastError):
    """A neighbour was waited for in vain; the member can be started again."""


class RefusedForGoodError(HoldfastError):
    """Another member will never give what was asked for: going on together is impossible."""


@dataclass
class Wait:
    """Who is waited for, since when, and what the matter is."""

    peer: str
    since: float
    problem: str = ""

    def __str__(self) -> str:
        seconds = time.monotonic() - self.since
        passed = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        return f"waiting for {self.peer} ({passed})" + (f": {self.problem}" if self.problem else "")


class Link:
    """The way to one other member. All of it runs on the event loop."""

    def __init__(
        self,
        federation: Federation,
        name: str,
        peer: str,
        start: str,
        inbox: Path,
        credentials: Credentials | None,
        events: Events,
        waits: dict[str, Wait],
        dependencies: Dependencies,
    ) -> None:
        self.federation, self.name, self.peer, self.start = federation, name, peer, start
        self.inbox, self.events, self.waits, self.dependencies = inbox, events, waits, dependencies
        self.channel = open_channel(federation, peer, credentials)
        self.metadata = None if credentials else ((NAME_KEY, name),)
        self.pool = ThreadPoolExecutor(1, f"from-{peer}")
        self.round = 0  # where the peer is, as far as we know
        self.bytes_received = self.bytes_sent = self.retries = 0
        self._introduced = False

    async def close(self) -> None:
        await self.channel.close()
        self.pool.shutdown(wait=False)

    # --- what can be asked ---------------------------------------------------------------------------------

    async def fetch(self, round: int, exchange: int, tensors: list[TensorSpec]) -> MessageFile:
        """The peer's message of an exchange, checked; waits for it, unless it came before."""
        kept = await self._kept(round, exchange, tensors)
        if kept is not None:
            return kept
        return await self._patiently(lambda: self._fetch(round, exchange, tensors))

    async def agreed(self, round: int, exchange: int) -> bool:
        """Whether the peer, who decides, counts the sporadic link between us as active."""

        async def attempt() -> bool | None:
            answer = await self._ask("Agree", round, exchange)
            return answer.active

        return await self._patiently(attempt)

    async def release(self, round: int) -> None:
        """Tells the peer, if it is there, that we have saved all rounds before ``round``."""
        try:
            await self._ask("Release", round, 0)
        except (grpc.aio.AioRpcError, TimeoutError, HoldfastError):
            return  # it keeps messages a little longer

    async def submit(self, message: MessageFile) -> None:
        """Brings ``message`` to the server, and returns when it is safe there."""

        async def attempt() -> bool | None:
            if not self._introduced:  # so that the server knows first which run the message is of
                await self._ask("Release", message.header.round, 0)
                self._introduced = True
            frames = self._frames(message)
            call = self._method("stream_unary", "Submit")(frames, metadata=self.metadata)
            try:
                answer = parse(Answer, await call)
            except grpc.aio.AioRpcError:  # is our own file as it was written?
                await asyncio.get_running_loop().run_in_executor(self.pool, message.verify)
                raise
            return True if answer.received else None

        await self._patiently(attempt)

    async def status(self, timeout: float) -> dict[str, Any]:
        """What the peer says about itself; if it does not answer, only why as its ``phase``."""
        call = self._method("unary_unary", "Status")(b"", metadata=self.metadata, timeout=timeout)
        try:
            told: dict[str, Any] = json.loads(await call)
        except grpc.aio.AioRpcError as error:
            return {"phase": "down" if error.code() == grpc.StatusCode.UNAVAILABLE else _reason(error)}
        return told

    # --- how -----------------------------------------------------------------------------------------------

    async def _patiently(self, attempt: Callable[[], Awaitable[T | None]]) -> T:
        """Repeats ``attempt`` until it gives something; the limit counts from the peer's last progress."""
        wait = self.waits[self.peer] = Wait(self.peer, time.monotonic())
        progress, known_round, pause = wait.since, self.round, SHORTEST_PAUSE
        try:
            while True:
                begun = time.monotonic()
                try:
                    result = await attempt()
                    if result is not None:
                        return result
                    wait.problem = ""
                except grpc.aio.AioRpcError as error:
                    if error.code() is FOR_GOOD:
                        raise RefusedForGoodError(f"{self.peer} refuses: {error.details()}") from None
                    wait.problem = _reason(error)
                except TimeoutError:
                    wait.problem = "it fell silent"
                except (MixedRunsError, DamagedError):
                    raise
                except HoldfastError as error:
                    wait.problem = str(error)
                    self.events.complain("a message was refused", peer=self.peer, reason=str(error))
                now = time.monotonic()
                if self.round > known_round:
                    progress, known_round = now, self.round
                if now - progress > self.federation.limits.wait:
                    raise WaitLimitError(
                        f"{wait}; that is the limit (limits.wait). Everything is saved: start the same "
                        "command again to go on"
                    )
                if wait.problem or now - begun < PATIENCE / 2:
                    self.retries += 1
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, LONGEST_PAUSE)
                else:
                    pause = SHORTEST_PAUSE
        finally:
            self.waits.pop(self.peer, None)

    async def _fetch(self, round: int, exchange: int, tensors: list[TensorSpec]) -> MessageFile | None:
        method = self._method("unary_stream", "Fetch")
        call = method(self._question(round, exchange), metadata=self.metadata)
        try:
            first = await asyncio.wait_for(call.read(), SILENCE)
            if first is grpc.aio.EOF:
                raise HoldfastError("an answer without a header")
            answer = parse(Answer, first)
            self.round = answer.round
            if answer.header is None:
                return None
            self._check(answer.header, round, exchange, tensors)
            received = await receive(
                self._pieces(call),
                answer.header,
                self.inbox / message_name(round, exchange, self.peer),
                squeezed=self.federation.compression == "lossless",
                keep=False,
                pool=self.pool,
            )
            self.dependencies.add(received.header.depends_on)
            return received
        finally:
            call.cancel()

    async def _kept(self, round: int, exchange: int, tensors: list[TensorSpec]) -> MessageFile | None:
        """The message, if it came before, for a round that is computed again, and is still intact."""
        path = self.inbox / message_name(round, exchange, self.peer)
        if not path.exists():
            return None
        try:
            message = MessageFile(path)
            await asyncio.get_running_loop().run_in_executor(self.pool, message.verify)
            self._check(message.header, round, exchange, tensors)
        except HoldfastError:
            remove(path)  # it was not synced, and the peer may have it still
            return None
        self.dependencies.add(message.header.depends_on)
        return message

    def _check(self, header: Header, round: int, exchange: int, tensors: list[TensorSpec]) -> None:
        """Whether a message is the one that was asked for."""
        check_header(
            header,
            federation=self.federation.id,
            sender=self.peer,
            round=round,
            exchange=exchange,
            tensors=tensors,
            limit=self.federation.limits.message_mib * 2**20,
        )

    async def _pieces(self, call: Any) -> AsyncIterator[bytes]:
        while True:
            async with asyncio.timeout(SILENCE):
                frame = await call.read()
            if frame is grpc.aio.EOF:
                return
            self.bytes_received += len(frame)
            yield frame

    async def _frames(self, message: MessageFile) -> AsyncIterator[bytes]:
        yield message.header.model_dump_json().encode()
        for piece in message.chunks():
            lossless = self.federation.compression == "lossless"
            frame = message.header.squeezed(piece) if lossless else piece
            self.bytes_sent += len(frame)
            yield frame

    async def _ask(self, method: str, round: int, exchange: int) -> Answer:
        call = self._method("unary_unary", method)
        reply = await call(self._question(round, exchange), metadata=self.metadata, timeout=SILENCE)
        answer: Answer = parse(Answer, reply)
        self.round = answer.round
        return answer

    def _question(self, round: int, exchange: int) -> bytes:
        ask = Ask(
            federation=self.federation.id,
            start=self.start,
            round=round,
            exchange=exchange,
            depends_on=self.dependencies.known,
        )
        return ask.model_dump_json().encode()

    def _method(self, kind: str, name: str) -> Any:
        return getattr(self.channel, kind)(f"/{SERVICE}/{name}")


def open_channel(federation: Federation, peer: str, credentials: Credentials | None) -> Any:
    """A connection that is made when needed; the other end must show a certificate in the peer's name."""
    address = federation.member(peer).address
    options: list[tuple[str, int | str]] = [*CONNECTION, *RECONNECTION]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", peer))
    return grpc.aio.secure_channel(address, credentials.for_client(), options=options)


def _reason(error: Any) -> str:
    """What gRPC has to say, in a few words."""
    details = " ".join((error.details() or "").split())
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return "it cannot be reached" + (" (certificate)" if "erification" in details else "")
    return details[:160] or error.code().name
