"""A member that starts anew while others go on from their folders: an error, not a wrong model."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_runs import DeployedRun, Started, deploy, describe, stopped
from member_processes import PATIENCE, Members

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.waiting import Stopped
from holdfast_deploy.storage.links import Dependencies, MixedRunsError

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
SCAFFOLD = {"name": "scaffold", "lr": 0.1, "local_steps": 2}
FEDLIN = {"name": "fedlin", "lr": 0.1, "local_steps": 2}
SERVER = {"network": {"topology": "server"}}
ROUNDS = 400


@pytest.mark.parametrize(
    ("algorithm", "changes", "newcomer"),
    [
        pytest.param(GECL, {}, "b", id="between neighbours"),
        pytest.param({"name": "dspodfl", "lr": 0.1}, {"network": {"links": 0.5}}, "b", id="sporadic"),
        pytest.param(SCAFFOLD, {"network": {"topology": "server", "cohort": 2}}, "b", id="a client"),
        pytest.param(SCAFFOLD, SERVER, "hub", id="a server"),
        pytest.param(FEDLIN, SERVER, "b", id="an averaged client"),
        pytest.param(FEDLIN, SERVER, "hub", id="an averaging server"),
    ],
)
def test_two_runs_do_not_mix(algorithm: dict, changes: dict, newcomer: str, tmp_path: Path) -> None:
    raw = describe(algorithm, rounds=12, **changes)
    run = stopped(raw, tmp_path, at=6)
    shutil.rmtree(tmp_path / newcomer)
    started = Started(run)
    started.until(lambda: newcomer in run.errors and len(run.errors) > 1)
    for member in run.members.values():
        member.stop()
    started.end()
    assert not run.models
    for name, error in run.errors.items():
        if not isinstance(error, Stopped):  # it noticed by itself
            assert f"two runs are mixed: {newcomer} started anew" in str(error), name
    assert not isinstance(run.errors[newcomer], Stopped)


def killed_midway(raw: dict[str, Any], folder: Path) -> Members:
    """All members as processes, killed when they are under way."""
    members = Members(raw, folder)
    for name in members.names:
        members.start(name)
    members.wait_for_round(4)
    for name in members.names:
        members.kill(name)
    return members


def other_data(members: Members, name: str) -> None:
    path = members.folder / f"{name}.npz"
    arrays = dict(np.load(path))
    arrays["x_train"] = arrays["x_train"][::-1] * 2
    np.savez(path, **arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "changes", "newcomer", "noticing"),
    [
        pytest.param(GECL, {}, "b", ["b"], id="between neighbours"),  # and whoever else gets to ask it
        pytest.param(SCAFFOLD, SERVER, "b", ["b", "hub"], id="a client"),
        pytest.param(FEDLIN, SERVER, "b", ["b", "hub"], id="an averaged client"),
        pytest.param(SCAFFOLD, SERVER, "hub", ["hub"], id="the server"),
    ],
)
def test_a_process_that_starts_anew_ends_the_run_with_an_error(
    algorithm: dict, changes: dict, newcomer: str, noticing: list[str], tmp_path: Path
) -> None:
    raw = describe(algorithm, rounds=ROUNDS, limits={"wait": PATIENCE}, **changes)
    with killed_midway(raw, tmp_path / "run") as members:
        shutil.rmtree(members.folder / f"{'server' if newcomer == 'hub' else 'node'}-{newcomer}")
        if newcomer != "hub":
            other_data(members, newcomer)
        for name in members.names:
            members.start(name)
        for name in noticing:
            members.processes[name].join(PATIENCE)
            assert members.processes[name].exitcode not in (0, None), members.log(name)[-3:]
            said = next(entry for entry in members.log(name) if entry["event"] == "stopping")
            assert f"two runs are mixed: {newcomer} started anew" in said["reason"]
            assert "start all of them anew" in said["reason"]
        deadline = time.monotonic() + PATIENCE
        while all(members.processes[name].is_alive() for name in members.names if name != newcomer):
            assert time.monotonic() < deadline  # somebody else has noticed, too
            time.sleep(0.05)
        assert not list(members.folder.glob("*/model.safetensors"))


@pytest.mark.slow
def test_with_the_old_folder_put_back_the_run_goes_on_to_the_same_model(tmp_path: Path) -> None:
    """What the error advises, and the calm run's model."""
    raw = describe(GECL, rounds=30, limits={"wait": PATIENCE})
    calm = deploy(raw, tmp_path / "calm", timeout=PATIENCE)
    with killed_midway(raw, tmp_path / "run") as members:
        (members.folder / "node-b").rename(members.folder / "old")
        for name in members.names:
            members.start(name)
        members.processes["b"].join(PATIENCE)
        assert members.processes["b"].exitcode not in (0, None)
        for name in members.names:
            members.processes[name].kill()
            members.processes[name].join()
        shutil.rmtree(members.folder / "node-b")
        (members.folder / "old").rename(members.folder / "node-b")
        for name in members.names:
            members.start(name)
        members.finish()
        for name in calm.models:
            mine = members.folder / f"node-{name}" / "model.safetensors"
            assert mine.read_bytes() == (tmp_path / "calm" / name / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_node_killed_again_and_again_while_it_begins_locks_nobody_out(tmp_path: Path) -> None:
    raw = describe(GECL, rounds=10, limits={"wait": PATIENCE})
    calm = deploy(raw, tmp_path / "calm", timeout=PATIENCE)
    with Members(raw, tmp_path / "run") as members:
        members.start("a")
        members.start("c")
        for pause in (0.0, 0.02, 0.1, 0.3):  # after its folder is there: before, while and after it has drawn
            members.start("b")
            deadline = time.monotonic() + PATIENCE
            while not (members.folder / "node-b").exists():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(pause)
            members.processes["b"].kill()
            members.processes["b"].join()
        members.start("b")
        members.finish()
        for name in calm.models:
            mine = members.folder / f"node-{name}" / "model.safetensors"
            assert mine.read_bytes() == (tmp_path / "calm" / name / "model.safetensors").read_bytes()


def test_all_that_start_anew_together_are_one_run(tmp_path: Path) -> None:
    raw = describe(GECL)
    first = deploy(raw, tmp_path / "run")
    for name in first.federation.names:
        shutil.rmtree(tmp_path / "run" / name)
    again = DeployedRun(make_federation(raw, "test"), tmp_path / "run").carry_out()
    assert not again.errors
    assert all(torch.equal(again.models[name], model) for name, model in first.models.items())


def test_what_a_message_depends_on_is_known_from_afar() -> None:
    """On a line a, b, c: c knows of a through b."""
    one, other = "1" * 16, "2" * 16
    c = Dependencies("c", one, ["a", "b", "c"])
    c.add({"b": one, "a": one})
    c.check({"b": one})
    with pytest.raises(MixedRunsError, match="a started anew"):
        c.add({"b": one, "a": other})
    assert c.known == {"a": one, "b": one, "c": one}
    with pytest.raises(HoldfastError, match="'d' is not a member"):
        c.add({"d": one})
