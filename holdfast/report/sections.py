"""Parts of a page that the report and the live view share, as markup; everything from outside is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from holdfast.experiments.record import RunRecord
from holdfast.experiments.record_files import short
from holdfast.report.format import number_text

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
    """How the data were divided where they say themselves which node a sample belongs to; else nothing."""
    if record.partition is None or record.partition.names is None:
        return []
    dataset = record.config.get("problem", {}).get("dataset")
    column = dataset.get("node") if isinstance(dataset, dict) else None
    return [f"divided by {column}" if column else "divided by the data's own nodes"]


def _value(value: Any) -> str:
    return " | ".join(map(short, value)) if isinstance(value, list) else short(value)


def listed(warnings: Sequence[str]) -> str:
    """What a reader must know, as a list that is hard to overlook; nothing for nothing."""
    lines = "".join(f"<li>{escape(one)}</li>" for one in warnings)
    return f'<ul class="trouble">{lines}</ul>' if lines else ""


def curves_note(records: Sequence[RunRecord]) -> str:
    """What holds for all curves."""
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
    """What is known of the network and the data, in figures and in words."""
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
