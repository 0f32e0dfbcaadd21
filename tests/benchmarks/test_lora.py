"""The benchmark of LoRA on a tiny model: it runs, and one client alone follows the Trainer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_one_client_follows_the_trainer(tmp_path, monkeypatch) -> None:
    for library in ("peft", "transformers", "accelerate"):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import lora

    table = tmp_path / "lora.json"
    given = ["--tiny", "--device=cpu", "--rounds=1", "--trainer-steps=4", f"--output={table}"]
    monkeypatch.setattr(sys, "argv", ["lora.py", *given])
    lora.main()
    found = json.loads(table.read_text())
    for rule in ("sgd", "adamw_torch"):
        losses = [theirs for _, theirs in found["losses"][rule]]
        assert max(losses) - min(losses) > 0.05  # otherwise following them would mean little
        assert found["largest_difference"][rule] < 1e-3
    assert len(found["tokens_per_second"]) == 8


@pytest.mark.parametrize("rule", ["sgd", "adamw_torch"])
def test_in_float32_a_client_follows_the_trainer_to_rounding(monkeypatch, rule) -> None:
    for library in ("peft", "transformers", "accelerate"):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import lora

    for ours, theirs in lora.compared_with_trainer(replace(lora.TINY, body=torch.float32), "cpu", rule, 8):
        assert ours == pytest.approx(theirs, abs=1e-5)
