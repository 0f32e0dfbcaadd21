"""The links of a network as matrices on the device where the simulator computes."""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from holdfast.core.precision import unrounded
from holdfast.topology import Network

# --- products of a network's matrices with the rows of all nodes, never rounded -------------------------


# On a GPU, rows with at most so many entries are added up one by one, which a compiler fuses with the rest.
SHORT_ROW = 4


class ShortRows(NamedTuple):
    """A matrix with k entries in every row (some may be 0): their columns, [k, n], and values, [k, n, 1]."""

    columns: Tensor
    values: Tensor

    @classmethod
    def of(cls, matrix: csr_array, like: Tensor) -> ShortRows:
        k = int(np.diff(matrix.indptr).max())
        columns = np.zeros((k, matrix.shape[0]), dtype=np.int64)
        values = np.zeros((k, matrix.shape[0], 1))
        for row, (first, last) in enumerate(zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True)):
            columns[: last - first, row] = matrix.indices[first:last]
            values[: last - first, row, 0] = matrix.data[first:last]
        return cls(torch.as_tensor(columns).to(like.device), torch.as_tensor(values).to(like))

    def __matmul__(self, rows: Tensor) -> Tensor:
        total = self.values[0] * rows[self.columns[0]]
        for column, value in zip(self.columns[1:], self.values[1:], strict=True):
            total.addcmul_(value, rows[column])
        return total


class SparseRows(NamedTuple):
    """A matrix of ``columns`` columns by its entries: row r has those from starts[r] to starts[r + 1]."""

    starts: Tensor
    places: Tensor
    values: Tensor
    columns: int

    @classmethod
    def of(cls, matrix: csr_array, like: Tensor) -> SparseRows:
        starts, places, values = map(torch.as_tensor, (matrix.indptr, matrix.indices, matrix.data))
        return cls(starts.to(like.device), places.to(like.device), values.to(like), matrix.shape[1])

    def __matmul__(self, rows: Tensor) -> Tensor:
        product: Tensor = _sparse_product(self.starts, self.places, self.values, self.columns, rows)
        return product


Matrix = Tensor | ShortRows | SparseRows


def exact_product(matrix: Matrix, rows: Tensor) -> Tensor:
    """``matrix`` @ ``rows`` without TF32: rows of W that do not sum to one shrink the models."""
    rounded = isinstance(matrix, Tensor) and matrix.is_cuda
    return _exact_product(matrix, rows) if rounded else matrix @ rows


# Operations of their own: a compiler would not see that the setting is another one here, nor can it take
# sparse tensors apart.
@torch.library.custom_op("holdfast::exact_product", mutates_args=())
def _exact_product(matrix: Tensor, rows: Tensor) -> Tensor:
    with unrounded():
        return matrix @ rows


@_exact_product.register_fake
def _(matrix: Tensor, rows: Tensor) -> Tensor:
    return rows.new_empty(matrix.shape[0], rows.shape[1])


@torch.library.custom_op("holdfast::sparse_product", mutates_args=())
def _sparse_product(starts: Tensor, places: Tensor, values: Tensor, columns: int, rows: Tensor) -> Tensor:
    with warnings.catch_warnings():  # that sparse tensors are young, and not checked unless asked for
        warnings.simplefilter("ignore", UserWarning)
        matrix = torch.sparse_csr_tensor(starts, places, values, (len(starts) - 1, columns))
        return matrix @ rows


@_sparse_product.register_fake
def _(starts: Tensor, places: Tensor, values: Tensor, columns: int, rows: Tensor) -> Tensor:
    return rows.new_empty(len(starts) - 1, rows.shape[1])


PRODUCTS = {torch.ops.holdfast.exact_product.default, torch.ops.holdfast.sparse_product.default}


# --- the links of a network as matrices on the device where the simulator computes ----------------------


# From this many nodes on, a graph with few links is mixed as a sparse matrix.
SPARSE_FROM_NODES = 512
SPARSE_BELOW_DENSITY = 0.05


class IncomingLinks(NamedTuple):
    """Who is heard by every node, itself first; nodes with fewer neighbours have places that nobody takes."""

    senders: Tensor  # [n, k] int64
    weights: Tensor  # [n, k]
    present: Tensor  # [n, k] bool


def incoming(weights: csr_array, adjacency: csr_array, like: Tensor) -> IncomingLinks:
    """Of the links that are not zero in ``adjacency`` [n, n]."""
    rows = [np.concatenate([[i], np.setdiff1d(_linked(adjacency, i), i)]) for i in range(weights.shape[0])]
    places = np.arange(max(map(len, rows)))
    present = places < np.array(list(map(len, rows)))[:, None]
    senders = np.stack([np.pad(row, (0, len(places) - len(row)), mode="edge") for row in rows])
    own = np.arange(len(rows))[:, None]
    shares = np.where(present, weights.toarray()[own, senders], 0.0)
    there = (torch.as_tensor(part).to(like.device) for part in (senders.astype(np.int64), present))
    return IncomingLinks(next(there), torch.as_tensor(shares).to(like), next(there))


def _linked(adjacency: csr_array, node: int) -> NDArray[np.int64]:
    begin, end = adjacency.indptr[node : node + 2]
    return np.asarray(adjacency.indices[begin:end][adjacency.data[begin:end] != 0], dtype=np.int64)


class StackedLinks:
    """Everything that the exchange over one network needs; made once per network."""

    def __init__(self, network: Network, like: Tensor) -> None:
        self.network = network
        self.like = like  # device and dtype of the messages

    @cached_property
    def weights(self) -> Matrix:
        """W, [n, n], dense or sparse, whichever multiplies faster."""
        return self._short(self.network.weights) or self._matrix(self.network.weights)

    @cached_property
    def adjacency(self) -> Matrix:
        """1 on links, 0 elsewhere, [n, n]."""
        return self._matrix(self.network.adjacency)

    def weights_over(self, available: NDArray[np.bool_]) -> Matrix:
        """P, [n, n]: W with only the ``available`` links, [E]; the others' weight stays with the node."""
        return self._matrix(self.network.weights_over(available))

    @cached_property
    def incoming(self) -> IncomingLinks:
        """What every node hears over all its links."""
        assert self.network.weights is not None
        return incoming(self.network.weights, self.network.adjacency, self.like)

    def incoming_over(self, available: NDArray[np.bool_]) -> IncomingLinks:
        """The same over the ``available`` links, [E]."""
        weights = self.network.weights_over(available)
        own, other, link = self.network.directed
        there = csr_array((available[link].astype(float), (own, other)), shape=weights.shape)
        return incoming(weights, there, self.like)

    @property
    def degree(self) -> Tensor:
        """Number of neighbours of every node that is here."""
        return self.all_degrees

    @cached_property
    def all_degrees(self) -> Tensor:
        """Number of neighbours, [n, 1]; behind a server all nodes are neighbours."""
        nodes = self.network.nodes
        degrees = [nodes - 1] * nodes if self.network.is_server else self.network.degrees
        return torch.as_tensor(degrees).to(self.like)[:, None]

    def vectors(self, numbers: int) -> float:
        """So many ``numbers`` of a message as a multiple of the model's dimension."""
        return numbers / self.like.numel()

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """(own, other), each [2E]: the nodes at the two ends of every directed link, sorted by own."""
        own, other, _ = self.network.directed
        return torch.as_tensor(own).to(self.like.device), torch.as_tensor(other).to(self.like.device)

    @property
    def rows(self) -> Tensor:
        """[2E]: the row of the node that every directed link belongs to."""
        return self.ends[0]

    @cached_property
    def reverse(self) -> Tensor:
        """[2E]: where the opposite direction of every directed link stands."""
        own, other = self.ends
        return torch.argsort(other * self.network.nodes + own)

    @cached_property
    def gathering(self) -> Matrix:
        """[n, 2E]: sums the rows of every node's own directed links."""
        own = self.ends[0].cpu().numpy()
        shape = (self.network.nodes, len(own))
        return self._matrix(csr_array((np.ones(len(own)), (own, np.arange(len(own)))), shape=shape))

    def _short(self, matrix: csr_array) -> ShortRows | None:
        short = self.like.is_cuda and np.diff(matrix.indptr).max() <= SHORT_ROW
        return ShortRows.of(matrix, self.like) if short else None

    def _matrix(self, matrix: csr_array) -> Tensor | SparseRows:
        rows, columns = matrix.shape
        if rows >= SPARSE_FROM_NODES and matrix.nnz < SPARSE_BELOW_DENSITY * rows * columns:
            return SparseRows.of(matrix, self.like)
        return torch.as_tensor(matrix.toarray()).to(self.like)
