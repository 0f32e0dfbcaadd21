"""A whole round, local steps and exchange, as one CUDA graph that is replayed.

A round is run while CUDA records the kernels. One that looks at values on the host (a shared coin, a solver
that stops early, sporadic nodes) cannot be recorded.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.core.randomness import Word
from holdfast.core.tree import tree_map
from holdfast.engines.common.oracle import MinibatchGradient
from holdfast.engines.common.simulation import Look
from holdfast.engines.simulate import fused as tracing
from holdfast.engines.simulate.fused import FusedRound
from holdfast.engines.simulate.replay import Program, Replay
from holdfast.problem.problem import PADDED_TO, Problem

# --- A whole round, local steps and exchange, as one CUDA graph that is replayed ------------------------


log = logging.getLogger(__name__)


def recorded(make: Callable[[Replay], Program]) -> Callable[[Replay], Program]:
    """What ``make`` makes of a round, as a graph."""
    return lambda replay: _record(make(replay))


def look_recorded(look: Look) -> Look:
    """``look``, a function of what stays in place, recorded when it is first called again.

    The first call makes what is kept and found once. What cannot be recorded is called as it is.
    """
    calls = 0
    result, replay = torch.empty(0), None

    def looked() -> Tensor:
        nonlocal calls, result, replay
        calls += 1
        if calls == 2:
            result = look()
            try:
                replay = _record(lambda: result.copy_(look()))
            except RuntimeError as error:
                log.info("measuring is not recorded: %s", str(error).splitlines()[0])
        if replay is None:
            return look()
        replay()
        return result

    return looked


def _record(program: Program) -> Program:
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with torch.cuda.stream(warm), _as_if_recording():
            program()
            # From now on a value read on the host, which would break the recording, is an error.
            _complain_of_waiting("error")
            program()
        torch.cuda.current_stream().wait_stream(warm)
    finally:
        _complain_of_waiting(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=warm):  # whose work space of cuBLAS is there already
        program()

    def replay(alive: Program = program) -> None:  # the graph reads constants that the program holds
        graph.replay()

    return replay


def _complain_of_waiting(mode: int | str) -> None:
    """Sets what torch does where the host waits for the device.

    It warns, once in a process, that it may miss some; a recording would notice those itself.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _as_if_recording() -> Iterator[None]:
    """Who asks torch whether a stream is being recorded hears yes.

    Libraries ask before they look at values on the host, and leave it out where the answer is yes.
    """
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


# --- rounds and gradients compiled by torch -------------------------------------------------------------


def as_written(replay: Replay) -> Program:
    """The round operation by operation, on fixed memory."""
    return lambda: replay.advance(replay.state)


def compiled(replay: Replay) -> Program:
    """The round as a few compiled programs, tried once."""
    # With rows that begin at multiples of 16 bytes, a round of 100 MLPs takes 13 % less time on an H200.
    rounds = replay.rounds
    columnwise = rounds.channel.columnwise and rounds.network.aggregation.columnwise
    may_be_padded = rounds.method.may_be_padded and columnwise
    state = _padded(replay) if may_be_padded else replay.state
    fused = FusedRound(replay.advance, state, replay.rounds.problem)
    fused(state)
    return lambda: fused(state)


def with_compiled_gradients(replay: Replay) -> Program:
    """The round as it is written, but for minibatch gradients."""
    gradient = compiled_gradient(replay.rounds.problem)
    return lambda: replay.advance(replay.state, gradient)


def compiled_gradient(problem: Problem) -> MinibatchGradient:
    """Drawing, gathering, normalising and differentiating fused into one program."""
    owner = weakref.ref(problem)  # what is compiled is never forgotten by torch, but the data must be

    def minibatch_gradient(x: Tensor, nodes: Tensor, round: Word, step: Word) -> tuple[Tensor, Tensor]:
        alive = owner()
        assert alive is not None
        return alive.minibatch_values_and_grads([x], nodes, round, step)[0]

    program = tracing.compiled(minibatch_gradient)

    def on_device(x: Tensor, nodes: Tensor, round: Word, step: Word) -> tuple[Tensor, Tensor]:
        # As tensors, so that a new round or step is no new program.
        words = [word if isinstance(word, Tensor) else nodes.new_full((), word) for word in (round, step)]
        value, gradient = program(x, nodes, *words)
        return value, gradient

    return on_device


def _padded(replay: Replay) -> Any:
    """The state with padded rows; ``replay.state`` becomes a view of it."""
    dim, narrow = replay.rounds.problem.dim, replay.state

    def is_row(tensor: Tensor) -> bool:
        return tensor.ndim > 0 and tensor.shape[-1] == dim

    def pad(tensor: Tensor) -> Tensor:
        return functional.pad(tensor, (0, -dim % PADDED_TO)) if is_row(tensor) else tensor

    wide = tree_map(pad, narrow)
    replay.state = tree_map(lambda w, t: w[..., :dim] if is_row(t) else w, wide, narrow)
    return wide
