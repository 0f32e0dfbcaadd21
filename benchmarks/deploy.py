"""What a deployed exchange costs: throughput against a raw HTTP stream, peak memory, overhead over compute.

python benchmarks/deploy.py [exchange | memory] [--megabytes 500] [--rounds 2] [--repeats 3]
                            [--algorithm local-gecl] [--folder DIR]

Everything runs on this machine, over loopback with mutual TLS, with one thread per process.

Throughput: one process has published messages, another fetches each once: read from disk, sent, checked
number by number, written to disk. The raw stream sends the same bytes, in the same pieces, from memory, over
a like connection, and drops them. Both take turns.
Memory and overhead: three nodes on a ring, as ``holdfast node`` processes; the largest resident size of each,
as it is and above that of nodes with a model of 0.1 MB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tomli_w
import torch
from rich.console import Console
from rich.table import Table

from holdfast_deploy.federation_file import make_federation, read_federation
from holdfast_deploy.member.node import open_node
from holdfast_deploy.member.session import Session
from holdfast_deploy.ops.events import Events, silence
from holdfast_deploy.site import open_site, read_data
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import load_credentials
from holdfast_deploy.wire.dial import Way
from holdfast_deploy.wire.line import Line
from holdfast_deploy.wire.protocol import (
    MESSAGES,
    STATUS,
    Kind,
    Peer,
    RefusedError,
    Sending,
    Wanted,
    pieces_of,
)
from holdfast_deploy.wire.server import Server

CLASSES = 125
LEAST_RATIO = 0.7  # throughput over the raw stream's
MOST_MEMORY = 6.0  # peak memory above an idle node's, in models


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def write_federation(folder: Path, nodes: int, rounds: int, megabytes: float, algorithm: str) -> Path:
    """A linear model of the wanted size, random data for every node, certificates."""
    folder.mkdir(parents=True)
    inputs = round(megabytes * 1e6 / 4 / CLASSES) - 1
    names = [chr(ord("a") + i) for i in range(nodes)]
    raw = {
        "name": "benchmark",
        "rounds": rounds,
        "problem": {"input_shape": [inputs], "classes": CLASSES, "model": "linear", "batch_size": 4},
        "network": {"topology": "ring"},
        "algorithm": {"name": algorithm, "lr": 1e-6, "local_steps": 5},
        "evaluate_every": rounds,
        "node": [
            {"name": name, "address": f"127.0.0.1:{port}"}
            for name, port in zip(names, free_ports(nodes), strict=True)
        ],
    }
    path = folder / "federation.toml"
    path.write_text(tomli_w.dumps(raw))
    make_certificates(folder / "certs", "benchmark", names, days=1)
    for i, name in enumerate(names):
        rng = np.random.default_rng(i)
        x = rng.standard_normal((8, inputs), dtype=np.float32)
        np.savez(folder / f"{name}.npz", x_train=x, y_train=rng.integers(0, CLASSES, 8))
    make_federation(raw, str(path))
    return path


def session_of(path: Path, name: str) -> Session:
    federation = read_federation(path)
    return open_node(
        federation,
        name,
        path.parent / f"node-{name}",
        open_site(federation, name, read_data(path.parent / f"{name}.npz")),
        credentials=load_credentials(path.parent / "certs", name),
        events=Events(name, silence),
    )


# --- throughput --------------------------------------------------------------------------------------------


def serve(path: Path, raw_port: int, messages: int, ready: Event, done: Event) -> None:
    """Node a with published messages, and beside it the raw stream of the same bytes."""
    torch.set_num_threads(1)
    with session_of(path, "a") as node:
        node.exchange.message_round = 1
        row = torch.randn(1, node.x0.numel(), generator=torch.Generator().manual_seed(0))
        published = [node.outbox.publish(node.exchange.header((1, i), row), row) for i in range(messages)]
        pieces = list(published[0].chunks())
        del row

        class Raw:
            """Answers every question for a message with the same bytes."""

            answers: ClassVar[dict[str, Any]] = {}

            @asynccontextmanager
            async def message(self, peer: Peer, wanted: Wanted) -> AsyncIterator[Sending]:
                size = sum(map(len, pieces))
                yield Sending(size, size, iter(pieces))

            async def submit(self, *_: Any) -> bytes:
                raise RefusedError(Kind.NOT_ALLOWED, "no server")

        async def listen() -> Server:
            server = Server(Raw, node.credentials, node.events)
            await server.listener.open(f"127.0.0.1:{raw_port}")
            return server

        node.listen(node.federation.member("a").address)
        server = node.waiting.run_interruptible(listen)
        ready.set()
        done.wait()
        node.waiting.run_interruptible(server.close)


@dataclass
class Cost:
    """Seconds, and seconds of processor time of who sends and who receives."""

    wall: float
    sending: float
    receiving: float

    @classmethod
    def so_far(cls, sender: int) -> Cost:
        """``sender``: that process; this one receives."""
        return cls(time.perf_counter(), cpu_seconds(sender), cpu_seconds(os.getpid()))

    def __sub__(self, before: Cost) -> Cost:
        return Cost(self.wall - before.wall, self.sending - before.sending, self.receiving - before.receiving)


def cpu_seconds(pid: int) -> float:
    """Of a process so far, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_throughput(folder: Path, megabytes: float, repeats: int) -> list[tuple[Cost, Cost]]:
    """What a fetch and what the raw stream cost, for every repetition."""
    path = write_federation(folder, 2, 1, megabytes, "gossip")
    spawn, raw_port = multiprocessing.get_context("spawn"), free_ports(1)[0]
    ready, done = spawn.Event(), spawn.Event()
    server = spawn.Process(target=serve, args=(path, raw_port, repeats + 1, ready, done), daemon=True)
    server.start()
    if not ready.wait(600):
        raise RuntimeError("the serving process did not start")
    pid = server.pid
    assert pid is not None
    try:
        with session_of(path, "b") as node:
            tensors = node.exchange.header((1, 0), node.x0[None]).tensors

            raw_line = Line(Way("a", f"127.0.0.1:{raw_port}"), node.credentials)

            async def fetch(exchange: int) -> Cost:
                # Each once: a message that is asked for again is first verified by who sends it.
                before = Cost.so_far(pid)
                message = await node.connections.to("a").fetch(1, exchange, tensors)
                cost = Cost.so_far(pid) - before
                message.path.unlink()
                return cost

            async def raw() -> Cost:
                with suppress(RefusedError):
                    await raw_line.ask(STATUS)  # connects
                before, received = Cost.so_far(pid), 0
                async with raw_line.request("GET", f"{MESSAGES}/1/0") as answer:
                    async for piece in pieces_of(answer.content):
                        received += len(piece)
                cost = Cost.so_far(pid) - before
                if received != node.x0.numel() * 4:
                    raise RuntimeError("the raw stream is not of the same size")
                return cost

            node.waiting.run_interruptible(lambda: fetch(0))  # connects
            costs = [
                (node.waiting.run_interruptible(partial(fetch, i + 1)), node.waiting.run_interruptible(raw))
                for i in range(repeats)
            ]
            node.waiting.run_interruptible(raw_line.close)
            return costs
    finally:
        done.set()
        server.join(60)


# --- memory and overhead -----------------------------------------------------------------------------------


def peak_memory(pid: int) -> int:
    """VmHWM, the largest resident size so far, in bytes; 0 when the process is gone."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def run_nodes(folder: Path, megabytes: float, rounds: int, algorithm: str) -> list[dict[str, Any]]:
    """The reports of three nodes, with their peak memory."""
    path = write_federation(folder, 3, rounds, megabytes, algorithm)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = {}
    for name in "abc":
        command = [sys.executable, "-m", "holdfast", "node", str(path), "--name", name, "--log", "json"]
        with (folder / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(
                [*command, "--data", str(folder / f"{name}.npz")], env=environment, stdout=log, stderr=log
            )
    peaks = dict.fromkeys(processes, 0)
    try:
        while any(process.poll() is None for process in processes.values()):
            for name, process in processes.items():
                peaks[name] = max(peaks[name], peak_memory(process.pid))
                if process.poll():
                    raise RuntimeError(f"{name} failed: {(folder / f'{name}.log').read_text()[-2000:]}")
            time.sleep(0.1)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    reports = [json.loads((folder / f"node-{name}" / "report.json").read_text()) for name in processes]
    return [report | {"peak": peaks[report["name"]]} for report in reports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["both", "exchange", "memory"], default="both")
    parser.add_argument("--megabytes", type=float, default=500.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--algorithm", default="local-gecl", help="of the three nodes")
    parser.add_argument("--folder", type=Path, help="where files go; as large as about 15 models")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console, passed = Console(), True
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.what != "memory":
            passed &= report_throughput(console, Path(folder), args.megabytes, args.repeats)
        if args.what != "exchange":
            passed &= report_memory(console, Path(folder), args.megabytes, args.rounds, args.algorithm)
    sys.exit(0 if passed else 1)


def report_throughput(console: Console, folder: Path, megabytes: float, repeats: int) -> bool:
    times = measure_throughput(folder / "exchange", megabytes, repeats)
    ratio = statistics.median(raw.wall / ours.wall for ours, raw in times)
    table = Table(
        "over raw",
        "exchange, MB/s",
        "CPU of sender, receiver, s/GB",
        "raw stream, MB/s",
        "CPU of sender, receiver, s/GB",
    )
    for ours, raw in times:
        figures = [f"{raw.wall / ours.wall:.2f}"]
        for cost in (ours, raw):
            sending, receiving = (1000 * seconds / megabytes for seconds in (cost.sending, cost.receiving))
            figures += [f"{megabytes / cost.wall:.0f}", f"{sending:.2f}, {receiving:.2f}"]
        table.add_row(*figures)
    console.print(table)
    console.print(f"median of the ratios: {ratio:.2f}, to be at least {LEAST_RATIO}")
    return ratio >= LEAST_RATIO


def report_memory(console: Console, folder: Path, megabytes: float, rounds: int, algorithm: str) -> bool:
    size = megabytes * 1e6
    idle = max(report["peak"] for report in run_nodes(folder / "idle", 0.1, 1, algorithm))
    reports = run_nodes(folder / "ring", megabytes, rounds, algorithm)
    table = Table(
        "node",
        "memory / model",
        "above idle",
        "overhead / compute",
        "round, s",
        "computing",
        "waiting",
        "saving",
    )
    for report in reports:
        parts = [report[f"{part}seconds"] for part in ("", "compute_", "waiting_", "saving_")]
        total, compute, *_ = parts
        table.add_row(
            report["name"],
            f"{report['peak'] / size:.2f}",
            f"{(report['peak'] - idle) / size:.2f}",
            f"{(total - compute) / compute:.2f}",
            *(f"{seconds / rounds:.2f}" for seconds in parts),
        )
    console.print(table)
    memory = (max(report["peak"] for report in reports) - idle) / size
    console.print(f"largest peak above an idle node of {idle / 1e6:.0f} MB: {memory:.2f} models, ", end="")
    console.print(f"to be at most {MOST_MEMORY}")
    console.print("waiting: for neighbours to compute, and for their messages; saving: states to disk")
    return memory <= MOST_MEMORY


if __name__ == "__main__":
    main()
