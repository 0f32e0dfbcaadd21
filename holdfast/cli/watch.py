"""``holdfast watch``, and ``holdfast run --watch``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import RECORD_FILES
from holdfast.report.live import open_view
from holdfast.report.serving import LiveServer


def watch_runs(folders: Sequence[Path], runs_dir: Path, port: int) -> None:
    """``holdfast watch``: until Ctrl-C."""
    with live_page(folders or [_newest(runs_dir)], Console(), port), suppress(KeyboardInterrupt):
        print("Ctrl-C ends this page; the run goes on without it", flush=True)
        threading.Event().wait()


@contextmanager
def live_page(folders: Sequence[Path], console: Console, port: int = 0) -> Iterator[None]:
    """Serves a page that follows ``folders``, and says where."""
    server = LiveServer(open_view(folders), port)
    console.print(Text.assemble("live page: ", (server.url, "bold")), soft_wrap=True)
    try:
        yield
    finally:
        server.close()


def _newest(runs_dir: Path) -> Path:
    """The run that was begun last."""
    runs = [path.parent for path in runs_dir.glob(f"*/{RECORD_FILES[0]}")]
    begun = [run for run in runs if (run / "environment.json").is_file()]
    if not begun:
        raise HoldfastError(f"no run in {runs_dir}: name a run directory, such as {runs_dir}/digits-ring")
    return max(begun, key=lambda run: (run / "environment.json").stat().st_mtime)
