"""docs/reference/wire.md is complete: a member written from it takes part, and is refused as it says."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import second_implementation
import torch
from federation_runs import PATIENCE, DeployedRun, describe
from relay_runs import relayed, relaying
from second_implementation import Direct, Refused, Relay, Relayed, SecondMember, serve, tls

from holdfast.data.dataset import Dataset
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.storage.messages import CHUNK
from holdfast_deploy.wire.dial import Unreachable
from holdfast_deploy.wire.protocol import MEMBERSHIP, MESSAGES, QUESTIONS, STATUS

INPUTS, CLASSES, ROUNDS = 3000, 100, 3  # a model of more than one piece
DIM = (INPUTS + 1) * CLASSES


def few_samples(node: int) -> Dataset:
    x, y = torch.ones(1, INPUTS), torch.tensor([node])
    return Dataset(x, y, x[:0], y[:0], classes=CLASSES)


@pytest.fixture(params=["direct", "relay"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[DeployedRun, SecondMember]]:
    """Node a of holdfast, and b of the second implementation, at addresses or both behind a relay."""
    raw = describe(
        {"name": "gossip", "lr": 1e-30},  # so small that a step changes no number
        nodes=2,
        rounds=ROUNDS,
        network={"topology": "line"},
        problem={"input_shape": [INPUTS], "classes": CLASSES, "model": "linear", "batch_size": 1},
    )
    direct = request.param == "direct"
    ports = [int(node["address"].rpartition(":")[2]) for node in raw["node"]]
    raw = raw if direct else relayed(raw, "ab")
    run = DeployedRun(make_federation(raw, "test"), tmp_path, data_of=few_samples)
    certs = tmp_path / "certs"
    with ExitStack() as stack:
        if not direct:
            stack.enter_context(relaying(run))
        member = run.members["a"] = stack.enter_context(run.member("a"))
        x0 = member.x0.numpy().tobytes()
        start = hashlib.sha256(f"torch.float32 [{DIM}]".encode() + x0).hexdigest()[:16]
        agreed = {"federation": run.federation.id, "start": start}
        if direct:
            context = tls(False, certs, "b")
            second = SecondMember(
                "b", "a", agreed, lambda peer: Direct(f"127.0.0.1:{ports[0]}", context, peer)
            )
            server = serve(second, ports[1], tls(True, certs, "b"))
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        else:
            assert run.federation.relay is not None
            relay = Relay(run.federation.relay.address, "relay", certs, "b")
            second = SecondMember("b", "a", agreed, lambda peer: Relayed(relay, peer))
            stack.callback(relay.listen(second).close)
        stack.callback(second.connection.close)
        yield run, second


def test_the_second_implementation_knows_nothing_of_holdfast() -> None:
    tree = ast.parse(Path(second_implementation.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("holdfast") for name in imported)


def test_every_question_is_on_the_page_and_is_answered(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `((?:GET|POST|PUT) /[^`]*)` \|", page, re.MULTILINE))
    messages = {f"{method} {MESSAGES}/ROUND/EXCHANGE" for method in ("GET", "PUT")}
    assert listed == {*QUESTIONS, MEMBERSHIP} | messages, "docs/reference/wire.md and QUESTIONS differ"
    run = DeployedRun(make_federation(describe({"name": "gossip", "lr": 0.1}, nodes=2), "test"), tmp_path)
    with run.member("a") as member:
        assert set(member.service.answers) == set(QUESTIONS), "Service.answers and QUESTIONS differ"


def test_it_takes_part_from_the_first_round_to_the_last(
    pair: tuple[DeployedRun, SecondMember],
) -> None:
    run, second = pair
    x = np.random.default_rng(0).standard_normal((1, DIM), dtype=np.float32)
    theirs = run.members["a"].x0.numpy()[None].copy()  # a lets go of it as soon as it has begun
    node = threading.Thread(target=run._run, args=["a"], daemon=True)
    node.start()
    for round in range(1, ROUNDS + 1):
        received = second.exchange(round, x, break_off=round == 2)
        np.testing.assert_array_equal(received, theirs)  # and so a has used what it got in the round before
        x = theirs = np.float32(0.5) * received + np.float32(0.5) * x
    second.part(ROUNDS + 1)
    node.join(PATIENCE)
    assert not run.errors
    np.testing.assert_array_equal(run.models["a"].numpy(), theirs[0])
    log = [json.loads(line) for line in (run.folder / "a" / "audit.jsonl").read_text().splitlines()]
    sent = [entry for entry in log if entry["event"] == "sent" and entry["round"] == 2]
    assert len(sent) == 2  # what broke off was asked for again ...
    assert run.members["a"].service.bytes_served < ROUNDS * 4 * DIM + 2 * CHUNK  # ... from where it did


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"federation": "0" * 32}, 409),
        ({"start": "0" * 16}, 409),
        ({"depends_on": {"a": "0" * 16}}, 410),
        ({"depends_on": {"nobody": "0" * 16}}, 400),
        ({"round": ROUNDS + 2}, 400),
        ({"more": 1}, 400),
        ({"passed": [{"round": -1}]}, 400),
    ],
)
def test_it_is_refused_as_the_page_says(
    changes: dict[str, Any], status: int, pair: tuple[DeployedRun, SecondMember]
) -> None:
    _, second = pair
    with pytest.raises(Refused) as refused:
        second.ask(**{"round": 1, **changes})
    assert refused.value.status == status


def test_version_1_of_the_wire_is_refused_in_one_line_at_both_ends(tmp_path: Path) -> None:
    """It was HTTP/2, which shows in the handshake."""
    run = DeployedRun(make_federation(describe({"name": "gossip", "lr": 0.1}, nodes=2), "test"), tmp_path)
    certs, address = tmp_path / "certs", run.federation.member("b").address
    with run.member("a") as member:
        old = tls(False, certs, "b")
        old.set_alpn_protocols(["h2"])
        assert member.port is not None
        with suppress(OSError), socket.create_connection(("127.0.0.1", member.port)) as plain:
            assert old.wrap_socket(plain, server_hostname="a").recv(1) == b""
        told = [entry["reason"] for entry in run.log if entry["event"] == "handshake refused"]
        assert told == ["it speaks the wire of holdfast 0.1: both ends need the same version"]

        answering = tls(True, certs, "b")
        answering.set_alpn_protocols(["h2"])
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as listening:

            def answer() -> None:
                with suppress(OSError):
                    answering.wrap_socket(listening.accept()[0], server_side=True).recv(1)

            threading.Thread(target=answer, daemon=True).start()

            async def ask() -> bytes:
                return await member.connections.to("b").line.ask(STATUS)

            with pytest.raises(Unreachable, match=r"the wire of holdfast 0\.1"):
                member.waiting.run_interruptible(ask)
