"""Going back to before a poisoned round, and the model of a run that is under way."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tomli_w
import torch
from federation_runs import PATIENCE, DeployedRun, Started, calm_run, deploy, describe, stopped

from holdfast.core.errors import HoldfastError
from holdfast_deploy.cli import orders
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.node import Node
from holdfast_deploy.storage.links import MixedRunsError
from holdfast_deploy.storage.messages import MessageFile

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
SCAFFOLD = {"name": "scaffold", "lr": 0.1, "local_steps": 2}
KEPT = {"limits": {"wait": 90.0, "snapshot_every": 2, "snapshots": 4}}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GECL, {}),
    (SCAFFOLD, {"network": {"topology": "server", "cohort": 2}}),
]


def names(run: DeployedRun) -> list[str]:
    return [member.name for member in run.federation.members]


def federation_file(raw: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "federation.toml"
    path.write_text(tomli_w.dumps(raw))
    return path


@pytest.mark.parametrize(("algorithm", "changes"), CASES)
def test_rolled_back_members_go_on_to_the_same_model(
    algorithm: dict, changes: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = describe(algorithm, rounds=11, **KEPT, **changes)
    calm = calm_run(raw)
    run = stopped(raw, tmp_path / "run", at=8)
    path = federation_file(raw, tmp_path)
    for name in names(run):
        for _ in range(2):  # once more changes nothing
            orders.rollback(path, 4, name, run.folder / name)
    assert "a is back at the end of round 4" in capsys.readouterr().out
    Started(run).end()
    assert not run.errors
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())
    assert not [entry for entry in run.log if "differs" in entry["event"]]


def test_members_can_be_rolled_back_further(tmp_path: Path) -> None:
    raw = describe(SCAFFOLD, rounds=11, **KEPT, network={"topology": "server", "cohort": 2})
    calm = calm_run(raw)
    run = stopped(raw, tmp_path / "run", at=8)
    path = federation_file(raw, tmp_path)
    for to in (6, 4):
        for name in names(run):
            identity = run.folder / name / "identity.json"
            before = identity.read_bytes()
            orders.rollback(path, to, name, run.folder / name)
            identity.write_bytes(before)  # a crash just before the end
            orders.rollback(path, to, name, run.folder / name)
    Started(run).end()
    assert not run.errors
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())


def test_who_was_idle_goes_on_after_the_round_that_all_are_put_back_to(tmp_path: Path) -> None:
    """A server with secret cohorts draws those of earlier rounds anew, and may think that it was in one."""
    raw = describe(SCAFFOLD, rounds=11, **KEPT, network={"topology": "server", "cohort": 1})
    run = stopped(raw, tmp_path / "run", at=8)
    path = federation_file(raw, tmp_path)
    for name in names(run):
        orders.rollback(path, 4, name, run.folder / name)
    saved = [MessageFile(run.folder / name / "state").header.round for name in names(run)]
    assert min(saved) < 4
    for name in run.federation.names:
        with run.member(name) as member:
            assert isinstance(member.program, Node)
            member.restore()
            assert member.done == 4


def test_who_is_left_out_of_a_rollback_is_noticed(tmp_path: Path) -> None:
    raw = describe(GECL, rounds=11, **KEPT)
    run = stopped(raw, tmp_path / "run", at=8)
    path = federation_file(raw, tmp_path)
    for name in "ab":
        orders.rollback(path, 6, name, run.folder / name)
    started = Started(run)
    started.until(lambda: any(isinstance(error, MixedRunsError) for error in list(run.errors.values())))
    started.threads["a"].join(PATIENCE)
    for member in run.members.values():
        member.stop()
    started.end()
    assert isinstance(run.errors["a"], HoldfastError)


def test_a_round_that_is_not_kept_is_refused(tmp_path: Path) -> None:
    raw = describe(GECL, rounds=11, **KEPT)
    run = stopped(raw, tmp_path / "run", at=8)
    path = federation_file(raw, tmp_path)
    with pytest.raises(HoldfastError, match=r"--to 5: .* has kept the states of the rounds 0, 2, 4, 6, "):
        orders.rollback(path, 5, "a", run.folder / "a")
    with pytest.raises(HoldfastError, match="is not the folder of a member"):
        orders.rollback(path, 4, "a", tmp_path)


# --- the model of a run that is under way ------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "changes"), CASES)
def test_the_current_model_can_be_had_at_any_time(algorithm: dict, changes: dict, tmp_path: Path) -> None:
    raw = describe(algorithm, rounds=6, **changes)
    run = deploy(raw, tmp_path / "run")
    path, keeper = federation_file(raw, tmp_path), "hub" if changes else "a"
    target = tmp_path / "now.safetensors"
    orders.model(path, keeper, None, run.folder / keeper, target)
    now = safetensors.torch.load_file(target)
    final = safetensors.torch.load_file(run.folder / "a" / "model.safetensors")
    assert now.keys() == final.keys()
    assert all(torch.equal(now[key], final[key]) for key in final)
    if changes:
        with pytest.raises(HoldfastError, match="a keeps no model between rounds: hub does"):
            orders.model(path, "a", None, run.folder / "a", target)


def test_a_new_federation_starts_from_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is part of what members agree on; the first loss is the old run's last."""
    monkeypatch.chdir(tmp_path)
    cold = deploy(describe(GECL, rounds=6), tmp_path / "cold")
    shutil.copy(cold.folder / "a" / "model.safetensors", tmp_path / "start.safetensors")
    raw = describe(GECL, rounds=1, start="start.safetensors")
    federation = make_federation(raw, "test")
    with DeployedRun(federation, tmp_path / "warm").member("a") as a:
        assert torch.equal(a.x0, cold.models["a"])
    shutil.copy(cold.folder / "b" / "model.safetensors", tmp_path / "start.safetensors")
    assert make_federation(raw, "test").id != federation.id
    (tmp_path / "start.safetensors").write_bytes(b"nonsense")
    with pytest.raises(HoldfastError, match=r"start: start.safetensors is not a safetensors file"):
        make_federation(raw, "test")
    with pytest.raises(HoldfastError, match=r"start: .* leads to another folder"):
        make_federation(raw | {"start": "../start.safetensors"}, "test")


def test_the_best_model_by_the_own_test_split_is_kept(tmp_path: Path) -> None:
    deploy(describe(GECL, rounds=6), tmp_path)
    with (tmp_path / "a" / "metrics.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    best = max(rows, key=lambda row: (float(row["test_accuracy"]), -float(row["test_loss"])))
    with safetensors.safe_open(tmp_path / "a" / "best.safetensors", framework="pt") as file:
        assert f'"round": {best["round"]},' in file.metadata()["holdfast"]
