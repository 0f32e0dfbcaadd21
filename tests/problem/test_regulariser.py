"""Each term of the regulariser: its value by a formula of its own, its derivatives by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from convex_problems import digits

from holdfast.experiments.spec import Objective
from holdfast.problem.curvature import estimate_curvature
from holdfast.problem.losses.base import Regulariser

FORMULAS: dict[str, Callable[[float], float]] = {
    "l2": lambda x: x**2 / 2,
    "l1": abs,
    "nonconvex": lambda x: x**2 / (1 + x**2),
}
every_term = pytest.mark.parametrize("name", sorted(Regulariser.names()))


def points() -> torch.Tensor:
    """[5, 7], none of them a kink."""
    return 2 * torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_every_term_is_an_option_and_has_a_formula() -> None:
    names = Regulariser.names()
    assert names <= set(Objective.model_fields), "write the option into Objective in experiments/spec.py"
    assert names == set(FORMULAS), "write the value of a new term into FORMULAS of this file"


@every_term
def test_its_value_is_that_of_the_formula(name: str) -> None:
    x = points()
    expected = [0.3 * math.fsum(FORMULAS[name](value) for value in row.tolist()) for row in x]
    assert Regulariser(**{name: 0.3}).value(x).tolist() == pytest.approx(expected, rel=1e-14)


@every_term
def test_its_derivatives_are_those_of_autograd(name: str) -> None:
    regulariser, x = Regulariser(**{name: 0.3}), points().requires_grad_()
    [slope] = torch.autograd.grad(regulariser.value(x).sum(), x, create_graph=True)
    assert torch.allclose(regulariser.add_grad(torch.ones_like(x), x), 1 + slope, rtol=1e-12, atol=1e-12)
    second = torch.zeros_like(x)
    if slope.requires_grad:
        found = torch.autograd.grad(slope.sum(), x, allow_unused=True)[0]
        second = second if found is None else found
    assert torch.allclose(regulariser.curvature(x), second, rtol=1e-12, atol=1e-12)


@every_term
def test_its_curvature_is_within_the_bounds(name: str) -> None:
    """The bounds are reached, too, if only at infinity."""
    [(_, term)] = Regulariser(**{name: 1.0}).terms
    x = torch.cat([torch.linspace(0, 5, 50_001), torch.logspace(1, 6, 100)]).double()
    found = term.curvature(torch.cat([-x, x]))
    assert term.least - 1e-12 <= float(found.min()) == pytest.approx(term.least, abs=1e-6)
    assert term.most + 1e-12 >= float(found.max()) == pytest.approx(term.most, abs=1e-6)


def test_convexity_is_that_of_the_terms_with_a_coefficient() -> None:
    assert Regulariser(l2=0.1, l1=0.2).convex
    assert not Regulariser(l2=0.1, nonconvex=1e-9).convex
    assert Regulariser(l2=0.1, l1=0.2, nonconvex=1.0).least == pytest.approx(0.1)
    assert Regulariser(l2=0.1, l1=0.2, nonconvex=1.0).most == pytest.approx(2.1)


@every_term
def test_its_bounds_are_those_of_the_whole_objective(name: str) -> None:
    plain, added = (
        estimate_curvature(digits(regulariser=r)) for r in (Regulariser(), Regulariser(**{name: 0.3}))
    )
    [(weight, term)] = Regulariser(**{name: 0.3}).terms
    assert added.everywhere == (term.least >= 0)
    if added.everywhere:
        assert added.mu == pytest.approx(plain.mu + weight * term.least, abs=1e-12)
        assert pytest.approx(plain.L + weight * term.most, rel=1e-9) == added.L
