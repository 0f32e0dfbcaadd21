"""Fifty nodes on one machine, most of whose time is spent waiting."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from federation_runs import describe, saved_model, simulate
from member_processes import PATIENCE, Members

from holdfast_deploy.federation_file import make_federation

NODES, ABSENT = 50, "n49"
WATCHED = 20.0  # seconds


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_fifty_nodes_finish_and_idle_ones_use_next_to_no_cpu(tmp_path: Path) -> None:
    raw = describe({"name": "local-gecl", "lr": 0.1}, nodes=NODES, rounds=30, limits={"wait": PATIENCE})
    with Members(raw, tmp_path / "many") as members:
        present = [name for name in members.names if name != ABSENT]
        for name in present:
            members.start(name)
        until = time.monotonic() + PATIENCE
        # Without n49 the nodes next to it cannot finish round 1, those two links away not round 2, and so
        # on: nobody gets beyond round 24.
        expected = {name: min(i, NODES - 2 - i) for i, name in enumerate(present)}
        while {name: members.rounds(name) for name in present} != expected:
            assert time.monotonic() < until, [members.rounds(name) for name in present]
            time.sleep(1.0)
        pids = {name: members.processes[name].pid for name in present}
        before = {name: cpu_seconds(pid) for name, pid in pids.items() if pid}
        time.sleep(WATCHED)
        used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items() if pid}
        print(
            f"CPU of {len(used)} waiting nodes in {WATCHED:.0f} s: {sum(used.values()):.2f} s in all,",
            end=" ",
        )
        print(f"{max(used.values()):.2f} s at most")
        assert sum(used.values()) / len(used) < 0.01 * WATCHED
        assert max(used.values()) < 0.05 * WATCHED  # those next to n49 try to reach it again and again
        members.start(ABSENT)
        members.finish()
        federation = make_federation(raw, "test")
        models = torch.stack([saved_model(members.path, name) for name in federation.names])
        parameters = simulate(federation).models  # [n, d], the weights [3, 6] before the biases [3]
        expected_models = torch.cat([parameters[:, 18:], parameters[:, :18]], 1)
        assert (models - expected_models).norm() <= 1e-5 * expected_models.norm()
