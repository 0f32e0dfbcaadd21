"""The report of a run: one HTML file that fetches nothing, and plots.

Its script draws curves that can be explored. Without the script the report has the same curves as pictures.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast.experiments.record import RunRecord, overlaid
from holdfast.experiments.record_files import short
from holdfast.experiments.tuning import Tuned
from holdfast.report.figures import FAINT, GRID, INK, save_figure, svg_text
from holdfast.report.page_data import curves_data, page_html, rows_data, setting_data, thinning
from holdfast.report.sections import curves_note, listed, results_table, setting_facts, subtitles
from holdfast.report.setting_figures import Plot, curve_plots, setting_plots
from holdfast.report.styles import COLOURS
from holdfast.report.tuning import sweep_data, swept, tuning_figure
from holdfast.report.verdict import differences, troubles, verdict

MOST_ROWS = 2000  # of a job that the page holds


def write_report(records: Sequence[RunRecord], target: Path, plots: Path | None = None) -> None:
    """Writes the report of one run, or of several overlaid, to the file ``target``.

    The pictures of one run are also written into the folder ``plots``, as PNG and SVG.
    """
    with _writing_plots(plots):
        text = report_html(records, plots)
    try:
        write_atomic(target, text.encode())
    except OSError as error:
        raise HoldfastError(f"cannot write the report {target}: {error.strerror}") from None


def write_plots(record: RunRecord, folder: Path) -> None:
    """Writes every picture of a run into ``folder``, as PNG and SVG."""
    with _writing_plots(folder):
        for plot in [*curve_plots([record]), *setting_plots(record)]:
            save_figure(plot.figure, folder / plot.stem)


@contextmanager
def _writing_plots(folder: Path | None) -> Iterator[None]:
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise HoldfastError(f"cannot write the plots into {folder}: {error.strerror}") from None


def report_html(records: Sequence[RunRecord], plots: Path | None = None) -> str:
    """The report as a text; the pictures of one run are also written into the folder ``plots``."""
    shown = overlaid(records)
    title = " and ".join(dict.fromkeys(record.name for record in shown))
    figures = "\n".join(_figure(plot, f"curve{i}", plots) for i, plot in enumerate(curve_plots(shown)))
    sweeps = swept(shown)
    data = curves_data(shown) | {
        "rows": rows_data(shown, MOST_ROWS),
        "sweeps": [sweep_data(tuned) for tuned in sweeps],
        "settings": [setting_data(record) for record in shown],
    }
    body = f"""<header>
<h1>{escape(title)}</h1>
{subtitles(shown)}
<p class="verdict">{escape(verdict(shown))}</p>
{listed([*differences(shown), *(one for record in shown for one in troubles(record))])}
</header>
<main>
<h2>Results</h2>
{results_table(shown)}
<h2>Curves</h2>
<p class="note">{escape(curves_note(shown))}{_thinned(shown)}</p>
<div id="curves"></div>
<div class="figures static">
{figures}
</div>
{"".join(_sweep(tuned, i) for i, tuned in enumerate(sweeps))}
<h2>Network and data</h2>
{"".join(_setting(record, i, plots) for i, record in enumerate(shown))}
<h2>Reproduce</h2>
{_reproduce(shown)}
</main>
<footer>Written by holdfast. This file is complete in itself: it can be mailed, archived and printed.</footer>
"""
    return page_html(f"{title}: holdfast report", body, data)


def _thinned(records: Sequence[RunRecord]) -> str:
    every = max(thinning(record, MOST_ROWS) for record in records)
    return (
        f" Of very long curves one measurement in {every} is drawn; metrics.csv has all." if every > 1 else ""
    )


def _sweep(tuned: Tuned, order: int) -> str:
    """The final metric against a hyperparameter, and a warning where the best value lies at an edge."""
    caption = "A star marks the best value of each line; crosses diverged or failed."
    plot = Plot(f"sweep{order}", caption, tuning_figure(tuned))
    return f"""<h2>Sweep over {escape(tuned.goal.parameter)}</h2>
<div id="sweep{order}"></div>
<div class="figures static">{_figure(plot, f"sweep-{order}")}</div>
{listed(tuned.caveats)}
"""


def _figure(plot: Plot, name: str, plots: Path | None = None) -> str:
    """A picture inside the page: ids made unique, and our own greys left to the page's colours."""
    svg = svg_text(plot.figure) if plots is None else save_figure(plot.figure, plots / plot.stem)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    root, rest = svg.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', root)
    assert view is not None
    rest = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", rest)
    variables = ((INK, "--ink"), (FAINT, "--faint"), (GRID, "--grid"))
    for colour, variable in (*variables, *((colour, f"--c{i}") for i, colour in enumerate(COLOURS))):
        rest = rest.replace(colour, f"var({variable})")
    label = escape(plot.caption)
    picture = f'<svg {view[0]} role="img" aria-label="{label}">{rest}'
    return f"<figure>{picture}<figcaption>{label}</figcaption></figure>"


def _setting(record: RunRecord, order: int, plots: Path | None) -> str:
    """Facts and pictures of network and partition."""
    figures = "".join(_figure(plot, f"run{order}-{plot.stem}", plots) for plot in setting_plots(record))
    return f"""{setting_facts(record)}
<div class="figures setting" id="setting{order}"></div>
<div class="figures setting static">{figures}</div>"""


def _reproduce(records: Sequence[RunRecord]) -> str:
    """The command, the experiment it runs and the machine it ran on."""
    deployed = [record.member for record in records if record.member is not None]
    here = f"<p>Deployed: {escape(', '.join(deployed))}. The federation file and the members' own data give "
    here += "the same figures, wall times aside.</p>"
    parts = []
    for record in (record for record in records if record.member is None):
        file = "setting.toml" if record.origin else "experiment.toml"
        parts.append(
            f"""{_command(record)}
<details><summary>{escape(record.prefix)}{file}</summary><pre>{escape(record.config_text)}</pre></details>
<details><summary>{escape(record.prefix)}environment</summary><table>{_environment(record)}</table></details>"""
        )
    files = any(record.member is None and not record.origin for record in records)
    where = "Run this in the folder that holds the run's directory. " if files else ""
    run = f"""<p>{where}Same seeds, versions and machine give
the same figures, wall times aside.</p>
{"".join(parts)}"""
    return (run if parts else "") + (here if deployed else "")


def _command(record: RunRecord) -> str:
    """The versions and the machine of the run."""
    if record.origin:
        return f"<p>Made in Python by <code>{escape(record.origin)}</code>; its arguments, in words:</p>"
    file = shlex.quote(f"{record.path.resolve().name}/experiment.toml")
    return f"<pre>holdfast run {escape(file)}</pre>"


def _environment(record: RunRecord) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(str(key))}</th><td class="words">{escape(short(value))}</td></tr>'
        for key, value in record.environment.items()
    )
