"""All that can befall a federation at once, and nobody attends to it: every round is done, and rightly.

Eight nodes in two halves, a relay between them, each site with its own addresses. Lines are cut for seconds,
one of them for more than two minutes, one node computes at a twentieth of its speed, processes are killed
twenty times, the relay among them, and a bit flips in a file. In the second test, one member is lost for
good, and another comes back on a new machine with an empty folder; nobody gives an order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cut_links import How, Lines
from endurance import PATIENCE, Endurance
from federation_runs import deploy, describe
from roster_runs import last_model, rosters_of, simulate_rosters

from holdfast_deploy.federation_file import make_federation

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
HALVES = ("abcd", "efgh")
ROUNDS = 40
LONG = 130.0  # seconds
LONG_CUTS: tuple[How, How] = ("silent", "reset")  # by seed


def eight(**membership: Any) -> dict[str, Any]:
    limits = {"wait": PATIENCE}
    return describe(GECL, nodes=8, rounds=ROUNDS, dtype="float64", limits=limits, membership=membership)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_where_nobody_is_removed_the_models_are_those_of_the_calm_run(seed: int, tmp_path: Path) -> None:
    raw = eight()
    deploy(raw, tmp_path / "calm", timeout=PATIENCE)
    (tmp_path / "run").mkdir()
    with Lines() as lines, Endurance(raw, tmp_path / "run", lines, HALVES) as members:
        for name in ["relay", *members.nodes]:
            members.start(name)
        members.wait_for_round(1)
        members.slow_down("g")
        members.harass(seed, kills=10, cuts=5, victims="abcdefh", last=ROUNDS // 2)
        lines.cut("b", "c", LONG, LONG_CUTS[seed])
        members.rot("b")
        members.harass(seed + 100, kills=10, cuts=5, victims="abcdefgh", last=ROUNDS - 4)
        members.finish()
        print(f"{members.kills} kills, {lines.cuts} cuts")
        assert (members.kills, lines.cuts) == (21, 11)
    for name in members.nodes:
        disturbed = members.folder / name / f"node-{name}"
        calm = tmp_path / "calm" / name / "model.safetensors"
        assert (disturbed / "model.safetensors").read_bytes() == calm.read_bytes(), name
        assert not rosters_of(disturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_where_members_are_lost_and_replaced_the_models_are_the_simulators(seed: int, tmp_path: Path) -> None:
    raw = eight(remove_after="12s", minimum=5, rejoin=True)
    file = make_federation(raw, "test")
    with Lines() as lines, Endurance(raw, tmp_path, lines, HALVES) as members:
        for name in ["relay", *members.nodes]:
            members.start(name)
        members.wait_for_round(1)
        members.slow_down("g")
        members.harass(seed, kills=6, cuts=3, victims="abdefh", last=8)
        members.lose("c")
        members.harass(seed + 100, kills=6, cuts=3, victims="abdeh", last=14)
        members.replace("f")
        members.harass(seed + 200, kills=6, cuts=3, victims="abdegh", last=22)
        members.rot("h")
        members.harass(seed + 300, kills=4, cuts=3, victims="abdeh", last=30)
        members.finish()
        print(f"{members.kills} kills, {lines.cuts} cuts")
        assert (members.kills, lines.cuts) == (25, 12)
    left = "abdefgh"
    rosters = rosters_of(tmp_path / "a" / "node-a")
    print([(roster.number, roster.first, "".join(roster.names), roster.joined) for roster in rosters])
    assert sorted(rosters[-1].names) == sorted(left)
    assert any("f" in roster.joined for roster in rosters)
    simulated = simulate_rosters(file, rosters)
    for name in left:
        folder = tmp_path / name / f"node-{name}"
        assert rosters_of(folder) == rosters
        difference = (last_model(folder, rosters) - simulated[name]).abs().max()
        assert difference <= 1e-12 * simulated[name].abs().max(), (name, float(difference))
