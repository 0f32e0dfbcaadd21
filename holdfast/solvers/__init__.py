"""Local solvers behind one call, ``oracle.argmin``."""

from holdfast.solvers.base import SOLVERS, LocalProblem, LocalSolver, Solver
from holdfast.solvers.newton import Newton

__all__ = ["SOLVERS", "LocalProblem", "LocalSolver", "Newton", "Solver"]
