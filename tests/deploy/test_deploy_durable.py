"""The order of writes: whenever the power fails, a member knows all that others have seen of it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from after_power_cut import Survivor, failures
from crash_points import Survives, anything, everything, nothing
from disk_events import Event, read_events
from federation_runs import PATIENCE, SAMPLES, DeployedRun, Started, describe, forked_member, write_federation
from power_cut import file_of, watched
from recorded_member import is_never, is_renamed, is_written, recorded_member

from holdfast.privacy.aggregation.protocol import DEALT
from holdfast.privacy.budget import DP
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.membership.kept_models import KeptModels
from holdfast_deploy.membership.log import MembershipLog
from holdfast_deploy.ops.audit import NAME, Head, check_heads, read_audit
from holdfast_deploy.storage.messages import Header, specs, write_message
from holdfast_deploy.storage.privacy_spent import Spent
from holdfast_deploy.storage.snapshots import keep

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
SCAFFOLD = {**FEDAVG, "name": "scaffold"}
SERVER = {"network": {"topology": "server"}}
MASKED = {**SERVER, "dtype": "float64", "secure_aggregation": {}, "round": {"quorum": 4, "deadline": 89.0}}
BUDGET = {"epsilon": 50.0, "delta": 1e-3, "clip": 1.0, "noise_multiplier": 1.0}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in memory where there is such a place: what is written there need not last."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def recorded(
    raw: dict[str, Any],
    folder: Path,
    name: str,
    killed: Callable[[Any], bool] = is_never,
    meanwhile: str = "",
) -> tuple[Path, str, list[Event]]:
    """What the member called ``name`` did in a run of real processes; the federation file, and its folder.

    ``killed``: right after which event it is; it is started again when the server has logged ``meanwhile``.
    """
    folder.mkdir()
    path = write_federation(raw, folder)
    names = [member["name"] for member in [*raw["node"], *([raw["server"]] if "server" in raw else [])]]
    own = f"server-{name}" if "server" in raw and name == raw["server"]["name"] else f"node-{name}"
    others = [forked_member(path, other) for other in names if other != name]
    try:
        if killed is not is_never:
            with recorded_member(path, name, own, folder / "events", killed) as process:
                process.join(PATIENCE)
                assert process.exitcode == -9
            _wait_for(meanwhile, folder / "hub.log")
        with recorded_member(path, name, own, folder / "events") as process:
            for one in [process, *others]:
                one.join(PATIENCE)
                assert one.exitcode == 0, [entry.read_text()[-2000:] for entry in folder.glob("*.log")]
    finally:
        for one in others:
            one.kill()
    return path, own, read_events(folder / "events")


def _wait_for(event: str, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while event and f'"{event}"' not in log.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def assert_durable(
    run: tuple[Path, str, list[Event]], name: str, disk: Path, *disks: Callable[[int], Survives]
) -> None:
    """On these disks, power cuts after each of the events leave what is needed."""
    path, own, events = run
    survivor = Survivor(path, name, own, disk / "left")
    try:
        for survives in disks:
            tried, wrong = failures(survivor, events, survives)
            assert not wrong, f"{len(wrong)} of {tried}: " + "\n".join(wrong[:3])
            assert tried > 20
    finally:
        survivor.close()


def test_whenever_the_power_fails_a_node_knows_what_others_have_seen(tmp_path: Path, disk: Path) -> None:
    run = recorded(describe(GECL, rounds=2), tmp_path / "run", "b")
    assert_durable(run, "b", disk, nothing, everything, partial(anything, 1))


def test_whenever_the_power_fails_a_server_knows_what_clients_have_seen(tmp_path: Path, disk: Path) -> None:
    run = recorded(describe(FEDAVG, nodes=2, rounds=2, **SERVER), tmp_path / "run", "hub")
    assert_durable(run, "hub", disk, nothing, partial(anything, 1))


@pytest.mark.parametrize("name", ["state", "2-0"])
def test_what_a_killed_process_has_left_is_durable_before_anybody_hears_of_it(
    name: str, tmp_path: Path, disk: Path
) -> None:
    """Its state, or a message, has its name, and the folder is not synced. It starts; the power fails."""
    run = recorded(
        describe(GECL, nodes=2, network={"topology": "line"}, rounds=2),
        tmp_path / "run",
        "a",
        partial(is_renamed, name),
    )
    assert_durable(run, "a", disk, nothing)


def test_no_message_leaves_while_the_log_has_no_room(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log alone. What is on the disk then knows all that the other member has seen."""
    raw = describe(GECL, nodes=2, network={"topology": "line"}, rounds=6, limits={"wait": PATIENCE})
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    write, full, log = os.write, True, tmp_path / "a" / NAME

    def writing(file: int, text: bytes) -> int:
        if full and b'"round":2' in text and os.path.samestat(os.fstat(file), log.stat()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, text)

    monkeypatch.setattr(os, "write", writing)
    started = Started(run)

    def is_over() -> bool:
        refused = [e for e in run.log if e["event"] == "refused" and "No space" in e["reason"]]
        return bool(refused) or run.members["b"].done > 1

    started.until(is_over)
    copy = shutil.copytree(tmp_path / "a", disk / "a")
    heard = list(read_audit(tmp_path / "b"))
    assert not [e for e in heard if e["event"] == "received" and e["round"] > 1]
    heads = [("b", head) for e in heard if (head := Head.parse(e.get("head", ""))) is not None]
    assert heads
    check_heads(copy, read_audit(copy), heads)
    full = False
    assert not started.end().errors, run.errors
    sent, received = (
        {(e["round"], e["digest"]) for e in read_audit(tmp_path / name) if e["event"] == event}
        for name, event in (("a", "sent"), ("b", "received"))
    )
    assert sent == received


def test_what_was_found_in_a_folder_is_durable_before_others_are_told_of_it(tmp_path: Path) -> None:
    """Votes, models to go back to, and what was spent of a budget, as a process that was killed left them."""
    federation = make_federation(describe(GECL, membership={}), "test")
    header = Header(federation=federation.id, sender="a", round=3, exchange=0, tensors=specs(torch.zeros(2)))

    def models() -> KeptModels:
        return KeptModels(tmp_path, 1, lambda: nullcontext(False), federation.limits)

    def log() -> MembershipLog:
        return MembershipLog(federation, None, tmp_path / "membership")

    with watched() as synced:
        log().remember(registered=True)
        models().keep(header, torch.zeros(2))
        Spent(tmp_path / "privacy.jsonl", begun=False).charge(
            "x", [(1.0, 1)], 1.0, DP(epsilon=9.0, delta=1e-3, clip=1.0)
        )
        folders = [tmp_path / "membership", tmp_path / "models"]
        synced.names = {key: names for key, names in synced.names.items() if "memory.json" not in names}
        synced.names = {key: names for key, names in synced.names.items() if "3" not in names}
        synced.files.discard(file_of(tmp_path / "privacy.jsonl"))
        log()
        models()
        Spent(tmp_path / "privacy.jsonl", begun=True)
        assert [synced.cut(folder) for folder in [*folders, tmp_path]] == [[], [], []]


def test_a_snapshot_survives_a_power_cut(tmp_path: Path) -> None:
    """Others have one of the same round, and all have to go back to the same."""
    header = Header(federation="f", sender="a", round=2, exchange=0, tensors=specs(torch.zeros(2)))
    with watched() as synced:
        write_message(tmp_path / "state.previous", header, torch.zeros(2))
        keep(tmp_path, done=3, every=2, count=4)
        assert (synced.cut(tmp_path), synced.cut(tmp_path / "snapshots")) == ([], [])
    assert (tmp_path / "snapshots" / "2").exists()


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ring": ("b", GECL, {"rounds": 4}),
    "two messages": ("b", {"name": "net-fleet", "lr": 0.1, "local_steps": 2}, {"rounds": 3}),
    "a message for each link": ("b", {"name": "gecl", "lr": 0.1}, {"rounds": 3}),
    "sporadic links": ("b", {"name": "dspodfl", "lr": 0.1}, {"network": {"links": 0.5, "compute": 0.6}}),
    "private": ("b", GECL, {"problem": {"sampling": "poisson", "private": BUDGET}, "rounds": 3}),
    "client": ("a", FEDAVG, {"nodes": 2, **SERVER}),
    "server": ("hub", SCAFFOLD, {"nodes": 3, **SERVER}),
    "averaging server": (
        "hub",
        {"name": "fedpd", "eta": 1.0, "lr": 0.1, "local_steps": 2},
        {"nodes": 2, **SERVER},
    ),
    "masked client": ("b", SCAFFOLD, {"nodes": 5, "rounds": 2, **MASKED}),
    "masked server": ("hub", SCAFFOLD, {"nodes": 5, "rounds": 2, **MASKED}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_whenever_and_however_the_power_fails(case: str, tmp_path: Path, disk: Path) -> None:
    name, algorithm, changes = CASES[case]
    raw = describe(algorithm, **changes)
    if "private" in raw["problem"]:
        for i, node in enumerate(raw["node"]):
            node["samples"] = SAMPLES + i
    run = recorded(raw, tmp_path / "run", name)
    assert_durable(run, name, disk, nothing, everything, *(partial(anything, seed) for seed in range(4)))


@pytest.mark.slow
def test_a_release_that_a_killed_process_has_written_down_is_durable_before_it_is_made(
    tmp_path: Path, disk: Path
) -> None:
    """The line in its ledger is there, and not synced. Then it starts, and the power fails."""
    raw = describe(GECL, problem={"sampling": "poisson", "private": BUDGET}, rounds=3)
    for i, node in enumerate(raw["node"]):
        node["samples"] = SAMPLES + i
    run = recorded(raw, tmp_path / "run", "b", partial(is_written, b'{"release"'))
    assert_durable(run, "b", disk, nothing, partial(anything, 1))


@pytest.mark.slow
def test_a_client_that_was_left_out_says_nothing_else_whenever_the_power_fails(
    tmp_path: Path, disk: Path
) -> None:
    """Killed in the middle of a round, it comes back when others are past it, and forgets what it said."""
    raw = describe(SCAFFOLD, nodes=5, rounds=3, **(MASKED | {"round": {"quorum": 4, "deadline": 8.0}}))
    late = partial(is_renamed, f"[0-9]+-{DEALT}")
    run = recorded(raw, tmp_path / "run", "b", late, meanwhile="left out of a round")
    assert "left out" in {entry["event"] for entry in read_audit(tmp_path / "run" / "node-b")}
    assert_durable(run, "b", disk, nothing, everything, *(partial(anything, seed) for seed in range(4)))
