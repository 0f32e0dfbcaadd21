"""Bad bytes, by the hundred thousand: an error for whoever sent them, a line in the log, and on it goes.

They go through the very functions that take in answers (``Link``) and questions (``Service``), without a
socket in between.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from bad_bytes import Mangler
from federation_runs import describe
from fuzzed_federation import (
    FEDAVG,
    GECL,
    REFUSED,
    SERVER,
    Fuzzed,
    bad_questions,
    in_bulk,
    refuses_answer,
    settle_submission,
)

from holdfast_deploy.member.server import Server
from holdfast_deploy.storage.messages import LENGTH
from holdfast_deploy.wire.line import Line
from holdfast_deploy.wire.protocol import Answer, Kind, Peer, RefusedError

# --- answers: a neighbour that was asked sends nonsense ----------------------------------------------------


class Replay:
    """In the place of a line to a peer: answers with what it is given, first the answer, then the bytes."""

    shown, status, headers = b"", 200, dict[str, str]()

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    async def ask(self, question: str, body: bytes, headers: dict[str, str]) -> bytes:
        return self.frames.pop(0)

    @asynccontextmanager
    async def request(self, method: str, path: str, headers: dict[str, str]) -> AsyncIterator[Any]:
        self.content = self
        yield self

    async def readany(self) -> bytes:
        return self.frames.pop(0) if self.frames else b""

    def at_eof(self) -> bool:
        return not self.frames


@in_bulk(5_000, 50_000)
def test_fuzzed_answers_are_refused(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(GECL, nodes=2), tmp_path)
    honest, frames = fuzzed.message("b")
    answer = Answer(round=1, header=honest).model_dump(mode="json")
    mangler, replay, kinds = Mangler(1), Replay(), Counter[str]()

    async def bombard() -> int:
        link = fuzzed["a"].connections.to("b")
        real, link.line = link.line, cast(Line, replay)
        refused = 0
        for _ in range(count):
            kind, bad = mangler.mangle(answer, frames)
            replay.frames = list(bad)
            if await refuses_answer(link, honest, frames):
                kinds[kind] += 1
                refused += 1
        replay.frames = [json.dumps(answer).encode(), *frames]
        assert not await refuses_answer(link, honest, frames)
        link.line, link.round = real, 0
        return refused

    refused = fuzzed["a"].waiting.run_interruptible(bombard)
    assert refused > 0.95 * count  # a flipped bit may leave an answer that is as good
    assert kinds.keys() == {*Mangler.HEADERS, *Mangler.PAYLOADS}
    fuzzed.finish()


# --- questions and submissions: a member that asks, or sends, nonsense --------------------------------------


def refusal(call: pytest.ExceptionInfo[RefusedError]) -> Kind:
    """Why; the reason is short."""
    assert len(str(call.value)) < 1000
    return call.value.kind


def framed(content: list[bytes]) -> list[bytes]:
    """A header, after its length, and the numbers."""
    return [LENGTH.pack(len(content[0])), *content]


async def stream(content: list[bytes]) -> AsyncIterator[bytes]:
    for frame in content:
        yield frame


@in_bulk(3_000, 30_000)
def test_fuzzed_questions_are_refused(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(GECL, nodes=2), tmp_path)
    service = fuzzed["a"].service

    methods = [service.sync, service.agree, service.release]

    async def bombard() -> int:
        asked = 0
        for i, text in enumerate(bad_questions(fuzzed["a"], Mangler(2), count)):
            with pytest.raises(RefusedError) as refused:
                await methods[i % 3](Peer("b"), text)
            assert refusal(refused) in REFUSED
            asked += 1
        return asked

    asked = fuzzed["a"].waiting.run_interruptible(bombard)
    assert asked > 0.9 * count
    assert fuzzed["a"].events.complaints["refused"] == asked
    fuzzed.finish()


@in_bulk(2_000, 20_000)
def test_fuzzed_submissions_are_refused(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(FEDAVG, nodes=2, **SERVER), tmp_path)
    honest, frames = fuzzed.message("a")
    head, mangler, hub = honest.model_dump(mode="json"), Mangler(3), fuzzed["hub"]
    assert isinstance(hub.program, Server)
    hub.exchange.message_round = 1  # so that everything but the mistake is right

    async def bombard() -> int:
        refused, kinds, longest = 0, set[Kind](), 0
        for _ in range(count):
            bad = mangler.mangle(head, frames)[1]
            try:
                await hub.service.submit(Peer("a"), 1, 0, stream(framed(bad)))
                settle_submission(hub, bad[0], honest, frames)
            except RefusedError as error:
                kinds.add(error.kind)
                longest = max(longest, len(str(error)))
                refused += 1
        assert kinds <= REFUSED
        assert longest < 1000
        return refused

    refused = hub.waiting.run_interruptible(bombard)
    assert refused > 0.9 * count
    assert hub.events.complaints["refused"] == refused
    hub.exchange.message_round = 0
    fuzzed.finish()


def test_a_message_that_cannot_be_saved_is_refused_for_now(tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(FEDAVG, nodes=2, **SERVER), tmp_path)
    honest, frames = fuzzed.message("a")
    hub = fuzzed["hub"]
    assert isinstance(hub.program, Server)
    hub.exchange.message_round = 1
    hub.store.inbox.rmdir()

    async def submit() -> bytes:
        return await hub.service.submit(
            Peer("a"), 1, 0, stream(framed([honest.model_dump_json().encode(), *frames]))
        )

    with pytest.raises(RefusedError) as refused:
        hub.waiting.run_interruptible(submit)
    assert refusal(refused) is Kind.NO_ROOM
    hub.store.inbox.mkdir()
    assert b'"received":true' in hub.waiting.run_interruptible(submit)
    settle_submission(hub, b"", honest, frames)
    hub.exchange.message_round = 0
    fuzzed.finish()
