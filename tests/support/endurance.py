"""Eight members in two halves with a relay between, each with its own file, and all that can befall them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from cut_links import How, Lines
from federation_runs import forked_member, forked_relay, free_ports, make_data

from holdfast_deploy.wire.authority import make_certificates

PATIENCE = 600.0  # seconds; far more than anything here takes
AWAKE, ASLEEP = 0.02, 0.38  # seconds: who is slow computes for a twentieth of the time


class Endurance:
    """The members, none of them started. Members of one half dial one another over lines that can be cut."""

    def __init__(self, raw: dict[str, Any], folder: Path, lines: Lines, halves: tuple[str, str]) -> None:
        self.folder, self.lines, self.halves = folder, lines, halves
        self.nodes, self.rounds = "".join(halves), raw["rounds"]
        self.processes: dict[str, ForkServerProcess] = {}
        self.lost: set[str] = set()
        self.kills = 0
        self._slow, self._allowed = "", 0  # who is slow, and up to which round it may go
        self._over = threading.Event()
        names = [*self.nodes, "relay"]
        self.real = dict(zip(names, free_ports(len(names)), strict=True))
        make_certificates(folder / "certs", raw["name"], names, days=1)
        crossing = [[one, other] for one in halves[0] for other in halves[1]]
        for i, name in enumerate(names):
            self._write_site(i, name, raw, crossing)

    def _write_site(self, number: int, name: str, raw: dict[str, Any], crossing: list[list[str]]) -> None:
        """Its own file: where it reaches whom is its own affair, and no part of what all agree on."""
        site = self.folder / name
        site.mkdir()
        (site / "certs").symlink_to(self.folder / "certs")
        half = next((half for half in self.halves if name in half), "")
        peers = [peer for peer in [*half, "relay"] if peer != name] if half else []
        address = {peer: f"127.0.0.1:{self.real[peer]}" for peer in [*self.nodes, "relay"]}
        for peer, port in zip(peers, free_ports(len(peers)), strict=True):
            self.lines.add(name, peer, port, self.real[peer])
            address[peer] = f"127.0.0.1:{port}"
        nodes = [{"name": node, "address": address[node]} for node in self.nodes]
        relay = {"name": "relay", "address": address["relay"], "links": crossing}
        (site / "federation.toml").write_text(tomli_w.dumps(raw | {"node": nodes, "relay": relay}))
        if half:
            data = make_data(number)
            arrays = {key: getattr(data, key).numpy() for key in ("x_train", "y_train", "x_test", "y_test")}
            np.savez(site / f"{name}.npz", **arrays)

    def __enter__(self) -> Endurance:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for process in self.processes.values():
            process.kill()
            process.join()

    # --- what is done to them -----------------------------------------------------------------------------

    def start(self, name: str) -> None:
        path = self.folder / name / "federation.toml"
        self.processes[name] = forked_relay(path) if name == "relay" else forked_member(path, name)

    def kill(self, name: str) -> None:
        process = self.processes[name]
        process.kill()
        process.join()
        self.kills += 1

    def lose(self, name: str) -> None:
        """For good."""
        self.kill(name)
        self.lost.add(name)

    def replace(self, name: str) -> None:
        """By a machine with an empty folder."""
        self.kill(name)
        shutil.rmtree(self.folder / name / f"node-{name}")
        self.start(name)

    def rot(self, name: str) -> None:
        """One bit of its newest state flips while it is down."""
        self.kill(name)
        places = [self.folder / name / f"node-{name}", *(self.folder / name).glob("node-*/roster-*")]
        state = max((p / "state" for p in places if (p / "state").exists()), key=os.path.getmtime)
        content = bytearray(state.read_bytes())
        content[-5] ^= 4
        state.write_bytes(bytes(content))
        self.start(name)

    def slow_down(self, name: str) -> None:
        """From here on, it runs at a twentieth of its speed, and no further than ``harass`` allows.

        All others wait for it. So however fast the machine is, no round is done before its blows have fallen.
        """
        self._slow = name
        self.wait_for_round(1)
        self._allowed = self.round(name) + 1
        threading.Thread(target=self._hold_back, daemon=True).start()

    def _hold_back(self) -> None:
        while not self._over.is_set():
            process = self.processes[self._slow]
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):  # killed meanwhile
                    os.kill(process.pid, signal.SIGSTOP)
                    time.sleep(ASLEEP)
                    while self.round(self._slow) >= self._allowed and not self._over.is_set():
                        time.sleep(AWAKE)
                    os.kill(process.pid, signal.SIGCONT)
            time.sleep(AWAKE)

    def harass(self, seed: int, kills: int, cuts: int, victims: str, last: int) -> None:
        """Blows at random times, evenly over the rounds up to ``last``, until there were enough of each.

        Some members are killed twice in a row; lines are cut for seconds.
        """
        draw, first, blows = random.Random(seed), self.round(self._slow), max(kills, cuts)
        killed = cut = blow = 0
        while killed < kills or cut < cuts:
            due = min(first + blow * (last - first) // blows, last)
            self._allowed = due + 1
            self.wait_for_round(due)
            time.sleep(draw.uniform(0.0, 0.3))
            if cut < cuts:
                half = draw.choice(self.halves)
                one, other = draw.sample([*(name for name in half if name not in self.lost), "relay"], 2)
                how: How = draw.choice(["silent", "reset"])
                self.lines.cut(one, other, draw.uniform(3.0, 8.0), how)
                cut += 1
            victim = draw.choice([*victims, *victims, "relay"])
            for _ in range(draw.choice([1, 1, 2])):
                if killed < kills and self.processes[victim].is_alive():
                    self.kill(victim)
                    killed += 1
                    time.sleep(draw.choice([0.0, 0.5]))
                    self.start(victim)
                    time.sleep(draw.uniform(0.0, 0.5))
            blow += 1

    # --- what becomes of them -----------------------------------------------------------------------------

    def log(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / f"{name}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def round(self, name: str) -> int:
        return max([entry["round"] for entry in self.log(name) if entry["event"] == "round done"], default=0)

    def wait_for_round(self, number: int) -> None:
        """Until the one that is slow has come so far; before there is one, until somebody has."""
        until = time.monotonic() + PATIENCE
        while max(map(self.round, self._slow or self.nodes)) < number:
            self.check_processes()
            assert time.monotonic() < until, self.last_words()
            time.sleep(0.1)

    def check_processes(self) -> None:
        """Nobody has failed; who was told to try later is started again, as by systemd."""
        for name, process in list(self.processes.items()):
            if name in self.lost or process.exitcode in (None, 0, -signal.SIGKILL):
                continue
            assert process.exitcode == 75, (name, process.exitcode, self.log(name)[-5:])
            print(f"{name} ended with {process.exitcode}, and is started again")
            self.start(name)

    def finish(self) -> None:
        """Waits for all who are left; from here on, nothing holds them up."""
        self._allowed = self.rounds + 1
        until = time.monotonic() + PATIENCE
        left = [name for name in self.nodes if name not in self.lost]
        while any(self.processes[name].exitcode != 0 for name in left):
            self.check_processes()
            assert time.monotonic() < until, self.last_words()
            time.sleep(0.1)

    def last_words(self) -> dict[str, Any]:
        return {name: self.log(name)[-4:] for name in self.nodes}
