"""What chooses by looking at private data is refused: the choice would give them away."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.core.errors import HoldfastError

QUIET = hf.DP(epsilon=9.0, delta=1e-5, clip=1.0, noise_multiplier=5.0)
GIVEN = {
    "model": "linear",
    "data": "digits",
    "nodes": 3,
    "rounds": 2,
    "batch_size": 16,
    "sampling": "poisson",
    "private": QUIET,
    "progress": False,
}


def test_early_stopping_looks_at_test_samples_only() -> None:
    with pytest.raises(
        HoldfastError, match="EarlyStopping would choose by train_loss, which is computed from"
    ):
        hf.train(hf.FedAvg(lr=0.1), callbacks=[hf.EarlyStopping("train_loss")], **GIVEN)
    result = hf.train(hf.FedAvg(lr=0.1), callbacks=[hf.EarlyStopping("test_accuracy", patience=9)], **GIVEN)
    assert result.status == "done"


def test_tuning_looks_at_test_samples_only_and_says_what_it_spends() -> None:
    with pytest.raises(HoldfastError, match="tuning would choose by train_loss"):
        hf.tune(hf.FedAvg(lr=0.1), metric="train_loss", values=[0.1, 0.2], **GIVEN)
    with pytest.warns(RuntimeWarning, match="each of the 2 trials spent the privacy budget"):
        hf.tune(hf.FedAvg(lr=0.1), values=[0.1, 0.2], widen=0, **GIVEN)
