"""The GPU executor: a whole round, local steps and exchange, as one CUDA graph that is replayed.

A round is run while CUDA records the kernels. One that looks at values on the host (a shared coin, a solver
that stops early, sporadic nodes) cannot be recorded; it runs step by step instead, and ``prepare`` says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.engines.simulate.replayed import (
    REFUSALS,
    Advance,
    Refusal,
    ReplayedSimulation,
    first_line,
    in_place,
)
from holdfast.objective.model_objective import ModelObjective
from holdfast.tree import tree_map

# Compiling takes ten seconds or more (two, if it was done before), and a step gains a fraction of a
# millisecond to a few: below this many steps of a node it is not worth it.
COMPILE_FROM_STEPS = 2000


class CapturedSimulation(ReplayedSimulation):
    """A ``Simulation`` on a GPU whose rounds are replayed from one recording."""

    traceable = True  # whether a round runs in this process alone

    def prepare(self, rounds: int) -> str:
        """Compiles, if ``rounds`` make it pay, and records a round; the state stays as it is."""
        start = time.perf_counter()
        self.forget_program()
        before = self.traffic, self.work
        # Trial rounds overwrite the state. It is kept on the host: a second one may not fit on the device.
        kept = tree_map(lambda t: t.cpu().contiguous(), self.state)
        how, steps = "", 0.0  # the latter of a node in the whole run
        problems: list[Refusal] = []
        try:
            advance = self.buffered(rounds)
            self.count(advance)
            steps = rounds * self._per_round[1].gradient_evaluations / len(self._chosen)
            for words, way in self._ways(in_place(advance), steps):
                problem = self._try(way, kept)
                if problem is None:
                    since = f", since a faster way failed: {problems[0].reason}" if problems else ""
                    how = f"rounds replayed from a CUDA graph, {words}{since}"
                    break
                problems.append(problem)
        except REFUSALS as error:
            problems.append(self.refusal(error))
        self.traffic, self.work = before
        if self.program is None:
            self._load(kept)
            reason = self.fall_back(problems[-1])
            how = f"rounds run step by step, since they cannot be recorded: {reason}"
            how += f", {self._compiled_gradients(steps)}"
        else:
            tree_map(lambda buffer, value: buffer.copy_(value), self.state, kept)
        return f"{how}; prepared in {time.perf_counter() - start:.1f} s"

    def _ways(self, advance: Advance, steps: float) -> Iterator[tuple[str, Callable[[], Advance]]]:
        """How to run a round, the fastest first, as far as so many ``steps`` of a node make it pay."""
        if self._worth_compiling(steps) and self.traceable:
            yield "compiled", lambda: self._fused(advance)
        if self._worth_compiling(steps):
            yield "only gradients compiled", lambda: self._with_compiled_gradients(advance)
        yield "not compiled", lambda: advance

    def _try(self, way: Callable[[], Advance], kept: Any) -> Refusal | None:
        """Records a round that goes this way; if that fails, why."""
        self._load(kept)
        if isinstance(self.objective, ModelObjective):
            self.objective.uncompile()
        try:
            self._record(way())
        except REFUSALS as error:
            torch.cuda.synchronize()
            self.program = None
            return self.refusal(error)
        return None

    def _with_compiled_gradients(self, advance: Advance) -> Advance:
        assert isinstance(self.objective, ModelObjective)
        self.objective.compile()
        return advance

    def _worth_compiling(self, steps: float) -> bool:
        # Compiled as a whole, gradients of all samples would make a program for every number of steps.
        objective = self.objective
        if not isinstance(objective, ModelObjective) or objective.batch_size is None:
            return False
        return not objective.row_grads.row_by_row and steps >= COMPILE_FROM_STEPS

    def _compiled_gradients(self, steps: float) -> str:
        """Compiles the gradients of rounds that run step by step, if it pays and works."""
        objective = self.objective
        if not self._worth_compiling(steps) or not isinstance(objective, ModelObjective):
            return "not compiled"
        objective.compile()
        try:
            objective.gradient(objective.x0.expand(len(self.everybody), -1), self.everybody, 0, 0)
        except REFUSALS as error:  # such as no compiler on this machine
            objective.uncompile()
            return f"not compiled: {first_line(error)}"
        return "only gradients compiled"

    def _record(self, advance: Advance) -> None:
        warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream())
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with torch.cuda.stream(warm):
                advance(self.state)
                # From now on a value read on the host, which would break the recording, is an error.
                torch.cuda.set_sync_debug_mode("error")
                advance(self.state)
            torch.cuda.current_stream().wait_stream(warm)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=warm):  # whose work space of cuBLAS is there already
            advance(self.state)
        self.program = graph.replay
        self._recorded = advance  # holds constants that the recording reads
