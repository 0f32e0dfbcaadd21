"""The members of a rehearsal as processes of this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from holdfast.core.errors import HoldfastError
from holdfast.report.format import bytes_text
from holdfast_deploy.cli.coordinator import Coordinator
from holdfast_deploy.cli.rehearsal_folder import Trial
from holdfast_deploy.cli.status import figures_text
from holdfast_deploy.federation_file import FederationFile


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
        self.trial: Trial | None = trial if trial.changes else None  # None: nothing more will happen
        self.code = code  # every node's ``--data module:function``; None: the files that were written
        self.rounds: dict[str, int] = {}
        self.doing: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.leaving: list[subprocess.Popen[str]] = []  # nodes that were removed
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
            print("stopped; the same command continues from here", file=sys.stderr)
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
        """Loses or removes a node, once it has done a third of its rounds."""
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
        """As the coordinator does it; ``name`` is stopped, or all could finish before they get the order."""
        leaving = self.processes.pop(name)
        leaving.send_signal(signal.SIGSTOP)
        self.leaving.append(leaving)
        file = self.folder / "federation.toml"
        asker = next(other for other in self.federation.names if other != name)
        Coordinator(file, asker=asker).change("remove", [name])

    def _let_go(self) -> None:
        """Wakes the node that was removed: it learns of that, says so and ends."""
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
