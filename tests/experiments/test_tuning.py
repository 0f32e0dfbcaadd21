"""The search: which value comes next, and when it ends, on scores that are known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import Spread
from holdfast.experiments.tuning import Goal, Trial, Tuned, first_grid


def search(
    score: Callable[[float], float | None], grid: list[float], mode: str = "max", widen: int = 4
) -> Tuned:
    """The search of ``tune``, with scores from a function instead of runs."""
    goal = Goal("lr", "m", mode, widen)  # type: ignore[arg-type]
    values, widened = list(grid), 0
    while True:
        found = [(value, score(value)) for value in values]
        trials = [Trial("a", value, None if s is None else Spread(s, None), "") for value, s in found]
        if widened == widen or (beyond := goal.next_value(trials)) is None:
            return Tuned(goal, trials, {"a": widened})
        values.append(beyond)
        widened += 1


def bump(value: float) -> float:
    """Best at 0.8."""
    return -((math.log2(value / 0.8)) ** 2)


def test_it_widens_upwards_until_the_best_is_inside() -> None:
    found = search(bump, [0.1, 0.2])
    assert [trial.value for trial in found.of("a")] == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert found.best("a").value == 0.8
    assert not found.on_edge("a")
    assert found.caveats == []


def test_and_downwards() -> None:
    found = search(bump, [3.2, 6.4, 12.8])
    assert [trial.value for trial in found.of("a")] == [0.4, 0.8, 1.6, 3.2, 6.4, 12.8]
    assert found.best("a").value == 0.8


def test_less_may_be_better() -> None:
    assert search(lambda value: -bump(value), [0.1, 0.2], "min").best("a").value == 0.8


def test_what_diverges_is_worst_and_bounds_the_grid() -> None:
    """Steps above 0.3 diverge: the best is the last that does not, and it is not on the edge."""
    found = search(lambda value: value if value < 0.3 else None, [0.05, 0.1])
    assert [(trial.value, trial.score is None) for trial in found.of("a")] == [
        (0.05, False),
        (0.1, False),
        (0.2, False),
        (0.4, True),
    ]
    assert found.best("a").value == 0.2
    assert not found.on_edge("a")


def test_where_all_diverge_smaller_ones_are_tried() -> None:
    found = search(lambda value: bump(value) if value <= 1 else None, [8.0, 16.0])
    assert found.best("a").value == 1.0
    assert (
        found.caveats == ["a: the best, lr 1, is the smallest tried, after 4 widenings"]
        or found.caveats == []
    )
    lost = search(lambda value: None, [8.0, 16.0], widen=2)
    assert lost.best("a") is None
    assert lost.caveats == ["a: everything diverged or failed, down to 2, after 2 widenings"]


def test_it_gives_up_and_says_so() -> None:
    found = search(lambda value: value, [1.0, 2.0], widen=3)
    assert found.best("a").value == 16.0
    assert found.on_edge("a")
    assert found.caveats == ["a: the best lr, 16, is the largest tried, after 3 widenings"]
    assert search(lambda value: value, [1.0, 2.0], widen=0).caveats == [
        "a: the best lr, 2, is the largest tried"
    ]


def test_a_plateau_is_no_reason_to_go_on() -> None:
    assert len(search(lambda value: 1.0, [0.1, 1.0, 10.0]).trials) == 3


def test_whole_numbers_stay_whole() -> None:
    found = search(lambda value: -abs(value - 16), [2, 4])  # type: ignore[arg-type]
    assert [trial.value for trial in found.of("a")] == [2, 4, 8, 16, 32]
    assert len(search(lambda value: -value, [1, 2]).trials) == 2  # nothing below one


@pytest.mark.parametrize(
    ("values", "present", "whole", "expected"),
    [
        (None, 0.1, False, [0.025, 0.05, 0.1, 0.2, 0.4]),
        (None, 2, True, [1, 2, 4, 8]),
        ([1, 0.1], None, False, [0.1, 1.0]),
    ],
)
def test_the_first_grid(values, present, whole: bool, expected: list[float]) -> None:
    found = first_grid("values", values, present, whole=whole)
    assert found == expected
    assert all(type(value) is (int if whole else float) for value in found)


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.1], [0.1, -1], [0.1, "1"], [], [True, 2.0]])
def test_grids_that_are_none(values) -> None:
    with pytest.raises(HoldfastError, match="values: expected two or more different positive numbers"):
        first_grid("values", values, None, whole=False)
    with pytest.raises(HoldfastError, match="values: give the values to try"):
        first_grid("values", None, "cosine", whole=False)


def test_a_grid_of_equals_says_so() -> None:
    found = search(lambda value: 0.125, [0.1, 0.2])
    assert found.caveats == ["a: all values of lr, 0.1 to 0.2, gave the same m; none of them is best"]
    assert search(lambda value: min(value, 0.2), [0.1, 0.2]).caveats == []  # a plateau, and less below it
