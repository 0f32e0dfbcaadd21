"""``holdfast node`` and ``holdfast server``."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.files import private_files
from holdfast.engines.deploy.member.base import Member, Stopped
from holdfast.engines.deploy.member.hub import Hub
from holdfast.engines.deploy.member.node import Node
from holdfast.engines.deploy.ops.events import Events, describe, json_lines
from holdfast.engines.deploy.wire.credentials import Credentials, load_credentials
from holdfast.engines.deploy.wire.handshakes import watch_handshakes
from holdfast.engines.deploy.wire.listening import is_loopback, require_loopback
from holdfast.experiments.federation import FederationFile, read_federation
from holdfast.experiments.sites import initial_model, open_site, read_data
from holdfast.report.format import bytes_text

Log = Literal["progress", "json"]

STOPPING = (signal.SIGINT, signal.SIGTERM)


@private_files()
def run_node(
    path: Path,
    name: str,
    data: Path,
    *,
    model: str | None,
    folder: Path | None,
    certs: Path | None,
    listen: str | None,
    device: str,
    insecure: bool,
    log: Log,
    monitor: int | None,
) -> None:
    """``holdfast node``"""
    federation = read_federation(path, model)
    if name not in federation.names:
        raise unknown("node in the federation", name, federation.names)
    credentials = _credentials(federation, path, certs, name, listen, insecure=insecure)
    site = open_site(federation, name, read_data(data), device)
    events = Events(name, json_lines)
    with ExitStack() as stack:
        stack.enter_context(watch_handshakes(events))
        node = Node(
            federation,
            name,
            folder or path.parent / f"node-{name}",
            site,
            credentials=credentials,
            events=events,
        )
        stack.enter_context(node)
        if federation.server is None:
            node.listen(listen or _bind(federation.member(name).address))
        _run(node, stack, log, monitor)
        _summary(node, log)


@private_files()
def run_server(
    path: Path,
    name: str,
    *,
    model: str | None,
    folder: Path | None,
    certs: Path | None,
    listen: str | None,
    insecure: bool,
    log: Log,
    monitor: int | None,
) -> None:
    """``holdfast server``"""
    federation = read_federation(path, model)
    if federation.server is None:
        raise HoldfastError(f"{path} has no [server]: its nodes talk to one another directly")
    if name != federation.server.name:
        raise unknown("server in the federation", name, [federation.server.name])
    credentials = _credentials(federation, path, certs, name, listen, insecure=insecure)
    events = Events(name, json_lines)
    with ExitStack() as stack:
        stack.enter_context(watch_handshakes(events))
        hub = Hub(
            federation,
            folder or path.parent / f"server-{name}",
            initial_model(federation),
            credentials=credentials,
            events=events,
        )
        stack.enter_context(hub)
        hub.listen(listen or _bind(federation.server.address))
        _run(hub, stack, log, monitor)
        _summary(hub, log)


def _run(member: Node | Hub, stack: ExitStack, log: Log, monitor: int | None) -> None:
    """To the end, watched; a signal stops it wherever it is, since every instant is safe to stop at."""
    if monitor is not None:
        from holdfast.engines.deploy.ops.monitor import serve_monitor

        server = serve_monitor(member.status, monitor)
        stack.callback(server.shutdown)
    if log == "progress":
        view = stack.enter_context(ProgressView(member))
        member.events.write = view.show
    if isinstance(member, Node) and member.site.warning:
        member.events.log("problem", "warning", reason=member.site.warning)
    own = member.federation.own_model
    if own is not None:
        member.events.log("own model", model=own.spec, file=str(own.file), sha256=own.sha256)

    def ask(number: int, frame: FrameType | None) -> None:
        for another in STOPPING:  # ends the process at once, which is safe, too
            signal.signal(another, signal.SIG_DFL)
        raise Stopped

    for number in STOPPING:
        signal.signal(number, ask)
    try:
        member.run()
    except Stopped:
        member.events.log("stopped", round=member.done)
        stack.close()
        print("stopped, all is saved; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except HoldfastError as error:
        member.events.log("stopping", "error", reason=str(error))
        raise


def _credentials(
    federation: FederationFile,
    path: Path,
    certs: Path | None,
    name: str,
    listen: str | None,
    *,
    insecure: bool,
) -> Credentials | None:
    if insecure:
        require_loopback(federation, listen)
        return None
    return load_credentials(certs or path.parent / "certs", name)


def _bind(address: str) -> str:
    """Loopback addresses as they are; otherwise all interfaces, as our own may have another name inside."""
    return address if is_loopback(address) else f"[::]:{address.rpartition(':')[2]}"


def _summary(member: Member, log: Log) -> None:
    if log == "json":
        return
    status, console = member.status(), Console()
    sent, received = (bytes_text(status[f"wire_bytes_{way}"]) for way in ("sent", "received"))
    console.print(f"finished {status['rounds']} rounds; waited {status['waiting_seconds']:.1f} s for others")
    console.print(f"sent {bytes_text(status['payload_bytes'])} of messages ({sent} out, {received} in)")
    for key, value in member.metrics.items():
        console.print(f"{key.replace('_', ' ')}: {value:.4f}")
    console.print(f"model and report: {member.folder}", soft_wrap=True, markup=False)


class ProgressView:
    """A bar over the rounds, with what the member is doing; log lines above it."""

    def __init__(self, member: Member) -> None:
        self.member, self.console = member, Console()
        self.bar = Progress(
            TextColumn("{task.description}", markup=False, style="bold"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds, left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
            console=self.console,
        )
        self.task = self.bar.add_task(member.name, total=member.federation.rounds, phase="starting")
        self.live = Live(
            console=self.console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def _render(self) -> Progress:
        self.bar.update(self.task, completed=self.member.done, phase=self.member.status()["phase"])
        return self.bar

    def show(self, entry: dict[str, Any]) -> None:
        if entry["event"] != "round done":
            self.console.print(describe(entry), markup=False, highlight=False)

    def __enter__(self) -> ProgressView:
        self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.__exit__(*error)
