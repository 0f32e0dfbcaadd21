"""Mixing matrices: how much weight a node gives to each neighbour's message (algorithms: X becomes W X).

All are sparse, float64, symmetric and doubly stochastic unless said otherwise.
"""

from __future__ import annotations

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.sparse import csr_array, diags_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.topology.graphs import Graph, shorten

# --- extreme eigenvalues --------------------------------------------------------------------------------


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


# --- mixing matrices ------------------------------------------------------------------------------------


MIXINGS: Registry[csr_array] = Registry("mixing", context=("graph",))
"""All mixing matrices by name."""


@MIXINGS.register("metropolis")
def metropolis(graph: Graph) -> csr_array:
    """W_ij = 1 / (1 + max(deg_i, deg_j)) on links; the rest stays at home."""
    A = adjacency(graph)
    degrees = np.diff(A.indptr)
    links = A.tocoo()
    weights = 1 / (1 + np.maximum(degrees[links.row], degrees[links.col]))
    return _fill_diagonal(csr_array((weights, (links.row, links.col)), shape=A.shape))


@MIXINGS.register("laplacian")
def laplacian(graph: Graph) -> csr_array:
    """W = I - 2 L / (3 lambda_max(L)) with the graph's Laplacian L; eigenvalues lie in [1/3, 1]."""
    A = adjacency(graph)
    if not A.nnz:  # a varying network may have moments without any link
        return _fill_diagonal(A)
    L = (diags_array(A.sum(axis=1)) - A).tocsr()
    return _fill_diagonal(A * (2 / (3 * largest_eigenvalues(L, 1)[0])))


@MIXINGS.register("uniform")
def uniform(graph: Graph) -> csr_array:
    """W_ij = 1/n for all pairs: exact averaging, for complete graphs only."""
    A = adjacency(graph)
    nodes = A.shape[0]
    if A.nnz != nodes * (nodes - 1):
        raise HoldfastError(
            f"mixing 'uniform' needs a complete graph, but only {A.nnz // 2} of {nodes * (nodes - 1) // 2} "
            "pairs are linked; use mixing 'metropolis', or topology 'complete' or 'server'"
        )
    return csr_array(np.full((nodes, nodes), 1 / nodes))


@MIXINGS.register("uniform-neighbour")
def uniform_neighbour(graph: Graph, allow_row_stochastic: bool = False) -> csr_array:
    """W_ij = 1 / (1 + deg_i) for neighbours and oneself; only for regular graphs unless allowed.

    If degrees differ, only the rows sum to one, so that mixing does not keep the average of the nodes.
    """
    A = adjacency(graph)
    degrees = np.diff(A.indptr)
    if degrees.min() != degrees.max() and not allow_row_stochastic:
        raise HoldfastError(
            "mixing 'uniform-neighbour' needs equal degrees to be doubly stochastic, but they range from "
            f"{degrees.min()} to {degrees.max()}; use mixing 'metropolis' (or allow_row_stochastic = true)"
        )
    return _fill_diagonal(csr_array(diags_array(1 / (1 + degrees)) @ A))


def _fill_diagonal(links: csr_array) -> csr_array:
    """The weights of the links with what is missing to row sums of one put on the diagonal."""
    W = (links + diags_array(1 - links.sum(axis=1))).tocsr()
    W.sort_indices()
    return W


def adjacency(graph: Graph) -> csr_array:
    """The checked graph as a symmetric 0/1 matrix [n, n]: undirected, nodes 0..n-1, no self loops.

    Attributes of the links, weights among them, are not used.
    """
    if not isinstance(graph, nx.Graph) or graph.is_directed() or graph.is_multigraph():
        raise HoldfastError(f"a topology must be an undirected networkx.Graph, got {type(graph).__name__}")
    nodes = graph.number_of_nodes()
    if nodes < 2:
        raise HoldfastError(f"a graph needs at least 2 nodes, got {nodes}; a single node can use the server")
    if not all(isinstance(node, int | np.integer) for node in graph) or set(graph) != set(range(nodes)):
        raise HoldfastError(
            f"the nodes of a graph must be the integers 0 to {nodes - 1}, got {_labels(graph)}; "
            "use networkx.convert_node_labels_to_integers"
        )
    loops = sorted(nx.nodes_with_selfloops(graph))
    if loops:
        raise HoldfastError(f"the graph links {shorten(loops)} with itself; remove self loops")
    A = nx.to_scipy_sparse_array(graph, nodelist=range(nodes), weight=None, format="csr")
    A = A.astype(np.float64)
    A.sort_indices()
    return A


def _labels(graph: Graph) -> str:
    labels = [repr(node) for node in list(graph)[:4]]
    return ", ".join(labels[:3]) + (", ..." if len(labels) > 3 else "")


def validate_mixing(W: csr_array, graph: Graph, allow_row_stochastic: bool = False) -> None:
    """Raises unless W is finite, non-negative, symmetric, with row sums of one, and zero where there is no
    link. ``allow_row_stochastic`` waives the symmetry.
    """
    A = adjacency(graph)
    if W.shape != A.shape:
        raise HoldfastError(f"mixing matrix: expected shape {A.shape} as the graph has, got {W.shape}")
    if not np.isfinite(W.data).all():
        raise HoldfastError(f"mixing matrix: {_first(W, ~np.isfinite(W.data))} is not finite")
    if W.data.min(initial=0) < 0:
        raise HoldfastError(f"mixing matrix: {_first(W, W.data < 0)} is negative")
    excess = np.abs(W.sum(axis=1) - 1)
    worst = int(excess.argmax())
    if excess[worst] > TOLERANCE:
        raise HoldfastError(
            f"mixing matrix: every row must sum to 1 within {TOLERANCE:g}, but row {worst} misses it by "
            f"{excess[worst]:.2g}; compute the weights in float64, or use mixing 'metropolis'"
        )
    if not (allow_row_stochastic or is_symmetric(W)):
        skew = (W - W.T).tocsr()
        raise HoldfastError(
            "mixing matrix: it must be symmetric (and so doubly stochastic), but W - Wᵀ has "
            f"{_first(skew, np.abs(skew.data) > TOLERANCE)}; use mixing 'metropolis'"
        )
    outside = csr_array(W - W.multiply(A + diags_array(np.ones(A.shape[0]))))
    if outside.count_nonzero():
        raise HoldfastError(
            f"mixing matrix: {_first(outside, outside.data != 0)} must be 0, as these nodes have no link"
        )


def _first(matrix: csr_array, wanted: NDArray[np.bool_]) -> str:
    """``[0, 2] = 0.5``: the first of the stored entries that are ``wanted``."""
    entries = matrix.tocoo()
    where = int(np.flatnonzero(wanted)[0])
    return f"[{entries.row[where]}, {entries.col[where]}] = {entries.data[where]:g}"


def require_connected(matrix: csr_array, subject: str, advice: str) -> None:
    """Raises, naming the nodes that are cut off, unless the links of ``matrix`` connect all nodes."""
    count, component = connected_components(matrix, directed=False)
    if count > 1:
        cut_off = np.flatnonzero(component != np.bincount(component).argmax()).tolist()
        raise HoldfastError(
            f"{subject} not connected: {count} components, with {shorten(cut_off)} cut off from the "
            f"{'others' if count == 2 else 'largest'}; {advice}"
        )
