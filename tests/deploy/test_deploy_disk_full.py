"""Few files, no disk space, strangers who hold connections: a member waits for room, and then goes on."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_runs import FORKS, _run_member, describe, saved_model, simulate
from member_processes import PATIENCE, Members

from holdfast.core.errors import DAMAGED, HoldfastError
from holdfast.privacy.budget import DP
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.network import NetworkThread
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.privacy_spent import Spent
from holdfast_deploy.storage.results import RoundRecord
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import load_credentials
from holdfast_deploy.wire.listener import MOST_FROM_ONE_ADDRESS, MOST_OF_ONE_MEMBER, Listener

FILES = 256  # that a member may open
GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}


def limited_member(path: Path, name: str, soft: int, hard: int) -> None:
    """A member that may not open more files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    _run_member(path, name, None)


def start_limited(members: Members, name: str, soft: int, hard: int) -> None:
    process = FORKS.Process(target=limited_member, args=(members.path, name, soft, hard), daemon=True)
    process.start()
    members.processes[name] = process


def wait_for(what: Callable[[], Any], members: Members) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        for name, process in members.processes.items():
            assert process.exitcode in (None, 0), (name, members.log(name)[-3:])
        assert time.monotonic() < until, {name: members.log(name)[-2:] for name in members.names}
        time.sleep(0.02)


def events_of(members: Members, name: str) -> list[str]:
    return [entry["event"] for entry in members.log(name)]


def warned(members: Members, name: str, problem: str) -> bool:
    """Whether the member says that it waits, or lets others wait, because of ``problem``."""
    log = members.log(name)
    return any(entry["level"] == "warning" and problem in entry.get("reason", "") for entry in log)


def assert_simulated(members: Members, raw: dict[str, Any]) -> None:
    """All finish, with the simulator's models."""
    members.finish()
    models = torch.stack([saved_model(members.path, name) for name in members.nodes])
    simulated = simulate(make_federation(raw, "test")).models
    expected = torch.cat([simulated[:, 18:], simulated[:, :18]], 1)  # biases come before weights
    assert (models - expected).norm() <= 1e-5 * expected.norm()


def connect(address: str, count: int) -> list[socket.socket]:
    """So many connections on which nothing is ever said."""
    host, _, port = address.rpartition(":")
    return [socket.create_connection((host, int(port))) for _ in range(count)]


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


# A node's door is a server's.
@pytest.mark.parametrize("topology", [pytest.param("line", marks=pytest.mark.slow), "server"])
def test_idle_connections_of_a_stranger_stop_nobody(topology: str, tmp_path: Path) -> None:
    """600 connections to a member that may open 256 files, held to the end."""
    raw = describe(GECL, nodes=2, network={"topology": topology}, limits={"wait": PATIENCE})
    target = "hub" if topology == "server" else "a"
    address = next(m["address"] for m in [*raw["node"], raw.get("server")] if m and m["name"] == target)
    with Members(raw, tmp_path / "federation") as members:
        start_limited(members, target, soft=FILES // 2, hard=FILES)
        wait_for(lambda: "starting" in events_of(members, target), members)
        pid = members.processes[target].pid
        assert pid is not None
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (FILES, FILES)  # raised as far as it may be
        with ExitStack() as stack:
            for connection in connect(address, 600):
                stack.enter_context(connection)
            for name in set(members.names) - {target}:
                members.start(name)
            assert_simulated(members, raw)
        idle = [entry["peer"] for entry in members.log(target) if entry["event"] == "idle connections"]
        assert set(idle) == {"127.0.0.1"}


class Guest(asyncio.Protocol):
    """Whatever comes counts as a question."""

    listener: Listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.listener.admit(self.transport)


@contextmanager
def listening(folder: Path, address: str, log: list[dict[str, Any]]) -> Iterator[Listener]:
    """A member called a that listens, in a thread of its own."""
    make_certificates(folder, "test", ["a", "b", "c"], days=90)
    network = NetworkThread()

    async def begin() -> Listener:
        listener = Listener(Guest, load_credentials(folder, "a"), Events("a", log.append))
        Guest.listener = listener
        await listener.open(address)
        return listener

    async def end() -> None:
        listener.close()

    listener = asyncio.run_coroutine_threadsafe(begin(), network.loop).result()
    try:
        yield listener
    finally:
        asyncio.run_coroutine_threadsafe(end(), network.loop).result()
        network.close()


def member_of(folder: Path, name: str, port: int) -> ssl.SSLSocket:
    """A connection with a certificate."""
    context = load_credentials(folder, name).client_context("a")
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="a")


def end_up_closed(connections: Sequence[socket.socket], closed: list[bool]) -> None:
    until = time.monotonic() + 30
    while (found := [is_closed(connection) for connection in connections]) != closed:
        assert time.monotonic() < until, found
        time.sleep(0.02)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::]:0"])
def test_the_oldest_strangers_have_to_go_and_members_stay(address: str, tmp_path: Path) -> None:
    """40 connections, of which the very first is a member's; IPv6 sockets take in IPv4 as well."""
    log: list[dict[str, Any]] = []
    with listening(tmp_path, address, log) as listener, ExitStack() as stack:
        callers: list[socket.socket] = [stack.enter_context(member_of(tmp_path, "b", listener.port))]
        while not listener.members:
            time.sleep(0.01)
        for _ in range(MOST_FROM_ONE_ADDRESS + 7):
            callers += connect(f"127.0.0.1:{listener.port}", 1)
            stack.enter_context(callers[-1])
        end_up_closed(callers, [False, *7 * [True], *32 * [False]])
    assert {entry["peer"] for entry in log} == {"127.0.0.1"}


def test_of_a_member_with_too_many_connections_the_ones_unused_for_longest_have_to_go(tmp_path: Path) -> None:
    """It shows a certificate on each, so it is no stranger; other members need room, too."""
    log: list[dict[str, Any]] = []
    with listening(tmp_path, "127.0.0.1:0", log) as listener, ExitStack() as stack:
        callers = list[ssl.SSLSocket]()
        for i in range(MOST_OF_ONE_MEMBER + 1):
            callers.append(stack.enter_context(member_of(tmp_path, "b" if i == 1 else "c", listener.port)))
            while len(listener.members) < i + 1:
                time.sleep(0.01)
        callers[0].sendall(b"hello")  # it is used again
        while next(iter(listener.members.values())).name != "b":
            time.sleep(0.01)
        for _ in range(7):
            callers.append(stack.enter_context(member_of(tmp_path, "c", listener.port)))
        end_up_closed(callers, [False, False, *7 * [True], *31 * [False]])
    assert {entry["peer"] for entry in log} == {"c"}


@pytest.mark.slow
@pytest.mark.parametrize("topology", [pytest.param("line", marks=pytest.mark.slow), "server"])
def test_a_member_that_may_open_no_more_files_waits(topology: str, tmp_path: Path) -> None:
    """The limit of a running member is set below what it has open: every file and every socket fails."""
    raw = describe(GECL, nodes=2, rounds=60, network={"topology": topology}, limits={"wait": PATIENCE})
    with Members(raw, tmp_path / "federation") as members:
        for name in members.names:
            members.start(name)
        wait_for(lambda: members.rounds("a") >= 3, members)
        for name in members.names:
            pid = members.processes[name].pid
            assert pid is not None
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, FILES))
            wait_for(lambda name=name: warned(members, name, "Too many open files"), members)
            time.sleep(1.5)  # so that it has tried more than once
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, FILES))
            done = members.rounds("a")
            wait_for(lambda done=done: members.rounds("a") >= done + 3, members)
        assert_simulated(members, raw)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few hundred KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only root may mount a small file system")
    with ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
        yield folder


def fill(path: Path) -> None:
    """Writes until there is no space left."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize(
    ("topology", "victim"),
    [("line", "a"), ("server", "hub"), pytest.param("server", "a", marks=pytest.mark.slow)],
)
def test_a_full_disk_is_waited_for(topology: str, victim: str, small_disk: Path, tmp_path: Path) -> None:
    raw = describe(GECL, nodes=2, rounds=60, network={"topology": topology}, limits={"wait": PATIENCE})
    with Members(raw, tmp_path / "federation") as members:
        for folder in (f"node-{victim}", f"server-{victim}"):
            os.symlink(small_disk, members.folder / folder)
        for name in members.names:
            members.start(name)
        wait_for(lambda: members.rounds("a") >= 3, members)
        fill(small_disk / "filler")
        wait_for(lambda: warned(members, victim, "No space left on device"), members)
        (small_disk / "filler").unlink()
        assert_simulated(members, raw)


@pytest.fixture
def only_this_many_bytes() -> Iterator[Callable[[int], None]]:
    """No file may become longer: the kernel writes what fits, and says how much that was."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_of_which_only_the_beginning_fits_is_not_charged(
    tmp_path: Path, only_this_many_bytes: Callable[[int], None]
) -> None:
    """If it were, and released, the next start would take it for a line that a crash interrupted."""
    budget, path = DP(epsilon=3.0, delta=1e-3, clip=1.0), tmp_path / "privacy.jsonl"
    spent = Spent(path, begun=False)
    spent.charge("one", [(0.1, 1)], 2.0, budget)
    one = path.read_bytes()
    only_this_many_bytes(len(one) + 20)
    with pytest.raises(OSError, match="File too large"):
        spent.charge("two", [(0.1, 1)], 2.0, budget)
    assert path.read_bytes() == one
    only_this_many_bytes(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    spent.charge("two", [(0.1, 1)], 2.0, budget)
    assert len(path.read_bytes().splitlines()) == 2
    assert Spent(path, begun=True).epsilon(1e-3) == spent.epsilon(1e-3)


def test_a_record_of_which_only_the_beginning_fits_is_not_written(
    tmp_path: Path, only_this_many_bytes: Callable[[int], None]
) -> None:
    record = RoundRecord(tmp_path / "cohorts.csv", "clients")
    record.keep()
    record.add(1, "a b c")
    only_this_many_bytes(record.path.stat().st_size + 3)
    with pytest.raises(OSError, match="File too large"):
        record.add(2, "a b c")
    only_this_many_bytes(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    record.add(2, "a b c")
    assert [line[0] for line in record.lines().values()] == ["a b c", "a b c"]


@pytest.mark.parametrize("damage", ["gone", "[]\n", '{"release": "x"}\n', "\0\n[]\n"])
def test_a_ledger_that_cannot_be_read_is_damaged(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    if damage != "gone":
        path.write_text(damage)
    with pytest.raises(HoldfastError, match=r"put (it|the file) back") as stopped:
        Spent(path, begun=True)
    assert stopped.value.exit_code == DAMAGED


@pytest.mark.parametrize("damage", ["a digit", "a line", "the first line"])
def test_a_ledger_that_was_changed_is_damaged(damage: str, tmp_path: Path) -> None:
    budget, path = DP(epsilon=3.0, delta=1e-3, clip=1.0), tmp_path / "privacy.jsonl"
    spent = Spent(path, begun=False)
    for release in ("one", "two", "three"):
        spent.charge(release, [(0.1, 11)], 2.0, budget)
    lines = path.read_text().splitlines(keepends=True)
    if damage == "a digit":  # of the last line, behind which there is none that tells
        lines[2] = lines[2].replace("[[0.1, 11]]", "[[0.1, 10]]")
    else:
        del lines[1 if damage == "a line" else 0]
    assert Spent(path, begun=True).epsilon(1e-3) == spent.epsilon(1e-3)
    path.write_text("".join(lines))
    with pytest.raises(HoldfastError, match=r"line \d is damaged; put the file back") as stopped:
        Spent(path, begun=True)
    assert stopped.value.exit_code == DAMAGED
