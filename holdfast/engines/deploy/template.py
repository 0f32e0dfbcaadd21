"""What states and messages look like, found without computing or sending anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from holdfast.contract import Algorithm, ServerAlgorithm
from holdfast.core.tree import tree_map
from holdfast.engines.common.counters import Traffic, Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.engines.common.zero import ZeroObjective
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.messages import MessageFile
from holdfast.engines.deploy.peers import NodePeers


class _Echo:
    """Stands in for received messages: whatever is read or added is nothing new."""

    def add_to(self, tree: Any, weight: float = 1.0) -> None:
        pass

    def read(self, like: Any, device: torch.device) -> Any:
        return like


class _Silence:
    """A transport over which nothing travels."""

    def broadcast(self, exchange: int, message: Any, neighbours: list[int]) -> dict[int, MessageFile]:
        return {j: cast(MessageFile, _Echo()) for j in neighbours}

    sporadic = broadcast

    def scatter(self, exchange: int, messages: Mapping[int, Tensor]) -> dict[int, MessageFile]:
        return {j: cast(MessageFile, _Echo()) for j in messages}

    def through_server(self, exchange: int, message: Any) -> MessageFile:
        return cast(MessageFile, _Echo())


def state_template(federation: Federation, node: int, x0: Tensor) -> Any:
    """A tree like the state of ``node``, on the device "meta": shapes without memory."""
    method = federation.method.at(0)
    row = torch.empty_like(x0, device="meta")[None]
    if isinstance(method, ServerAlgorithm):
        return method.init(row)
    assert isinstance(method, Algorithm)
    graph = federation.graph
    like = torch.empty_like(x0, device="meta")
    peers = NodePeers(node, graph, federation.seed, 0, _Silence(), like, Traffic())
    return method.init(row, _zero_oracle(len(federation.node), node, x0.numel()), peers)


def client_message(federation: Federation, dim: int) -> Any:
    """A tree like what a client of a server method sends, with models of dimension ``dim``, on "meta".

    Found in one dimension and in two: the size of every tensor is a number, or grows with the dimension.
    """
    method = federation.method.at(0)
    assert isinstance(method, ServerAlgorithm)

    def sent(size: int) -> Any:
        x0 = torch.zeros(size, dtype=torch.float64)
        received = method.broadcast(method.init_server(x0.clone()))
        oracle = _zero_oracle(len(federation.node), 0, size)
        return method.client(method.init(x0[None].clone()), received, oracle)[1]

    def at_dim(one: Tensor, two: Tensor) -> Tensor:
        sizes = [a + (b - a) * (dim - 1) for a, b in zip(one.shape, two.shape, strict=True)]
        return torch.empty(sizes, dtype=federation.torch_dtype, device="meta")

    return tree_map(at_dim, sent(1), sent(2))


def _zero_oracle(nodes: int, node: int, dim: int) -> BatchOracle:
    return BatchOracle(ZeroObjective(nodes, dim), torch.tensor([node]), 0, 0, Work())
