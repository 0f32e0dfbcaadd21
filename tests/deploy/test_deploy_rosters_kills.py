"""Members are killed at any instant while they agree to go on without one: nobody goes on in another way."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import tomli_w
from federation_runs import describe
from member_processes import PATIENCE, Members
from roster_runs import last_model, rosters_of, simulate_rosters

from holdfast_deploy.cli.rehearsal import rehearse
from holdfast_deploy.federation_file import make_federation

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_kills_during_an_agreement_change_neither_rosters_nor_models(seed: int, tmp_path: Path) -> None:
    """c is killed for good; then, until the others have a roster without it, and after, they are killed."""
    limits, membership = {"wait": PATIENCE}, {"remove_after": "3s", "minimum": 3}
    raw = describe(GECL, nodes=5, rounds=60, dtype="float64", limits=limits, membership=membership)
    file, draw, others = make_federation(raw, "test"), random.Random(seed), ["a", "b", "d", "e"]
    with Members(raw, tmp_path / "run") as members:
        for name in members.nodes:
            members.start(name)
        members.wait_for_round(10)
        members.kill("c")
        for _ in range(14):
            time.sleep(draw.uniform(0.0, 1.5))
            victim = draw.choice(others)
            if not members.processes[victim].is_alive():
                break  # all have finished
            members.kill(victim)
            time.sleep(draw.choice([0.0, 0.5]))
            members.start(victim)
        del members.processes["c"]
        members.finish()
        kills = members.kills
    rosters = rosters_of(tmp_path / "run" / "node-a")
    print(f"{kills} kills, rosters {[(e.first, e.names, e.joined) for e in rosters]}")
    assert kills >= 5
    assert rosters[-1].names == others
    simulated = simulate_rosters(file, rosters)
    for name in others:
        assert rosters_of(tmp_path / "run" / f"node-{name}") == rosters
        model = last_model(tmp_path / "run" / f"node-{name}", rosters)
        assert (model - simulated[name]).abs().max() <= 1e-12 * simulated[name].abs().max()


@pytest.mark.slow
def test_a_rehearsal_removes_a_member_and_has_all_talk_through_a_relay(tmp_path: Path) -> None:
    """With real processes: the nodes, the relay, and the coordinator's order between them."""
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(describe(GECL, nodes=3, rounds=30, membership={"minimum": 2})))
    folder = tmp_path / "rehearsal"
    rehearse(path, folder=folder, remove="c", relay=True)
    (roster,) = rosters_of(folder / "node-a")
    assert roster.names == ["a", "b"]
    assert all((folder / f"node-{name}" / "report.json").exists() for name in "ab")
    assert "the coordinator has removed c" in (folder / "c.log").read_text()
    assert "relaying" in (folder / "relay.log").read_text()
