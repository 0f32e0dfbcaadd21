"""DualFL: accelerated proximal gradient on the dual, with exact or nearly exact local solves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor

from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    Oracle,
    Peers,
)
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, NonNegative, Positive, check
from holdfast.solvers import GapRule, LocalSolver, Newton, allowed_gap, gradient_norm_for_gap

SHRINKAGE = 10.0  # what continuation divides alpha by
EXACT = Newton()
GAMMA = 0.01  # of (3.7) and (3.8): any positive number will do


class Node(NamedTuple):
    x: Tensor  # minimiser of the node's last local problem, where it starts on the next
    mean: Tensor  # the mean of those over all nodes
    dual: Tensor  # nu zeta_j: tends to the node's own gradient at the optimum; sums to zero
    plain_dual: Tensor  # the same before momentum
    t: Tensor  # [..., 1]: t_n of (3.4), which the momentum is made of


def momentum(t: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """t_{n+1} and beta_n of (3.4); rho = 0 gives FISTA's."""
    rest = 1 - rho * t**2
    t_next = (rest + torch.sqrt(rest**2 + 4 * t**2)) / 2
    return t_next, (t - 1) / t_next * (1 - t_next * rho) / (1 - rho)


@ALGORITHMS.register("dualfl", family="primal-dual, with a server", paper="Park and Xu 2023, Alg. 1")
@dataclass(frozen=True)
class DualFL(Algorithm):
    """Accelerated in rounds, for smooth or nonsmooth convex objectives (Park and Xu 2023, Alg. 1).

    mu-strongly convex: nu <= mu and rho = 0, error O(1/n). L-smooth too: rho <= nu/L, error factor per round
    sqrt(1 - sqrt(rho)). Merely convex: alpha > 0, nu = alpha and rho = alpha/(L + alpha), for L-smooth
    objectives; ends where the common gradient is -alpha times the model. ``for_problem`` sets all three.
    """

    declared = Capabilities(
        topology="server",
        assumes_convex=True,
        uses_solver=True,
        uses_curvature=True,
        columnwise=True,
    )

    nu: Positive  # step in the dual; at most the strong convexity of the local problems
    rho: Annotated[float, Field(ge=0, lt=1)] = 0.0  # momentum: 0 grows as in FISTA, larger settles lower
    alpha: NonNegative = 0.0  # weight of (alpha/2) ||x||^2 added to every local problem
    shrink_alpha_every: Count | None = None  # rounds after which alpha is divided by 10; None: never
    solver: LocalSolver = EXACT
    gap_rule: GapRule | None = None  # stop local solves where (3.7), (3.8) allow; None: by the solver's rule
    mu: Positive | None = None  # gap_rule "strong-convexity": strong convexity of the objective, above nu

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu is not None and self.gap_rule != "strong-convexity":
            raise HoldfastError("DualFL.mu: only the gap_rule 'strong-convexity' uses it; leave it out")
        self.gradient_norm(0, 1)  # refuses nu >= mu where the rule cannot hold
        if self.shrink_alpha_every is not None and self.alpha == 0:
            raise HoldfastError("DualFL.shrink_alpha_every: there is no alpha to shrink; give alpha too")

    @classmethod
    def for_problem(
        cls,
        mu: float,
        L: float | None = None,
        *,
        nu: float | None = None,
        alpha: float = 0.0,
        **options: Any,
    ) -> Self:
        """The theorems' parameters for ``mu``-strongly convex and ``L``-smooth f_i (None: nonsmooth).

        ``nu``, by default mu + alpha, may be given smaller. ``alpha`` is needed where mu = 0. ``options`` are
        those of the class.
        """
        check("mu", NonNegative, mu)
        check("L", Positive | None, L)
        convexity = mu + check("alpha", NonNegative, alpha)
        nu = convexity if nu is None else check("nu", Positive, nu)
        if nu == 0:
            raise HoldfastError("mu: should be greater than 0 unless alpha is given, got 0")
        if nu > convexity:
            raise HoldfastError(f"nu: should be at most mu + alpha = {convexity:.6g}, got {nu:.6g}")
        if L is not None and mu > L:
            raise HoldfastError(f"L: should be at least mu = {mu:.6g}, got {L:.6g}")
        # nu = L + alpha: all curvatures are equal, so the first round is exact whatever rho.
        rho = 0.0 if L is None or nu == L + alpha else nu / (L + alpha)
        if options.get("gap_rule") == "strong-convexity":
            options["mu"] = mu
        return cls(nu, rho, alpha, **options)

    def at(self, round: int) -> Self:
        """Continuation divides alpha by 10, and nu and rho alike: that keeps them in the theorems' ranges."""
        if self.shrink_alpha_every is None:
            return self
        divisor = SHRINKAGE ** (round // self.shrink_alpha_every)
        return dataclasses.replace(
            self, nu=self.nu / divisor, rho=self.rho / divisor, alpha=self.alpha / divisor
        )

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        zero = torch.zeros_like(x0)
        return Node(x=x0, mean=x0, dual=zero, plain_dual=zero, t=torch.ones_like(x0[..., :1]))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        nodes = int(peers.degree.max()) + 1  # behind a server all nodes are neighbours
        accuracy = self.gradient_norm(oracle.round, nodes)
        x = oracle.argmin(-s.dual, torch.zeros_like(s.x), self.alpha, s.x, self.solver, accuracy)
        mean = peers.exchange(x).mixed
        plain_dual = s.dual + self.nu * (mean - x)
        t, beta = momentum(torch.ones_like(s.t) if self.begins(oracle.round) else s.t, self.rho)
        dual = plain_dual + beta * (plain_dual - s.plain_dual)
        return Node(x=x, mean=mean, dual=dual, plain_dual=plain_dual, t=t)

    def begins(self, round: int) -> bool:
        """Whether ``round`` is the first with its alpha: momentum starts again."""
        return self.shrink_alpha_every is not None and round % self.shrink_alpha_every == 0

    def gradient_norm(self, round: int, nodes: int) -> float | None:
        """Where the theorems let the local solves of ``round`` stop; None if that is left to the solver."""
        if self.gap_rule is None:
            return None
        n = round if self.shrink_alpha_every is None else round % self.shrink_alpha_every
        gap = allowed_gap(n, nodes, nu=self.nu, rho=self.rho, gamma=GAMMA)
        return gradient_norm_for_gap(gap, self.gap_rule, mu=(self.mu or 0.0) + self.alpha, nu=self.nu)

    def dual(self, s: Node) -> Tensor:
        return s.dual

    def model(self, s: Node) -> Tensor:
        return s.mean
