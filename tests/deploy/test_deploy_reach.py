"""Firewalls and bad lines: HTTP CONNECT proxies, a relay that is killed, messages that break off."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from connect_proxy import ConnectProxy
from federation_runs import PATIENCE, DeployedRun, Started, calm_run, deploy, describe, free_ports
from federation_runs import write_federation as write
from relay_runs import relayed, relaying

from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.storage.messages import CHUNK

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
GOSSIP = {"name": "gossip", "lr": 0.1}
LARGE = {"input_shape": [1_000_000]}  # three classes: a message of 12 MB


def test_a_node_behind_a_proxy_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member asks the proxy that the environment names, as most programs do."""
    direct = describe(GECL, rounds=3)
    calm = calm_run(direct)
    run = DeployedRun(make_federation(relayed(direct, "abc"), "test"), tmp_path)
    proxy, (port,) = ConnectProxy(), free_ports(1)
    proxy.open(port)
    try:
        with relaying(run):
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
            run.carry_out()
    finally:
        proxy.close()
    assert not run.errors
    assert set(proxy.requests) == {f"CONNECT {run.federation.relay.address}"}
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())


@pytest.mark.slow
@pytest.mark.parametrize("lossless", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_message_larger_than_any_connection_lasts_arrives_in_parts(
    lossless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every connection to b ends after five megabytes, and b's messages have twelve."""
    monkeypatch.setattr("holdfast_deploy.member.finish.GRACE", 0.5)
    raw = describe(GOSSIP, nodes=2, rounds=1, problem=LARGE, compression="lossless" if lossless else "none")
    calm = deploy(raw, tmp_path / "calm")
    run = DeployedRun(make_federation(raw, "test"), tmp_path / "cut")
    listening = int(run.federation.member("b").address.rpartition(":")[2])
    (behind,) = free_ports(1)
    proxy = ConnectProxy(cut=5_000_000, target=behind)
    proxy.open(listening)
    started = Started(run, ["a"])
    try:
        run.members["b"] = run.member("b", started.network, listen=f"127.0.0.1:{behind}")
        started.begin("b")
        started.end()
    finally:
        proxy.close()
    assert not run.errors
    assert proxy.cuts >= 2
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())
    # What had arrived was not sent again, but for compressed pieces that were cut: they cannot be used.
    # b may have sent more: what was on its way when a connection ended.
    again = run.members["a"].accounts.wire_bytes[1] - calm.members["a"].accounts.wire_bytes[1]
    assert 0 <= again <= (proxy.cuts * CHUNK if lossless else 0)


def relay_process(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "holdfast", "federation", "relay", str(path)]
    with (path.parent / "relay.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


@pytest.mark.slow
def test_a_relay_killed_again_and_again_changes_nothing(tmp_path: Path) -> None:
    """Processes that all dial out, one through a proxy; SIGKILL for the relay, and once for a node."""
    direct = describe(GECL, rounds=40)
    calm = deploy(direct, tmp_path / "calm")
    raw = relayed(direct, "abc")
    path, proxy, (port,) = write(raw, tmp_path), ConnectProxy(), free_ports(1)
    proxy.open(port)
    relay = relay_process(path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    behind = environment | {"https_proxy": f"http://127.0.0.1:{port}"}

    def start(name: str) -> subprocess.Popen[str]:
        with (tmp_path / f"{name}.log").open("a") as log:
            command = [sys.executable, "-m", "holdfast", "node", str(path), "--name", name, "--log", "json"]
            data = str(tmp_path / f"{name}.npz")
            env = behind if name == "c" else environment
            return subprocess.Popen([*command, "--data", data], env=env, stdout=log, stderr=log, text=True)

    def done() -> int:
        texts = [(tmp_path / f"{name}.log").read_text() for name in "abc"]
        lines = [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]
        return max((line["round"] for line in lines if line["event"] == "round done"), default=0)

    nodes = {name: start(name) for name in "abc"}
    try:
        for round in (4, 12, 20):
            until = time.monotonic() + 300
            while done() < round:
                assert time.monotonic() < until
                time.sleep(0.1)
            relay.kill()
            relay.wait()
            if round == 12:
                nodes["b"].kill()
                nodes["b"].wait()
                nodes["b"] = start("b")
            relay = relay_process(path)
        for name, node in nodes.items():
            assert node.wait(300) == 0, (tmp_path / f"{name}.log").read_text()[-2000:]
    finally:
        proxy.close()
        for process in (relay, *nodes.values()):
            process.kill()
            process.wait()
    assert proxy.requests
    for name in "abc":
        tensors = (tmp_path / f"node-{name}" / "model.safetensors").read_bytes()
        assert tensors == (calm.folder / name / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_proxy_that_refuses_is_told_by_status_in_its_own_words(tmp_path: Path) -> None:
    """In its own words, and in one line."""
    path = write(describe(GOSSIP, nodes=2), tmp_path)
    path.write_text(path.read_text().replace("127.0.0.1", "peer.invalid"))
    asked: list[bytes] = []

    def refuse(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                asked.append(connection.recv(4096))
                connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=refuse, args=[proxy], daemon=True).start()
        told = subprocess.run(
            [sys.executable, "-m", "holdfast", "federation", "status", str(path)],
            env={**os.environ, "https_proxy": f"http://127.0.0.1:{proxy.getsockname()[1]}", "no_proxy": ""},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert any(b"CONNECT peer.invalid" in question for question in asked)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.count("down") == 2
