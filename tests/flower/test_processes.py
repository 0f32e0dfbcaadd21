"""The example app in real processes of Flower's: a SuperLink with SuperNodes, and its simulator."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast as hf

pytest.importorskip("flwr", reason="needs flwr: pip install '.[flower]' in an environment of its own")
pytestmark = pytest.mark.slow

APP = Path(__file__).parents[2] / "examples/flower_app"
BIN = Path(sys.executable).parent
NODES, ROUNDS, LIMIT = 2, 2, 400


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("flower")
    paths = [*map(os.path.abspath, filter(None, sys.path)), str(APP)]
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(port: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("the SuperLink does not listen")


@pytest.fixture(scope="module")
def superlink(environment: dict[str, str]) -> Iterator[str]:
    """The name of a SuperLink with two SuperNodes, each of which starts a process for every message."""
    home, port = Path(environment["FLWR_HOME"]), free_port()
    link = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(link)
    commands = [
        f"flower-superlink --insecure --port {port} --disable-runtime-dependency-installation".split(),
        *(
            f"flower-supernode --insecure --superlink 127.0.0.1:{port} --port {free_port()} "
            f"--node-config partition-id={i}".split()
            for i in range(NODES)
        ),
    ]
    started = []
    try:
        for i, (program, *arguments) in enumerate(commands):
            with (home / f"log.{i}").open("w") as log:
                command = [str(BIN / program), *arguments]
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            wait_for(port)
        yield "here"
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def expected(method: str) -> dict[str, torch.Tensor]:
    """What the simulator makes of the same app."""
    sys.path.insert(0, str(APP))
    try:
        from bridged import task
    finally:
        sys.path.remove(str(APP))
    result = hf.train(
        task.METHODS[method],
        model=task.net(),
        data=task.federated(NODES),
        rounds=ROUNDS,
        dtype="float64",
        progress=False,
        **task.OPTIONS,
    )
    return result.model.state_dict()


def assert_equal(written: Path, method: str) -> None:
    found, wanted = load_file(written), expected(method)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["scaffold", "fedpd"])
def test_superlink_and_supernodes(
    method: str, superlink: str, environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "model.safetensors"
    config = f'method="{method}" nodes={NODES} rounds={ROUNDS} output="{out}"'
    command = [str(BIN / "flwr"), "run", str(APP), superlink, "--stream", "--run-config", config]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    assert_equal(out, method)


SIMULATION = """
import sys
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from safetensors.torch import save_file
from bridged.task import METHODS, OPTIONS, net, samples
from holdfast import flower

nodes, rounds, name, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
server, clients = ServerApp(), ClientApp()

@server.main()
def main(grid, context):
    strategy = flower.Strategy(METHODS[name], model=net(), nodes=nodes, dtype="float64")
    save_file(strategy.start(grid, num_rounds=rounds).arrays.to_torch_state_dict(), out)

own = lambda context: samples(flower.partition_id(context), nodes)
clients.train()(flower.Client(METHODS[name], model=net(), data=own, **OPTIONS))
run_simulation(server, clients, nodes, backend_config={"client_resources": {"num_cpus": 1}})
"""


@pytest.mark.parametrize("method", ["feddyn", "dualfl"])
def test_simulation(method: str, environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs flwr[simulation]")
    out = tmp_path / "model.safetensors"
    command = [sys.executable, "-c", SIMULATION, str(NODES), str(ROUNDS), method, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    assert_equal(out, method)
