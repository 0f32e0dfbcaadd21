"""What a run leaves to look at: a report in one HTML file, with no script and nothing fetched, and plots."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast.experiments.record import RunRecord, overlaid
from holdfast.experiments.record_files import short
from holdfast.report.figures import FAINT, GRID, INK, save_figure, svg_text
from holdfast.report.format import number_text
from holdfast.report.html_table import results_table
from holdfast.report.plots import Plot, curve_plots, curves_note, setting_plots
from holdfast.report.style import CSS
from holdfast.report.verdict import differences, troubles, verdict

FACTS = {
    "nodes": "nodes",
    "directed_links": "directed links",
    "mixing_parameter": "mixing parameter p",
    "spectral_lambda": "spectral λ",
    "dimension": "model parameters",
    "samples": "training samples",
    "min_samples_per_node": "fewest per node",
    "max_samples_per_node": "most per node",
    "unused_samples": "unused samples",
    "test_samples": "test samples",
}


def write_report(records: Sequence[RunRecord], target: Path) -> None:
    """Writes the report of one run, or of several overlaid, to the file ``target``."""
    text = report_html(records)
    try:
        write_atomic(target, text.encode())
    except OSError as error:
        raise HoldfastError(f"cannot write the report {target}: {error.strerror}") from None


def write_plots(record: RunRecord, folder: Path) -> None:
    """Writes every picture of a run into ``folder``, as PNG and SVG."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot in [*curve_plots([record]), *setting_plots(record)]:
            save_figure(plot.figure, folder / plot.stem)
    except OSError as error:
        raise HoldfastError(f"cannot write the plots into {folder}: {error.strerror}") from None


def report_html(records: Sequence[RunRecord]) -> str:
    """The report as a text."""
    shown = overlaid(records)
    title = " and ".join(dict.fromkeys(record.name for record in shown))
    figures = "\n".join(_figure(plot, f"curve{i}") for i, plot in enumerate(curve_plots(shown)))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: holdfast report</title>
<style>{CSS}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{"".join(f'<p class="subtitle">{escape(record.prefix + _subtitle(record))}</p>' for record in shown)}
<p class="verdict">{escape(verdict(shown))}</p>
{_troubles(shown)}
</header>
<main>
<h2>Results</h2>
{results_table(shown)}
<h2>Curves</h2>
<p class="note">{escape(curves_note(shown))}</p>
<div class="figures">
{figures}
</div>
<h2>Network and data</h2>
{"".join(_setting(record, f"run{i}") for i, record in enumerate(shown))}
<h2>Reproduce</h2>
{_reproduce(shown)}
</main>
<footer>Written by holdfast. This file is complete in itself: it can be mailed, archived and printed.</footer>
</body>
</html>
"""


def _subtitle(record: RunRecord) -> str:
    """The experiment in one line."""

    def named(section: str, key: str, words: str) -> list[str]:
        value = record.config.get(section, {}).get(key)
        return [] if value is None else [words.format(_value(value))]

    parts = [
        *named("problem", "dataset", "{}"),
        *named("problem", "partition", "{} partition"),
        *named("problem", "model", "{} model"),
        *named("problem", "nodes", "{} nodes"),
        *named("network", "topology", "{} topology"),
    ]
    return " · ".join(parts)


def _value(value: Any) -> str:
    return " | ".join(map(short, value)) if isinstance(value, list) else short(value)


def _troubles(records: Sequence[RunRecord]) -> str:
    found = [*differences(records), *(trouble for record in records for trouble in troubles(record))]
    return f'<ul class="trouble">{"".join(f"<li>{escape(one)}</li>" for one in found)}</ul>' if found else ""


def _figure(plot: Plot, name: str) -> str:
    """A picture inside the page: ids made unique, and our own greys left to the page's colours."""
    svg = svg_text(plot.figure)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    root, rest = svg.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', root)
    assert view is not None
    rest = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", rest)
    for colour, variable in ((INK, "--ink"), (FAINT, "--faint"), (GRID, "--grid")):
        rest = rest.replace(colour, f"var({variable})")
    label = escape(plot.caption)
    picture = f'<svg {view[0]} role="img" aria-label="{label}">{rest}'
    return f"<figure>{picture}<figcaption>{label}</figcaption></figure>"


def _setting(record: RunRecord, run: str) -> str:
    """Facts and pictures of network and partition."""
    facts = record.summary["facts"]
    names = {key: FACTS.get(key, key.replace("_", " ")) for key in sorted(facts, key=_place)}
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_fact(facts[key]))}</dd></div>"
        for key, name in names.items()
    )
    figures = "".join(_figure(plot, f"{run}-{plot.stem}") for plot in setting_plots(record))
    heading = f"<h3>{escape(record.prefix.removesuffix(': '))}</h3>" if record.prefix else ""
    return f"""{heading}<dl class="facts">{tiles}</dl>
<p class="note">{escape(_setting_note(record))}</p>
<div class="figures setting">{figures}</div>"""


def _setting_note(record: RunRecord) -> str:
    """What p means, and, where there are several networks and partitions, which one is shown."""
    if record.member is not None:
        return f"As {record.member} sees it, one of the federation's members: it knows its own data only."
    words = ["One exchange leaves at most the fraction 1 − p = λ² of the nodes' squared disagreement."]
    jobs = record.summary["jobs"]
    swept = [axis for axis in record.axes if axis.split(".")[0] in ("problem", "network")]
    if len({job["seed"] for job in jobs}) > 1 or swept:
        first = [
            f"seed {jobs[0]['seed']}",
            *(f"{axis}={short(jobs[0]['axes'].get(axis))}" for axis in swept),
        ]
        words.append(f"Each seed draws its own network and partition; shown: {', '.join(first)}.")
    return " ".join(words)


def _place(fact: str) -> int:
    """Known facts first, in our order."""
    return list(FACTS).index(fact) if fact in FACTS else len(FACTS)


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return number_text(value)
    return f"{value:,}" if isinstance(value, int) else short(value)


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
    """What made the run."""
    if record.origin:
        return f"<p>Made in Python by <code>{escape(record.origin)}</code>; its arguments, in words:</p>"
    file = shlex.quote(f"{record.path.resolve().name}/experiment.toml")
    return f"<pre>holdfast run {escape(file)}</pre>"


def _environment(record: RunRecord) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(str(key))}</th><td class="words">{escape(short(value))}</td></tr>'
        for key, value in record.environment.items()
    )
