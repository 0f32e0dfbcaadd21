"""``holdfast federation try``: everybody as processes on this machine, with real certificates."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from rich.console import Console
from rich.live import Live
from rich.table import Table

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.files import private_files, write_atomic
from holdfast.report.format import bytes_text
from holdfast_deploy.cli.federation import figures_text
from holdfast_deploy.cli.membership import change_members
from holdfast_deploy.cli.rehearsal_data import write_data
from holdfast_deploy.consent import signature_path
from holdfast_deploy.federation_file import FederationFile, make_federation, read_federation
from holdfast_deploy.signing import make_key, public_key
from holdfast_deploy.sites import names_code
from holdfast_deploy.wire.authority import make_certificates

SOON = 10.0  # seconds after which a member that is lost in a rehearsal is left out


class Trial(NamedTuple):
    """What is to befall the members of a rehearsal, when a third of the rounds are done."""

    lose: str | None = None  # who is killed, and left out by the others
    remove: str | None = None  # who is removed by an order of the coordinator
    relay: bool = False  # whether nobody can be dialled but a relay, from the beginning

    @property
    def changes(self) -> bool:
        """Whether members change."""
        return self.lose is not None or self.remove is not None


@private_files()
def rehearse(
    path: Path, data: str | None, model: str | None, folder: Path, *, fresh: bool, trial: Trial
) -> None:
    """``holdfast federation try``"""
    original = read_federation(path, model).running()
    _check_trial(original, trial)
    if path.resolve().parent == folder.resolve():
        raise HoldfastError(f"--dir {folder} holds {path.name} itself; a rehearsal needs a folder of its own")
    if original.own_model is not None:
        print(f"own model: {original.own_model.file}, sha256 {original.own_model.sha256}")
    if fresh and folder.exists():
        if any(folder.iterdir()) and not (folder / "federation.toml").exists():
            raise HoldfastError(f"--fresh: {folder} is not the folder of a rehearsal; delete it yourself")
        shutil.rmtree(folder)
    raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    if not (folder / "federation.toml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if not (data and names_code(data)):
            write_data(original, data, folder)
        _prepare(raw, trial, folder / "certs")
        _on_loopback(raw)
        certified = [*raw["node"], *(raw[role] for role in ("server", "relay") if role in raw)]
        make_certificates(folder / "certs", original.name, [m["name"] for m in certified], days=7)
        write_atomic(folder / "federation.toml", tomli_w.dumps(raw).encode())
        if signature_path(path).exists() and not trial.changes:  # addresses are no part of what is signed
            write_atomic(signature_path(folder / "federation.toml"), signature_path(path).read_bytes())
    else:
        _prepare(raw, trial, folder / "certs")
    federation = read_federation(folder / "federation.toml")
    if federation.id != make_federation(raw, str(path)).id:
        raise HoldfastError(f"{folder} is a rehearsal of another federation; add --fresh to begin anew")
    Rehearsal(federation, folder, model, data if data and names_code(data) else None, trial).run()


def _check_trial(federation: FederationFile, trial: Trial) -> None:
    for name in filter(None, (trial.lose, trial.remove)):
        if name not in federation.names:
            raise unknown("node in the federation", name, federation.names)
    rules = federation.membership
    if trial.lose is not None and (rules is None or rules.remove_after is None):
        raise HoldfastError(
            "--lose: the federation file does not say after which time a member is left out; "
            "add [membership] with remove_after"
        )
    if trial.remove is not None and rules is None:
        raise HoldfastError("--remove: members of this federation stay as they are; add [membership]")
    if trial.relay and federation.server is not None:
        raise HoldfastError("--relay: nodes dial the server, and need no relay")


def _prepare(raw: dict[str, Any], trial: Trial, certs: Path) -> None:
    """Changes the file ``raw`` for what is to be rehearsed."""
    if trial.changes:  # the coordinator has not signed this one; here the rehearsal is the coordinator
        raw["coordinator"] = public_key(make_key(certs))
    if trial.lose is not None:
        raw["membership"]["remove_after"] = SOON
    elif trial.remove is not None:  # by the order alone
        raw["membership"].pop("remove_after", None)
    if trial.relay:
        raw.setdefault("relay", {"name": "relay", "address": "127.0.0.1:1"})
        raw["node"] = [{k: v for k, v in node.items() if k != "address"} for node in raw["node"]]


def _on_loopback(raw: dict[str, Any]) -> None:
    """Everybody who can be dialled gets a free port of this machine."""
    everybody = [*raw["node"], *(raw[role] for role in ("server", "relay") if role in raw)]
    members = [member for member in everybody if "address" in member]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in members]
    for member, taken in zip(members, sockets, strict=True):
        member["address"] = f"127.0.0.1:{taken.getsockname()[1]}"
    for taken in sockets:
        taken.close()


class Rehearsal:
    """All members as child processes; their log lines go to files, and their state to a table."""

    def __init__(
        self,
        federation: FederationFile,
        folder: Path,
        model: str | None,
        code: str | None,
        trial: Trial,
    ) -> None:
        self.federation, self.folder, self.model = federation, folder, model
        self.trial: Trial | None = trial if trial.changes else None  # None: nothing is to happen any more
        self.code = code  # every node's ``--data module:function``; None: the files that were written
        self.rounds: dict[str, int] = {}
        self.doing: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.leaving: list[subprocess.Popen[str]] = []  # who was removed
        self.events_seen: set[str] = set()
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
                    self._try()
                    self._let_go()
                    time.sleep(0.1)
            failed = self._failed()  # before the others are stopped
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", file=sys.stderr)
            sys.exit(130)
        finally:
            for process in (*self.processes.values(), *self.leaving):
                process.terminate()
                process.send_signal(signal.SIGCONT)
            for process in (*self.processes.values(), *self.leaving):
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

    def _try(self) -> None:
        """What is to befall somebody, once it has done a third of its rounds."""
        trial = self.trial
        if trial is None:
            return
        victims = [name for name in (trial.lose, trial.remove) if name is not None]
        if any(3 * self.rounds.get(name, 0) < self.federation.rounds for name in victims):
            return
        self.trial = None
        if trial.lose is not None:
            self.processes.pop(trial.lose).kill()
        if trial.remove is not None:
            self._remove(trial.remove)

    def _remove(self, name: str) -> None:
        """As the coordinator does it; ``name`` is held up, lest all have finished before they are told."""
        leaving = self.processes.pop(name)
        leaving.send_signal(signal.SIGSTOP)
        self.leaving.append(leaving)
        file = self.folder / "federation.toml"
        asker = next(other for other in self.federation.names if other != name)
        change_members(file, "remove", [name], asker=asker)

    def _let_go(self) -> None:
        """Whom the others go on without: it hears of that, says so and ends."""
        if self.leaving and "a new roster" in self.events_seen:
            self.leaving[0].send_signal(signal.SIGCONT)

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
                self.events_seen.add(entry["event"])
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
