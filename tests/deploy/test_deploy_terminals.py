"""What other members say reaches people as plain text, if it makes sense at all."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import holdfast
from federation_runs import DeployedRun, describe, write_federation
from http_peers import Made, Pretender, problem

from holdfast.core.errors import HoldfastError, printable
from holdfast_deploy.federation_file import make_federation, read_federation
from holdfast_deploy.wire.credentials import load_credentials
from holdfast_deploy.wire.protocol import STATUS
from holdfast_deploy.wire.retry import WaitLimitError

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
        context = load_credentials(path.parent / "certs", name).server_context()
        self.server = Pretender(address, context, self.made_up)

    def made_up(self, question: str, body: bytes, headers: Any) -> Made:
        return (200, self.answer) if question == STATUS else problem(409, HOSTILE)

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()


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


@pytest.mark.parametrize(
    "begin",
    [
        "HTTP/1.1 200 \x1b[2J",
        "HTTP/9.9 200 OK",
        "\x1b[2J",
        "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/",
        "HTTP/1.1 200 OK\r\nContent-Encoding: gzip",
    ],
)
def test_what_is_no_answer_cannot_write_to_the_terminal(begin: str, tmp_path: Path) -> None:
    path = write_federation(describe(GECL, nodes=2, network=LINE), tmp_path)
    host, _, port = read_federation(path).member("b").address.rpartition(":")
    context = load_credentials(tmp_path / "certs", "b").server_context()

    def answer(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with context.wrap_socket(listening.accept()[0], server_side=True) as connection:
                    connection.recv(10_000)
                    connection.sendall(f"{begin}\r\nContent-Length: 1\r\n\r\n\x1b".encode())

    with socket.create_server((host, int(port))) as listening:
        threading.Thread(target=answer, args=[listening], daemon=True).start()
        result = holdfast("federation", "status", path)
    assert (result.code, result.err) == (0, "")
    assert all(c.isprintable() for c in result.out.replace("\n", ""))


def test_who_only_imports_holdfast_keeps_environment_and_standard_error() -> None:
    program = """
import os, sys
def outside():
    status = os.fstat(2)
    return dict(os.environ), status.st_dev, status.st_ino, sys.stderr
before = outside()
import holdfast
assert "aiohttp" not in sys.modules
from holdfast_deploy.cli import hosting
from holdfast_deploy.member.node import Node, open_node
from holdfast_deploy.relay.relay import Relay
assert "aiohttp" in sys.modules
assert outside() == before
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_and_log_lines_are_plain_text() -> None:
    assert printable("é 日本 [x] \\ ok") == "é 日本 [x] \\ ok"
    assert printable("\x1b[2J\n\u202e\ud800\x9b") == r"\x1b[2J\n\u202e\ud800\x9b"
    assert str(HoldfastError("\x1b[2J")) == r"\x1b[2J"
