"""Bad bytes over real sockets with TLS: an error for whoever sent them, and on it goes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
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
from holdfast_deploy.wire.protocol import SERVICE, Answer

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

    codes = fuzzed["a"].waiting.run_on_loop(bombard)
    assert codes.keys() == REFUSED | {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    reasons = [entry.get("reason", "") for entry in fuzzed.run.log]
    assert any("a frame above" in reason for reason in reasons)  # refused by gRPC itself, yet in our log
    fuzzed.finish()


@over_sockets
def test_fuzzed_submissions_over_sockets(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(FEDAVG, nodes=2, **SERVER), tmp_path)
    honest, frames = fuzzed.message("a")
    head, mangler, hub = honest.model_dump(mode="json"), Mangler(5), fuzzed["hub"]
    assert isinstance(hub.program, Server)
    hub.exchange.message_round = 1
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

    codes = hub.waiting.run_on_loop(bombard)
    # INTERNAL is what our own end says when the other has refused a message before all of it was sent.
    refused = codes[grpc.StatusCode.INVALID_ARGUMENT] + codes[grpc.StatusCode.INTERNAL]
    assert refused > 0.9 * count
    assert codes.keys() <= REFUSED | {
        grpc.StatusCode.OK,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    assert hub.events.complaints["refused"] >= refused
    hub.exchange.message_round = 0
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
        link = a.connections.to("b")
        refused = [await refuses_answer(link, honest, frames) for _ in range(count)]
        link.round = 0
        return sum(refused)

    server = a.waiting.run_on_loop(pretend)
    assert a.waiting.run_on_loop(bombard) > 0.9 * count
    assert told == count
    mangler.random.seed(7)
    running = threading.Thread(target=fuzzed.run._run, args=["a"])
    running.start()
    while a.events.complaints["a message was refused"] < 5:
        time.sleep(0.01)
    asyncio.run_coroutine_threadsafe(server.stop(0), fuzzed.network.loop).result()
    fuzzed.run.members["b"] = fuzzed.run.member("b", fuzzed.network)
    fuzzed.finish(running={"a": running})
