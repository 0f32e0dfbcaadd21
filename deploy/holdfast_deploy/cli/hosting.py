"""A member as a process: its log, its signals, its page, and the bar that shows how far it is."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.core.errors import MISCONFIGURED, HoldfastError
from holdfast.problem.problem import on_threads, step_threads
from holdfast.report.format import bytes_text
from holdfast.report.live import answers, is_local, respond
from holdfast_deploy.cli.options import Log
from holdfast_deploy.federation_file import FederationFile
from holdfast_deploy.member.lifetime import run_through_rosters
from holdfast_deploy.member.network import Hosting
from holdfast_deploy.member.node import Node
from holdfast_deploy.member.session import Session
from holdfast_deploy.member.status import blank_status
from holdfast_deploy.member.waiting import Stopped
from holdfast_deploy.ops.events import Events, describe, json_lines, nothing_but_entries
from holdfast_deploy.ops.monitor import serve_monitor
from holdfast_deploy.storage.disk_full import explained
from holdfast_deploy.views import member_view
from holdfast_deploy.wire.credentials import Credentials, load_credentials
from holdfast_deploy.wire.listener import bind_address, is_loopback, require_loopback

Status = Callable[[], dict[str, Any]]

STOPPING = (signal.SIGINT, signal.SIGTERM)


def member_credentials(
    federation: FederationFile, name: str, certs: Path | None, listen: str | None
) -> Credentials | None:
    """The certificate of the member ``name`` in ``certs``; without any, it talks to its own machine only."""
    if certs is None:
        require_loopback(federation, listen)
        return None
    return load_credentials(certs, name, federation.coordinator)


@contextmanager
def member_log(name: str, log: Log) -> Iterator[Events]:
    """The member's log. As JSON lines it holds all that is said, also the error that ends the command."""
    events = Events(name, json_lines)
    if log != "json":
        yield events
        return
    with nothing_but_entries(events):
        try:
            yield events
        except (HoldfastError, OSError, MemoryError) as error:
            code = getattr(error, "exit_code", MISCONFIGURED)
            events.log("stopping", "error", reason=str(error) or "out of memory", exit_code=code)
            sys.exit(code)
        except Exception as error:  # of the site's own code, or ours: still one line
            reason, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
            events.log("crashed", "error", reason=reason, traceback=trace, exit_code=1)
            sys.exit(1)


def host(
    federation: FederationFile,
    name: str,
    folder: Path,
    credentials: Credentials | None,
    events: Events,
    make: Callable[[Any, Hosting], Session],
    *,
    listen: str | None,
    log: Log,
    monitor: str | None,
) -> None:
    """Runs the member that ``make`` makes to the end, through all rosters.

    A signal stops it, since every instant is safe to stop at. ``monitor``: a port, or host:port.
    """
    where = None
    if federation.listens(name):
        named = [member.address for member in federation.members if member.name == name]
        where = listen or (bind_address(named[0]) if named else None) or None
    for number in STOPPING:
        signal.signal(number, _stop)
    with ExitStack() as stack:
        watched = Watched(partial(blank_status, federation, name))
        if monitor is not None:
            stack.enter_context(monitor_page(folder, watched, federation.shared_metrics, monitor))
        try:
            run_through_rosters(
                federation,
                name,
                folder,
                credentials,
                events,
                make,
                lambda member: _run_member(member, watched, events, where, progress=log == "progress"),
                listen=where,
                outside=watched.of,
            )
        except Stopped:
            if log == "progress":
                print("stopped, all is saved; the same command continues from here", file=sys.stderr)
            sys.exit(130)
        except (HoldfastError, OSError) as problem:
            error = explained(problem) if isinstance(problem, OSError) else problem
            if log == "progress":  # otherwise ``member_log`` says so
                events.log("stopping", "error", reason=str(error))
            raise error from None


class Watched:
    """The status of whatever this process is at: a member, or one that waits until it takes part."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def of(self, status: Status) -> None:
        """From here on, ``status`` tells it."""
        self.status = status

    def __call__(self) -> dict[str, Any]:
        return self.status()


def _run_member(
    member: Session, watched: Watched, events: Events, listen: str | None, *, progress: bool
) -> None:
    """One roster, watched."""
    watched.of(member.status)
    with ExitStack() as stack:
        member.open(listen)
        if progress:
            events.write = stack.enter_context(ProgressView(member)).show
        if isinstance(member.program, Node):
            site = member.program.site
            stack.enter_context(on_threads(step_threads(site.problem)))
            if site.warning:
                events.log("problem", "warning", reason=site.warning)
        own = member.federation.own_model
        if own is not None:
            events.log("own model", model=own.spec, file=str(own.file), sha256=own.sha256)
        try:
            member.run()
        except Stopped:
            events.log("stopped", round=member.done)
            raise
        if progress:
            _summary(member)


@contextmanager
def monitor_page(
    folder: Path, status: Status, shared: Sequence[str], where: str | int
) -> Iterator[ThreadingHTTPServer]:
    """A member's live page, its health and metrics for Prometheus on a port, or on host:port.

    ``folder``: the member's. ``shared``: the metrics that may be shown.
    """
    pages = answers(member_view(folder, status, shared))
    host, _, port = str(where).rpartition(":")
    host = host or "127.0.0.1"
    inside = is_loopback(f"{host}:{port}")  # otherwise the page is for other machines, too, under any name
    own = is_local if inside else lambda _: True
    server = serve_monitor(status, int(port), lambda handler: respond(handler, pages), host, own)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def _stop(number: int, frame: FrameType | None) -> None:
    for another in STOPPING:  # ends the process at once, which is safe, too
        signal.signal(another, signal.SIG_DFL)
    raise Stopped


def _summary(member: Session) -> None:
    status, console = member.status(), Console()
    sent, received = (bytes_text(status[f"wire_bytes_{way}"]) for way in ("sent", "received"))
    console.print(f"finished {status['rounds']} rounds; waited {status['waiting_seconds']:.1f} s for others")
    console.print(f"sent {bytes_text(status['payload_bytes'])} of messages ({sent} out, {received} in)")
    for key, value in member.accounts.metrics.items():
        console.print(f"{key.replace('_', ' ')}: {value:.4f}")
    console.print(f"model and report: {member.folder}", soft_wrap=True, markup=False)


class ProgressView:
    """A bar over the rounds, with what the member is doing; log lines above it."""

    def __init__(self, member: Session) -> None:
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
