"""Members with good certificates who send what is not due, or never come to an end; over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from federation_runs import DeployedRun, describe
from fuzzed_federation import Fuzzed

from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.server import Server
from holdfast_deploy.member.session import Session
from holdfast_deploy.storage.messages import Header, write_message
from holdfast_deploy.wire.dialling import WaitLimitError
from holdfast_deploy.wire.protocol import SERVICE
from holdfast_deploy.wire.service import Answer, Ask

PATIENCE = 60.0  # seconds; far more than any of this takes
GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
SERVER = {"network": {"topology": "server"}}
SLOW_LINE = "holdfast_deploy.federation.SLOWEST"


def channel_to(run: DeployedRun, server: str, client: str) -> Any:
    """A connection with ``client``'s own good certificate."""
    credentials = run.credentials(client).for_client()
    options = [("grpc.ssl_target_name_override", server), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(run.federation.member(server).address, credentials, options)


def message(hub: Session, folder: Path, tree: Any, **fields: int) -> tuple[Header, list[bytes]]:
    """The header and the pieces of a message of the node a to ``hub``."""
    header = hub.exchange.header((1, 0), tree).model_copy(update={"sender": "a", **fields})
    written = write_message(folder / "message", header, tree)
    return written.header, list(written.chunks())


# --- what is not due ---------------------------------------------------------------------------------------


def test_an_averaging_server_takes_in_only_what_is_due(tmp_path: Path) -> None:
    """A message of a later round or exchange, or of another shape, does not keep out the honest one."""
    fuzzed = Fuzzed(describe(GECL, nodes=2, rounds=20, **SERVER), tmp_path)
    hub = fuzzed["hub"]
    assert isinstance(hub.program, Server)
    vector = torch.zeros(1, hub.x0.numel())
    due, exchange = hub.program.clients.due.key
    good = hub.program.clients.due.like
    bad = {
        "a later round": ({"round": 17, "exchange": 0}, good),
        "the end": ({"round": 21, "exchange": 0}, ()),
        "a later exchange": ({"round": due, "exchange": exchange + 1}, good),
        "one number": ({"round": due, "exchange": exchange}, torch.zeros(1, 1)),
        "one vector too many": ({"round": due, "exchange": exchange}, (vector, vector, vector)),
    }

    async def submit() -> dict[str, grpc.StatusCode]:
        codes = {}
        async with channel_to(fuzzed.run, "hub", "a") as channel:
            for kind, (fields, tree) in bad.items():
                filled = _zeros(tree)
                header, pieces = message(hub, tmp_path, filled, **fields)
                call = channel.stream_unary(f"/{SERVICE}/Submit")(
                    iter([header.model_dump_json().encode(), *pieces]), timeout=PATIENCE
                )
                codes[kind] = await call.code()
        return codes

    codes = hub.waiting.run_on_loop(submit)
    # INTERNAL is what our own end says when the other has refused a message before all of it was sent.
    refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL}
    assert {kind for kind, code in codes.items() if code not in refused} == set()
    assert not hub.program.clients.arrivals
    fuzzed.finish()


def _zeros(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.zeros(tree.shape)
    parts = [_zeros(part) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


# --- what is never finished --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "local-gecl"])
def test_of_one_client_there_is_one_unfinished_message(method: str, tmp_path: Path) -> None:
    """40 messages of 2 MiB over five connections, each without its last piece."""
    raw = describe(
        {"name": method, "lr": 0.1, "local_steps": 2},
        nodes=2,
        rounds=2,
        problem={"model": {"name": "mlp", "hidden": [80_000]}},
        **SERVER,
    )
    fuzzed = Fuzzed(raw, tmp_path)
    hub = fuzzed["hub"]
    assert isinstance(hub.program, Server)
    key = hub.program.clients.due.key
    tree = _zeros(hub.program.clients.due.like)
    header, pieces = message(hub, tmp_path, tree, round=key[0], exchange=key[1])
    assert len(pieces) > 2

    over = asyncio.Event()

    async def unfinished() -> AsyncIterator[bytes]:
        yield header.model_dump_json().encode()
        for piece in pieces[:-1]:
            yield piece
        await over.wait()

    async def flood() -> tuple[int, int]:
        channels = [channel_to(fuzzed.run, "hub", "a") for _ in range(5)]
        calls = [
            asyncio.ensure_future(
                channels[i % 5].stream_unary(f"/{SERVICE}/Submit")(unfinished(), timeout=PATIENCE)
            )
            for i in range(40)
        ]
        try:
            async with asyncio.timeout(PATIENCE / 2):
                while sum(call.done() for call in calls) < 39:
                    await asyncio.sleep(0.05)
            files = len(list(hub.store.inbox.iterdir()))
            assert not any(call.exception() is None for call in calls if call.done())
            return files, hub.service.gate.calls["a"]
        finally:
            over.set()
            await asyncio.wait(calls)
            for channel in channels:
                await channel.close()

    files, calls = hub.waiting.run_on_loop(flood)
    assert files == 1
    assert calls == 1

    async def calm() -> None:
        while list(hub.store.inbox.iterdir()):
            await asyncio.sleep(0.05)

    hub.waiting.run_on_loop(calm)
    fuzzed.finish()


# --- waiting is limited, whatever others claim -------------------------------------------------------------


class Pretender:
    """Answers in the place of node b, with its good certificate, whatever ``fetch`` makes up."""

    def __init__(
        self, run: DeployedRun, node: Session, fetch: Callable[[bytes, Any], AsyncIterator[bytes]]
    ) -> None:
        self.run, self.node, self.fetch = run, node, fetch
        self.server: Any = None

    def __enter__(self) -> Pretender:
        self.node.waiting.run_on_loop(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        stopping = asyncio.run_coroutine_threadsafe(self.server.stop(0), self.node.network.loop)
        stopping.result()

    async def _start(self) -> None:
        self.server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
        handlers = {"Fetch": grpc.unary_stream_rpc_method_handler(self.fetch)}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = self.run.federation.member("b").address
        self.server.add_secure_port(address, self.run.credentials("b").for_server())
        await self.server.start()


def ends_waiting(member: Session) -> None:
    """The member gives up, as ``limits.wait`` says."""
    ended: Future[Any] = Future()

    def run() -> None:
        try:
            ended.set_result(member.run())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        error = ended.exception(timeout=PATIENCE / 2)
    finally:
        member.stop()
        ended.exception(timeout=PATIENCE)
    assert isinstance(error, WaitLimitError), error


def test_a_neighbour_cannot_be_waited_for_longer_by_claiming_round_after_round(tmp_path: Path) -> None:
    raw = describe(GECL, nodes=2, network={"topology": "line"}, limits={"wait": 1.0, "exchange": 0.5})
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    claimed = 0

    async def fetch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal claimed
        claimed += 1
        yield Answer(round=claimed).model_dump_json().encode()

    with run.member("a") as node, Pretender(run, node, fetch):
        ends_waiting(node)


def test_a_neighbour_cannot_be_waited_for_longer_by_sending_piece_after_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten pieces, one a second: none of them is late, but the message is."""
    monkeypatch.setattr(SLOW_LINE, 2**40)
    raw = describe(
        {"name": "gossip", "lr": 0.1},
        nodes=2,
        rounds=100,
        network={"topology": "line"},
        problem={"model": {"name": "mlp", "hidden": [1600, 1600]}},
        limits={"wait": 2.0, "exchange": 0.5},
    )
    run = DeployedRun(make_federation(raw, "test"), tmp_path)

    with run.member("a") as node:
        vector = torch.zeros(1, node.x0.numel())

        async def fetch(request: bytes, context: Any) -> AsyncIterator[bytes]:
            ask = Ask.model_validate_json(request)
            header = node.exchange.header((ask.round, ask.exchange), vector).model_copy(
                update={"sender": "b", "round": ask.round}
            )
            written = write_message(tmp_path / f"{ask.round}", header, vector)
            yield Answer(round=ask.round, header=written.header).model_dump_json().encode()
            for piece in written.chunks():
                await asyncio.sleep(1.0)
                yield piece

        with Pretender(run, node, fetch):
            ends_waiting(node)


@pytest.mark.parametrize("method", ["fedavg", "local-gecl"])
def test_a_server_cannot_be_made_to_wait_longer_by_questions(method: str, tmp_path: Path) -> None:
    """Node a asks and asks while the server waits for its message, and for that of b."""
    raw = describe({"name": method, "lr": 0.1}, nodes=2, limits={"wait": 2.0, "exchange": 1.0}, **SERVER)
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    with run.member("hub") as hub:
        ask = Ask(federation=run.federation.id, start=hub.start, round=1, exchange=0)

        async def pester() -> None:
            async with channel_to(run, "hub", "a") as channel:
                release = channel.unary_unary(f"/{SERVICE}/Release")
                while True:
                    await release(ask.model_dump_json().encode(), timeout=PATIENCE)
                    await asyncio.sleep(0.05)

        pestering = asyncio.run_coroutine_threadsafe(pester(), hub.network.loop)
        try:
            ends_waiting(hub)
        finally:
            pestering.cancel()
