"""Which executor runs where."""

from __future__ import annotations

import torch

from holdfast.engines.simulate.executors.captured import CapturedSimulation
from holdfast.engines.simulate.executors.compiled import CompiledSimulation
from holdfast.engines.simulate.executors.replayed import ReplayedSimulation


def simulation_class(device: torch.device) -> type[ReplayedSimulation]:
    """The executor for a device: recorded rounds on a GPU, elsewhere rounds that are compiled if it pays."""
    return CapturedSimulation if device.type == "cuda" else CompiledSimulation
