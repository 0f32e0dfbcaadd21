"""Certificates that are revoked, renewed, about to expire, or by one's own authority; encrypted keys."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import holdfast
from federation_runs import PATIENCE, DeployedRun, Started, deploy, describe, write_federation
from http_peers import Caller, Made, Pretender

from holdfast.core.errors import REFUSED, HoldfastError
from holdfast_deploy.federation_file import make_federation, read_federation
from holdfast_deploy.keys import make_key, public_key
from holdfast_deploy.ops.events import Events
from holdfast_deploy.wire import certificate_watch
from holdfast_deploy.wire.authority import (
    make_authority,
    make_certificates,
    make_request,
    sign_request,
)
from holdfast_deploy.wire.certificate_watch import watch_certificates
from holdfast_deploy.wire.credentials import Credentials, load_credentials, serial_of
from holdfast_deploy.wire.dial import Unreachable, way_to
from holdfast_deploy.wire.line import Line
from holdfast_deploy.wire.protocol import STATUS
from holdfast_deploy.wire.retry import RefusedForGoodError
from holdfast_deploy.wire.revocations import SEEN, Known, Revoked, read_revocations, revoke

GECL = {"name": "local-gecl", "lr": 0.1}


def soon(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def renew(certs: Path, name: str, days: float = 1) -> str:
    """A new certificate for the same key; its serial number."""
    sign_request(certs, make_request(certs, name), [name], days)
    return serial_of((certs / f"{name}.crt").read_bytes())


def test_a_revoked_member_is_refused_at_once_and_comes_back_with_a_new_certificate(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    raw = describe(
        GECL, nodes=2, rounds=100_000, evaluate_every=1000, coordinator=public_key(make_key(certs))
    )
    federation = make_federation(raw, "test")
    make_certificates(certs, "test", ["a", "b"], days=1)
    run = DeployedRun(federation, tmp_path)
    started = Started(run)
    started.until(lambda: run.members["b"].done >= 2)
    stolen = serial_of((certs / "b.crt").read_bytes())
    assert federation.coordinator is not None
    revoke(certs, Revoked(name="b", serial=stolen, time="today", reason="stolen"), federation.coordinator)
    started.threads["b"].join(PATIENCE)
    assert isinstance(run.errors.pop("b"), RefusedForGoodError)
    done = run.members["b"].done
    run.members.pop("b").close()
    assert started.threads["a"].is_alive()
    assert any("was revoked on today: stolen" in str(entry.get("reason")) for entry in run.log)
    with pytest.raises(HoldfastError, match="ask for a new one"):
        load_credentials(certs, "b", federation.coordinator)

    renew(certs, "b")
    started.start("b")
    started.until(lambda: run.members["b"].done >= done + 2)
    started.stop()


class Apart(DeployedRun):
    """Every member has its own folder of certificates."""

    def credentials(self, name: str) -> Credentials:
        return load_credentials(self.folder / f"certs-{name}", name, self.federation.coordinator)


def test_a_list_of_revoked_certificates_is_passed_on(tmp_path: Path) -> None:
    """The coordinator gives it to c alone; a list that somebody else has signed goes nowhere."""
    certs, others = tmp_path / "certs", tmp_path / "others"
    raw = describe(GECL, nodes=4, rounds=100_000, coordinator=public_key(make_key(certs)))
    federation = make_federation(raw, "test")
    make_certificates(certs, "test", [*"abcd", "old"], days=1)
    for name in "abcd":
        shutil.copytree(certs, tmp_path / f"certs-{name}")
    run = Apart(federation, tmp_path)
    started = Started(run)
    started.until(lambda: run.members["a"].done >= 1)
    assert federation.coordinator is not None
    forged = Revoked(name="b", serial=serial_of((certs / "b.crt").read_bytes()), time="today")
    revoke(others, forged, public_key(make_key(others)))
    shutil.copy(others / "revoked.json", tmp_path / "certs-a")
    entry = Revoked(name="old", serial=serial_of((certs / "old.crt").read_bytes()), time="today")
    revoke(tmp_path / "certs-c", entry, federation.coordinator)
    wanted = (tmp_path / "certs-c" / "revoked.json").read_bytes()
    for name in "abd":
        soon(lambda name=name: run.members[name].credentials.revocations.number == 1)
        soon((tmp_path / f"certs-{name}" / SEEN).exists)
        assert (tmp_path / f"certs-{name}" / SEEN).read_bytes() == wanted + b"\n"
    started.stop()


def test_questions_at_once_after_a_renewal_do_not_close_each_others_connection(tmp_path: Path) -> None:
    raw = describe(GECL, nodes=2, rounds=100_000)
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    started = Started(run)
    started.until(lambda: run.members["a"].done >= 1)
    serial = renew(tmp_path / "certs", "a")
    credentials = run.members["a"].credentials
    assert credentials is not None
    soon(lambda: serial_of(credentials.certificate) == serial)

    async def ask() -> list[bytes]:
        link = run.members["a"].connections.to("b")
        link.line._version = -1  # whatever the round under way has done since
        return await asyncio.gather(*(link.line.ask(STATUS, headers=link.said) for _ in range(8)))

    loop = run.members["a"].network.loop
    assert all(asyncio.run_coroutine_threadsafe(ask(), loop).result(60))
    started.stop()


def test_a_certificate_that_expires_is_said_to_have(tmp_path: Path) -> None:
    make_certificates(tmp_path, "test", ["a"], days=1)
    soon_over = load_credentials(tmp_path, "a")
    make_certificates(tmp_path / "short", "test", ["a"], days=1e-6)  # 0.09 s
    expired = (tmp_path / "short" / "a.crt").read_bytes()
    log: list[dict[str, Any]] = []

    async def watch() -> None:
        watching = asyncio.create_task(watch_certificates(soon_over, None, Events("a", log.append), list))
        await asyncio.sleep(0.2)
        soon_over.certificate = expired
        await asyncio.wait([watching], timeout=1.5 * certificate_watch.WATCH)
        watching.cancel()

    asyncio.run(watch())
    assert [entry["event"] for entry in log] == ["certificate expires soon", "certificate has expired"]


BROKEN = b"-----BEGIN CERTIFICATE-----\nMIIBxxxx\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("name", ["ca.crt", "b.ca.crt"])
def test_an_authority_that_is_broken_in_the_middle_keeps_nobody_from_hearing_of_revocations(
    name: str, tmp_path: Path
) -> None:
    coordinator = public_key(make_key(tmp_path))
    make_certificates(tmp_path, "test", ["a", "b"], days=90)
    own, whole = load_credentials(tmp_path, "a", coordinator), (tmp_path / "ca.crt").read_bytes()
    (tmp_path / name).write_bytes(whole + BROKEN)
    with pytest.raises(HoldfastError, match=rf"{name} is not a certificate"):
        load_credentials(tmp_path, "a", coordinator)
    log: list[dict[str, Any]] = []

    async def watch() -> None:
        watching = asyncio.create_task(watch_certificates(own, coordinator, Events("a", log.append), list))
        while not log:
            await asyncio.sleep(0.02)
        (tmp_path / name).write_bytes(whole)
        stolen = serial_of((tmp_path / "b.crt").read_bytes())
        revoke(tmp_path, Revoked(name="b", serial=stolen, time="today"), coordinator)
        while len(log) < 2:
            assert not watching.done()
            await asyncio.sleep(0.02)
        watching.cancel()

    asyncio.run(asyncio.wait_for(watch(), PATIENCE))
    assert [entry["event"] for entry in log] == ["certificates not reloaded", "certificates reloaded"]
    assert own.revocations.number == 1


def test_a_member_that_starts_with_a_revoked_certificate_is_refused(tmp_path: Path) -> None:
    coordinator = public_key(make_key(tmp_path))
    make_certificates(tmp_path, "test", ["a", "b"], days=90)
    own = serial_of((tmp_path / "a.crt").read_bytes())
    revoke(tmp_path, Revoked(name="a", serial=own, time="today"), coordinator)
    with pytest.raises(HoldfastError, match=r"a\.crt: .* was revoked on today; ask for a new one") as stopped:
        load_credentials(tmp_path, "a", coordinator)
    assert stopped.value.exit_code == REFUSED
    load_credentials(tmp_path, "b", coordinator)


def test_whoever_answers_with_a_revoked_certificate_is_not_talked_to(tmp_path: Path) -> None:
    """A thief at b's address has only the old certificate. It is seen before anything is asked."""
    certs = tmp_path / "certs"
    raw = describe(GECL, nodes=2, coordinator=public_key(make_key(certs)))
    federation = make_federation(raw, "test")
    make_certificates(certs, "test", ["a", "b"], days=1)
    a, b = load_credentials(certs, "a"), load_credentials(certs, "b")
    asked: list[str] = []

    def answer(question: str, body: bytes, headers: Any) -> Made:
        asked.append(question)
        return 200, b"{}"

    async def ask() -> None:
        line = Line(way_to(federation, "a", "b"), a)
        try:
            for _ in range(3):  # one connection is used again ...
                assert await line.ask(STATUS) == b"{}"
            assert line.shown == b.certificate
            entry = Revoked(name="b", serial=serial_of(b.certificate), time="today")
            a.revocations = Known(revoked={entry.serial: entry})
            assert "was revoked on today" in line.drop_if_revoked()  # ... until it is revoked
            for _ in range(2):
                with pytest.raises(Unreachable, match="was revoked on today"):
                    await line.ask(STATUS)
        finally:
            await line.close()

    with Pretender(federation.member("b").address, b.server_context(), answer):
        asyncio.run(ask())
    assert len(asked) == 3


def test_nobody_but_the_coordinator_revokes(tmp_path: Path) -> None:
    key, thief = public_key(make_key(tmp_path)), public_key(make_key(tmp_path / "thief"))
    entry = Revoked(name="a", serial="AB12", time="today")
    with pytest.raises(HoldfastError, match="another key than the coordinator's"):
        revoke(tmp_path / "thief", entry, key)
    path = revoke(tmp_path / "thief", entry, thief)
    shutil.copy(path, tmp_path)
    with pytest.raises(HoldfastError, match="another key than the coordinator's"):
        read_revocations(tmp_path, key)
    with pytest.raises(HoldfastError, match="names no coordinator"):
        read_revocations(tmp_path, None)
    (tmp_path / "revoked.json").unlink()
    path = revoke(tmp_path, entry, key)
    path.write_text(path.read_text().replace("AB12", "AB13"))
    with pytest.raises(HoldfastError, match="not of this document"):
        read_revocations(tmp_path, key)


@pytest.mark.parametrize("gone_back", ["shorter and newer", "older", "gone"])
def test_what_was_revoked_stays_so_whatever_the_list_says_later(gone_back: str, tmp_path: Path) -> None:
    """The coordinator's folder was restored from a backup. A member knows better, also if started anew."""
    own, theirs = tmp_path / "own", tmp_path / "coordinator"
    key = public_key(make_key(theirs))
    make_certificates(own, "test", ["a"], days=90)
    backup = revoke(theirs, Revoked(name="b", serial="1", time="today"), key).read_bytes()
    shutil.copy(revoke(theirs, Revoked(name="b", serial="2", time="today"), key), own)
    log: list[dict[str, Any]] = []

    async def watch(until: Callable[[], bool]) -> None:
        watching = asyncio.create_task(watch_certificates(a, key, Events("a", log.append), list))
        while not until():
            await asyncio.sleep(0.02)
        watching.cancel()

    a = load_credentials(own, "a", key)
    asyncio.run(asyncio.wait_for(watch((own / SEEN).exists), PATIENCE))

    (own / "revoked.json").unlink()
    if gone_back != "gone":
        (theirs / "revoked.json").write_bytes(backup)
        (own / "revoked.json").write_bytes(backup)
    if gone_back == "shorter and newer":
        for serial in ("3", "4"):
            revoke(theirs, Revoked(name="c", serial=serial, time="today"), key)
        shutil.copy(theirs / "revoked.json", own)
    a.refresh(key)
    new = load_credentials(own, "a", key)
    for credentials in (a, new):
        assert credentials.revocations.why("1") is not None
        assert credentials.revocations.why("2") is not None
        assert (credentials.revocations.why("4") is not None) == (gone_back == "shorter and newer")
    if gone_back != "shorter and newer":
        return

    a = new
    asyncio.run(asyncio.wait_for(watch(lambda: bool(log)), PATIENCE))
    [said] = [entry for entry in log if entry["event"] == "a list of revoked certificates lacks some"]
    assert "version 3 lacks the certificate 2 of b, which an earlier version revoked" in said["reason"]
    shutil.copy(own / SEEN, theirs)  # as it says
    revoke(theirs, Revoked(name="d", serial="5", time="today"), key)
    (theirs / SEEN).unlink()
    mended = read_revocations(theirs, key)
    assert sorted(mended.revoked) == ["1", "2", "3", "4", "5"]
    assert not mended.left_out


def test_members_tell_one_another_what_a_shorter_list_lacks(tmp_path: Path) -> None:
    """Each of two has a list that revokes what the other's does not; neither is to forget anything."""
    certs, backup = tmp_path / "certs", tmp_path / "backup"
    raw = describe(GECL, nodes=2, rounds=100_000, coordinator=public_key(make_key(certs)))
    federation = make_federation(raw, "test")
    assert federation.coordinator is not None
    make_certificates(certs, "test", [*"ab", "old", "left"], days=1)
    shutil.copytree(certs, backup)
    serials = {name: serial_of((certs / f"{name}.crt").read_bytes()) for name in ("old", "left")}
    revoke(certs, Revoked(name="old", serial=serials["old"], time="today"), federation.coordinator)
    for serial in ("AB12", serials["left"]):
        revoke(backup, Revoked(name="left", serial=serial, time="today"), federation.coordinator)
    shutil.copytree(certs, tmp_path / "certs-a")
    shutil.copytree(backup, tmp_path / "certs-b")
    started = Started(Apart(federation, tmp_path))
    for name in "ab":
        known = started.run.members[name].credentials
        assert known is not None
        soon(lambda known=known: set(serials.values()) <= known.revocations.revoked.keys())
        seen = tmp_path / f"certs-{name}" / SEEN
        soon(lambda seen=seen: seen.exists() and seen.read_bytes().count(b"\n") == 2)
    started.stop()
    assert (tmp_path / "certs-a" / SEEN).read_bytes() == (tmp_path / "certs-b" / SEEN).read_bytes()


def test_the_command_revokes_what_stands_in_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    made = holdfast(
        "federation", "new", "--nodes=a=h:1,b=h:2", "--algorithm", "dsgd", "--input-shape", 6, "--classes", 3,
        "-o", path, "algorithm.lr=0.1",
    )  # fmt: skip
    assert made.code == 0, made.err
    holdfast("federation", "certs", path)
    told = holdfast("federation", "revoke", path, "b", "--reason", "stolen laptop")
    assert told.code == 0, told.err
    serial = serial_of((tmp_path / "certs" / "b.crt").read_bytes())
    assert serial in told.out
    assert holdfast("federation", "revoke", path, "b").code == 2  # already
    status = holdfast("federation", "status", path, "--name", "b")
    assert (status.code, "stolen laptop" in status.err) == (77, True)


def test_new_certificates_are_shown_without_a_restart(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(describe(GECL, nodes=2), "test"), tmp_path)
    with run.member("a") as member:
        certs, b = tmp_path / "certs", load_credentials(tmp_path / "certs", "b")

        def shown() -> str:
            with Caller(f"127.0.0.1:{member.port}", "a", b.client_context("a")) as caller:
                caller.connect()
                assert isinstance(caller.sock, ssl.SSLSocket)
                return serial_of(ssl.DER_cert_to_PEM_cert(caller.sock.getpeercert(True) or b"").encode())

        before = shown()
        assert before == serial_of((certs / "a.crt").read_bytes())
        after = renew(certs, "a", days=12)
        soon(lambda: any(entry["event"] == "certificates reloaded" for entry in run.log))
        assert shown() == after != before

        soon(lambda: any(entry["event"] == "certificate expires soon" for entry in run.log))
        assert member.status()["certificate_days"] == pytest.approx(12, abs=0.1)

        (certs / "a.crt").write_text("half a file")
        soon(lambda: any(entry["event"] == "certificates not reloaded" for entry in run.log))
        assert shown() == after
    warned = [entry for entry in run.log if entry["event"] == "certificate expires soon"]
    assert warned[-1]["days"] == 12.0
    assert "federation csr" in warned[-1]["reason"]


def test_status_tells_that_a_certificate_is_about_to_expire(tmp_path: Path) -> None:
    path = write_federation(describe(GECL, nodes=2), tmp_path)
    run = DeployedRun(read_federation(path), tmp_path)
    with run.member("a"):
        table = " ".join(holdfast("federation", "status", path, "--name", "b").out.split())
    assert "certificate" in table
    assert "expires" in table


def test_an_organisations_own_authority_vouches_for_its_member_alone(tmp_path: Path) -> None:
    certs, theirs = tmp_path / "certs", tmp_path / "their-authority"
    make_certificates(certs, "test", ["a"], days=1)
    make_request(certs, "b")
    make_authority(theirs, "hospital b")
    for name in ("a", "b"):
        (certs / f"{name}.csr").write_bytes(make_request(certs, name).read_bytes())
    sign_request(theirs, certs / "b.csr", ["b"], days=1)
    forged = sign_request(theirs, certs / "a.csr", ["a"], days=1).read_bytes()  # by b's people, for a's name
    shutil.copy(theirs / "b.crt", certs)
    with pytest.raises(HoldfastError, match=r"not signed by the authority in ca\.crt"):
        load_credentials(certs, "b")
    shutil.copy(theirs / "ca.crt", certs / "b.ca.crt")
    run = deploy(describe(GECL, nodes=2, rounds=2), tmp_path)
    assert set(run.models) == {"a", "b"}

    with pytest.raises(HoldfastError, match="does not vouch for it"):
        load_credentials(certs, "b").check("a", forged)
    with run.member("b") as member:
        stranger = Credentials((certs / "a.key").read_bytes(), forged, (certs / "b.ca.crt").read_bytes())
        with Caller(f"127.0.0.1:{member.port}", "b", stranger.client_context("b")) as caller:
            reply = caller.ask(STATUS)
        assert reply.status == 410
        assert "does not vouch for it" in reply.reason


def test_encrypted_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_federation(describe(GECL, nodes=2), tmp_path)
    home, secret = tmp_path / "home", tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    refused = holdfast("federation", "csr", path, "--name", "b", "--certs", home, "--encrypt")
    assert (refused.code, "HOLDFAST_PASSPHRASE_FILE" in refused.err) == (2, True)
    monkeypatch.setenv("HOLDFAST_PASSPHRASE_FILE", str(secret))
    asked = holdfast("federation", "csr", path, "--name", "b", "--certs", home, "--encrypt")
    assert asked.code == 0, asked.err
    assert b"ENCRYPTED" in (home / "b.key").read_bytes()
    sign_request(tmp_path / "certs", home / "b.csr", ["a", "b"], 1, replace=True)
    for name in ("b.crt", "ca.crt"):
        shutil.copy(tmp_path / "certs" / name, home)
    assert b"ENCRYPTED" not in load_credentials(home, "b").key
    run = DeployedRun(make_federation(describe(GECL, nodes=2), "test"), tmp_path)
    with run.member("a") as member:  # whoever shows the certificate has the key
        context = load_credentials(home, "b").client_context("a")
        with Caller(f"127.0.0.1:{member.port}", "a", context) as caller:
            assert caller.ask(STATUS).status == 200

    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(home, elsewhere)
    monkeypatch.setenv("HOLDFAST_PASSPHRASE", "wrong")
    with pytest.raises(HoldfastError, match="its passphrase is another one"):
        load_credentials(elsewhere, "b")


def test_keys_that_others_on_the_machine_can_read_are_warned_of(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(describe(GECL, nodes=2), "test"), tmp_path)
    run.member("a").close()
    assert not [entry for entry in run.log if entry["event"] == "a key is not private"]
    certs = tmp_path / "certs"
    certs.joinpath("a.key").chmod(0o640)
    certs.joinpath("ca.key").chmod(0o644)
    member = run.member("a")
    soon(lambda: any(entry["event"] == "a key is not private" for entry in run.log))
    member.close()
    told = [entry["reason"] for entry in run.log if entry["event"] == "a key is not private"]
    assert told == [f"others can read it: chmod 600 {certs / name}" for name in ("a.key", "ca.key")]


def test_certificates_that_are_away_are_missed_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_watch, "WATCH", 0.01)
    make_certificates(tmp_path / "certs", "test", ["a"], days=90)
    credentials, log = load_credentials(tmp_path / "certs", "a"), list[dict[str, object]]()

    async def watch() -> None:
        watching = asyncio.ensure_future(
            certificate_watch.watch_certificates(credentials, None, Events("a", log.append), lambda: None)
        )
        for _ in range(2):
            (tmp_path / "certs").rename(tmp_path / "away")
            await asyncio.sleep(0.2)
            (tmp_path / "away").rename(tmp_path / "certs")
            await asyncio.sleep(0.2)
        watching.cancel()

    asyncio.run(watch())
    assert sum(entry["event"] == "certificates not reloaded" for entry in log) == 2
