"""The loop that solvers by gradient steps share: rows advance together, and each stops by itself."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.contract.solver import LocalProblem, Solver, require_smooth
from holdfast.core.tree import tree_map
from holdfast.core.validation import Count, Positive
from holdfast.solvers.stopping import StoppingRule, check_precision


class Progress(NamedTuple):
    """A step of all rows."""

    state: Any  # a NamedTuple of [m, ...] tensors with ``answer`` [m, d] and ``energy`` [m, 1] among them
    done: Tensor  # [m, 1]: the stopping rule is met
    stuck: Tensor  # [m, 1]: no further step is possible


@dataclass(frozen=True, kw_only=True)
class IterativeSolver(Solver):
    """Steps until a rule is met; rows that are done stand still and cost nothing."""

    handles_l1: ClassVar[bool] = False
    needs_smoothness: ClassVar[bool] = True

    stop: Literal["energy", "gradient"] = "energy"  # relative change in a step, or norm of the gradient
    tolerance: Positive | None = 1e-12  # for what ``stop`` says; None: take exactly max_steps steps
    max_steps: Count = 10_000

    @abstractmethod
    def begin(self, problem: LocalProblem, start: Tensor, rule: StoppingRule) -> Any:
        """The state before the first step."""

    @abstractmethod
    def advance(self, problem: LocalProblem, state: Any, active: Tensor, rule: StoppingRule) -> Progress:
        """One step; only the ``active`` rows [m, 1] count, and only they may cost evaluations."""

    def solve(self, problem: LocalProblem, start: Tensor) -> Tensor:
        rule = self._rule(problem)
        if self.needs_smoothness or rule.exists:
            require_smooth(type(self).__name__, problem, l1=self.handles_l1)
        check_precision(type(self).__name__, rule, problem, start)
        state = self.begin(problem, start, rule)
        rule = rule.starting_at(state.energy)
        active = torch.ones_like(start[..., :1], dtype=torch.bool)
        unfinished = torch.zeros_like(active)
        for _ in range(self.max_steps):
            after, done, stuck = self.advance(problem, state, active, rule)
            if bool(active.all()):
                state = after
            else:
                state = tree_map(lambda new, old, rows=active: choose(rows, new, old), after, state)
            unfinished = unfinished | (active & stuck & ~done)
            active = active & ~done & ~stuck
            if not bool(active.any()):
                break
        problem.report_unfinished(unfinished | active if rule.exists else unfinished)
        answer: Tensor = state.answer
        return answer

    @property
    def adaptive(self) -> bool:
        return self.tolerance is not None

    def _rule(self, problem: LocalProblem) -> StoppingRule:
        if problem.gradient_norm is not None:
            return StoppingRule(gradient_norm=problem.gradient_norm)
        if self.stop == "energy":
            return StoppingRule(energy_change=self.tolerance)
        return StoppingRule(gradient_norm=self.tolerance)


def choose(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``new`` where ``rows`` [m, 1] says so, else ``old``; tensors [m, ...]."""
    return torch.where(rows.reshape(len(rows), *[1] * (new.dim() - 1)), new, old)
