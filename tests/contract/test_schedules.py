"""Schedules say what is wrong with them when they are made, not in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import holdfast as hf


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hf.linear(-1.0, 5),
            r"schedule 'linear'\.start: should be greater than or equal to 0, got -1",
        ),
        (
            lambda: hf.linear(0.1, 0),
            r"schedule 'linear'\.rounds: should be greater than or equal to 1, got 0",
        ),
        (lambda: hf.linear(0.1, 5.5), r"schedule 'linear'\.rounds: should be a valid integer, got 5\.5"),
        (lambda: hf.constant(0.0), r"schedule 'constant'\.value: should be greater than 0, got 0"),
        (lambda: hf.halving(float("nan"), 3), r"schedule 'halving'\.start: .*, got nan"),
        (lambda: hf.cosine("a", 3), r"schedule 'cosine'\.start: .*, got 'a'"),
    ],
)
def test_nonsense_is_refused_when_a_schedule_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        make()


def test_a_rate_that_would_be_zero_is_refused_when_the_method_is_made() -> None:
    message = r"FedAvg\.lr: linear\(0\.0, rounds=5, end=0\.1\) at round 0: should be greater than 0, got 0\.0"
    with pytest.raises(hf.HoldfastError, match=message):
        hf.FedAvg(lr=hf.linear(0.0, 5, 0.1))
    with pytest.raises(hf.HoldfastError, match=r"FedPD\.skip: linear\(0\.5, .* at round 4: should be less"):
        hf.FedPD(eta=0.1, lr=0.1, skip=hf.linear(0.5, 5, 2.0))


def test_schedules_within_bounds_are_taken() -> None:
    assert hf.FedAvg(lr=hf.linear(0.1, 5)).at(4).lr == pytest.approx(0.02, rel=1e-12)
    assert hf.FedAvg(lr=hf.cosine(0.1, 3)).at(0).lr == 0.1
    assert hf.FedPD(eta=0.1, lr=0.1, skip=hf.linear(0.0, 5, 1.0)).at(0).skip == 0  # a probability may be 0
