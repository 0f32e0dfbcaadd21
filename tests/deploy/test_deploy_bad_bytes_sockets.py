"""Bad bytes over real sockets with TLS: an error for whoever sent them, and on it goes."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bad_bytes import Mangler
from federation_runs import describe
from fuzzed_federation import (
    FEDAVG,
    GECL,
    SERVER,
    Fuzzed,
    bad_questions,
    in_bulk,
    refuses_answer,
    settle_submission,
)
from http_peers import Caller, Made, Pretender

from holdfast_deploy.member.server import Server
from holdfast_deploy.storage.messages import LENGTH
from holdfast_deploy.wire.protocol import LINKS, MESSAGES, RELEASED, SYNC, Answer

over_sockets = in_bulk(100, 3000)


def caller(fuzzed: Fuzzed, server: str, client: str) -> Caller:
    """A connection with ``client``'s own good certificate."""
    context = fuzzed.run.credentials(client).client_context(server)
    return Caller(fuzzed.run.federation.member(server).address, server, context)


@over_sockets
def test_fuzzed_questions_over_sockets(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(GECL, nodes=2), tmp_path)
    questions = [*bad_questions(fuzzed["a"], Mangler(4), count), bytes(2**21), bytes(2**23)]
    paths = [LINKS, RELEASED, "POST /v2/nonsense", SYNC]
    with caller(fuzzed, "a", "b") as b:
        statuses = Counter(b.ask(paths[i % 4], text).status for i, text in enumerate(questions))
        odd = [
            b.ask("GET /v2/messages/1/x").status,
            b.ask(f"GET {MESSAGES}/1/0", If_Match="\u00e9" * 2000).status,
            b.ask(f"GET {MESSAGES}/1/0", Range="bytes=5-2").status,
            b.ask(f"GET {MESSAGES}/1/0", Range=f"bytes={10**17}-").status,
            b.ask(f"PUT {MESSAGES}/1/0", b"x").status,
            b.ask("DELETE /v2/status").status,
        ]
    assert statuses.keys() == {400, 409, 404}
    assert odd == [404, 412, 400, 412, 403, 404]
    reasons = [entry.get("reason", "") for entry in fuzzed.run.log]
    assert any("more than 262144 bytes" in reason for reason in reasons)
    fuzzed.finish()


@over_sockets
def test_what_is_not_http_is_refused(count: int, tmp_path: Path) -> None:
    """Inside TLS, with a good certificate: a mangled request is an error for its sender alone."""
    fuzzed = Fuzzed(describe(GECL, nodes=2), tmp_path)
    good = b"POST /v2/links HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nX: y\r\n\r\n{}"
    draw, statuses = random.Random(8), Counter[bytes]()
    for i in range(count):
        bad = bytearray(good)
        if i % 3 == 0:
            for _ in range(draw.randint(1, 4)):
                bad[draw.randrange(len(bad))] = draw.randrange(256)
        elif i % 3 == 1:
            bad[draw.randrange(len(bad)) :] = draw.randbytes(draw.choice([0, 10, 20_000]))
        else:
            at = draw.randrange(len(bad))
            bad[at:at] = bad[draw.randrange(len(bad)) :]
        with suppress(OSError), caller(fuzzed, "a", "b") as b:
            b.connect()
            assert b.sock is not None
            b.sock.sendall(bytes(bad))
            b.sock.settimeout(0.05)
            statuses[b.sock.recv(12)[9:]] += 1
    assert not any(status.startswith((b"2", b"5")) for status in statuses), statuses
    fuzzed.finish()


@over_sockets
def test_fuzzed_submissions_over_sockets(count: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(describe(FEDAVG, nodes=2, **SERVER), tmp_path)
    honest, frames = fuzzed.message("a")
    head, mangler, hub = honest.model_dump(mode="json"), Mangler(5), fuzzed["hub"]
    assert isinstance(hub.program, Server)
    hub.exchange.message_round = 1
    too_large = [[bytes(2**22)], [json.dumps(head).encode(), bytes(2**22)]]
    statuses = Counter[int]()
    with caller(fuzzed, "hub", "a") as a:
        for bad in [*(mangler.mangle(head, frames)[1] for _ in range(count)), *too_large]:
            body = LENGTH.pack(len(bad[0])) + b"".join(bad)
            try:
                status = a.ask(f"PUT {MESSAGES}/1/0", body).status
            except (OSError, HTTPException):  # refused before all of it was sent
                status = 400
            statuses[status] += 1
            if status == 200:
                settle_submission(hub, bad[0], honest, frames)
    assert statuses[400] > 0.9 * count
    assert statuses.keys() <= {200, 400, 409}
    assert hub.events.complaints["refused"] >= statuses[400]
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

    bad: list[bytes] = []

    def nonsense(question: str, body: bytes, headers: Any) -> Made:
        nonlocal told, bad
        if question == SYNC:
            told += 1
            bad = mangler.mangle(answer, frames)[1]
            return 200, bad[0]
        return 200, b"".join(bad[1:])

    async def bombard() -> int:
        link = a.connections.to("b")
        refused = [await refuses_answer(link, honest, frames) for _ in range(count)]
        link.round = 0
        return sum(refused)

    context = fuzzed.run.credentials("b").server_context()
    server = Pretender(federation.member("b").address, context, nonsense)
    assert a.waiting.run_interruptible(bombard) > 0.9 * count
    assert told == count
    mangler.random.seed(7)
    running = threading.Thread(target=fuzzed.run._run, args=["a"])
    running.start()
    while a.events.complaints["a message was refused"] < 5:
        time.sleep(0.01)
    server.close()
    fuzzed.run.members["b"] = fuzzed.run.member("b", fuzzed.network)
    fuzzed.finish(running={"a": running})
