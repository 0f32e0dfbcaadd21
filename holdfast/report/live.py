"""The page that follows runs: the report's own parts, refreshed as rows come in, and its server."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import RECORD_FILES, RunRecord, read_record
from holdfast.report.following import Following, LogLine
from holdfast.report.page_data import page_html, policy, setting_data
from holdfast.report.sections import (
    Member,
    curves_note,
    listed,
    members_table,
    recorded_members,
    results_table,
    setting_facts,
    subtitles,
)
from holdfast.report.verdict import differences, job_troubles, verdict


class LiveView:
    """What ``/`` and ``/data`` of a live page answer."""

    def __init__(
        self,
        following: Following,
        members: Callable[[Sequence[RunRecord]], Sequence[Member]] = recorded_members,
        network: dict[str, Any] | None = None,
        log: Callable[[], Sequence[LogLine]] = tuple,
        name: str = "",
    ) -> None:
        """``members`` of a federation, given those with records; its ``network``, ``log`` and ``name``."""
        self.following, self.members_of, self.network = following, members, network
        self.own_log, self.name = log, name

    def page(self) -> str:
        """The whole page as it is now."""
        with self.following.lock:
            self.following.refresh()
            parts, progress = self._parts(), self._progress()
            news = self.following.news("")
            data = self._about() | {
                "since": news["since"],
                "rows": news["rows"],
                "settings": self._settings(),
                "progress": progress,
                "log": self._log(),
            }
            shown = self.following.shown
        facts = [f"{setting_facts(record)}{_setting(i)}" for i, record in enumerate(shown)]
        if self.network is not None:
            facts = [_setting(0)]
        body = f"""<header>
<h1>{escape(progress["title"])}</h1>
{subtitles(shown)}
<p class="progress" id="progress" data-status="{escape(progress["status"])}">{escape(progress["text"])}</p>
<p class="trouble" id="lost" hidden>Nobody answers any more: the command that served this page has ended. \
What is shown stays; the run's own report.html has the rest.</p>
<noscript><p class="trouble">This page is drawn by its script. Without it there is the table; load the page \
again for newer figures.</p></noscript>
<div id="said">{parts["said"]}</div>
</header>
<main>
<div id="members">{parts["members"]}</div>
<div id="results">{parts["results"]}</div>
<h2>Curves</h2>
<div id="note">{parts["note"]}</div>
<div id="curves"></div>
<h2>{"Network" if self.network else "Network and data"}</h2>
{"".join(facts)}
<h2>Log</h2>
<ol class="log" id="log" tabindex="0" aria-label="Log"></ol>
</main>
<footer>Served by holdfast on this machine only. Nothing can be changed from here.</footer>
"""
        return page_html(progress["title"], body, data, live=True)

    def news(self, since: str) -> dict[str, Any]:
        """What is new since then; see ``Following.news``."""
        with self.following.lock:
            self.following.refresh()
            news = self.following.news(since)
            changed = news.pop("changed") or bool(self.members)  # their activity is in no file
            return news | {
                "about": self._about() if changed else {},
                "parts": self._parts() if changed else {},
                "progress": self._progress(),
                "log": self._log() if changed else None,
            }

    def _progress(self) -> dict[str, Any]:
        progress = self.following.progress()
        return progress | {"title": self.name} if self.name else progress

    def _log(self) -> Sequence[LogLine]:
        return self.own_log() or self.following.log

    @property
    def members(self) -> Sequence[Member]:
        return self.members_of(self.following.shown)

    def _about(self) -> dict[str, Any]:
        about = self.following.about()
        if self.network is not None:
            about["node_figures"] = _member_figures(self.network["names"], self.members)
        return about

    def _settings(self) -> list[dict[str, Any] | None]:
        if self.network is not None:
            return [self.network]
        return [setting_data(record) for record in self.following.shown]

    def _parts(self) -> dict[str, str]:
        """Markup by the id of the element that it goes into."""
        shown, members = self.following.shown, self.members
        warnings = [self.following.trouble] if self.following.trouble else []
        if shown:
            warnings += [*differences(shown), *(one for record in shown for one in job_troubles(record))]
        compares = bool(shown) and all(record.member is None for record in shown)
        sentence = f'<p class="verdict">{escape(verdict(shown))}</p>' if compares else ""
        return {
            "said": sentence + listed(warnings),
            "members": f"<h2>Members</h2>{members_table(members)}" if members else "",
            "results": f"<h2>Results</h2>{results_table(shown)}" if shown else "",
            "note": f'<p class="note">{escape(curves_note(shown))}</p>',
        }


def _setting(order: int) -> str:
    return f'<div class="figures setting" id="setting{order}"></div>'


def _member_figures(names: Sequence[str], members: Sequence[Member]) -> list[dict[str, Any]]:
    """What colours the nodes of a federation."""
    known = {member.name: member for member in members}
    figures = (("rounds done", "count", "round"), ("time spent on exchanges", "seconds", "waiting_seconds"))
    return [
        {
            "record": 0,
            "title": title,
            "kind": kind,
            "values": [getattr(known[name], key) if name in known else None for name in names],
        }
        for title, kind, key in figures
    ]


# --- which live view a folder gets: runs, tunings, members of federations ------------


def open_view(folders: Sequence[Path]) -> LiveView:
    """The view of runs, tunings and members, or of one folder that an installed package knows how to show.

    The package names a file in the entry point group ``holdfast.views``, and shows folders with that file.
    """
    if len(folders) == 1:
        for point in entry_points(group="holdfast.views"):
            if (folders[0] / point.name).is_file():
                view: LiveView = point.load()(folders[0])
                return view
    for folder in folders:
        if not (folder / "tuning.json").is_file():
            read_record(folder)
    return LiveView(Following(lambda: [run for folder in folders for run in _runs_in(folder)]))


def _runs_in(folder: Path) -> list[Path]:
    if not (folder / "tuning.json").is_file():
        return [folder]
    return [run for run in sorted(folder.glob("grid-*")) if is_run(run)]


def is_run(folder: Path) -> bool:
    """Whether a run, or a member of a federation, keeps its record in ``folder``."""
    return all((folder / name).is_file() for name in RECORD_FILES)


# --- the page's server ----------------------------------------------------------------------------------
#
# It serves this machine only, is read-only, and has an address that cannot be guessed. There is one page and
# its data. No path leads to a file. The name that a browser asked for has to be that of this machine, so that
# no other site can have its name point here and read along (DNS rebinding).


Answer = tuple[str, bytes]  # type and content
LOCAL = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def is_local(host: str | None) -> bool:
    """Whether the ``Host`` of a request is this machine; any port, as it may come through a tunnel."""
    name = (host or "").strip().lower()
    return (name if name.endswith("]") else name.rpartition(":")[0] or name) in LOCAL


def answers(view: LiveView, root: str = "/") -> dict[str, Callable[[str], Answer]]:
    """What is answered under which path, given the query."""

    def page(_: str) -> Answer:
        return "text/html; charset=utf-8", view.page().encode()

    def data(query: str) -> Answer:
        since = parse_qs(query).get("since", [""])[0]
        text = json.dumps(view.news(since), separators=(",", ":"), allow_nan=False)
        return "application/json", text.encode()

    return {root: page, f"{root}data": data}


def respond(handler: BaseHTTPRequestHandler, pages: dict[str, Callable[[str], Answer]]) -> None:
    """Answers a GET from ``pages``, or refuses it."""
    asked = urlsplit(handler.path)
    if not is_local(handler.headers.get("Host")):
        return handler.send_error(403, "Not the name of this machine")
    path = asked.path.encode()
    page = next((page for own, page in pages.items() if secrets.compare_digest(own.encode(), path)), None)
    if page is None:
        return handler.send_error(404)
    kind, content = page(asked.query)
    handler.send_response(200)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)
    return None


class LiveServer:
    """A live page at ``url``, served until closed."""

    def __init__(self, view: LiveView, port: int = 0) -> None:
        """``port`` 0: a free one."""
        pages = answers(view, f"/{secrets.token_urlsafe(16)}/")
        served = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 30  # seconds for a request to come in
            server_version, sys_version = "holdfast", ""

            def do_GET(self) -> None:
                served.asked = time.monotonic()
                with suppress(ConnectionError):  # the browser has gone
                    respond(self, pages)
                served.answered += 1

            def log_message(self, format: str, *args: object) -> None:
                pass

        try:
            self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise HoldfastError(
                f"--port {port}: cannot serve on 127.0.0.1 ({error.strerror}); choose another port"
            ) from None
        self.server.daemon_threads = True
        self.asked, self.answered = -60.0, 0
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}{next(iter(pages))}"
        threading.Thread(target=self.server.serve_forever, name="live page", daemon=True).start()

    def close(self, patience: float = 2.5) -> None:
        """Ends; a browser that shows the page gets the chance to ask once more."""
        answered, looked_on = self.answered, time.monotonic() - self.asked < patience
        end = time.monotonic() + patience
        while looked_on and self.answered == answered and time.monotonic() < end:
            time.sleep(0.05)
        self.server.shutdown()
        self.server.server_close()
