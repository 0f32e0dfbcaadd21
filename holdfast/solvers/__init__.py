"""Local solvers behind one call, ``oracle.argmin``."""

from holdfast.contract.solver import SOLVERS, LocalProblem, LocalSolver, Solver
from holdfast.solvers.aogm import AOGM
from holdfast.solvers.fista import FISTA
from holdfast.solvers.gradient import GradientDescent, StochasticGradientDescent
from holdfast.solvers.iterative import GapRule, allowed_gap, gradient_norm_for_gap
from holdfast.solvers.lbfgs import LBFGS
from holdfast.solvers.newton import Newton

__all__ = [
    "AOGM",
    "FISTA",
    "LBFGS",
    "SOLVERS",
    "GapRule",
    "GradientDescent",
    "LocalProblem",
    "LocalSolver",
    "Newton",
    "Solver",
    "StochasticGradientDescent",
    "allowed_gap",
    "gradient_norm_for_gap",
]
