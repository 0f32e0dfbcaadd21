"""The user's requirement: the budget (epsilon, delta) of every sample or node, and the clipping norm."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.validation import Positive, check_fields

Accountant = Literal["pld", "rdp"]
LEAST_NOISE, MOST_NOISE = 1e-2, 1e6
# Beyond these, budgets promise nothing, and the spending cannot be computed, or only in a long time.
Epsilon = Annotated[Positive, Field(le=1e4)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Noise = Annotated[float, Field(ge=LEAST_NOISE, le=MOST_NOISE)]


@dataclass(frozen=True, kw_only=True)
class DP:
    """Differential privacy of single samples: whatever leaves a node is (epsilon, delta)-private.

    ``epsilon``, ``delta``: the budget of the whole run; delta should be far below 1 over a node's samples.
    ``clip``: the largest Euclidean norm that the gradient of a sample keeps; larger ones are scaled down.
    ``noise_multiplier``: standard deviation of the noise over the sensitivity; None: the smallest with which
    all planned rounds stay within the budget. Training ends before a round that would exceed it.
    ``accountant``: how the spending is computed, with privacy loss distributions ("pld") or with Rényi
    divergences ("rdp"), whose bounds are larger, for comparison with others.
    """

    epsilon: Epsilon
    delta: Delta
    clip: Positive
    noise_multiplier: Noise | None = None
    accountant: Accountant = "pld"

    def __post_init__(self) -> None:
        check_fields("DP", self)


@dataclass(frozen=True, kw_only=True)
class NodeDP:
    """Differential privacy of whole nodes, for methods that a server leads: what others see of a node's data.

    ``epsilon``, ``delta``: the budget of the whole run; delta should be far below 1 over the number of nodes.
    ``clip``: the largest Euclidean norm that a client's message keeps; larger ones are scaled down.
    ``noise_multiplier``: standard deviation of the noise in the sum of messages over ``clip``; None: the
    smallest with which all planned rounds stay within the budget.
    ``noise``: where it is added. "server": by a trusted server, which protects from all others. "clients": by
    each to its own message, which protects from the server, too. "distributed": each adds a share, and the
    server sees only the noised sum, which takes secure aggregation in a real federation.
    ``cohorts``: "fixed", of the size that is given, known to all; or "poisson": each client takes part
    with probability cohort / n, which only the server knows, and which makes rounds cheaper.
    ``quantile``: None; or the share of messages that are not to be clipped: ``clip`` is then adapted from
    round to round, with a noisy count (Andrew et al. 2021).
    ``accountant``: "pld" or "rdp", as for ``DP``.
    """

    epsilon: Epsilon
    delta: Delta
    clip: Positive
    noise_multiplier: Noise | None = None
    noise: Literal["server", "clients", "distributed"] = "server"
    cohorts: Literal["fixed", "poisson"] = "fixed"
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    accountant: Accountant = "pld"

    def __post_init__(self) -> None:
        check_fields("NodeDP", self)
        if self.noise != "server" and self.cohorts == "poisson":
            raise HoldfastError(
                f"NodeDP.cohorts: the server sees who takes part, so with noise = {self.noise!r} a secret "
                "draw gains nothing; use 'fixed'"
            )
        if self.noise == "clients" and self.quantile is not None:
            raise HoldfastError(
                "NodeDP.quantile: a count to which every client adds all of the noise says nothing; use "
                "noise = 'server' or 'distributed'"
            )


UNITS: dict[str, type[DP | NodeDP]] = {"sample": DP, "node": NodeDP}
OPTIONAL = ("noise_multiplier", "noise", "cohorts", "quantile", "accountant")


def _from_table(given: Any) -> Any:
    """A table of a file as the budget that it describes, of samples or of nodes; anything else as it is."""
    if not isinstance(given, dict):
        return given
    table = dict(given)
    unit = table.pop("unit", "sample")
    try:
        if unit not in UNITS:
            raise unknown("unit of private", unit, UNITS)
        known = [field.name for field in fields(UNITS[unit])]
        for key in table:
            if key not in known:
                raise unknown("key in private", key, known)
        if missing := [key for key in known if key not in table and key not in OPTIONAL]:
            raise HoldfastError(f"{missing[0]} is missing")
        return UNITS[unit](**table)
    except HoldfastError as error:
        raise ValueError(str(error)) from None


Budget = Annotated[DP | NodeDP | None, BeforeValidator(_from_table)]
