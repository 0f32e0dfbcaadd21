"""The members of a federation, for people: who is how far, and what they wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Any

from holdfast.experiments.record import RunRecord
from holdfast.report.format import bytes_text, seconds_text


@dataclass(frozen=True)
class Member:
    """Where a member stands; None where nobody knows."""

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
        """From what a member tells about itself."""
        names = {field.name for field in fields(cls)}
        told = {key: value for key, value in status.items() if key in names}
        return cls(**told, doing=status["phase"])

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
