"""What an operator, a backup or another program does to a member: it is told by name, with what mends it."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import holdfast
from federation_runs import DeployedRun, Started, deploy, describe, stopped, write_federation
from roster_runs import Threads

from holdfast.core.errors import DAMAGED, REFUSED, TRY_LATER, HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.waiting import Stopped
from holdfast_deploy.membership import service
from holdfast_deploy.storage import store
from holdfast_deploy.storage.disk_full import FileGoneError
from holdfast_deploy.storage.results import RoundRecord

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
SERVER = {"network": {"topology": "server"}}


class At(list[dict[str, Any]]):
    """A log; when the member ``name`` has finished a round, something is done before it goes on."""

    def __init__(self, name: str, what: dict[int, Callable[[], object]]) -> None:
        super().__init__()
        self.name, self.what = name, what  # by round, each once

    def append(self, entry: dict[str, Any]) -> None:
        super().append(entry)
        if (entry["event"], entry["node"]) == ("round done", self.name):
            self.what.pop(entry["round"], lambda: None)()


def assert_same_models(run: DeployedRun, calm: Path) -> None:
    assert not run.errors
    for name in run.federation.names:
        mine = (run.folder / name / "model.safetensors").read_bytes()
        assert mine == (calm / name / "model.safetensors").read_bytes(), name


def ended_by_fault(run: DeployedRun, started: Started, name: str) -> HoldfastError:
    """Why ``name`` has ended, which nobody else has; then all are stopped."""
    started.until(lambda: name in run.errors)
    for member in run.members.values():
        member.stop()
    started.end()
    error = run.errors.pop(name)
    assert all(isinstance(other, Stopped) for other in run.errors.values()), run.errors
    run.errors.clear()
    assert isinstance(error, HoldfastError), error
    return error


@pytest.mark.parametrize(
    ("algorithm", "changes", "name"),
    [pytest.param(GECL, {}, "b", id="a node"), pytest.param(FEDAVG, SERVER, "hub", id="a server")],
)
def test_a_folder_that_is_taken_away_is_missed_at_once(
    algorithm: dict, changes: dict, name: str, tmp_path: Path
) -> None:
    raw = describe(algorithm, rounds=12, **changes)
    deploy(raw, tmp_path / "calm")
    run = DeployedRun(make_federation(raw, "test"), tmp_path / "run")
    place, away = tmp_path / "run" / name, tmp_path / "away"
    run.log = At(name, {4: lambda: place.rename(away)})
    error = ended_by_fault(run, Started(run), name)
    assert error.exit_code == DAMAGED
    assert f"{place} was taken away" in str(error)
    assert "federation replace" in str(error)
    shutil.rmtree(place, ignore_errors=True)
    away.rename(place)
    run.log = []
    assert_same_models(Started(run).end(), tmp_path / "calm")


@pytest.mark.parametrize("part", ["inbox", "outbox", "state", "audit.jsonl"])
def test_what_is_taken_out_of_a_folder_is_named_and_the_member_goes_on_from_what_is_saved(
    part: str, tmp_path: Path
) -> None:
    raw = describe(GECL, rounds=12, limits={"wait": 8.0})
    deploy(raw, tmp_path / "calm")
    run = DeployedRun(make_federation(raw, "test"), tmp_path / "run")
    place = tmp_path / "run" / "b" / part

    def take() -> None:
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        while part == "audit.jsonl" and run.members["b"].waiting.failure is None:
            time.sleep(0.01)

    run.log = At("b", {4: take})
    error = ended_by_fault(run, Started(run), "b")
    assert error.exit_code == DAMAGED
    assert f"{place}" in str(error)
    assert "was taken away while the member ran" in str(error)
    assert json.loads((tmp_path / "run" / "b" / "summary.json").read_text())["jobs"][0]["status"] == "failed"
    run.log = []
    assert_same_models(Started(run).end(), tmp_path / "calm")


def test_a_member_whose_votes_are_taken_away_ends_and_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    file = make_federation(describe(GECL, rounds=40, dtype="float64", membership={"minimum": 2}), "test")
    run = Threads(file, tmp_path)
    for name in "abc":
        run.start(name)
    run.hold(2)
    place = tmp_path / "b" / "membership"
    shutil.rmtree(place)
    run.limit = 41
    run.until(lambda: "b" in run.errors)
    error = run.errors.pop("b")
    assert isinstance(error, FileGoneError)
    assert f"{place}" in str(error)
    for name in "ac":
        run.stop(name)


def test_a_disk_that_is_full_before_anything_is_there_is_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_federation(describe(GECL), tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "lock")

    monkeypatch.setattr(store, "write_identity", full)
    ended = holdfast("node", path, "--name", "a", "--data", tmp_path / "a.npz", "--log", "json")
    assert ended.code == TRY_LATER
    assert "free some disk space" in ended.err


@pytest.mark.parametrize(
    "text", ["a;round\n1;2\n", "round,x\none,1\n", "round\n\0\n3\n", "round,more\n1,2\n"]
)
def test_figures_that_cannot_be_read_are_all_that_is_lost(text: str, tmp_path: Path) -> None:
    run = stopped(describe(GECL, rounds=6, limits={"wait": 8.0}), tmp_path, at=3)
    table = tmp_path / "b" / "metrics.csv"
    table.write_text(text)
    Started(run).end()
    assert not run.errors
    assert len(table.read_text().splitlines()) > 2
    told = [e for e in run.log if e["event"] == "a file is damaged" and str(table) in e["reason"]]
    assert bool(told) == ("more" not in text)  # a column of somebody else's is left out


def test_a_server_from_an_old_backup_says_so(tmp_path: Path) -> None:
    raw = describe(FEDAVG, rounds=16, **SERVER)
    deploy(raw, tmp_path / "calm")
    run = DeployedRun(make_federation(raw, "test"), tmp_path / "run")
    hub, backup, newest = tmp_path / "run" / "hub", tmp_path / "backup", tmp_path / "newest"
    run.log = At("hub", {3: lambda: shutil.copytree(hub, backup), 9: lambda: run.members["hub"].stop()})
    started = Started(run)
    started.threads["hub"].join()
    run.members["hub"].close()
    assert isinstance(run.errors.pop("hub"), Stopped)
    hub.rename(newest)
    backup.rename(hub)
    started.start("hub")  # its clients have been there all the time
    error = ended_by_fault(run, started, "hub")
    assert error.exit_code == REFUSED
    assert "hub was put back" in str(error)
    assert "federation rollback" in str(error)
    shutil.rmtree(hub)
    newest.rename(hub)
    assert_same_models(Started(run).end(), tmp_path / "calm")


def test_a_port_that_somebody_else_has_is_free_later(tmp_path: Path) -> None:
    raw = describe(GECL)
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    host, _, port = raw["node"][0]["address"].rpartition(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(HoldfastError, match="port is taken") as taken,
    ):
        run.member("a")
    assert taken.value.exit_code == TRY_LATER


def test_a_name_that_does_not_resolve_is_told_from_a_member_that_is_down(tmp_path: Path) -> None:
    raw = describe(GECL, limits={"wait": 0.5})
    raw["node"][1]["address"] = "b.invalid:7001"
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    with run.member("a") as a:

        async def ask() -> bool:  # connections belong to the event loop
            return await a.connections.to("b").agreed(1, 0)

        with pytest.raises(HoldfastError, match=r"waiting for b .*host name is not known"):
            a.waiting.run_interruptible(ask)


def test_a_record_of_rounds_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    record = RoundRecord(tmp_path / "steps.csv", "steps")
    record.path.write_text("round,steps\none,2\n")
    with pytest.raises(HoldfastError, match="is damaged: put it back") as error:
        record.keep()
    assert error.value.exit_code == DAMAGED


def test_a_model_is_written_of_the_member_whose_folder_it_is(tmp_path: Path) -> None:
    raw = describe(GECL, rounds=3)
    path = write_federation(raw, tmp_path)
    deploy(raw, tmp_path / "run")

    def written(name: str, folder: str) -> tuple[int, str]:
        ended = holdfast("federation", "model", path, "--name", name, "--dir", tmp_path / "run" / folder)
        return ended.code, ended.out + ended.err

    assert written("a", "a")[0] == 0
    code, told = written("a", "b")
    assert (code, "is of another member, b" in told) == (2, True)
    for file in ("state", "state.previous"):
        (tmp_path / "run" / "a" / file).write_bytes(b"no state")
    assert written("a", "a")[0] == DAMAGED
    code, told = written("a", "nowhere")
    assert (code, "has the member begun" in told) == (2, True)
