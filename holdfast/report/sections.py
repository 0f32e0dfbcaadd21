"""Parts of a page that the report and the live view share, as markup; everything from outside is escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Any

from holdfast.experiments.record import FinalRow, RunRecord, Spread
from holdfast.experiments.record_files import COST_COLUMNS, short
from holdfast.report.format import (
    best_lines,
    bytes_text,
    metric_title,
    number_text,
    recorded_metrics,
    round_text,
    seconds_text,
    spread_text,
)
from holdfast.report.styles import curve_styles

# --- parts of a page that the report and the live view share --------------------------------------------


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


def subtitles(records: Sequence[RunRecord]) -> str:
    """A line on each experiment."""
    lines = [(record.prefix, _subtitle(record)) for record in records]
    return "".join(f'<p class="subtitle">{escape(name + line)}</p>' for name, line in lines if line)


def _subtitle(record: RunRecord) -> str:
    """The experiment in one line."""

    def named(section: str, key: str, words: str) -> list[str]:
        value = record.config.get(section, {}).get(key)
        return [] if value is None else [words.format(_value(value))]

    parts = [
        *(_file(record) or named("problem", "dataset", "{}")),
        *(_owners(record) or named("problem", "partition", "{} partition")),
        *named("problem", "model", "{} model"),
        *named("problem", "nodes", "{} nodes"),
        *named("network", "topology", "{} topology"),
    ]
    return " · ".join(parts)


def _file(record: RunRecord) -> list[str]:
    """The column to predict and its file, for a table; else nothing."""
    dataset = record.config.get("problem", {}).get("dataset")
    if not isinstance(dataset, dict) or not {"file", "target"} <= set(dataset):
        return []
    return [f"{_value(dataset['target'])} in {_value(dataset['file'])}"]


def _owners(record: RunRecord) -> list[str]:
    """How the data were divided, where they name the node of each sample themselves; else nothing."""
    if record.partition is None or record.partition.names is None:
        return []
    dataset = record.config.get("problem", {}).get("dataset")
    column = dataset.get("node") if isinstance(dataset, dict) else None
    return [f"divided by {column}" if column else "divided by the data's own nodes"]


def _value(value: Any) -> str:
    return " | ".join(map(short, value)) if isinstance(value, list) else short(value)


def listed(warnings: Sequence[str]) -> str:
    """Warnings to the reader, as a list that is hard to overlook; "" without any."""
    lines = "".join(f"<li>{escape(one)}</li>" for one in warnings)
    return f'<ul class="trouble">{lines}</ul>' if lines else ""


def curves_note(records: Sequence[RunRecord]) -> str:
    """A note that holds for all curves."""
    groups = [group for record in records for group in record.groups]
    words = ["Every recorded round; the colours are those of the table."]
    if any(len(group.seeds) > 1 for group in groups):
        words.append("Lines are means over seeds, bands reach from the lowest to the highest seed.")
    if any(group.status == "diverged" for group in groups):
        words.append(
            "A diverged curve ends at the last finite round of all its seeds, or leaves the picture."
        )
    return " ".join(words)


def setting_facts(record: RunRecord) -> str:
    """The facts about the network and the data, in figures and in words."""
    facts = record.summary["facts"]
    names = {key: FACTS.get(key, key.replace("_", " ")) for key in sorted(facts, key=_place)}
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_fact(facts[key]))}</dd></div>"
        for key, name in names.items()
    )
    heading = f"<h3>{escape(record.prefix.removesuffix(': '))}</h3>" if record.prefix else ""
    return f"""{heading}<dl class="facts">{tiles}</dl>
<p class="note">{escape(_setting_note(record))}</p>"""


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


# --- what is said where a run had no test data, and so no figures on samples it was not trained on ------


REMEDIES = {  # by data set; those that are not here always have test data, or never
    "csv": "name some with test_file in [problem.dataset]",
    "image-folder": "name some with test_folder in [problem.dataset]",
    "image-folders": "name some with test_folder in [problem.dataset]",
    "npz": "add x_test and y_test to the file",
}


def untested(records: Sequence[RunRecord]) -> str:
    """One sentence with the remedy; empty if there are test data, or if none are to be expected."""
    remedies = list(dict.fromkeys(filter(None, map(_remedy, records))))
    if not remedies:
        return ""
    missing = "There are no test data, so nothing tells how well the models do on new samples"
    return f"{missing}; {' or '.join(remedies)}."


def _remedy(record: RunRecord) -> str | None:
    config, facts = record.config, record.summary["facts"]
    if record.member is not None or facts.get("test_samples") != 0:
        return None
    if config.get("metrics", "default") != "default":  # the user chose them
        return None
    if record.origin is not None:
        return f"give {record.origin} some with test="
    dataset = config.get("problem", {}).get("dataset")
    name = dataset.get("name") if isinstance(dataset, dict) else dataset
    if not isinstance(name, str):
        return None
    if ":" in name:
        return f"{name} can return hf.TrainTest(train, test)"
    return REMEDIES.get(name)


# --- the table of results of the HTML report ------------------------------------------------------------


BEST, OUT = ' class="best"', ' class="out"'


def results_table(records: Sequence[RunRecord]) -> str:
    """One line per algorithm and swept value, best figures bold, and a note on how to read them."""
    rows = [row for record in records for row in record.final_table()]
    columns = [*recorded_metrics(records), "payload_bytes", "gradient_evaluations", "seconds"]
    columns = [column for column in columns if any(column in row.values for row in rows)]
    heads = ["algorithm", "seeds", "round"]
    for column in columns:
        heads.append(metric_title(column))
        if column == "test_accuracy":
            heads.append("best accuracy (%)")
    rivals = any(record.member is None for record in records)  # members of a federation do not compete
    best = {column: best_lines(rows, column) if rivals else set() for column in columns}
    styles = curve_styles(records)
    lines = []
    for line, row in enumerate(rows):
        swatch = f'<span class="swatch" style="background:{styles[row.label].variable}"></span>'
        note = f'<small class="note">{escape(row.note)}</small>' if row.note else ""
        cells = [f'<th scope="row">{swatch}{escape(row.label)}{note}</th>']
        cells += [f"<td>{row.seeds}</td>", f"<td>{round_text(row)}</td>"]
        for column in columns:
            cells.append(_cell(column, row.values.get(column), line in best[column]))
            if column == "test_accuracy":
                cells.append(_cell(column, row.best_accuracy, best=False))
        lines.append(f'<tr data-curve="{line}"{"" if row.status == "done" else OUT}>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "\n".join(lines)
    return f"""<div class="wide"><table class="results" style="--columns:{len(heads)}">
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>
<p class="note">{escape(_note(rows, any(record.member is not None for record in records), rivals))}</p>
{f'<p class="note">{escape(missing)}</p>' if (missing := untested(records)) else ""}"""


def _cell(column: str, spread: Spread | None, best: bool) -> str:
    """The mean, and small below it the deviation; costs hardly vary, so they show the mean alone."""
    if spread is None:
        return "<td>–</td>"
    mean, _, deviation = spread_text(column, spread).partition(" ± ")
    below = f"<small>± {escape(deviation)}</small>" if deviation and column not in COST_COLUMNS else ""
    return f"<td{BEST if best else ''}>{escape(mean)}{below}</td>"


def _note(rows: Sequence[FinalRow], deployed: bool, rivals: bool) -> str:
    words = ["Figures of the last recorded round; the best of each column is bold."]
    if not rivals:
        words = ["Figures of the last recorded round."]
    elif len({row.contest for row in rows}) > 1:
        words[0] = (
            "Figures of the last recorded round; the best of each column, for the same problem, is bold."
        )
    if any(row.seeds > 1 for row in rows):
        words.append(
            "Mean ± sample standard deviation over seeds, at the last round that all of them reached."
        )
    if any(math.isnan(spread.mean) for row in rows for spread in row.values.values()):
        words.append("nan: undefined in that round, for one seed at least.")
    if any(row.best_accuracy for row in rows):
        words.append("Best accuracy: the highest over all recorded rounds, for each seed.")
    if any(row.status == "diverged" for row in rows):
        words.append("Diverged: figures of the last round in which everything was finite.")
    if any(row.status == "failed" for row in rows):
        words.append("Failed: figures of the last round before the error.")
    words.append("Traffic and gradients: of all nodes together. Time: spent in rounds, without measuring.")
    if deployed:
        words.append("Of a deployed member: its own traffic, gradients and figures, and all of its time.")
    return " ".join(words)


# --- the members of a federation: how far each one is, and what it waits for ----------------------------


@dataclass(frozen=True)
class Member:
    """How far a member is; None where that is not known."""

    name: str
    round: int | None = None
    rounds: int = 0
    doing: str = ""
    payload_bytes: int | None = None
    wire_bytes_sent: int | None = None
    wire_bytes_received: int | None = None
    waiting_seconds: float | None = None
    last_error: str = ""

    @classmethod
    def of_status(cls, status: Mapping[str, Any]) -> Member:
        """From a member's answer about itself."""
        names = {field.name for field in fields(cls)}
        given = {key: value for key, value in status.items() if key in names}
        return cls(**given, doing=status["phase"])

    @classmethod
    def of_record(cls, record: RunRecord, doing: str = "") -> Member:
        """From the files that a member keeps."""
        [job] = record.summary["jobs"]
        row = record.rows[-1] if record.rows else {}
        amounts: dict[str, Any] = {
            name: row.get(name)
            for name in ("payload_bytes", "wire_bytes_sent", "wire_bytes_received", "waiting_seconds")
        }
        return cls(
            name=record.name,
            round=job["round"],
            rounds=job["rounds"],
            doing=doing or job["status"],
            **amounts,
            last_error=job.get("message", ""),
        )


def recorded_members(records: Sequence[RunRecord]) -> list[Member]:
    """Those members of a federation whose files are among the records."""
    return [Member.of_record(record) for record in records if record.member is not None]


def members_table(members: Sequence[Member]) -> str:
    """One line for each, with how many rounds it is behind the first."""
    furthest = max((member.round or 0 for member in members), default=0)
    heads = ("member", "round", "behind", "doing", "traffic", "sent", "received", "waiting", "last warning")
    head = "".join(f'<th scope="col"{_words(name)}>{name}</th>' for name in heads)
    lines = []
    for member in members:
        known = member.round is not None
        amounts = (member.payload_bytes, member.wire_bytes_sent, member.wire_bytes_received)
        cells = {
            "round": f"{member.round}/{member.rounds}" if known else "–",
            "behind": str(furthest - (member.round or 0)) if known else "–",
            "doing": member.doing,
            **dict(zip(heads[4:7], ("–" if a is None else bytes_text(a) for a in amounts), strict=True)),
            "waiting": "–" if member.waiting_seconds is None else seconds_text(member.waiting_seconds),
            "last warning": member.last_error,
        }
        body = "".join(f"<td{_words(name)}>{escape(text)}</td>" for name, text in cells.items())
        lines.append(f'<tr><th scope="row">{escape(member.name)}</th>{body}</tr>')
    return f"""<div class="wide"><table class="results" style="--columns:{len(heads)}">
<thead><tr>{head}</tr></thead>
<tbody>{"".join(lines)}</tbody>
</table></div>
<p class="note">Traffic: messages, each counted once. Sent and received: with repetitions, compressed. \
Waiting: time spent on exchanges.</p>"""


def _words(name: str) -> str:
    return ' class="words"' if name in ("doing", "last warning") else ""
