"""Which executor runs where, and from how much work on preparing a round pays.

The rules count work, not seconds: the same experiment is run in the same way whenever and wherever it is.
"""

from __future__ import annotations

import torch

from holdfast.engines.common.simulation import Executor, Simulation, Stepwise
from holdfast.engines.simulate.programs import (
    as_written,
    compiled,
    compiled_gradient,
    look_recorded,
    recorded,
    with_compiled_gradients,
)
from holdfast.engines.simulate.replay import REFUSALS, Replaying, Way

# On a GPU, compiling takes ten seconds or more (two, if it was done before), and a step gains a fraction of a
# millisecond to a few: below this many steps of a node it is not worth it.
COMPILE_FROM_STEPS = 2000
# On a CPU, compiling takes a quarter of a minute, and a compiled step four fifths of the time. Counted are
# parameters times samples.
COMPILE_FROM_WORK = 2e12


def executor_for(device: torch.device) -> Executor:
    """Recorded rounds on a GPU; elsewhere rounds that are compiled if it pays."""
    if device.type == "cuda":
        return Replaying(gpu_ways, "recorded", gpu_stepwise, look_recorded)
    return Replaying(cpu_ways, "compiled", lambda simulation, rounds: Stepwise())


def gpu_ways(simulation: Simulation, rounds: int) -> list[Way]:
    """A recorded round, compiled if that pays."""
    ways = [Way("rounds replayed from a CUDA graph, not compiled", recorded(as_written))]
    if _gpu_compiles(simulation, rounds):
        words = "rounds replayed from a CUDA graph, only gradients compiled"
        ways.insert(0, Way(words, recorded(with_compiled_gradients)))
        # On several ranks, a round waits for others in the middle.
        if simulation.world.size == 1 and simulation.problem.fuses:
            ways.insert(0, Way("rounds replayed from a CUDA graph, compiled", recorded(compiled)))
    return ways


def gpu_stepwise(simulation: Simulation, rounds: int) -> Stepwise:
    """Rounds that cannot be recorded: step by step, with compiled gradients if it pays and works."""
    if not _gpu_compiles(simulation, rounds):
        return Stepwise()
    gradient, problem = compiled_gradient(simulation.problem), simulation.problem
    try:
        gradient(problem.x0.expand(len(simulation.nodes), -1), simulation.nodes, 0, 0)
    except REFUSALS:  # such as no compiler on this machine; gradients are then computed as they are
        return Stepwise()
    return Stepwise(gradient)


def cpu_ways(simulation: Simulation, rounds: int) -> list[Way]:
    """Compiled rounds, if the whole run, rounds before these included, is much work."""
    problem = simulation.problem
    if not (problem.stochastic and problem.stacked and problem.traceable) or simulation.world.size > 1:
        return []
    cohort_size = simulation.rounds.cohort_size
    if cohort_size == 1:
        return []
    samples = problem.samples_per_minibatch(simulation.nodes) / problem.nodes * cohort_size
    work = _steps(simulation, simulation.round + rounds) * samples * problem.dim
    return [Way(f"{problem.description}, compiled", compiled)] if work >= COMPILE_FROM_WORK else []


def _gpu_compiles(simulation: Simulation, rounds: int) -> bool:
    # Compiled as a whole, gradients of all samples would make a program for every number of steps.
    problem = simulation.problem
    return problem.stochastic and problem.stacked and _steps(simulation, rounds) >= COMPILE_FROM_STEPS


def _steps(simulation: Simulation, rounds: int) -> float:
    """Gradients that a node computes in so many rounds in which it takes part."""
    cohort_size = simulation.rounds.cohort_size
    return rounds * simulation.work_per_round.gradient_evaluations / cohort_size
