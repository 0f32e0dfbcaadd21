"""``holdfast federation try``: everybody as processes on this machine, with real certificates."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from holdfast.cli.federation import figures_text
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.files import private_files, write_atomic
from holdfast.core.tree import leaves, tree_map
from holdfast.data import DATASETS, IID, Dataset, partition
from holdfast.data.columns import Columns, write_columns
from holdfast.data.samples import Pair
from holdfast.engines.deploy.wire.authority import make_certificates
from holdfast.experiments.consent import signature_path
from holdfast.experiments.federation import FederationFile, read_federation
from holdfast.experiments.sites import names_code, read_data
from holdfast.report.format import bytes_text

SOON = 10.0  # seconds after which a member that is lost in a rehearsal is left out
RANDOM_SAMPLES = 64  # per node, where there are no data to rehearse with


@private_files()
def rehearse(
    path: Path, data: str | None, model: str | None, folder: Path, *, fresh: bool, lose: str | None = None
) -> None:
    """``holdfast federation try``"""
    original = read_federation(path, model)
    if lose is not None:
        original = _with_a_loss(original, lose)
    if path.resolve().parent == folder.resolve():
        raise HoldfastError(f"--dir {folder} holds {path.name} itself; a rehearsal needs a folder of its own")
    if original.own_model is not None:
        print(f"own model: {original.own_model.file}, sha256 {original.own_model.sha256}")
    if fresh and folder.exists():
        if any(folder.iterdir()) and not (folder / "federation.toml").exists():
            raise HoldfastError(f"--fresh: {folder} is not the folder of a rehearsal; delete it yourself")
        shutil.rmtree(folder)
    if not (folder / "federation.toml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if not (data and names_code(data)):
            _write_data(original, data, folder)
        make_certificates(folder / "certs", original.name, [m.name for m in original.certified], days=7)
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        _on_loopback(raw)
        if lose is not None:
            raw["membership"]["remove_after"] = SOON
            raw.pop("coordinator", None)  # who has not signed this one
        write_atomic(folder / "federation.toml", tomli_w.dumps(raw).encode())
        if signature_path(path).exists() and lose is None:  # addresses are no part of what is signed
            write_atomic(signature_path(folder / "federation.toml"), signature_path(path).read_bytes())
    federation = read_federation(folder / "federation.toml")
    if federation.id != original.id:
        raise HoldfastError(f"{folder} is a rehearsal of another federation; add --fresh to begin anew")
    Rehearsal(federation, folder, model, data if data and names_code(data) else None, lose).run()


def _with_a_loss(federation: FederationFile, name: str) -> FederationFile:
    """The federation as it is rehearsed if ``name`` is lost on the way."""
    if name not in federation.names:
        raise unknown("node in the federation", name, federation.names)
    if federation.membership is None or federation.membership.remove_after is None:
        raise HoldfastError(
            "--lose: the federation file does not say after which time a member is left out; "
            "add [membership] with remove_after"
        )
    rules = federation.membership.model_copy(update={"remove_after": SOON})
    changed = federation.of(federation.model_dump() | {"membership": rules.model_dump(), "coordinator": None})
    changed._own_model = federation.own_model
    changed.check()
    return changed


def _on_loopback(raw: dict[str, Any]) -> None:
    """Everybody who can be dialled gets a free port of this machine."""
    everybody = [*raw["node"], *(raw[role] for role in ("server", "relay") if role in raw)]
    members = [member for member in everybody if "address" in member]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in members]
    for member, taken in zip(members, sockets, strict=True):
        member["address"] = f"127.0.0.1:{taken.getsockname()[1]}"
    for taken in sockets:
        taken.close()


def _write_data(federation: FederationFile, data: str | None, folder: Path) -> None:
    """One npz file for each node, as the sites would have it."""
    for i, (name, part) in enumerate(zip(federation.names, _split(federation, data), strict=True)):
        count, own = federation.node[i].samples, len(next(leaves(part.train)))
        if count is not None and own < count:
            raise HoldfastError(f"{name}: the file says {count} samples, the rehearsal has {own}")
        train = tree_map(lambda column, count=count: column[:count], part.train)
        if isinstance(train, Pair):
            test = {} if part.test is None else {"x_test": part.test.x, "y_test": part.test.y}
            np.savez(folder / f"{name}.npz", x_train=train.x, y_train=train.y, **test)
        else:
            write_columns(folder / f"{name}.npz", Columns(train, part.test))


class Part(NamedTuple):
    """What a node has in a rehearsal: trees of samples."""

    train: Any
    test: Any


def _split(federation: FederationFile, data: str | None) -> list[Part]:
    nodes, seed, problem = len(federation.node), federation.seed, federation.problem
    if data is None:
        if problem.input_shape is None:
            raise HoldfastError("columns cannot be made up: give --data, an npz file like a node's own")
        rng = np.random.default_rng(seed)
        parts = []
        for node in federation.node:
            count = (node.samples or RANDOM_SAMPLES) + RANDOM_SAMPLES // 4
            x = torch.from_numpy(rng.standard_normal((count, *problem.input_shape)).astype(np.float32))
            y = rng.standard_normal(count).astype(np.float32)
            labels = torch.from_numpy(
                y if problem.classes is None else rng.integers(0, problem.classes, count)
            )
            cut = count - RANDOM_SAMPLES // 4
            parts.append(Part(Pair(x[:cut], labels[:cut]), Pair(x[cut:], labels[cut:])))
        return parts
    dataset = read_data(Path(data)) if Path(data).suffix == ".npz" else _registered(data, nodes, seed)
    if isinstance(dataset, Columns):
        train, test = dataset.train, dataset.test
        order = np.random.default_rng(seed).permutation(len(next(leaves(train))))
        rows = [torch.from_numpy(np.sort(own)) for own in np.array_split(order, nodes)]
        return [Part(tree_map(lambda column, own=own: column[own], train), test) for own in rows]
    split = partition(dataset.x_train, dataset.y_train, IID(), nodes=nodes, seed=seed)
    return [Part(split.node(i), Pair(dataset.x_test, dataset.y_test)) for i in range(nodes)]


def _registered(data: str, nodes: int, seed: int) -> Dataset:
    found = DATASETS.build(data, {}, nodes=nodes, seed=seed)
    if not isinstance(found, Dataset):
        raise HoldfastError(f"--data {data}: a rehearsal divides arrays only; give an npz file")
    return found


class Rehearsal:
    """All members as child processes; their log lines go to files, and their state to a table."""

    def __init__(
        self,
        federation: FederationFile,
        folder: Path,
        model: str | None,
        code: str | None,
        lose: str | None = None,
    ) -> None:
        self.federation, self.folder, self.model = federation, folder, model
        self.lose = lose  # who is killed when it has done a third of its rounds
        self.code = code  # every node's ``--data module:function``; None: the files that were written
        self.rounds: dict[str, int] = {}
        self.doing: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.followers: list[threading.Thread] = []

    def run(self) -> None:
        """To the end; leaves with an error if a member did."""
        console = Console()
        try:
            for member in self.federation.certified:
                self._start(member.name)
            with Live(console=console, get_renderable=self._table, refresh_per_second=4, transient=True):
                members = [self.processes[member.name] for member in self.federation.members]
                while any(process.poll() is None for process in members):
                    if self._failed():
                        break
                    if self.lose is not None and 3 * self.rounds.get(self.lose, 0) >= self.federation.rounds:
                        self.processes.pop(self.lose).kill()
                        self.lose = None
                    time.sleep(0.1)
            failed = self._failed()  # before the others are stopped
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", file=sys.stderr)
            sys.exit(130)
        finally:
            for process in self.processes.values():
                process.terminate()
            for process in self.processes.values():
                process.wait()
            for follower in self.followers:
                follower.join()
        console.print(self._results())
        if failed:
            last = (self.folder / f"{failed}.log").read_text().strip().splitlines()[-1:] or ["{}"]
            try:
                why = json.loads(last[0]).get("reason", last[0])
            except json.JSONDecodeError:  # the interpreter's own last words
                why = last[0]
            raise HoldfastError(f"{failed} stopped: {why}")
        console.print(
            f"rehearsed; models, metrics and logs are in {self.folder}", soft_wrap=True, markup=False
        )

    def _failed(self) -> str:
        """A member that ended with an error, if any."""
        return next((name for name, process in self.processes.items() if process.poll()), "")

    def _start(self, name: str) -> None:
        data = self.code or str(self.folder / f"{name}.npz")
        role = ["node", "--data", data] if name in self.federation.names else ["server"]
        command, file = [sys.executable, "-m", "holdfast"], str(self.folder / "federation.toml")
        own = ["--model", self.model] if self.model is not None else []
        arguments = [role[0], file, "--name", name, *role[1:], *own, "--log", "json"]
        if self.federation.relay is not None and name == self.federation.relay.name:
            arguments = ["federation", "relay", file]
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes[name] = process
        follower = threading.Thread(target=self._follow, args=(name, process), daemon=True)
        follower.start()
        self.followers.append(follower)

    def _follow(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with (self.folder / f"{name}.log").open("a") as log:
            for line in process.stderr:
                log.write(line)
                log.flush()
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self.doing[name] = entry["event"]
                self.rounds[name] = entry.get("round", self.rounds.get(name, 0))

    def _table(self) -> Table:
        table = Table("member", "round", "last event", box=None, pad_edge=False)
        for name in self.processes:
            done = self.rounds.get(name, 0)
            table.add_row(name, f"{done}/{self.federation.rounds}", self.doing.get(name, "starting"))
        return table

    def _results(self) -> Table:
        table = Table("member", "rounds", "sent", "waited", "figures", box=None, pad_edge=False)
        for member in self.federation.members:
            role = "server" if self.federation.server is member else "node"
            path = self.folder / f"{role}-{member.name}" / "report.json"
            if path.exists():
                report = json.loads(path.read_text())
                sent, waited = bytes_text(report["payload_bytes"]), f"{report['waiting_seconds']:.1f} s"
                figures = figures_text(report["metrics"])
                table.add_row(member.name, str(report["round"]), sent, waited, figures)
        return table
