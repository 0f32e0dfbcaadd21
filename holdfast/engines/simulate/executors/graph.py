"""A whole round, local steps and exchange, as one CUDA graph that is replayed.

A round is run while CUDA records the kernels. One that looks at values on the host (a shared coin, a solver
that stops early, sporadic nodes) cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.engines.simulate.executors.replay import Program, Replay


def recorded(make: Callable[[Replay], Program]) -> Callable[[Replay], Program]:
    """What ``make`` makes of a round, as a graph."""
    return lambda replay: _record(make(replay))


def _record(program: Program) -> Program:
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm.wait_stream(torch.cuda.current_stream())
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with torch.cuda.stream(warm):
            program()
            # From now on a value read on the host, which would break the recording, is an error.
            torch.cuda.set_sync_debug_mode("error")
            program()
        torch.cuda.current_stream().wait_stream(warm)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=warm):  # whose work space of cuBLAS is there already
        program()

    def replay(alive: Program = program) -> None:  # the graph reads constants that the program holds
        graph.replay()

    return replay
