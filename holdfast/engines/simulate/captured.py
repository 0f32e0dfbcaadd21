"""The GPU executor: a whole round, local steps and exchange, as one CUDA graph that is replayed.

The algorithm is not changed for this. Its round is run while CUDA records the kernels; whatever differs from
round to round (the round's number, the cohort, scheduled hyperparameters) lives in buffers that are filled
before each replay. A round that looks at values on the host (a shared coin, a solver that stops early,
sporadic nodes) cannot be recorded; it runs step by step instead, and ``prepare`` says why.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from holdfast.algorithms.schedules import Rate
from holdfast.engines.simulate.fused import FusedRound
from holdfast.engines.simulate.peers import Traffic
from holdfast.engines.simulate.simulation import Simulation
from holdfast.objective.flat import widened
from holdfast.objective.model_objective import ModelObjective
from holdfast.objective.oracle import Work
from holdfast.registry import is_ours
from holdfast.tree import leaves, tree_map
from holdfast.validation import hints


def simulation_class(device: torch.device) -> type[Simulation]:
    """The executor for a device: recorded rounds on a GPU, the plain simulator elsewhere."""
    return CapturedSimulation if device.type == "cuda" else Simulation


# Compiling takes ten seconds or more (two, if it was done before), and a step gains a fraction of a
# millisecond to a few: below this many steps of a node it is not worth it.
COMPILE_FROM_STEPS = 2000

Advance = Callable[[Any], Any]  # from a state to the state after the round


def in_place(advance: Advance) -> Advance:
    """``advance`` with the new state put where the old one was."""

    def renew(state: Any) -> Any:
        after = _apart(advance(state), state)
        return tree_map(lambda old, new: old if old is new else old.copy_(new), state, after)

    return renew


class CapturedSimulation(Simulation):
    """A ``Simulation`` on a GPU whose rounds are replayed from one recording."""

    graph: torch.cuda.CUDAGraph | None = None
    traceable = True  # whether a round runs in this process alone

    def prepare(self, rounds: int) -> str:
        """Compiles, if ``rounds`` make it pay, and records a round; the state stays as it is."""
        start = time.perf_counter()
        before = self.traffic, self.work
        # Trial rounds overwrite the state. It is kept on the host: a second one may not fit on the device.
        kept = tree_map(lambda t: t.cpu().contiguous(), self.state)
        how, steps = "", 0.0  # the latter of a node in the whole run
        problems: list[str] = []
        try:
            advance = self.buffered()
            self.count(advance)
            steps = rounds * self._per_round[1].gradient_evaluations / len(self._chosen)
            for words, way in self._ways(in_place(advance), steps):
                problem = self._try(way, kept)
                if not problem:
                    since = f", since a faster way failed: {problems[0]}" if problems else ""
                    how = f"rounds replayed from a CUDA graph, {words}{since}"
                    break
                problems.append(problem)
        except Exception as error:  # whatever the method objects to: there is another way
            problems.append(_first_line(error))
        self.traffic, self.work = before
        if self.graph is None:
            self._load(kept)
            how = f"rounds run step by step, since they cannot be recorded: {problems[-1]}"
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

    def step(self) -> None:
        if self.graph is None:
            super().step()
            return
        self.fill()
        self.graph.replay()
        for total, each in zip((self.traffic, self.work), self._per_round, strict=True):
            for name, amount in vars(each).items():
                setattr(total, name, getattr(total, name) + amount)
        self.round += 1

    def restore(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        static = self.state
        super().restore(tensors, counters)
        if self.graph is not None:
            self.state = tree_map(lambda buffer, value: buffer.copy_(value), static, self.state)

    def buffered(self) -> Advance:
        """A round with buffers in place of all that differs from round to round, or from run to run.

        The latter are rates that stay the same: programs compiled for one step size serve for all.
        """
        if self.network.sequence is not None or self.network.activity is not None:
            raise RuntimeError("the network changes from round to round")
        device = self.everybody.device
        self._round_now = torch.tensor(self.round, device=device)
        self._chosen = self._cohort().clone()
        now = self.method.at(self.round)
        self._rates = {
            name: torch.tensor(float(getattr(now, name)), device=device, dtype=torch.float64)
            for name, kind in hints(type(self.method)).items()
            if kind == Rate
        }
        method = copy.copy(self.method)
        for name, buffer in self._rates.items():
            object.__setattr__(method, name, buffer)
        round_now = cast(int, self._round_now)  # where the round's number is asked for, its buffer stands in
        return lambda state: self._advance(method, state, round_now, self._chosen)

    def _try(self, way: Callable[[], Advance], kept: Any) -> str:
        """Records a round that goes this way; if that fails, why."""
        self._load(kept)
        if isinstance(self.objective, ModelObjective):
            self.objective.uncompile()
        try:
            self._record(way())
        except Exception as error:  # whatever CUDA, the compiler or the method object to
            torch.cuda.synchronize()
            self.graph = None
            return _first_line(error)
        return ""

    def _fused(self, advance: Advance) -> Advance:
        """``advance`` compiled; of our own methods, on wider rows."""
        assert isinstance(self.objective, ModelObjective)
        state = self._widen() if is_ours(self.method) else self.state
        fused = FusedRound(advance, state, self.objective)
        return lambda _: fused(state)

    def _widen(self) -> Any:
        """The state where vectors like the model are wider; what it was becomes a view of that.

        A user's method may count its columns or divide by them, ours do not.
        """
        dim, narrow = self.objective.dim, self.state

        def like_the_model(tensor: Tensor) -> bool:
            return tensor.ndim > 0 and tensor.shape[-1] == dim

        wide = tree_map(lambda t: widened(t) if like_the_model(t) else t, narrow)
        self.state = tree_map(lambda w, t: w[..., :dim] if like_the_model(t) else w, wide, narrow)
        return wide

    def _with_compiled_gradients(self, advance: Advance) -> Advance:
        assert isinstance(self.objective, ModelObjective)
        self.objective.compile()
        return advance

    def _worth_compiling(self, steps: float) -> bool:
        # Compiled as a whole, gradients of all samples would make a program for every number of steps.
        objective = self.objective
        in_minibatches = isinstance(objective, ModelObjective) and objective.batch_size is not None
        return in_minibatches and steps >= COMPILE_FROM_STEPS

    def _compiled_gradients(self, steps: float) -> str:
        """Compiles the gradients of rounds that run step by step, if it pays and works."""
        objective = self.objective
        if not self._worth_compiling(steps) or not isinstance(objective, ModelObjective):
            return "not compiled"
        objective.compile()
        try:
            objective.gradient(objective.x0.expand(len(self.everybody), -1), self.everybody, 0, 0)
        except Exception as error:  # such as no compiler on this machine
            objective.uncompile()
            return f"not compiled: {_first_line(error)}"
        return "only gradients compiled"

    def count(self, advance: Advance) -> None:
        """What a round sends and computes, found by running one: a replay counts nothing.

        What rounds make once and keep is made here too. No minibatch gradient is computed: none is looked at.
        """
        self.traffic, self.work = Traffic(), Work()
        if isinstance(self.objective, ModelObjective):
            _ = self.objective.row_grads.samples_at_once
            with self.objective.gradients_by(lambda x, *_: x.new_zeros(()).expand_as(x)):
                advance(self.state)
        else:
            advance(self.state)
        self._per_round = copy.copy(self.traffic), copy.copy(self.work)

    def _load(self, kept: Any) -> None:
        """The state as it was, every tensor in memory of its own."""
        self.state = None  # lets go of the old memory first
        self.state = tree_map(lambda t: t.to(self.everybody.device, copy=True), kept)

    def _record(self, advance: Advance) -> None:
        warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(warm):
                advance(self.state)
                # From now on a value read on the host, which would break the recording, is an error.
                torch.cuda.set_sync_debug_mode("error")
                advance(self.state)
            torch.cuda.current_stream().wait_stream(warm)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=warm):  # whose work space of cuBLAS is there already
            advance(self.state)
        self.graph = graph
        self._recorded = advance  # holds constants that the recording reads

    def fill(self) -> None:
        """Puts what this round differs in into the buffers."""
        self._round_now.fill_(self.round)
        if self.cohort_size < self.objective.nodes:
            self._chosen.copy_(self._cohort())
        now = self.method.at(self.round)
        for name, buffer in self._rates.items():
            buffer.fill_(getattr(now, name))


def _apart(after: Any, before: Any) -> Any:
    """``after`` without memory of another part of ``before``, which is about to be overwritten."""
    taken = {_memory(tensor) for tensor in leaves(before)}

    def own(buffer: Tensor, value: Tensor) -> Tensor:
        return value.clone() if value is not buffer and _memory(value) in taken else value

    return tree_map(own, before, after)


def _memory(tensor: Tensor) -> int:
    """The same for tensors with memory in common; while a round is traced, they have no addresses."""
    return int(tensor.untyped_storage()._cdata)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
