"""Measuring on a GPU: recorded, and read a round later; these tests need a GPU."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from devices import GPU_MARKS

import holdfast as hf
from holdfast.data import DATASETS

pytestmark = GPU_MARKS


def train(device: str, **options):
    digits = DATASETS.build("digits", {})
    data = hf.partition(digits.x_train, digits.y_train, hf.Dirichlet(0.5), nodes=5, seed=0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    return hf.train(
        hf.LocalGECL(lr=0.05, local_steps=4),
        model=model,
        data=data,
        topology="ring",
        test=(digits.x_test, digits.y_test),
        rounds=24,
        device=device,
        dtype="float64",
        **{"evaluate_every": 1, **options},
    )


class Watcher(hf.Callback):
    """Wants every row at once, and notes how late it comes."""

    def __init__(self) -> None:
        self.rows, self.order = [], []

    def on_evaluate(self, job, row) -> None:
        self.rows.append(row)
        self.order.append(("row", row["round"]))

    def on_round(self, job, round) -> None:
        self.order.append(("round", round))


class Patient(Watcher):
    late = True


def test_recorded_figures_are_those_of_the_cpu(caplog) -> None:
    caplog.set_level(logging.INFO)
    slow, fast = train("cpu"), train("cuda")
    assert "not recorded" not in caplog.text
    assert fast.history["round"] == list(range(25))
    for name in slow.history.rows[0]:
        if name != "seconds":
            assert fast.history[name] == pytest.approx(slow.history[name], rel=1e-6, abs=1e-12), name
    seconds = fast.history["seconds"]
    assert seconds[0] == 0
    assert all(a < b for a, b in pairwise(seconds))


def test_rows_come_a_round_late_only_to_those_who_allow_it() -> None:
    prompt, patient = Watcher(), Patient()
    train("cuda", callbacks=[prompt])
    train("cuda", callbacks=[patient])
    in_turn = [(kind, round) for round in range(25) for kind in ("row", "round")]
    assert prompt.order == in_turn
    assert patient.order[:4] == [("round", 0), ("row", 0), ("round", 1), ("row", 1)]
    assert patient.order[-3:] == [("row", 23), ("row", 24), ("round", 24)]
    for a, b in zip(prompt.rows, patient.rows, strict=True):
        assert {**a, "seconds": 0} == pytest.approx({**b, "seconds": 0}, rel=1e-9)
