"""Members with good certificates who send what is not due, or never come to an end; over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_runs import DeployedRun, describe
from fuzzed_federation import Fuzzed
from http_peers import Caller, Made, Pretender, submission

from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.server import Server
from holdfast_deploy.member.session import Session
from holdfast_deploy.storage.messages import Header, MessageFile, write_message
from holdfast_deploy.wire.protocol import MESSAGES, RELEASED
from holdfast_deploy.wire.retry import WaitLimitError
from holdfast_deploy.wire.service import Answer, Ask

PATIENCE = 60.0  # seconds; far more than any of this takes
GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
SERVER = {"network": {"topology": "server"}}
SLOW_LINE = "holdfast_deploy.federation.SLOWEST"


def caller(run: DeployedRun, server: str, client: str) -> Caller:
    """A connection with ``client``'s own good certificate."""
    context = run.credentials(client).client_context(server)
    return Caller(run.federation.member(server).address, server, context, PATIENCE)


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

    for kind, (fields, tree) in bad.items():
        header, pieces = message(hub, tmp_path, _zeros(tree), **fields)
        path = f"PUT {MESSAGES}/{header.round}/{header.exchange}"
        with caller(fuzzed.run, "hub", "a") as a:
            assert a.ask(path, submission(header, pieces)).status == 400, kind
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
    """30 messages of 2 MiB, each without its last piece."""
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

    over, body = threading.Event(), submission(header, pieces)

    def unfinished() -> Iterator[bytes]:
        yield body[: -len(pieces[-1])]
        over.wait(PATIENCE)

    def flood() -> None:
        with caller(fuzzed.run, "hub", "a") as a, suppress(OSError, HTTPException):
            a.ask(f"PUT {MESSAGES}/{key[0]}/{key[1]}", unfinished(), Content_Length=str(len(body)))

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(30)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + PATIENCE / 2
    while hub.events.complaints["refused"] < 29:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert len(list(hub.store.inbox.iterdir())) == 1
    assert hub.service.callers.calls["a"] == 1
    over.set()
    for thread in threads:
        thread.join(PATIENCE)

    async def calm() -> None:
        while list(hub.store.inbox.iterdir()):
            await asyncio.sleep(0.05)

    hub.waiting.run_interruptible(calm)
    fuzzed.finish()


# --- waiting is limited, whatever others claim -------------------------------------------------------------


def pretending(run: DeployedRun, answer: Callable[[str, bytes, Any], Made]) -> Pretender:
    """Answers in the place of node b, with its good certificate."""
    return Pretender(run.federation.member("b").address, run.credentials("b").server_context(), answer)


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

    def answer(question: str, body: bytes, headers: Any) -> Made:
        nonlocal claimed
        claimed += 1
        return 200, Answer(round=claimed).model_dump_json().encode()

    with run.member("a") as node, pretending(run, answer):
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

        def slowly(path: Path) -> Iterator[bytes]:
            for piece in MessageFile(path).chunks():
                time.sleep(1.0)
                yield piece

        def answer(question: str, body: bytes, headers: Any) -> Made:
            if question.startswith("GET"):
                return 200, slowly(tmp_path / question.split("/")[-2])
            ask = Ask.model_validate_json(body)
            where = (ask.round, ask.exchange)
            header = node.exchange.header(where, vector).model_copy(update={"sender": "b"})
            if not (tmp_path / f"{ask.round}").exists():
                write_message(tmp_path / f"{ask.round}", header, vector)
            header = MessageFile(tmp_path / f"{ask.round}").header
            return 200, Answer(round=ask.round, header=header).model_dump_json().encode()

        with pretending(run, answer):
            ends_waiting(node)


@pytest.mark.parametrize("method", ["fedavg", "local-gecl"])
def test_a_server_cannot_be_made_to_wait_longer_by_questions(method: str, tmp_path: Path) -> None:
    """Node a asks and asks while the server waits for its message, and for that of b."""
    raw = describe({"name": method, "lr": 0.1}, nodes=2, limits={"wait": 2.0, "exchange": 1.0}, **SERVER)
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    with run.member("hub") as hub:
        ask = Ask(federation=run.federation.id, start=hub.start, round=1, exchange=0)

        stop = threading.Event()

        def pester() -> None:
            with caller(run, "hub", "a") as a, suppress(OSError, HTTPException):
                while not stop.wait(0.05):
                    a.ask(RELEASED, ask.model_dump_json().encode())

        pestering = threading.Thread(target=pester, daemon=True)
        pestering.start()
        try:
            ends_waiting(hub)
        finally:
            stop.set()
            pestering.join(PATIENCE)
