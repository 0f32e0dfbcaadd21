"""Who sees progress, and what: a real terminal, a real notebook, and nobody in a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

import holdfast as hf
from holdfast.report.progress import notebook_html

FUNCTIONS = [lambda x: ((x - 1) ** 2).sum(), lambda x: (3 * (x + 1) ** 2).sum()]
SCRIPT = """
import sys
import holdfast as hf
functions = [lambda x: ((x - 1) ** 2).sum(), lambda x: (3 * (x + 1) ** 2).sum()]
for progress in (False, None):
    print("begin", progress, flush=True)
    hf.minimize(functions, [0.0], hf.SCAFFOLD(lr=0.05), 300, progress=progress)
print("end")
"""


def minimize(**options) -> hf.MinimizeResult:
    return hf.minimize(FUNCTIONS, [0.0], hf.SCAFFOLD(lr=0.05), 5, **options)


def test_a_terminal_sees_it_unless_it_is_silenced() -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=follower, stderr=follower, stdin=follower, env=environment
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # how Linux says that nobody writes any more
            break
        if not part:
            break
        seen += part
    os.close(leader)
    assert running.wait() == 0
    silent, shown = seen.decode().split("begin None")
    assert silent.strip() == "begin False"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "SCAFFOLD" in text
    assert "300/300" in text  # what stays: the last figures
    assert text.strip().endswith("end")


def test_a_pipe_sees_nothing_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    minimize()
    assert capfd.readouterr() == ("", "")
    minimize(progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "SCAFFOLD" in err


def test_it_is_not_shown_twice(capfd: pytest.CaptureFixture[str]) -> None:
    minimize(progress=True, callbacks=[hf.Progress(console=Console(file=io.StringIO()))])
    assert capfd.readouterr() == ("", "")


def test_what_progress_may_be() -> None:
    with pytest.raises(hf.HoldfastError, match="progress: should be a valid boolean, got 'yes'"):
        minimize(progress="yes")


def test_markup_of_users_is_text_in_a_notebook() -> None:
    progress = hf.Progress(console=Console(file=io.StringIO()))
    hf.minimize(FUNCTIONS, [0.0], hf.SCAFFOLD(lr=0.05), 5, callbacks=[progress])
    [job] = progress.jobs
    progress.latest[hf.experiments.callbacks.JobInfo("x", "<b>[red]", 5)] = progress.latest[job]
    progress.jobs = list(progress.latest)
    html = notebook_html(progress._figures())
    assert "&lt;b&gt;[red]" in html
    assert html.startswith("<pre")


@pytest.mark.slow
def test_a_notebook_sees_it() -> None:
    """A real kernel: one output that is replaced, and no word on standard error."""
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cell = nbformat.v4.new_code_cell(SCRIPT)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert "".join(o.text for o in outputs if o.output_type == "stream") == "begin False\nbegin None\nend\n"
    [shown] = [o.data["text/html"] for o in outputs if o.output_type == "display_data"]
    assert "SCAFFOLD" in shown
    assert "300/300" in shown
