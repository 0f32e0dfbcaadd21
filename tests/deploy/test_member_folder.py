"""What a member leaves on disk, compared with the table in docs/deploy.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from federation_runs import PATIENCE, SAMPLES, describe, forked_member, write_federation

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
SCAFFOLD = {"name": "scaffold", "lr": 0.1, "local_steps": 2}
SERVER = {"topology": "server"}
LINE = {"topology": "line"}
BUDGET = {"epsilon": 50.0, "delta": 1e-3, "clip": 1.0, "noise_multiplier": 1.0}
# What every member has in the end.
ALWAYS = {"model.safetensors", "metrics.csv", "summary.json", "report.json", "audit.jsonl"}
ALWAYS |= {"state", "state.previous", "outbox", "inbox", "decisions", "identity.json", "lock"}


def table() -> set[str]:
    """The names in the first column of the table."""
    section = PAGE.read_text(encoding="utf-8").split("\n## The folder of a member\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)}


def private() -> dict[str, Any]:
    raw = describe(FEDAVG, nodes=3, rounds=2, network=SERVER, secure_aggregation={})
    raw["problem"] |= {"sampling": "poisson", "private": BUDGET}
    for i, node in enumerate(raw["node"]):
        node["samples"] = SAMPLES + i
    return raw


RUNS: dict[str, tuple[dict[str, Any], set[str]]] = {  # a federation, and what it makes some member write
    "graph": (
        describe(GECL, nodes=2, rounds=4, network=LINE, limits={"snapshot_every": 1}),
        {"best.safetensors", "parted", "snapshots"},
    ),
    "members that change": (
        describe(GECL, nodes=2, rounds=2, network=LINE, membership={}),
        {"membership", "models"},
    ),
    "time budget": (
        describe(GECL, nodes=2, rounds=2, network=LINE, round={"budget": "20s"}),
        {"steps.csv"},
    ),
    "deadline": (
        describe(SCAFFOLD, nodes=3, rounds=2, network=SERVER, round={"quorum": 2, "deadline": 9.0}),
        {"cohorts.csv"},
    ),
    "personal models": (
        describe({"name": "ditto", "lr": 0.1}, nodes=2, rounds=2, network=SERVER),
        {"personal.safetensors"},
    ),
    "private": (private(), {"privacy.jsonl", "noise.key", "masks.key", "unmasked"}),
}


@pytest.mark.parametrize("run", RUNS)
def test_all_that_a_member_leaves_is_in_the_table(run: str, tmp_path: Path) -> None:
    raw, special = RUNS[run]
    path = write_federation(raw, tmp_path)
    names = [node["name"] for node in raw["node"]] + (["hub"] if "server" in raw else [])
    processes = [forked_member(path, name) for name in names]
    for name, process in zip(names, processes, strict=True):
        process.join(PATIENCE)
        assert process.exitcode == 0, (tmp_path / f"{name}.log").read_text()
    written = [{file.name for file in folder.iterdir()} for folder in tmp_path.glob("*-*") if folder.is_dir()]
    assert len(written) == len(names)
    assert all(names >= ALWAYS for names in written), written
    assert set.union(*written) >= special
    assert set.union(*written) - table() == set()


def test_the_table_lists_nothing_else() -> None:
    assert table() - ALWAYS - set.union(*(special for _, special in RUNS.values())) == {"roster-N"}
