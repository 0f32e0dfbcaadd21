"""The audit log: both ends of a link tell the same story, and nothing in it can be changed unnoticed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from command_line import holdfast
from federation_runs import PATIENCE, DeployedRun, Started, deploy, describe, stopped
from http_peers import Caller

from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.ops.audit import (
    BEGINNING,
    MOST_UNSYNCED,
    AuditError,
    AuditLog,
    Head,
    check_heads,
    read_audit,
)
from holdfast_deploy.wire.credentials import serial_of
from holdfast_deploy.wire.protocol import Ask
from holdfast_deploy.wire.service import LATER, REPEATS

GECL = {"name": "local-gecl", "lr": 0.1}
PASSED = ("round", "exchange", "bytes", "digest")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DeployedRun:
    return deploy(describe(GECL, rounds=2), tmp_path_factory.mktemp("federation"))


def passed(folder: Path, event: str, peer: str) -> list[tuple]:
    entries = read_audit(folder)
    return sorted(
        tuple(entry[key] for key in PASSED)
        for entry in entries
        if (entry["event"], entry.get("peer")) == (event, peer)
    )


def copy_of(run: DeployedRun, name: str, target: Path) -> Path:
    """A member's folder as ``federation audit`` reads it."""
    folder = target / name
    folder.mkdir()
    for file in ("audit.jsonl", "state", "state.previous"):
        (folder / file).write_bytes((run.folder / name / file).read_bytes())
    return folder


def test_what_one_end_sent_is_what_the_other_received(run: DeployedRun) -> None:
    for sender, receiver in (("a", "b"), ("b", "a"), ("b", "c"), ("c", "a")):
        sent = passed(run.folder / sender, "sent", receiver)
        assert [entry[0] for entry in sent] == [1, 2, 3]  # two rounds, and the final message
        assert sent == passed(run.folder / receiver, "received", sender)


def test_lines_tell_address_certificate_and_what_was_begun(run: DeployedRun) -> None:
    entries = list(read_audit(run.folder / "a"))
    serial = serial_of((run.folder / "certs" / "b.crt").read_bytes())
    sent = next(entry for entry in entries if entry["event"] == "sent" and entry["peer"] == "b")
    assert sent["serial"] == serial
    assert sent["address"].startswith("127.0.0.1:")
    received = next(entry for entry in entries if entry["event"] == "received" and entry["peer"] == "b")
    assert received["serial"] == serial
    assert received["address"] == run.federation.member("b").address
    assert entries[0]["event"] == "begun"
    assert entries[0]["federation"] == run.federation.id
    assert entries[-1]["event"] == "ended"


def test_clients_and_server_tell_the_same_story(tmp_path: Path) -> None:
    raw = describe({"name": "fedavg", "lr": 0.1}, nodes=2, rounds=2, network={"topology": "server"})
    deploy(raw, tmp_path)
    for name in ("a", "b"):
        sent = passed(tmp_path / name, "sent", "hub")
        assert len(sent) == 3
        assert sent == passed(tmp_path / "hub", "received", name)
        assert passed(tmp_path / "hub", "sent", name) == passed(tmp_path / name, "received", "hub")


def test_the_command_checks_and_prints(run: DeployedRun, tmp_path: Path) -> None:
    folder, b, c = (copy_of(run, name, tmp_path) for name in ("a", "b", "c"))
    told = holdfast("federation", "audit", folder, "--against", b, "--against", c)
    assert told.code == 0, told.err
    assert "intact" in told.err
    assert "received" in told.out
    lines = holdfast("federation", "audit", folder, "--json").out.splitlines()
    assert [json.loads(line)["n"] for line in lines] == list(range(len(lines)))

    log = folder / "audit.jsonl"
    whole = log.read_bytes()
    for spoilt in (
        whole.replace(b'"round":1', b'"round":9', 1),
        b"".join(line for i, line in enumerate(whole.splitlines(keepends=True)) if i != 4),
        whole.replace(b"\n", b"\n\n", 1),
        b"".join(whole.splitlines(keepends=True)[2:]),
    ):
        log.write_bytes(spoilt)
        found = holdfast("federation", "audit", folder)
        assert (found.code, "does not follow the line before" in found.err) == (65, True)

    lines = whole.splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:5]))
    found = holdfast("federation", "audit", folder)
    assert (found.code, "but state has seen" in found.err) == (65, True)
    for state in ("state", "state.previous"):
        (folder / state).unlink()
    assert holdfast("federation", "audit", folder).code == 0
    found = holdfast("federation", "audit", folder, "--against", b)
    assert (found.code, "lines at the end are missing" in found.err) == (65, True)


@pytest.mark.parametrize(
    "changed",
    [
        "{}",
        '{"event": "sent", "time": "now", "bytes": "many"}',
        '{"event": 1, "time": 2}',
        '{"event": "begun", "time": "now", "member": ["a"]}',
        '{"time": "now", "event": ' + "[" * 60_000,
    ],
)
def test_a_last_line_that_no_member_writes_is_one_line_of_complaint(changed: str, tmp_path: Path) -> None:
    """The chain does not show it: nothing comes after the last line."""
    log = AuditLog(tmp_path)
    log.note("begun", member="a")
    log.close()
    follows = f'"n": 1, "previous": "{log.head.hash}"'
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write(changed.replace("{", "{" + follows + (", " if changed != "{}" else ""), 1) + "\n")
    outcome = holdfast("federation", "audit", tmp_path)
    assert outcome.code == 65
    assert outcome.err.count("\n") == 1
    assert "audit.jsonl, line 2: it " in outcome.err


def test_a_log_that_was_written_anew_contradicts_what_others_saw(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.note("sent", peer="b")
    seen = log.sync()
    check_heads(tmp_path, read_audit(tmp_path), [("b", seen), ("c", Head(0, BEGINNING))])
    log.close()
    (tmp_path / "audit.jsonl").unlink()
    log = AuditLog(tmp_path)
    log.note("sent", peer="c")
    log.close()
    with pytest.raises(AuditError, match="the log was rewritten"):
        check_heads(tmp_path, read_audit(tmp_path), [("b", seen)])


def test_a_torn_line_is_cut_off_and_noted(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.note("sent", peer="b")
    log.note("sent", peer="c")
    log.close()
    path = tmp_path / "audit.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [entry["n"] for entry in read_audit(tmp_path)] == [0]
    log = AuditLog(tmp_path)
    log.note("sent", peer="d")
    log.close()
    entries = list(read_audit(tmp_path))
    assert [entry["event"] for entry in entries] == ["sent", "repaired", "sent"]
    assert entries[1]["torn_bytes"] > 0


def test_a_hole_that_a_power_cut_leaves_is_cut_off_with_all_after_it(tmp_path: Path) -> None:
    """Of two lines that were not synced, the second alone may be on the disk: no neighbour has seen it."""
    log = AuditLog(tmp_path)
    log.note("sent", peer="b")
    seen = log.sync()
    log.note("received", peer="b")
    before = (tmp_path / "audit.jsonl").stat().st_size
    log.note("received", peer="c")
    log.close()
    path = tmp_path / "audit.jsonl"
    content = path.read_bytes()
    synced = content.index(b"\n") + 1
    path.write_bytes(content[:synced] + bytes(before - synced) + content[before:])
    log = AuditLog(tmp_path)
    log.close()
    entries = list(read_audit(tmp_path))
    assert [entry["event"] for entry in entries] == ["sent", "repaired"]
    check_heads(tmp_path, entries, [("b", seen)])


def test_who_waits_while_another_syncs_shares_the_next_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, begun, go_on, syncs = AuditLog(tmp_path), threading.Event(), threading.Event(), []
    fdatasync = os.fdatasync

    def syncing(file: int) -> None:
        syncs.append(log.head.lines)
        begun.set()
        go_on.wait(PATIENCE)
        fdatasync(file)

    monkeypatch.setattr(os, "fdatasync", syncing)
    log.note("sent", peer="a")
    first = threading.Thread(target=log.sync)
    first.start()
    begun.wait(PATIENCE)
    others = []
    for peer in "bcdefgh":
        log.note("sent", peer=peer)  # while the disk is at work
        others.append(threading.Thread(target=log.sync))
        others[-1].start()
    assert log.durable.lines == 0
    go_on.set()
    for thread in [first, *others]:
        thread.join(PATIENCE)
    assert log.durable == log.head
    assert syncs == [1, 8]
    log.close()


def test_lines_that_no_message_waits_for_are_synced_before_they_are_many(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for number in range(300):
        log.note("refused", reason="x" * 300, number=number)
        assert (log.head.lines - log.durable.lines) * 300 < MOST_UNSYNCED
    log.close()


def _write_and_die(folder: Path) -> None:
    log = AuditLog(folder)
    for number in range(50):
        log.note("sent", number=number)
    os.kill(os.getpid(), signal.SIGKILL)


def test_every_line_survives_sigkill(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(tmp_path,))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert [entry["number"] for entry in read_audit(tmp_path)] == list(range(50))


def test_where_there_is_no_room_lines_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    log.note("sent", peer="b")
    with pytest.raises(OSError, match="No space"):
        log.sync()
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:7]))  # a little room
    log.note("sent", peer="c")
    log.sync()
    log.close()
    assert [entry["peer"] for entry in read_audit(tmp_path)] == ["b", "c"]


@pytest.mark.parametrize("damage", ["cut", "gone", "written anew"])
def test_a_member_notes_that_lines_were_taken_out_while_it_was_down(damage: str, tmp_path: Path) -> None:
    """Its next saved states, by which the command finds out, would know nothing of it."""
    run = stopped(describe(GECL, nodes=2, rounds=3, network={"topology": "line"}), tmp_path, 2)
    path = tmp_path / "a" / "audit.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    if damage == "cut":
        path.write_bytes(b"".join(lines[:3]))
    elif damage == "written anew":
        again = AuditLog(tmp_path / "a")
        for _ in lines:
            again.note("sent", peer="b")
        again.close()
    run.carry_out()
    assert not run.errors
    noted = {name: [e["reason"] for e in read_audit(tmp_path / name) if "reason" in e] for name in "ab"}
    assert "lines are missing, or others" in " ".join(noted["a"])
    assert "lines are missing" not in " ".join(noted["b"])


def test_lines_since_the_start_are_not_missing_where_a_member_goes_back_in_the_same_process(
    tmp_path: Path,
) -> None:
    """As after a damaged file: the state that it goes on from was saved after the log was opened."""
    log = AuditLog(tmp_path)
    log.note("begun")
    head = log.sync()
    log.note("sent")
    assert log.holds(head)
    assert not log.holds(head._replace(hash=BEGINNING))
    assert not log.holds(Head(3, head.hash))
    log.close()


def test_a_lock_that_leads_elsewhere_empties_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    run = DeployedRun(
        make_federation(describe(GECL, nodes=2, network={"topology": "line"}), "test"), tmp_path
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "lock").symlink_to(precious)
    run.member("a").close()
    assert precious.read_text() == "precious"


def test_who_asks_for_the_same_message_again_and_again_has_to_wait(tmp_path: Path) -> None:
    """Every answer is a line in the log: at 200 a second, a day's would take five gigabytes."""
    raw = describe(GECL, nodes=2, network={"topology": "line"})
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    started = Started(run, ["a"])
    member, credentials = run.members["a"], run.credentials("b")
    started.until(lambda: bool(member.outbox.messages))
    ask = Ask(federation=run.federation.id, start=member.start, round=1, exchange=0)
    address = run.federation.member("a").address
    with Caller(address, "a", credentials.client_context("a")) as b:
        for _ in range(REPEATS):
            assert len(b.fetch(ask)) > 0
        before = time.monotonic()
        assert len(b.fetch(ask)) > 0
        assert time.monotonic() - before >= LATER
    started.stop()
