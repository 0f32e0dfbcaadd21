"""The CPU executor: where a run takes minutes, a round as a few compiled programs."""

from __future__ import annotations

import time

from holdfast.core.registry import is_ours
from holdfast.core.tree import tree_map
from holdfast.engines.simulate.executors.replayed import REFUSALS, ReplayedSimulation, in_place
from holdfast.problem.model_problem import ModelObjective

# Compiling takes a quarter of a minute, and a compiled step four fifths of the time. Counted are parameters
# times samples, not seconds: the same experiment is to be run in the same way whenever and wherever it is.
COMPILE_FROM_WORK = 2e12


class CompiledSimulation(ReplayedSimulation):
    """A ``Simulation`` on a CPU that compiles its rounds if they will take long."""

    def prepare(self, rounds: int) -> str:
        how = super().prepare(rounds)
        if not self._worth_compiling(self.round + rounds):
            return how
        start = time.perf_counter()
        self.forget_program()
        before = self.traffic, self.work
        kept = tree_map(lambda tensor: tensor.clone(), self.state)
        try:
            advance = self.buffered(rounds)
            self.count(advance)
            self._load(kept)
            compiled = self._fused(in_place(advance))
            compiled(self.state)
            self.program = lambda: compiled(self.state)
            how = f"all nodes stacked, compiled; prepared in {time.perf_counter() - start:.1f} s"
        except REFUSALS as error:
            how = f"{how}, as rounds cannot be compiled: {self.fall_back(self.refusal(error))}"
        self.traffic, self.work = before
        if self.program is None:
            self._load(kept)
        else:
            tree_map(lambda buffer, value: buffer.copy_(value), self.state, kept)
        return how

    def _worth_compiling(self, rounds: int) -> bool:
        """Whether so many rounds are much work, and of what is known to do the same in every call."""
        objective = self.objective
        if not isinstance(objective, ModelObjective) or objective.batch_size is None:
            return False
        if not objective.row_grads.may_be_traced or objective.row_grads.row_by_row or self.cohort_size == 1:
            return False
        steps = rounds * int(getattr(self.method, "local_steps", 1))
        work = steps * self.cohort_size * objective.batch_size * objective.dim
        return is_ours(self.method) and work >= COMPILE_FROM_WORK
