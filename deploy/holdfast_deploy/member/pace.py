"""How many local steps fit into a round's time."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from holdfast.core.randomness import Word
from holdfast.problem.problem import Problem
from holdfast_deploy.storage.results import RoundRecord


class Pace:
    """Local steps of a node on ``problem`` that take ``budget`` seconds, at the pace of the round before.

    At least one, which is what the first round takes, and at most ``most``. The number is written down before
    the first step, in ``steps.csv``: after a crash the same round has as many steps.
    """

    def __init__(self, folder: Path, problem: Problem, budget: float, most: int) -> None:
        self.problem, self.budget, self.most = problem, budget, most
        self.record = RoundRecord(folder / "steps.csv", "steps", "seconds_per_step")
        lines = self.record.lines()
        self.record.keep()
        self.taken = {round: int(steps) for round, (steps, _) in lines.items()}
        self.pace = float(lines[max(lines)][1]) if lines else 0.0  # seconds per step; 0: not known
        self.seconds, self.count = 0.0, 0  # of the steps since it was last looked at

    def steps(self, round: int) -> int:
        """The local steps of ``round``, the first being 1."""
        if round not in self.taken:
            if self.count:
                self.pace = self.seconds / self.count
            fitting = min(int(self.budget / self.pace), self.most) if self.pace else 1
            self.record.add(round, max(fitting, 1), f"{self.pace:.6g}")
            self.taken[round] = max(fitting, 1)
        self.seconds, self.count = 0.0, 0
        return self.taken[round]

    def gradient(self, x: Tensor, nodes: Tensor, round: Word, step: Word) -> tuple[Tensor, Tensor]:
        """The problem's own, timed."""
        begun = time.perf_counter()
        result = self.problem.minibatch_values_and_grads([x], nodes, round, step)[0]
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        self.seconds, self.count = self.seconds + time.perf_counter() - begun, self.count + 1
        return result
