"""How many cores a gradient step is worth.

Kernels of small models are done before a second thread has started, and then wait for it: on a machine with
other work, a step on two cores took up to eight times as long as on one (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from holdfast.problem.problem import Problem

# Multiply-adds of a step for each thread: with fewer, another one gains nothing on an idle machine.
WORTH_A_THREAD = 2**25


def step_threads(problem: Problem) -> int:
    """The threads for a step of all nodes here: those that torch has, or fewer if it is small.

    Where nodes are computed one by one, they are spread over all cores, and each has one.
    """
    most = torch.get_num_threads()
    if problem.x0.is_cuda or not problem.stacked:
        return most
    multiply_adds = problem.samples_per_minibatch(problem.here) * problem.dim
    return max(1, min(most, multiply_adds // WORTH_A_THREAD))


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Has torch use so many threads meanwhile."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
