"""Bad bytes, by the hundred thousand: an error for whoever sent them, a line in the log, and on it goes.

100,000 go through the very functions that take in answers (``Link``) and questions (``Service``), without a
socket in between; more go over real sockets with TLS.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from bad_bytes import Mangler
from federation_runs import Run, deploy, describe

from holdfast.engines.deploy.federation import make_federation
from holdfast.engines.deploy.hub import Hub
from holdfast.engines.deploy.links import Link
from holdfast.engines.deploy.member import Member, NetworkThread
from holdfast.engines.deploy.messages import Header, write_message
from holdfast.engines.deploy.service import SERVICE, Answer, Ask
from holdfast.errors import HoldfastError

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
SERVER = {"network": {"topology": "server"}}
MOST_LINES = 30  # kinds of complaints about one peer

REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}


def in_bulk(few: int, many: int) -> pytest.MarkDecorator:
    """A few every time, many where time does not matter."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


class Fuzzed:
    """A federation of two nodes that is not under way yet, and what comes of it."""

    def __init__(self, raw: dict[str, Any], folder: Path, absent: str = "") -> None:
        self.calm = deploy(raw, folder / "calm")
        self.run = Run(make_federation(raw, "test"), folder / "fuzzed")
        self.network = NetworkThread()
        names = [member.name for member in self.run.federation.members if member.name not in absent]
        self.run.members = {name: self.run.member(name, self.network) for name in names}

    def __getitem__(self, name: str) -> Member:
        return self.run.members[name]

    def message(self, sender: str) -> tuple[Header, list[bytes]]:
        """The header and the frames of a good message of the first round."""
        numbers = torch.randn(1, self["a"].x0.numel(), generator=torch.Generator().manual_seed(0))
        header = self["a"].header(0, numbers).model_copy(update={"sender": sender, "round": 1})
        written = write_message(self.run.folder / "good", header, numbers)
        return written.header, list(written.chunks())

    def finish(self, running: dict[str, threading.Thread] | None = None) -> None:
        """The federation runs, and gets the model of one that nobody disturbed; the log is short."""
        complaints = [entry for entry in self.run.log if entry["level"] != "info"]
        assert len(complaints) <= MOST_LINES, [entry["reason"][:60] for entry in complaints]
        assert all(len(entry["reason"]) <= 400 for entry in complaints)
        for member in self.run.members.values():
            assert not list(member.store.inbox.iterdir())
        threads = running or {}
        for name in self.run.members.keys() - threads.keys():
            threads[name] = threading.Thread(target=self.run._run, args=[name])
            threads[name].start()
        for thread in threads.values():
            thread.join(120)
        for member in self.run.members.values():
            member.close()
        self.network.close()
        assert not self.run.errors
        for name, model in self.calm.models.items():
            assert torch.equal(self.run.models[name], model)


# --- answers: a neighbour that was asked sends nonsense ----------------------------------------------------


class Replay:
    """In the place of a gRPC channel: answers every call with the frames it is given."""

    def __init__(self) -> None:
        self.frames: Iterator[bytes] = iter(())

    def unary_stream(self, method: str) -> Any:
        return lambda request, metadata: self

    async def read(self) -> Any:
        return next(self.frames, grpc.aio.EOF)

    def cancel(self) -> None:
        pass


async def refuses_answer(link: Link, honest: Header, frames: list[bytes]) -> bool:
    """Whether an answer is refused; one that is accepted must be the right one after all."""
    try:
        received = await link._fetch(1, 0, honest.tensors)
    except (HoldfastError, grpc.aio.AioRpcError):
        return True
    if received is None:  # "not yet" is an answer, too
        return True
    assert received.header == honest
    assert list(received.chunks()) == frames
    received.path.unlink()
    return False


@in_bulk(5_000, 50_000)
def test_fuzzed_answers_are_refused(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(GECL, nodes=2), tmp_path)
    honest, frames = fuzzed.message("b")
    answer = Answer(round=1, header=honest).model_dump(mode="json")
    mangler, replay, kinds = Mangler(1), Replay(), Counter[str]()

    async def bombard() -> int:
        link = await fuzzed["a"].link("b")
        real, link.channel = link.channel, replay
        refused = 0
        for _ in range(count):
            kind, bad = mangler.mangle(answer, frames)
            replay.frames = iter(bad)
            if await refuses_answer(link, honest, frames):
                kinds[kind] += 1
                refused += 1
        replay.frames = iter([json.dumps(answer).encode(), *frames])
        assert not await refuses_answer(link, honest, frames)
        link.channel, link.round = real, 0
        return refused

    refused = fuzzed["a"].ask(bombard)
    assert refused > 0.95 * count  # a flipped bit may leave an answer that is as good
    assert kinds.keys() == {*Mangler.HEADERS, *Mangler.PAYLOADS}
    fuzzed.finish()


# --- questions and submissions: a member that asks, or sends, nonsense --------------------------------------


class Aborted(Exception):  # noqa: N818 - as in gRPC
    """The call was answered with an error."""


class Caller:
    """In the place of gRPC's context: the call of a member with a good certificate."""

    def __init__(self, name: str) -> None:
        self.name, self.code = name, None

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": [self.name.encode()]}

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code = code
        assert len(details) < 1000
        raise Aborted


def is_good_question(text: bytes, honest: dict[str, Any], rounds: int) -> bool:
    """Whether a mangled question is still one that a neighbour may ask."""
    try:
        ask = Ask.model_validate_json(text)
    except ValueError:
        return False
    same = (ask.federation, ask.start) == (honest["federation"], honest["start"])
    return same and ask.round <= rounds + 1


def bad_questions(member: Member, mangler: Mangler, count: int) -> Iterator[bytes]:
    honest = {"federation": member.federation.id, "start": member.start, "round": 1, "exchange": 0}
    for _ in range(count):
        _, (text,) = mangler.mangle(honest, [])
        if not is_good_question(text, honest, member.federation.rounds):
            yield text


async def stream(content: list[bytes]) -> AsyncIterator[bytes]:
    for frame in content:
        yield frame


@in_bulk(3_000, 30_000)
def test_fuzzed_questions_are_refused(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(GECL, nodes=2), tmp_path)
    service = fuzzed["a"].service

    async def fetch(frames: AsyncIterator[bytes], caller: Caller) -> bytes:
        return await anext(aiter(service.fetch(frames, caller)))

    methods = [fetch, service.agree, service.release]

    async def bombard() -> int:
        asked = 0
        for i, text in enumerate(bad_questions(fuzzed["a"], Mangler(2), count)):
            caller = Caller("b")
            with pytest.raises(Aborted):
                await methods[i % 3](stream([text]), caller)
            assert caller.code in REFUSED
            asked += 1
        return asked

    asked = fuzzed["a"].ask(bombard)
    assert asked > 0.9 * count
    assert fuzzed["a"].events.complaints["refused"] == asked
    fuzzed.finish()


def settle_submission(hub: Hub, text: bytes, honest: Header, frames: list[bytes]) -> None:
    """A submission was not refused: it is good after all, or of a round that is over, and not kept."""
    if hub.arrivals:
        kept = hub._file((1, 0), "a")
        assert kept.header == honest
        assert list(kept.chunks()) == frames
        hub._drop((1, 0))
    else:
        assert json.loads(text)["round"] < hub.stage


@in_bulk(2_000, 20_000)
def test_fuzzed_submissions_are_refused(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(FEDAVG, nodes=2, **SERVER), tmp_path)
    honest, frames = fuzzed.message("a")
    head, mangler, hub = honest.model_dump(mode="json"), Mangler(3), fuzzed["hub"]
    assert isinstance(hub, Hub)
    hub.stage = 1  # so that everything but the mistake is right

    async def bombard() -> int:
        refused = 0
        for _ in range(count):
            bad, caller = mangler.mangle(head, frames)[1], Caller("a")
            try:
                await hub.service.submit(stream(bad), caller)
                settle_submission(hub, bad[0], honest, frames)
            except Aborted:
                assert caller.code in REFUSED
                refused += 1
        return refused

    refused = hub.ask(bombard)
    assert refused > 0.9 * count
    assert hub.events.complaints["refused"] == refused
    hub.stage = 0
    fuzzed.finish()


# --- the same over real sockets ----------------------------------------------------------------------------

over_sockets = in_bulk(100, 3000)


def channel_to(fuzzed: Fuzzed, server: str, client: str) -> Any:
    """A connection with ``client``'s own good certificate that lets any size of message go out."""
    credentials = fuzzed.run.credentials(client).for_client()
    options = [("grpc.ssl_target_name_override", server), ("grpc.max_send_message_length", -1)]
    return grpc.aio.secure_channel(fuzzed.run.federation.member(server).address, credentials, options)


@over_sockets
def test_fuzzed_questions_over_sockets(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(GECL, nodes=2), tmp_path)

    async def bombard() -> Counter[grpc.StatusCode]:
        codes: Counter[grpc.StatusCode] = Counter()
        async with channel_to(fuzzed, "a", "b") as channel:
            methods = [channel.unary_unary(f"/{SERVICE}/{name}") for name in ("Agree", "Release", "Nonsense")]
            methods.append(channel.unary_stream(f"/{SERVICE}/Fetch"))
            questions = [*bad_questions(fuzzed["a"], Mangler(4), count), bytes(2**21), bytes(2**23)]
            for i, text in enumerate(questions):
                call = methods[i % 4](text, timeout=60)
                codes[await call.code()] += 1
        return codes

    codes = fuzzed["a"].ask(bombard)
    assert codes.keys() == REFUSED | {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    reasons = [entry.get("reason", "") for entry in fuzzed.run.log]
    assert any("a frame above" in reason for reason in reasons)  # refused by gRPC itself, yet in our log
    fuzzed.finish()


@over_sockets
def test_fuzzed_submissions_over_sockets(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(FEDAVG, nodes=2, **SERVER), tmp_path)
    honest, frames = fuzzed.message("a")
    head, mangler, hub = honest.model_dump(mode="json"), Mangler(5), fuzzed["hub"]
    assert isinstance(hub, Hub)
    hub.stage = 1
    frames_too_large = [[bytes(2**22)], [json.dumps(head).encode(), bytes(2**22)]]

    async def bombard() -> Counter[grpc.StatusCode]:
        codes: Counter[grpc.StatusCode] = Counter()
        async with channel_to(fuzzed, "hub", "a") as channel:
            submit = channel.stream_unary(f"/{SERVICE}/Submit")
            for bad in [*(mangler.mangle(head, frames)[1] for _ in range(count)), *frames_too_large]:
                code = await submit(iter(bad), timeout=60).code()
                codes[code] += 1
                if code is grpc.StatusCode.OK:
                    settle_submission(hub, bad[0], honest, frames)
        return codes

    codes = hub.ask(bombard)
    # INTERNAL is what our own end says when the other has refused a message before all of it was sent.
    refused = codes[grpc.StatusCode.INVALID_ARGUMENT] + codes[grpc.StatusCode.INTERNAL]
    assert refused > 0.9 * count
    assert codes.keys() <= REFUSED | {
        grpc.StatusCode.OK,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    assert hub.events.complaints["refused"] >= refused
    hub.stage = 0
    fuzzed.finish()


@over_sockets
def test_fuzzed_answers_over_sockets(count: int, tmp_path: Path) -> None:
    """A neighbour with a good certificate answers with nonsense, first to us, then to the running node."""
    fuzzed = Fuzzed(describe(GECL, nodes=2), tmp_path, absent="b")
    a, federation = fuzzed["a"], fuzzed.run.federation
    honest, frames = fuzzed.message("b")
    answer, mangler = Answer(round=1, header=honest).model_dump(mode="json"), Mangler(6)
    told = 0

    async def nonsense(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal told
        told += 1
        for frame in mangler.mangle(answer, frames)[1]:
            yield frame

    async def pretend() -> Any:
        server = grpc.aio.server()
        handlers = {"Fetch": grpc.unary_stream_rpc_method_handler(nonsense)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_secure_port(federation.member("b").address, fuzzed.run.credentials("b").for_server())
        await server.start()
        return server

    async def bombard() -> int:
        link = await a.link("b")
        refused = [await refuses_answer(link, honest, frames) for _ in range(count)]
        link.round = 0
        return sum(refused)

    server = a.ask(pretend)
    assert a.ask(bombard) > 0.9 * count
    assert told == count
    mangler.random.seed(7)
    running = threading.Thread(target=fuzzed.run._run, args=["a"])
    running.start()
    while a.events.complaints["a message was refused"] < 5:
        time.sleep(0.01)
    asyncio.run_coroutine_threadsafe(server.stop(0), fuzzed.network.loop).result()
    fuzzed.run.members["b"] = fuzzed.run.member("b", fuzzed.network)
    fuzzed.finish(running={"a": running})
