"""Killed processes and a bad network change nothing: the model is, bit for bit, an undisturbed run's."""

from __future__ import annotations

import json
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from chaos_proxy import FATES, ChaosProxies
from federation_runs import deploy, describe, forked_member, free_ports, write_federation

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 3}
SCAFFOLD = {"name": "scaffold", "lr": 0.1, "local_steps": 2}
FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
PATIENCE = 400.0  # seconds; far more than any of this takes


class Members:
    """All members of a federation as processes, to be killed and started again."""

    def __init__(self, raw: dict[str, Any], folder: Path, proxies: ChaosProxies | None) -> None:
        folder.mkdir()
        self.folder = folder
        listeners = raw["node"] if "server" not in raw else [raw["server"]]
        real = dict(zip([m["name"] for m in listeners], free_ports(len(listeners)), strict=True))
        self.listen = {name: f"127.0.0.1:{port}" for name, port in real.items()} if proxies else {}
        if proxies is not None:
            for member in listeners:
                proxies.add(int(member["address"].rpartition(":")[2]), real[member["name"]])
        self.path = write_federation(raw, folder)
        self.nodes = [member["name"] for member in raw["node"]]
        self.names = [*self.nodes, *([raw["server"]["name"]] if "server" in raw else [])]
        self.processes: dict[str, ForkServerProcess] = {}
        self.kills = 0

    def __enter__(self) -> Members:
        for name in self.names:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def start(self, name: str) -> None:
        self.processes[name] = forked_member(self.path, name, self.listen.get(name))

    def kill(self, name: str) -> None:
        """SIGKILL, in the midst of the run."""
        process = self.processes[name]
        assert process.is_alive(), f"{name} was gone before it could be killed: {self.log(name)[-3:]}"
        process.kill()
        process.join()
        self.kills += 1

    def log(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def rounds(self, name: str) -> int:
        """How far the member called ``name`` has come."""
        return max([entry["round"] for entry in self.log(name) if entry["event"] == "round done"], default=0)

    def wait_for_round(self, number: int) -> None:
        """Until somebody has come so far."""
        until = time.monotonic() + PATIENCE
        while max(map(self.rounds, self.nodes)) < number:
            assert time.monotonic() < until, {name: self.log(name)[-2:] for name in self.names}
            time.sleep(0.02)

    def finish(self) -> None:
        """Waits for all to finish."""
        until = time.monotonic() + PATIENCE
        for name, process in self.processes.items():
            process.join(max(until - time.monotonic(), 0.0))
            assert process.exitcode == 0, (name, process.exitcode, self.log(name)[-3:])

    def harass(self, victims: list[str], kills: int, rounds: int, seed: int) -> None:
        """Kills members drawn from ``victims``, spread over the run; a third of them twice in a row."""
        draw = random.Random(seed)
        strokes = 0
        while self.kills < kills:
            strokes += 1
            # With fewer strokes than kills, the last one comes well before the last round.
            self.wait_for_round(strokes * rounds // (kills + 2))
            victim = draw.choice(victims)
            time.sleep(draw.uniform(0.0, 0.05))
            self.kill(victim)
            time.sleep(draw.choice([0.0, 0.3]))
            self.start(victim)
            if draw.random() < 1 / 3:  # while it starts, or resumes
                time.sleep(draw.uniform(0.0, 1.0))
                self.kill(victim)
                self.start(victim)


def check(raw: dict[str, Any], tmp_path: Path, victims: list[str], kills: int, seed: int) -> None:
    """Two runs, one of them disturbed, give the same models."""
    deploy(raw, tmp_path / "calm", timeout=PATIENCE)
    with ChaosProxies(seed) as proxies, Members(raw, tmp_path / "chaos", proxies) as members:
        members.harass(victims, kills, raw["rounds"], seed)
        members.finish()
        assert members.kills >= kills
        logs = [entry for name in members.names for entry in members.log(name)]
    for name in members.nodes:
        disturbed = members.folder / f"node-{name}" / "model.safetensors"
        calm = tmp_path / "calm" / name / "model.safetensors"
        assert disturbed.read_bytes() == calm.read_bytes(), name
    assert {entry["event"] for entry in logs} >= {"starting", "resuming", "finished"}
    assert not [entry for entry in logs if entry["level"] == "error" or "differs" in entry["event"]]
    print(f"{members.kills} kills, connections: {dict(proxies.fates)}")
    if kills >= 20:
        assert all(proxies.fates[fate] >= 10 for fate in FATES)


def test_a_few_kills_and_a_bad_network_change_nothing(tmp_path: Path) -> None:
    raw = describe(GECL, nodes=3, rounds=12)
    check(raw, tmp_path, ["a", "b", "c"], kills=2, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_kills_on_a_ring_of_six_change_nothing(seed: int, tmp_path: Path) -> None:
    raw = describe(GECL, nodes=6, rounds=120, limits={"wait": PATIENCE})
    check(raw, tmp_path, list("abcdef"), kills=22, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "cohort"), [(SCAFFOLD, 3), (FEDAVG, "all")])
def test_a_server_killed_again_and_again_changes_nothing(
    algorithm: dict, cohort: int | str, tmp_path: Path
) -> None:
    network = {"topology": "server", "cohort": cohort}
    raw = describe(algorithm, nodes=4, rounds=120, network=network, limits={"wait": PATIENCE})
    check(raw, tmp_path, ["hub", "hub", "a", "b", "c", "d"], kills=22, seed=2)
