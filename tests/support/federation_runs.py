"""Federations for tests: the simulator's answer, members in threads of this process, members as processes."""

from __future__ import annotations

import itertools
import multiprocessing.context
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tomli_w
import torch
from forks import FORKS
from torch import Tensor

from holdfast.data.dataset import Dataset
from holdfast.data.federated import FederatedData
from holdfast.engines.common.simulation import Simulation
from holdfast.problem.losses import LOSSES
from holdfast.problem.model_problem import ModelProblem
from holdfast_deploy.federation_file import FederationFile, make_federation
from holdfast_deploy.member.network import NetworkThread
from holdfast_deploy.member.node import open_node
from holdfast_deploy.member.server import open_server
from holdfast_deploy.member.session import Session
from holdfast_deploy.member.waiting import Stopped
from holdfast_deploy.ops.events import Events
from holdfast_deploy.site import initial_model, open_site
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import Credentials, load_credentials

SHAPE, CLASSES, SAMPLES = 6, 3, 20

PATIENCE = 300.0  # seconds, far more than any of this takes, on a machine that does much else too


PORTS = 2_846  # for each of eight processes that run tests
_first = 10_000 + PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8)
_begin = os.getpid() * 89 % PORTS  # another run of the tests may be going on, in whose range this one's lies
_candidates = itertools.cycle([*range(_first + _begin, _first + PORTS), *range(_first, _first + _begin)])


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses just now, none of which was given out lately.

    They lie below those that the system gives to whoever asks for any port, so that nobody gets one of them
    between this call and the start of a member.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = next(_candidates)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def describe(algorithm: dict[str, Any], nodes: int = 3, rounds: int = 5, **changes: Any) -> dict[str, Any]:
    """A small federation as it would stand in a file; ``changes`` replace or extend its sections."""
    needs_server = changes.get("network", {}).get("topology") == "server"
    names = [chr(ord("a") + i) if nodes <= 26 else f"n{i}" for i in range(nodes)]
    ports = free_ports(nodes + 1)
    raw: dict[str, Any] = {
        "name": "test",
        "rounds": rounds,
        "seed": 3,
        "problem": {"input_shape": [SHAPE], "classes": CLASSES, "model": "linear", "batch_size": 4},
        "network": {"topology": "ring"},
        "algorithm": algorithm,
        "limits": {"wait": 90.0},
        "node": [{"name": n, "address": f"127.0.0.1:{p}"} for n, p in zip(names, ports, strict=False)],
    }
    if needs_server:
        raw["server"] = {"name": "hub", "address": f"127.0.0.1:{ports[-1]}"}
    for key, value in changes.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return raw


def make_data(node: int, shape: tuple[int, ...] = (SHAPE,), samples: int = SAMPLES) -> Dataset:
    """Heterogeneous data: every node sees other labels more often."""
    rng = np.random.default_rng(100 + node)
    count = samples + node
    x = rng.standard_normal((count + 8, *shape)).astype(np.float32)
    y = np.where(rng.random(count + 8) < 0.6, node % CLASSES, rng.integers(0, CLASSES, count + 8))
    return Dataset(
        torch.tensor(x[:count]),
        torch.tensor(y[:count]),
        torch.tensor(x[count:]),
        torch.tensor(y[count:]),
        classes=CLASSES,
    )


def simulate(
    federation: FederationFile,
    cohorts: list[list[int]] | None = None,
    steps: list[list[int]] | None = None,
) -> Simulation:
    """The simulator on the same federation, run to its end; with recorded cohorts and steps, if given."""
    shape = tuple(federation.problem.input_shape)
    data = [make_data(i, shape) for i in range(len(federation.node))]
    problem = federation.problem
    objective = ModelProblem(
        initial_model(federation),
        LOSSES.build(problem.loss.name, problem.loss.parameters),
        FederatedData.of_nodes([(d.x_train, d.y_train) for d in data]),
        batch_size=None if problem.batch_size == "full" else problem.batch_size,
        seed=federation.seed,
        weights=problem.weights,
    )
    cohort = None if federation.network.cohort == "all" else federation.network.cohort
    simulation = Simulation(
        federation.method,
        objective,
        federation.member_network,
        seed=federation.seed,
        cohort=cohorts or cohort or "all",
        channel=federation.wire_channel,
        steps=steps,
    )
    for _ in range(federation.rounds):
        simulation.step()
    return simulation


@dataclass
class DeployedRun:
    """A federation in threads of this process, over real sockets and TLS."""

    federation: FederationFile
    folder: Path
    members: dict[str, Session] = field(default_factory=dict)
    models: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    data_of: Callable[[int], Any] | None = None  # a node's own data; by default those of ``make_data``
    counted_noise: bool = False  # private noise from the seed, as in a simulation

    def credentials(self, name: str) -> Credentials:
        certs = self.folder / "certs"
        if not certs.exists():
            names = [member.name for member in self.federation.certified]
            make_certificates(certs, self.federation.name, names, days=1)
        return load_credentials(certs, name, self.federation.coordinator)

    def member(self, name: str, network: NetworkThread | None = None, listen: str | None = None) -> Session:
        """The member called ``name``, listening if others have to reach it."""
        federation, folder = self.federation, self.folder / name
        shared: dict[str, Any] = {
            "credentials": self.credentials(name),
            "events": Events(name, self.log.append),
            "network": network,
        }
        made: Session
        if federation.server is not None and name == federation.server.name:
            own = {"counted_noise": self.counted_noise}
            made = open_server(federation, folder, initial_model(federation), **own, **shared)
        else:
            node = federation.names.index(name)
            data = (
                self.data_of(node) if self.data_of else make_data(node, tuple(federation.problem.input_shape))
            )
            site = open_site(federation, name, data, counted_noise=self.counted_noise)
            made = open_node(federation, name, folder, site, **shared)
        made.open(listen)
        return made

    def carry_out(self, timeout: float = PATIENCE) -> DeployedRun:
        """Runs all members to the end, or to their first error."""
        network = NetworkThread()
        names = [member.name for member in self.federation.members]
        self.members = {name: self.member(name, network) for name in names}
        self.run_members(timeout)
        network.close()
        return self

    def run_members(self, timeout: float = PATIENCE) -> None:
        """Runs the members that there are to the end, or to their first error, and closes them."""
        threads = [threading.Thread(target=self._run, args=[name], daemon=True) for name in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        for member in self.members.values():
            member.stop()
        for thread in threads:
            thread.join(timeout)
        for member in self.members.values():
            member.close()

    def _run(self, name: str) -> None:
        try:
            result = self.members[name].run()
            if result is not None:
                self.models[name] = result
        except BaseException as error:
            self.errors[name] = error


_CALM: dict[str, DeployedRun] = {}


def calm_run(raw: dict[str, Any]) -> DeployedRun:
    """The federation that ``raw`` describes, disturbed by nobody; run once for all that compare with it."""
    key = make_federation(raw, "test").id  # the same wherever its members listen
    if key not in _CALM:
        with tempfile.TemporaryDirectory() as folder:
            _CALM[key] = deploy(raw, Path(folder))
    return _CALM[key]


def deploy(raw: dict[str, Any], folder: Path, timeout: float = PATIENCE) -> DeployedRun:
    """Runs the federation that ``raw`` describes; fails if a member did."""
    run = DeployedRun(make_federation(raw, "test"), folder).carry_out(timeout)
    if run.errors:
        raise next(iter(run.errors.values()))
    return run


class Started:
    """All members of a federation, or some of them, under way in threads."""

    def __init__(self, run: DeployedRun, names: list[str] | None = None) -> None:
        self.run, self.network = run, NetworkThread()
        self.threads: dict[str, threading.Thread] = {}
        run.members = {}
        for name in names or [member.name for member in run.federation.members]:
            self.start(name)

    def start(self, name: str) -> None:
        self.run.members[name] = self.run.member(name, self.network)
        self.begin(name)

    def begin(self, name: str) -> None:
        """Has a member that is there run."""
        self.threads[name] = threading.Thread(target=self.run._run, args=[name], daemon=True)
        self.threads[name].start()

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def end(self) -> DeployedRun:
        """Waits for all, and closes them."""
        for thread in self.threads.values():
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for member in self.run.members.values():
            member.close()
        self.network.close()
        return self.run

    def stop(self) -> None:
        for member in self.run.members.values():
            member.stop()
        self.end()
        for error in self.run.errors.values():
            assert isinstance(error, Stopped), error
        self.run.errors.clear()


def stopped(raw: dict[str, Any], folder: Path, at: int) -> DeployedRun:
    """A federation that was stopped when somebody had finished ``at`` rounds."""
    run = DeployedRun(make_federation(raw, "test"), folder)

    class Log(list[dict[str, Any]]):
        """Whoever writes that it has finished that round stops them all, before it goes on."""

        def append(self, entry: dict[str, Any]) -> None:
            super().append(entry)
            if entry["event"] == "round done" and entry["round"] >= at:
                for member in list(run.members.values()):
                    member.stop()

    run.log = Log()
    started = Started(run)
    started.until(lambda: max(member.done for member in run.members.values()) >= at)
    started.stop()
    run.log = list(run.log)
    return run


# --- members as processes ----------------------------------------------------------------------------------


def write_federation(raw: dict[str, Any], folder: Path) -> Path:
    """federation.toml, certificates and every node's data in ``folder``."""
    path = folder / "federation.toml"
    path.write_text(tomli_w.dumps(raw))
    federation = make_federation(raw, "test")
    make_certificates(folder / "certs", federation.name, [m.name for m in federation.certified], days=1)
    for i, name in enumerate(federation.names):
        data = make_data(i, tuple(federation.problem.input_shape))
        arrays = {key: getattr(data, key).numpy() for key in ("x_train", "y_train", "x_test", "y_test")}
        np.savez(folder / f"{name}.npz", **arrays)
    return path


def member_process(path: Path, name: str, *options: object, **kwargs: Any) -> subprocess.Popen[str]:
    """``holdfast node`` or ``holdfast server`` for a federation written by ``write_federation``."""
    data = path.parent / f"{name}.npz"
    command = ["node", str(path), "--name", name, "--data", str(data)]
    if not data.exists():
        command = ["server", str(path), "--name", name]
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", *command, "--log", "json", *map(str, options)],
        cwd=path.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )


def forked_member(
    path: Path, name: str, listen: str | None = None
) -> multiprocessing.context.ForkServerProcess:
    """A member as a process that starts at once; its log lines go to NAME.log beside the file."""
    process = FORKS.Process(target=_run_member, args=(path, name, listen), daemon=True)
    process.start()
    return process


def forked_relay(path: Path) -> multiprocessing.context.ForkServerProcess:
    """The relay, likewise."""
    process = FORKS.Process(target=_run_relay, args=(path,), daemon=True)
    process.start()
    return process


def _run_relay(path: Path) -> None:
    from holdfast_deploy.cli.node import relay

    _log_to(path.parent / "relay.log")
    relay(path)


def _log_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _run_member(path: Path, name: str, listen: str | None) -> None:
    import toy_channels  # noqa: F401 - registers a channel

    from holdfast_deploy.cli.node import node, server

    torch.set_num_threads(1)
    _log_to(path.parent / f"{name}.log")
    data = path.parent / f"{name}.npz"
    if data.exists():
        node(path, name, str(data), listen=listen, log="json")
    else:
        server(path, name, listen=listen, log="json")


def saved_model(path: Path, name: str) -> Tensor:
    """The model that the node called ``name`` has written, flat."""
    tensors = safetensors.torch.load_file(path.parent / f"node-{name}" / "model.safetensors")
    return torch.cat([tensor.flatten() for tensor in tensors.values()])
