"""The benchmark of what measuring costs, on a small workload: it runs, and measures as often as it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_it_runs_all_cases(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import evaluation

    monkeypatch.setattr(evaluation, "WORKLOADS", {"softmax": evaluation.linear(3, batch=80, steps=20)})
    table = tmp_path / "evaluation.json"
    given = ["--models=softmax", "--rounds=2", "--repeats=1", f"--output={table}"]
    monkeypatch.setattr(sys, "argv", ["evaluation.py", *given])
    evaluation.main()
    every = {row["case"]: row["every"] for row in json.loads(table.read_text())}
    assert list(every) == list(evaluation.CASES)
    # All nodes' models and the average on 1,000 samples, and 1,500 samples of training, for 4,800 gradients.
    assert every["default"] == -(-(3000 + 1000 + 1500) * 5 // (3 * 4800))
    assert every["every"] == 1
