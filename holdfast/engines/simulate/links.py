"""The links of a network as matrices on the device where the simulator computes."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array
from torch import Tensor

from holdfast.topology import Network

# From this many nodes on, a graph with few links is mixed as a sparse matrix.
SPARSE_FROM_NODES = 512
SPARSE_BELOW_DENSITY = 0.05


class StackedLinks:
    """Everything that the exchange over one network needs; made once per network."""

    def __init__(self, network: Network, like: Tensor) -> None:
        self.network = network
        self.like = like  # device and dtype of the messages

    @cached_property
    def weights(self) -> Tensor:
        """W, [n, n], dense or sparse, whichever multiplies faster."""
        return self._matrix(self.network.weights)

    @cached_property
    def adjacency(self) -> Tensor:
        """1 on links, 0 elsewhere, [n, n]."""
        return self._matrix(self.network.adjacency)

    def weights_over(self, active: NDArray[np.bool_]) -> Tensor:
        """P, [n, n]: W with only the ``active`` links, [E]; the weight of the others stays at home."""
        nodes, (i, j) = self.network.nodes, self.network.links()[active].T
        assert self.network.weights is not None
        weights = self.network.weights[i, j]
        upper = csr_array((weights, (i, j)), shape=(nodes, nodes))
        crossing = upper + upper.T
        return self._matrix(csr_array(crossing + diags_array(1 - crossing.sum(axis=1))))

    @cached_property
    def degree(self) -> Tensor:
        """Number of neighbours, [n, 1]; behind a server everybody is everybody's neighbour."""
        nodes = self.network.nodes
        degrees = [nodes - 1] * nodes if self.network.is_server else self.network.degrees
        return torch.as_tensor(degrees).to(self.like)[:, None]

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """(own, other), each [2E]: the nodes at the two ends of every directed link, sorted by own."""
        links = self.network.links()
        own, other = np.concatenate([links, links[:, ::-1]]).T
        order = np.lexsort((other, own))
        device = self.like.device
        return torch.as_tensor(own[order], device=device), torch.as_tensor(other[order], device=device)

    @cached_property
    def reverse(self) -> Tensor:
        """[2E]: where the opposite direction of every directed link stands."""
        own, other = self.ends
        return torch.argsort(other * self.network.nodes + own)

    @cached_property
    def gathering(self) -> Tensor:
        """[n, 2E], sparse: sums the rows of every node's own directed links."""
        own = self.ends[0].cpu().numpy()
        shape = (self.network.nodes, len(own))
        return self._sparse(csr_array((np.ones(len(own)), (own, np.arange(len(own)))), shape=shape))

    def _matrix(self, matrix: csr_array) -> Tensor:
        nodes = self.network.nodes
        if nodes >= SPARSE_FROM_NODES and matrix.nnz < SPARSE_BELOW_DENSITY * nodes**2:
            return self._sparse(matrix)
        return torch.as_tensor(matrix.toarray()).to(self.like)

    def _sparse(self, matrix: csr_array) -> Tensor:
        rows, columns, values = map(torch.as_tensor, (matrix.indptr, matrix.indices, matrix.data))
        return torch.sparse_csr_tensor(rows, columns, values, matrix.shape).to(self.like)
