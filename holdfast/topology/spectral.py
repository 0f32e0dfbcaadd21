"""Extreme eigenvalues, right even where they lie within 1e-7 of each other (rings of 10,000 nodes)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.sparse import csr_array
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from holdfast.core.errors import HoldfastError

TOLERANCE = 1e-12
"""By how much a row sum may miss one, and an entry its mirror image, before we call it a mistake."""

DENSE_LIMIT = 1500
"""Up to this many nodes a dense matrix is the fastest and surest way (18 MB, below a second)."""

ROUGH = 1e-4
"""Relative accuracy of the estimate that tells shift-and-invert where to look."""


def spectral_lambda(W: csr_array) -> float:
    """The largest singular value ‖W - J‖₂ of a matrix whose rows sum to one."""
    nodes = W.shape[0]
    if not is_symmetric(W):
        if nodes > DENSE_LIMIT:
            raise HoldfastError(
                f"lambda of weights that are only row-stochastic is limited to {DENSE_LIMIT} nodes, "
                f"got {nodes}; choose symmetric weights such as 'metropolis'"
            )
        return float(np.linalg.norm(W.toarray() - 1 / nodes, 2))
    if nodes <= DENSE_LIMIT:
        return float(np.abs(np.linalg.eigvalsh(W.toarray() - 1 / nodes)).max())
    second = largest_eigenvalues(W, 2, bound=1.0)[0]
    # Gershgorin: no eigenvalue lies below 2 min W_ii - 1, so the lower end of the spectrum rarely matters
    if second >= 1 - 2 * W.diagonal().min():
        return float(second)
    return float(max(second, largest_eigenvalues(-W, 1)[0]))


def least_eigenvalue(W: csr_array) -> float:
    """The smallest eigenvalue; of a matrix that is not symmetric, the smallest real part of one."""
    if is_symmetric(W):
        return float(-largest_eigenvalues((-W).tocsr(), 1)[0])
    return float(np.linalg.eigvals(W.toarray()).real.min())


def largest_eigenvalues(matrix: csr_array, count: int, bound: float | None = None) -> NDArray[np.float64]:
    """The ``count`` largest eigenvalues of a symmetric matrix, ascending; none of all exceeds ``bound``.

    Lanczos converges fast on well-connected graphs, whose factorisation would fill up. On long thin ones
    (rings, lines) it does not, but these factorise at no cost, so shift-and-invert finishes the work.
    """
    size = matrix.shape[0]
    if size <= DENSE_LIMIT:
        return np.asarray(eigh(matrix.toarray(), eigvals_only=True, subset_by_index=[size - count, size - 1]))
    options = {"v0": np.random.default_rng(0).standard_normal(size), "ncv": 40, "return_eigenvectors": False}
    try:
        found = eigsh(matrix, k=count, which="LA", maxiter=50, **options)
    except ArpackNoConvergence:
        if bound is None:
            rough = eigsh(matrix, k=1, which="LA", tol=ROUGH, **options)[0]
            bound = rough + ROUGH * abs(matrix).sum(axis=1).max()  # ten times the usual error of `rough`
        found = eigsh(matrix, k=count, sigma=bound + 1e-8, which="LM", **options)
    return np.sort(found)


def is_symmetric(matrix: csr_array) -> bool:
    """Whether every entry equals its mirror image, up to rounding."""
    return bool(abs(matrix - matrix.T).max() <= TOLERANCE)
