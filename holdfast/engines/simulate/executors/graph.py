"""A whole round, local steps and exchange, as one CUDA graph that is replayed.

A round is run while CUDA records the kernels. One that looks at values on the host (a shared coin, a solver
that stops early, sporadic nodes) cannot be recorded.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.engines.common.simulation import Look
from holdfast.engines.simulate.executors.replay import Program, Replay

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
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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
