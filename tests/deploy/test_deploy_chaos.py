"""Killed processes and a bad network change nothing: the model is, bit for bit, an undisturbed run's."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from chaos_proxy import FATES, ChaosProxies
from federation_runs import deploy, describe
from member_processes import PATIENCE, Members

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 3}
SCAFFOLD = {"name": "scaffold", "lr": 0.1, "local_steps": 2}
FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}


def harass(members: Members, victims: list[str], kills: int, rounds: int, seed: int) -> None:
    """Kills members drawn from ``victims``, spread over the run; a third of them twice in a row."""
    draw = random.Random(seed)
    strokes = 0
    while members.kills < kills:
        strokes += 1
        # With fewer strokes than kills, the last one comes well before the last round.
        members.wait_for_round(strokes * rounds // (kills + 2))
        victim = draw.choice(victims)
        time.sleep(draw.uniform(0.0, 0.05))
        members.kill(victim)
        time.sleep(draw.choice([0.0, 0.3]))
        members.start(victim)
        if draw.random() < 1 / 3:  # while it starts, or resumes
            time.sleep(draw.uniform(0.0, 1.0))
            members.kill(victim)
            members.start(victim)


def check(raw: dict[str, Any], tmp_path: Path, victims: list[str], kills: int, seed: int) -> None:
    """Two runs, one of them disturbed, give the same models."""
    deploy(raw, tmp_path / "calm", timeout=PATIENCE)
    with ChaosProxies(seed) as proxies, Members(raw, tmp_path / "chaos", proxies) as members:
        for name in members.names:
            members.start(name)
        harass(members, victims, kills, raw["rounds"], seed)
        members.finish()
        assert members.kills >= kills
        logs = [entry for name in members.names for entry in members.log(name)]
    for name in members.nodes:
        disturbed = members.folder / f"node-{name}" / "model.safetensors"
        calm = tmp_path / "calm" / name / "model.safetensors"
        assert disturbed.read_bytes() == calm.read_bytes(), name
    assert {entry["event"] for entry in logs} >= {"starting", "resuming", "finished"}
    errors = [entry for entry in logs if entry["level"] == "error" or "differs" in entry["event"]]
    assert not errors, errors
    print(f"{members.kills} kills, connections: {dict(proxies.fates)}")
    if kills >= 20:
        assert all(proxies.fates[fate] >= 10 for fate in FATES)


@pytest.mark.slow
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
