"""The GPU executor: a whole round, local steps and exchange, as one CUDA graph that is replayed.

The algorithm is not changed for this. Its round is run once while CUDA records the kernels; whatever differs
from round to round (the round's number, the cohort, scheduled hyperparameters) lives in buffers that are
filled before each replay. A round that looks at values on the host (a shared coin, a solver that stops early,
sporadic nodes) cannot be recorded; it runs step by step instead, and ``prepare`` says why.
"""

from __future__ import annotations

import copy
import time
from typing import Any, cast

import torch
from torch import Tensor

from holdfast.engines.simulate.simulation import Simulation
from holdfast.errors import HoldfastError
from holdfast.objective.model_objective import ModelObjective
from holdfast.objective.oracle import Work
from holdfast.tree import tree_map


def simulation_class(device: torch.device) -> type[Simulation]:
    """The executor for a device: recorded rounds on a GPU, the plain simulator elsewhere."""
    return CapturedSimulation if device.type == "cuda" else Simulation


# Compiling takes tens of seconds; below this many rounds it is not worth it.
COMPILE_FROM_ROUNDS = 200


class CapturedSimulation(Simulation):
    """A ``Simulation`` on a GPU whose rounds are replayed from one recording."""

    graph: torch.cuda.CUDAGraph | None = None

    def prepare(self, rounds: int) -> str:
        """Compiles, if ``rounds`` make it pay, and records a round; the state stays as it is."""
        start = time.perf_counter()
        compiled = isinstance(self.objective, ModelObjective) and rounds >= COMPILE_FROM_ROUNDS
        if compiled:
            self.objective.compile()  # type: ignore[attr-defined]
        try:
            self._record()
            how = "rounds replayed from a CUDA graph"
        except (RuntimeError, HoldfastError) as error:
            torch.cuda.synchronize()
            how = f"rounds run step by step, since they cannot be recorded: {str(error).splitlines()[0]}"
        took = time.perf_counter() - start
        return f"{how}, {'compiled' if compiled else 'not compiled'}; prepared in {took:.1f} s"

    def step(self) -> None:
        if self.graph is None:
            super().step()
            return
        self._fill()
        self.graph.replay()
        self.traffic.numbers += self._per_round_traffic[0]
        self.traffic.delay += self._per_round_traffic[1]
        self.work.gradient_evaluations += self._per_round_work.gradient_evaluations
        self.work.sample_gradients += self._per_round_work.sample_gradients
        self.work.delay += self._per_round_work.delay
        self.round += 1

    def restore(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        static = self.state
        super().restore(tensors, counters)
        if self.graph is not None:
            self.state = tree_map(lambda buffer, value: buffer.copy_(value), static, self.state)

    def _record(self) -> None:
        if self.network.sequence is not None or self.network.activity is not None:
            raise RuntimeError("the network changes from round to round")
        device = self.everybody.device
        self._round_now = torch.tensor(self.round, device=device)
        self._chosen = self._cohort().clone()
        self._scheduled = {
            name: torch.tensor(float(value(self.round)), device=device, dtype=torch.float64)
            for name, value in vars(self.method).items()
            if callable(value)
        }
        method = copy.copy(self.method)
        for name, buffer in self._scheduled.items():
            object.__setattr__(method, name, buffer)

        round_now = cast(
            int, self._round_now
        )  # where the number of the round is asked for, the buffer stands in
        state = tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), self.state)
        traffic, work = copy.copy(self.traffic), copy.copy(self.work)
        warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(warm):
                self._advance(method, tree_map(torch.clone, state), round_now, self._chosen)
                # From now on a value read on the host, which would break the recording, is an error.
                torch.cuda.set_sync_debug_mode("error")
                self._advance(method, tree_map(torch.clone, state), round_now, self._chosen)
            torch.cuda.current_stream().wait_stream(warm)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            self.traffic, self.work = copy.copy(traffic), copy.copy(work)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            after = self._advance(method, state, round_now, self._chosen)
            tree_map(lambda buffer, value: buffer if buffer is value else buffer.copy_(value), state, after)
        self._per_round_traffic = (self.traffic.numbers - traffic.numbers, self.traffic.delay - traffic.delay)
        self._per_round_work = Work(
            self.work.gradient_evaluations - work.gradient_evaluations,
            self.work.sample_gradients - work.sample_gradients,
            self.work.delay - work.delay,
        )
        self.traffic, self.work = traffic, work
        self.state, self.graph = state, graph

    def _fill(self) -> None:
        """Puts what this round differs in into the buffers."""
        self._round_now.fill_(self.round)
        if self.cohort_size < self.objective.nodes:
            self._chosen.copy_(self._cohort())
        now = self.method.at(self.round)
        for name, buffer in self._scheduled.items():
            buffer.fill_(getattr(now, name))
