"""What a user asks for: the budget (epsilon, delta) of every sample, and where gradients are clipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from holdfast.core.validation import Positive, check_fields


@dataclass(frozen=True, kw_only=True)
class DP:
    """Differential privacy of single samples: whatever leaves a node is (epsilon, delta)-private.

    ``epsilon``, ``delta``: the budget of the whole run; delta should be far below 1 over a node's samples.
    ``clip``: the largest Euclidean norm that the gradient of a sample keeps; larger ones are scaled down.
    ``noise_multiplier``: standard deviation of the noise over the sensitivity; None: the smallest with which
    all planned rounds stay within the budget. Training ends before a round that would exceed it.
    """

    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    clip: Positive
    noise_multiplier: Positive | None = None

    def __post_init__(self) -> None:
        check_fields("DP", self)
