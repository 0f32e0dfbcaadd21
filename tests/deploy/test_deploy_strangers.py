"""Strangers are refused, the log says so once, and nothing is disturbed."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from federation_runs import deploy, describe, forked_member, write_federation
from http_peers import Caller, Made, Pretender

from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.wire.authority import make_certificates, make_request, sign_request
from holdfast_deploy.wire.credentials import Credentials, load_credentials
from holdfast_deploy.wire.protocol import LINKS, MESSAGES, RELEASED, SYNC
from holdfast_deploy.wire.service import Ask

PATIENCE = 300.0  # seconds; far more than any of this takes
DENIED, UNAVAILABLE = 403, 0  # a status, and no answer at all


class Strangers:
    """Credentials that should not be good enough, made from a federation's own authority where needed."""

    def __init__(self, certs: Path, folder: Path) -> None:
        self.certs, self.folder = certs, folder
        self.real = load_credentials(certs, "b")

    def no_certificate(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self.real.authority.decode())
        return context

    def of_another_authority(self) -> Credentials:
        make_certificates(self.folder / "other", "test", ["b"], days=1)
        return replace(load_credentials(self.folder / "other", "b"), authority=self.real.authority)

    def signed(self, name: str, days: float) -> Credentials:
        """A certificate of the federation's authority."""
        folder = self.folder / f"{name}{days}"
        folder.mkdir()
        for part in ("ca.key", "ca.crt"):
            (folder / part).write_bytes((self.certs / part).read_bytes())
        sign_request(folder, make_request(folder, name), [name], days)
        read = {part: (folder / f"{name}.{part}").read_bytes() for part in ("key", "crt")}
        return Credentials(read["key"], read["crt"], self.real.authority)

    def everybody(self, bystander: str | None, to: str) -> dict[str, tuple[ssl.SSLContext, int, str]]:
        """(what it connects with, what it is answered, what the log says) by kind of stranger."""
        kinds = {
            "no certificate": (self.no_certificate(), UNAVAILABLE, "no certificate"),
            "another authority": (
                self.of_another_authority().client_context(to),
                UNAVAILABLE,
                "a certificate of another authority",
            ),
            "expired": (self.signed("b", -0.5).client_context(to), UNAVAILABLE, "an expired certificate"),
            "not in the federation": (
                self.signed("mallory", 1).client_context(to),
                DENIED,
                "not a member of the federation",
            ),
        }
        if bystander is not None:
            member = load_credentials(self.certs, bystander).client_context(to)
            kinds["not a neighbour"] = (member, DENIED, "not a neighbour")
        return kinds


def try_everything(address: str, name: str, context: ssl.SSLContext, ask: bytes) -> list[int]:
    """What a stranger is answered to each question."""
    statuses = []
    for question in (SYNC, LINKS, RELEASED, f"GET {MESSAGES}/1/0", f"PUT {MESSAGES}/1/0"):
        with Caller(address, name, context, timeout=30) as caller:
            try:
                statuses.append(caller.ask(question, ask).status)
            except (OSError, HTTPException):
                statuses.append(UNAVAILABLE)
    return statuses


def log_of(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / f"{name}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


class Impostor:
    """Answers in a member's place, with a certificate that is not the member's; counts who falls for it."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.victims = 0

        def fall_for(question: str, body: bytes, headers: Any) -> Made:
            self.victims += 1
            return 200, b"{}"

        self.server = Pretender(address, credentials.server_context(), fall_for)


# A node's door is a server's.
@pytest.mark.parametrize("topology", [pytest.param("ring", marks=pytest.mark.slow), "server"])
def test_strangers_are_refused_and_logged_and_disturb_nothing(topology: str, tmp_path: Path) -> None:
    """On a ring a, b, c, d and with a server; the last node comes when the strangers have had their turn."""
    server = topology == "server"
    algorithm = {"name": "fedavg" if server else "local-gecl", "lr": 0.1, "local_steps": 2}
    raw = describe(algorithm, nodes=4, network={"topology": topology}, limits={"wait": PATIENCE})
    calm = deploy(raw, tmp_path / "calm")
    folder = tmp_path / "disturbed"
    folder.mkdir()
    path = write_federation(raw, folder)
    federation = make_federation(raw, "test")
    target = "hub" if server else "a"
    address = federation.member(target).address
    strangers = Strangers(folder / "certs", tmp_path)
    kinds = strangers.everybody(None if server else "c", target)
    start = calm.members["a"].start
    ask = Ask(federation=federation.id, start=start, round=1, exchange=0).model_dump_json().encode()

    present = [name for name in federation.names if name != "d"] + (["hub"] if server else [])
    members = {name: forked_member(path, name) for name in present}
    try:
        wait_for(lambda: (folder / "a.log").exists() and (folder / f"{target}.log").exists())
        wait_for(lambda: any(e["event"] == "starting" for e in log_of(folder, target)))
        if not server:
            impostors = {
                "another authority": strangers.of_another_authority,
                "another member": lambda: load_credentials(folder / "certs", "c"),
                "expired": lambda: strangers.signed("d", -0.5),
            }
            for credentials in impostors.values():  # in the place of d, whom a and c are waiting for
                impostor = Impostor(federation.member("d").address, credentials())
                time.sleep(1.0)
                impostor.server.close()
                assert impostor.victims == 0
        for kind, (context, expected, _) in kinds.items():
            for _ in range(2):
                assert set(try_everything(address, target, context, ask)) == {expected}, kind
        wait_for(lambda: len([e for e in log_of(folder, target) if "reason" in e]) >= len(kinds))
        members["d"] = forked_member(path, "d")
        for name, process in members.items():
            process.join(PATIENCE)
            assert process.exitcode == 0, log_of(folder, name)[-3:]
    finally:
        for process in members.values():
            process.kill()
            process.join()

    refusals = [entry for entry in log_of(folder, target) if "reason" in entry]
    for kind, (_, _, reason) in kinds.items():
        assert len([entry for entry in refusals if entry["reason"] == reason]) == 1, kind
    report = json.loads((folder / f"{'server' if server else 'node'}-{target}" / "report.json").read_text())
    counts = report["refused"]
    assert counts["refused"] >= 2 * 5 * sum(code is DENIED for _, code, _ in kinds.values())
    assert counts["handshake refused"] >= 2 * sum(code is UNAVAILABLE for _, code, _ in kinds.values())
    for name in federation.names:
        disturbed = folder / f"node-{name}" / "model.safetensors"
        assert disturbed.read_bytes() == (tmp_path / "calm" / name / "model.safetensors").read_bytes()


def test_a_crowd_at_the_door_does_not_crash_a_member(tmp_path: Path) -> None:
    """Handshakes at the same time, by anybody, without a certificate."""
    raw = describe({"name": "gossip", "lr": 0.1, "local_steps": 2}, nodes=2, limits={"wait": PATIENCE})
    path = write_federation(raw, tmp_path)
    host, _, port = make_federation(raw, "test").member("a").address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def knock(_: int) -> None:
        try:
            with socket.create_connection((host, int(port)), timeout=30) as plain, context.wrap_socket(plain):
                pass
        except OSError:  # refused, or one of too many
            pass

    member = forked_member(path, "a")
    try:
        wait_for(lambda: (tmp_path / "a.log").exists())
        wait_for(lambda: any(e["event"] == "starting" for e in log_of(tmp_path, "a")))
        with futures.ThreadPoolExecutor(16) as crowd:
            list(crowd.map(knock, range(1000)))
        assert member.exitcode is None
    finally:
        member.kill()
        member.join()


def test_requests_are_read_by_the_parser_that_others_have_tested() -> None:
    """aiohttp has another one, in Python, for where its extensions are missing."""
    program = """
import asyncio
from holdfast.core.errors import HoldfastError
from holdfast_deploy.ops.events import Events, silence
from holdfast_deploy.wire.server import Server

async def serve():
    Server(lambda: None, None, Events("a", silence))

try:
    asyncio.run(serve())
except HoldfastError as error:
    print(error)
"""
    for extra, told in (({}, ""), ({"AIOHTTP_NO_EXTENSIONS": "1"}, "aiohttp runs without its C parser")):
        environment = {**os.environ, **extra}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(told)
        assert bool(done.stdout) == bool(told)
