"""Products of a network's matrices with the rows of all nodes, never rounded."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from holdfast.core.precision import unrounded

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
