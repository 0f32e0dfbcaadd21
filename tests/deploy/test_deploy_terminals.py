"""What other members say reaches people as plain text, if it makes sense at all."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from command_line import holdfast
from federation_runs import PATIENCE, DeployedRun, describe, write_federation

from holdfast.core.errors import HoldfastError, printable
from holdfast_deploy.federation_file import make_federation, read_federation
from holdfast_deploy.ops.events import Events, silence
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import load_credentials
from holdfast_deploy.wire.dialling import WaitLimitError
from holdfast_deploy.wire.handshakes import watch_handshakes
from holdfast_deploy.wire.listening import serve_calls
from holdfast_deploy.wire.protocol import SERVICE

GECL = {"name": "local-gecl", "lr": 0.1}
LINE = {"topology": "line"}
SERVER = {"topology": "server"}

GOOD: dict[str, Any] = {
    "name": "b",
    "federation": "id",
    "round": 1,
    "rounds": 5,
    "phase": "computing round 2",
    "payload_bytes": 84,
    "wire_bytes_sent": 84,
    "wire_bytes_received": 84,
    "retries": 0,
    "waiting_seconds": 1,
    "uptime_seconds": 2.5,
    "refused": {},
    "last_error": "",
    "metrics": {"local_loss": 0.5},
}
MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"\x1b[2J",
    "a list": b"[]",
    "a number": b"3",
    "deep": b"[" * 100_000,
    "empty": b"{}",
    **{
        f"{key} {value!r:.20}": json.dumps(GOOD | {key: value}).encode()
        for key, value in (
            ("round", "x"),
            ("round", -1),
            ("round", 6),
            ("round", None),
            ("round", 10**400),
            ("phase", 3),
            ("phase", None),
            ("phase", "\ud800"),
            ("payload_bytes", "many"),
            ("payload_bytes", 10**400),
            ("waiting_seconds", []),
            ("waiting_seconds", float("inf")),
            ("last_error", {"\x1b[2J": 1}),
            ("metrics", [1]),
            ("metrics", {"\x1b[2J": 1.0}),
            ("metrics", {"local_loss": "\x1b[2J"}),
            ("name", "a"),
            ("clients", {"a": {"round": "x", "seconds_ago": 1}}),
            ("clients", [1]),
        )
    },
}
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e [bold red]x[/bold red]\n\r :boom:"


class Liar:
    """A member with a good certificate that answers what it is told to."""

    def __init__(self, path: Path, name: str) -> None:
        self.answer = b""
        address = read_federation(path).member(name).address
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        handlers = {
            "Status": grpc.unary_unary_rpc_method_handler(lambda request, context: self.answer),
            "Fetch": grpc.unary_stream_rpc_method_handler(self.refuse),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.server.add_secure_port(address, load_credentials(path.parent / "certs", name).for_server())

    def refuse(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, HOSTILE)
        yield b""

    def __enter__(self) -> Liar:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(None).wait()


def test_status_survives_whatever_a_member_answers(tmp_path: Path) -> None:
    path = write_federation(describe(GECL, nodes=2, network=LINE), tmp_path)
    with Liar(path, "b") as liar:
        liar.answer = json.dumps(GOOD).encode()
        assert "1/5" in holdfast("federation", "status", path).out
        for kind, answer in MALFORMED.items():
            liar.answer = answer
            result = holdfast("federation", "status", path)
            assert result.code == 0, kind
            assert "malformed answer" in " ".join(result.out.split()), kind
            assert all(c.isprintable() for c in result.out.replace("\n", "")), kind
            told = json.loads(holdfast("federation", "status", path, "--json").out)
            assert told["b"].keys() == {"phase"}, kind


def test_status_shows_others_words_as_plain_text(tmp_path: Path) -> None:
    path = write_federation(describe(GECL, nodes=2, network=LINE), tmp_path)
    with Liar(path, "b") as liar:
        words = {"phase": HOSTILE, "last_error": HOSTILE * 1000, "refused": {HOSTILE: 1}}
        liar.answer = json.dumps(GOOD | words | {"metrics": {"test_loss": float("nan")}}).encode()
        result = holdfast("federation", "status", path)
        told = json.loads(holdfast("federation", "status", path, "--json").out)["b"]
    assert result.code == 0
    assert all(c.isprintable() for c in result.out.replace("\n", ""))
    assert "[bold red]x[/bold red]" in told["phase"]
    assert r"\x1b[2J" in told["phase"]
    assert all(c.isprintable() for c in json.dumps(told, ensure_ascii=False))
    assert len(told["last_error"]) < 10_000


def test_status_survives_a_lying_server(tmp_path: Path) -> None:
    raw = describe({"name": "fedavg", "lr": 0.1}, nodes=2, network=SERVER)
    path = write_federation(raw, tmp_path)
    with Liar(path, "hub") as liar:
        clients: dict[str, Any] = {
            "a": {"round": 1, "seconds_ago": 2.5},
            HOSTILE: {"round": 1, "seconds_ago": 1},
        }
        liar.answer = json.dumps(GOOD | {"name": "hub", "clients": clients}).encode()
        assert "seen 2 s ago" in holdfast("federation", "status", path).out
        for bad in ({"a": 3}, {"a": {"round": 99, "seconds_ago": 1}}, {"a": {}}, {"a": {"round": 1}}, 3):
            liar.answer = json.dumps(GOOD | {"name": "hub", "clients": bad}).encode()
            result = holdfast("federation", "status", path)
            assert result.code == 0
            assert "malformed answer" in " ".join(result.out.split())


def test_a_refusal_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    raw = describe(GECL, nodes=2, network=LINE, limits={"wait": 0.5, "exchange": 0.5})
    path = write_federation(raw, tmp_path)
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    with Liar(path, "b"), run.member("a") as member, pytest.raises(WaitLimitError) as error:
        member.run()
    assert r"\x1b[2J" in str(error.value)
    for text in (str(error.value), member.events.last_error, *(entry.get("reason", "") for entry in run.log)):
        assert all(c.isprintable() for c in text)


def test_what_grpc_quotes_cannot_write_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with watch_handshakes(Events("a", silence)):
        os.write(2, b"Got goaway; Debug Text: \x1b[2J\n")
    written = capfd.readouterr().err  # gRPC may still have a word about connections of other tests
    assert written.endswith("Got goaway; Debug Text: \\x1b[2J\n")
    assert "\x1b" not in written


def test_who_only_imports_holdfast_keeps_environment_and_standard_error() -> None:
    """Nor do members: only the commands read what gRPC writes there."""
    program = """
import os, sys
def outside():
    status = os.fstat(2)
    return dict(os.environ), status.st_dev, status.st_ino, sys.stderr
before = outside()
import holdfast
assert "grpc" not in sys.modules
from holdfast_deploy.cli import hosting
from holdfast_deploy.member.node import Node, open_node
from holdfast_deploy.relay.relay import Relay
assert "grpc" in sys.modules
assert outside() == before
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_and_log_lines_are_plain_text() -> None:
    assert printable("é 日本 [x] \\ ok") == "é 日本 [x] \\ ok"
    assert printable("\x1b[2J\n\u202e\ud800\x9b") == r"\x1b[2J\n\u202e\ud800\x9b"
    assert str(HoldfastError("\x1b[2J")) == r"\x1b[2J"


def test_a_member_takes_its_own_trials_of_old_tls_for_no_strangers_in_any_roster(tmp_path: Path) -> None:
    make_certificates(tmp_path, "test", ["a"], days=1)
    own, log = load_credentials(tmp_path, "a"), list[dict[str, Any]]()

    async def fetch(frames: Any, context: Any) -> AsyncGenerator[bytes, None]:
        yield b""

    def old_tls(port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            pytest.raises(OSError),  # noqa: PT011 - an alert, or the end
            socket.create_connection(("127.0.0.1", port), PATIENCE) as raw,
        ):
            context.wrap_socket(raw)

    async def listen_again(stranger: bool) -> None:
        server, port, _ = await serve_calls("127.0.0.1:0", own, fetch, {}, 10, Events("a", silence))
        if stranger:
            await asyncio.to_thread(old_tls, port)
        await server.stop(0)

    for last in (False, True):
        with watch_handshakes(Events("a", log.append)):
            for _ in range(2):
                asyncio.run(listen_again(stranger=False))
            asyncio.run(listen_again(stranger=last))
        assert [entry["reason"] for entry in log] == ["TLS older than 1.3"] * last
