"""Damaged files: every flipped bit is noticed, and what can be computed again is, to the same bit."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_runs import PATIENCE, DeployedRun, Started, calm_run, deploy, describe, stopped
from thinning import thinned

from holdfast.core.errors import REFUSED, HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.storage.links import PutBackError
from holdfast_deploy.storage.messages import DamagedError, MessageFile
from holdfast_deploy.wire.retry import RefusedForGoodError

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
RING = {"topology": "ring"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "two exchanges a round": ({"name": "gt-sgd", "lr": 0.05, "order": "atc"}, RING, "b"),
    "every neighbour something else": ({"name": "ecl", "lr": 0.1, "local_steps": 2}, RING, "a"),
    "sporadic, decides": ({"name": "dspodfl", "lr": 0.1}, RING | {"links": 0.5, "compute": 0.5}, "a"),
    "sporadic, is told": ({"name": "dspodfl", "lr": 0.1}, RING | {"links": 0.5, "compute": 0.5}, "c"),
    "server": ({"name": "scaffold", "lr": 0.1, "local_steps": 2}, {"topology": "server", "cohort": 2}, "hub"),
    "client": ({"name": "scaffold", "lr": 0.1, "local_steps": 2}, {"topology": "server", "cohort": 2}, "b"),
    "averaging server": ({"name": "fedlin", "lr": 0.1, "local_steps": 2}, {"topology": "server"}, "hub"),
    "averaged client": ({"name": "fedlin", "lr": 0.1, "local_steps": 2}, {"topology": "server"}, "b"),
}


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Damages one bit; a negative ``at`` counts from the end."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0] ^ 1 << bit
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte]))


# --- what a finished node has written ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", None), ("model.safetensors", b""), ("report.json", b""), ("report.json", b"null")],
)
def test_damaged_results_of_a_finished_node_are_written_again(
    file: str, content: bytes | None, finished: DeployedRun, tmp_path: Path
) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    folder = tmp_path / "run" / "a"
    good = (folder / "model.safetensors").read_bytes()
    if content is None:  # the last number of the model
        flip(folder / file, -1)
    else:
        (folder / file).write_bytes(content)
    run = DeployedRun(finished.federation, tmp_path / "run")
    with run.member("a") as a:  # by itself: the others are gone
        assert torch.equal(a.run(), finished.models["a"])
    assert (folder / "model.safetensors").read_bytes() == good
    assert (
        json.loads((folder / "report.json").read_text())["metrics"] == finished.members["a"].accounts.metrics
    )
    complaints = [entry for entry in run.log if entry["event"] == "a file is damaged"]
    assert [str(folder / file) in entry["reason"] for entry in complaints] == [True]


# --- every flipped bit is noticed -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> DeployedRun:
    return deploy(describe(GECL, rounds=3), tmp_path_factory.mktemp("finished"))


@pytest.mark.parametrize("what", ["state", "outbox"])
def test_every_flipped_bit_of_a_header_is_noticed(what: str, finished: DeployedRun, tmp_path: Path) -> None:
    folder = finished.folder / "a"
    path = folder / "state" if what == "state" else sorted((folder / "outbox").iterdir())[0]
    good = path.read_bytes()
    store, copy = finished.members["a"].store, tmp_path / path.name
    copy.write_bytes(good)
    start = store.own(copy, "a").start
    draw = random.Random(0)
    payload = [draw.randrange(8 * start, 8 * len(good)) for _ in range(200)]
    unnoticed = []
    for bit in [*range(8 * start), *payload]:
        flip(copy, bit // 8, bit % 8)
        try:
            store.own(copy, "a")
            unnoticed.append(bit)
        except DamagedError:
            flip(copy, bit // 8, bit % 8)
    assert not unnoticed
    assert copy.read_bytes() == good


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 100, b"{}" * 40])
def test_a_file_that_never_was_a_message_is_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(DamagedError, match="is damaged"):
        MessageFile(tmp_path / "state")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("another node", "state is of another member: expected a, got b"),
        ("another federation", "state is of another federation file"),
        ("another run", "state is of another run"),
    ],
)
def test_a_state_from_elsewhere_is_refused(
    source: str, complaint: str, finished: DeployedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    if source == "another node":
        donor = folder / "b"
    elif source == "another federation":
        donor = deploy(describe(GECL, rounds=4), tmp_path / "other").folder / "a"
    else:  # the same federation and node, begun once more
        raw = finished.federation.model_dump(mode="json")
        donor = deploy(raw, tmp_path / "other").folder / "a"
        assert (donor / "model.safetensors").read_bytes() == (folder / "a/model.safetensors").read_bytes()
    shutil.copy(donor / "state", folder / "a" / "state")
    with (
        DeployedRun(finished.federation, folder).member("a") as a,
        pytest.raises(HoldfastError, match=complaint),
    ):
        a.run()


def test_a_message_of_another_round_in_the_outbox_is_refused(finished: DeployedRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    outbox = folder / "a" / "outbox"
    newest = sorted(outbox.iterdir())[-1]
    newest.rename(outbox / "9-0")
    with pytest.raises(HoldfastError, match="9-0 is of another round: expected 9, got"):
        DeployedRun(finished.federation, folder).member("a")


# --- what can be computed again, is -----------------------------------------------------------------------


def damage(folder: Path, what: str) -> None:
    if what == "state":
        flip(folder / "state", 30)
    elif what == "numbers of the state":
        flip(folder / "state", -1, 5)
    else:
        for path in (folder / what).iterdir():
            flip(path, -1)


# in turn, each way of exchanging with one of the files: the other pairs are slow tests
PAIRS = [(case, what) for i, case in enumerate(CASES) for what in ("state", "outbox")[:: 1 - 2 * (i % 2)]]


@pytest.mark.parametrize(("case", "what"), thinned(PAIRS, every=2, spread=True))
def test_a_damaged_file_is_made_good_and_the_models_are_the_same(
    case: str, what: str, tmp_path: Path
) -> None:
    algorithm, network, victim = CASES[case]
    raw = describe(algorithm, network=network, rounds=8)
    calm = calm_run(raw)
    run = stopped(raw, tmp_path / "damaged", at=4)
    damage(run.folder / victim, what)
    started = Started(run)
    started.end()
    assert not run.errors
    for name, model in calm.models.items():
        assert torch.equal(run.models[name], model)
    events = [entry["event"] for entry in run.log if entry["node"] == victim]
    if what == "state":
        assert "a file is damaged" in events
    elif list((tmp_path / "damaged" / victim / "outbox").iterdir()):
        assert "a published message is damaged" in events
    assert not [entry for entry in run.log if entry["level"] == "error" or "differs" in entry["event"]]
    payload = {name: member.accounts.payload_bytes for name, member in calm.members.items()}
    assert {name: member.accounts.payload_bytes for name, member in run.members.items()} == payload


def test_a_message_that_rots_while_it_waits_is_computed_again(tmp_path: Path) -> None:
    """The node notices by itself, says so in its status, and goes on without being started again."""
    raw = describe(GECL, rounds=8)
    calm = deploy(raw, tmp_path / "calm")
    started = Started(DeployedRun(make_federation(raw, "test"), tmp_path / "rotten"), ["a", "c"])
    a = started.run.members["a"]
    published = started.run.folder / "a" / "outbox" / "1-0"
    started.until(lambda: published.exists() and "b" in a.waits)
    flip(published, -1)
    started.start("b")
    started.end()
    assert not started.run.errors
    for name, model in calm.models.items():
        assert torch.equal(started.run.models[name], model)
    assert a.status()["refused"]["a published message is damaged"] == 1
    events = {entry["event"]: entry for entry in started.run.log if entry["node"] == "a"}
    assert events["a published message is damaged"]["reason"].endswith("1-0 is damaged")
    assert "going back to what is saved" in events


def test_a_message_that_rots_before_the_server_has_it_is_computed_again(tmp_path: Path) -> None:
    raw = describe(
        {"name": "scaffold", "lr": 0.1, "local_steps": 2}, network={"topology": "server"}, rounds=6
    )
    calm = deploy(raw, tmp_path / "calm")
    run = stopped(raw, tmp_path / "rotten", at=3)
    for path in (run.folder / "hub" / "inbox").glob("*-b"):  # as if they had never arrived
        path.unlink()
    started = Started(run, ["a", "b", "c"])
    started.until(lambda: bool(run.members["b"].waits))
    for path in (run.folder / "b" / "outbox").iterdir():
        flip(path, -1)
    started.start("hub")
    started.end()
    assert not run.errors
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())


@pytest.mark.parametrize("algorithm", ["scaffold", "fedlin"])
def test_a_message_that_rots_at_the_server_is_sent_again_by_its_client(
    algorithm: str, tmp_path: Path
) -> None:
    """When the client is started again, as the server's log says."""
    raw = describe({"name": algorithm, "lr": 0.1, "local_steps": 2}, network={"topology": "server"}, rounds=6)
    calm = deploy(raw, tmp_path / "calm")
    run = DeployedRun(make_federation(raw, "test"), tmp_path / "rotten")
    started = Started(run, ["hub", "a", "b"])
    inbox = run.folder / "hub" / "inbox"
    started.until(lambda: len(list(inbox.glob("?-?-b"))) > 0)
    started.stop()
    for path in inbox.glob("?-?-b"):
        flip(path, -1)
    Started(run).end()
    assert not run.errors
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())
    assert any("start b again" in entry.get("reason", "") for entry in run.log)


def test_a_message_of_the_last_round_that_rots_while_a_node_finishes_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_deploy.member.finish.GRACE", 0.5)
    run = deploy(describe(GECL, rounds=6), tmp_path)
    models = dict(run.models)
    for name in run.federation.names:
        (tmp_path / name / "parted").unlink()
    for part in ("report.json", "state"):  # b has to compute the last round again, and asks a and c
        (tmp_path / "b" / part).unlink()
    shutil.rmtree(tmp_path / "b" / "inbox")
    started = Started(run, ["a", "c"])
    started.until(lambda: run.members["a"].exchange.phase == "finishing")
    flip(tmp_path / "a" / "outbox" / "6-0", -1)
    started.start("b")
    started.end()
    assert not run.errors
    assert all(torch.equal(run.models[name], model) for name, model in models.items())
    assert run.members["a"].status()["refused"]["a published message is damaged"] == 1


# --- what cannot, is said at once, with advice that works --------------------------------------------------


def test_without_an_intact_state_the_advice_is_to_start_anew_everywhere(tmp_path: Path) -> None:
    raw = describe(GECL, rounds=12)
    run = stopped(raw, tmp_path / "run", at=4)
    flip(run.folder / "a" / "state", 40)
    flip(run.folder / "a" / "state.previous", 40)
    with run.member("a") as a, pytest.raises(HoldfastError, match=r"neither .*state nor state\.previous"):
        a.run()
    for name in run.federation.names:  # as the message says
        shutil.rmtree(run.folder / name)
    calm = deploy(raw, tmp_path / "calm")
    Started(run).end()
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())


def test_a_node_put_back_too_far_is_told_so_at_once(tmp_path: Path) -> None:
    """Without its states it begins again at round 0, which the others have long left behind."""
    run = stopped(describe(GECL, rounds=12), tmp_path / "run", at=6)
    for part in ("state", "state.previous"):
        (run.folder / "a" / part).unlink()
    for part in ("inbox", "outbox"):
        shutil.rmtree(run.folder / "a" / part)
    started = Started(run)
    started.threads["a"].join(PATIENCE)
    assert not started.threads["a"].is_alive()
    error = run.errors.pop("a")
    assert isinstance(error, RefusedForGoodError | PutBackError)  # it asks first, or another asks it
    assert error.exit_code == REFUSED
    assert "a was put back" in str(error)
    assert "start all of them anew" in str(error)
    started.stop()


# --- what a folder is, and what can be done where it cannot be mended ---------------------------------------


def test_a_lost_identity_is_made_from_what_was_written(tmp_path: Path) -> None:
    raw = describe(GECL, rounds=8)
    run = stopped(raw, tmp_path, at=4)
    paths = {name: tmp_path / name / "identity.json" for name in "abc"}
    before = {name: path.read_text() for name, path in paths.items()}
    paths["a"].unlink()
    paths["b"].write_text(before["b"].replace('"incarnation": "', '"incarnation": "0'))
    paths["c"].write_text(before["c"][:-20])
    Started(run).end()
    assert not run.errors
    assert {name: path.read_text() for name, path in paths.items()} == before
    assert all(torch.equal(run.models[name], model) for name, model in calm_run(raw).models.items())


def test_a_folder_beyond_repair_says_to_which_round_all_can_go_back(tmp_path: Path) -> None:
    raw = describe(GECL, rounds=8, limits={"wait": 90.0, "snapshot_every": 2, "snapshots": 4})
    run = stopped(raw, tmp_path, at=6)
    for name in ("state", "state.previous"):
        flip(tmp_path / "a" / name, -3)
    with run.member("a") as member, pytest.raises(HoldfastError, match=r"rollback --to 4', each") as error:
        member.run()
    assert error.value.exit_code == 65
    (tmp_path / "a" / "identity.json").unlink()
    shutil.rmtree(tmp_path / "a" / "outbox")
    with pytest.raises(HoldfastError, match="and so is all that it could be made from"):
        run.member("a")
