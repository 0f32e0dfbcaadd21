"""``holdfast watch``, and the page that ``holdfast run --watch`` serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from rich.console import Console


def watch(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run directories, or one rehearsal of a federation."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the page, on 127.0.0.1; 0 is a free one.")
    ] = 0,
    runs_dir: Annotated[
        Path, typer.Option(help="Where the newest run is looked for, if none is named.")
    ] = Path("runs"),
) -> None:
    """Follow a run in the browser: curves, table, network, partition and log, as they grow.

    Prints the address of a page that only this machine can open. The run itself is not touched: it may have
    been started elsewhere, be resumed, or have ended.
    """
    from rich.console import Console

    with live_page(folders or [_newest(runs_dir)], Console(), port), suppress(KeyboardInterrupt):
        print("Ctrl-C ends this page; the run continues without it", flush=True)
        threading.Event().wait()


@contextmanager
def live_page(folders: Sequence[Path], console: Console, port: int = 0) -> Iterator[None]:
    """Serves a page that follows ``folders``, and says where."""
    from rich.text import Text

    from holdfast.report.live import LiveServer, open_view

    server = LiveServer(open_view(folders), port)
    console.print(Text.assemble("live page: ", (server.url, "bold")), soft_wrap=True)
    try:
        yield
    finally:
        server.close()


def _newest(runs_dir: Path) -> Path:
    """The run that was begun last."""
    from holdfast.experiments.record import RECORD_FILES

    runs = [path.parent for path in runs_dir.glob(f"*/{RECORD_FILES[0]}")]
    begun = [run for run in runs if (run / "environment.json").is_file()]
    if not begun:
        raise HoldfastError(f"no run in {runs_dir}: name a run directory, such as {runs_dir}/digits-ring")
    return max(begun, key=lambda run: (run / "environment.json").stat().st_mtime)
