"""What a user asks for: the budget (epsilon, delta) of every sample, and where gradients are clipped."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from holdfast.core.errors import HoldfastError, unknown
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


def _from_table(given: Any) -> Any:
    """A table of a file as the budget that it describes; anything else as it is."""
    if not isinstance(given, dict):
        return given
    known = [field.name for field in fields(DP)]
    try:
        for key in given:
            if key not in known:
                raise unknown("key in private", key, known)
        if missing := [key for key in known if key not in given and key != "noise_multiplier"]:
            raise HoldfastError(f"{missing[0]} is missing")
        return DP(**given)
    except HoldfastError as error:
        raise ValueError(str(error)) from None


Budget = Annotated[DP | None, BeforeValidator(_from_table)]
