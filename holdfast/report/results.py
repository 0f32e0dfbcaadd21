"""The figures of runs as plain data, for programs: what ``--json`` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.experiments.record import FinalRow, RunRecord, Spread, overlaid


def as_data(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """One entry per run: where it lies, what became of it, and one line per algorithm and swept value."""
    return [
        {
            "run": str(record.path),
            "name": record.name,
            "status": record.summary["status"],
            "results": [_line(row) for row in record.final_table()],
        }
        for record in overlaid(records)
    ]


def _line(row: FinalRow) -> dict[str, Any]:
    return {
        "label": row.label,
        "algorithm": row.algorithm,
        "status": row.status,
        "note": row.note,
        "round": row.round,
        "rounds": row.rounds,
        "seeds": row.seeds,
        "figures": {name: _figure(spread) for name, spread in row.values.items()},
    }


def _figure(spread: Spread) -> dict[str, float | None]:
    """Mean and standard deviation over seeds; JSON knows no infinities."""
    std = spread.std
    return {
        "mean": spread.mean if math.isfinite(spread.mean) else None,
        "std": std if std is not None and math.isfinite(std) else None,
    }
