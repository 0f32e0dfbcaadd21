"""What states and messages look like, found without computing or sending anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from holdfast.contract import Algorithm, ServerAlgorithm
from holdfast.core.tree import tree_map
from holdfast.engines.common.counters import Traffic, Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.engines.common.zero import ZeroObjective
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.member.peers import NodePeers
from holdfast.engines.deploy.storage.messages import MessageFile

T = TypeVar("T")


class _Echo:
    """Stands in for received messages: whatever is read or added is nothing new."""

    def add_to(self, tree: Any, weight: float = 1.0) -> None:
        pass

    def read(self, like: Any, device: torch.device) -> Any:
        return like


class _Silence:
    """A transport over which nothing travels."""

    def __init__(self) -> None:
        self.sent: list[Any] = []  # to the server

    def broadcast(self, exchange: int, message: Any, neighbours: list[int]) -> dict[int, MessageFile]:
        return {j: cast(MessageFile, _Echo()) for j in neighbours}

    sporadic = broadcast

    def scatter(self, exchange: int, messages: Mapping[int, Tensor]) -> dict[int, MessageFile]:
        return {j: cast(MessageFile, _Echo()) for j in messages}

    def through_server(self, exchange: int, message: Any) -> MessageFile:
        self.sent.append(message)
        return cast(MessageFile, _Echo())

    def insist(self, read: Callable[[], T]) -> T:
        return read()


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

    return _at_dim(federation, dim, sent(1), sent(2))


def averaged_messages(federation: Federation, dim: int, stage: int) -> list[Any]:
    """Trees like what every node has a server average in a stage, exchange by exchange, on "meta".

    Stage 0 is before the first round. Found as in ``client_message``.
    """
    method, r = federation.method, max(stage - 1, 0)
    assert isinstance(method, Algorithm)

    def sent(size: int) -> list[Any]:
        x0, start, round = torch.zeros(size, dtype=torch.float64), _Silence(), _Silence()

        def peers(transport: _Silence) -> NodePeers:
            return NodePeers(0, federation.graph, federation.seed, r, transport, x0, Traffic())

        oracle = _zero_oracle(len(federation.node), 0, size, r)
        state = method.at(0).init(x0[None].clone(), oracle, peers(start))
        if stage == 0:
            return start.sent
        method.at(r).round(state, oracle, peers(round))
        return round.sent

    return [_at_dim(federation, dim, one, two) for one, two in zip(sent(1), sent(2), strict=True)]


def _at_dim(federation: Federation, dim: int, one: Any, two: Any) -> Any:
    """A tree of dimension ``dim``, given such trees of dimension one and two."""

    def grow(a: Tensor, b: Tensor) -> Tensor:
        sizes = [m + (n - m) * (dim - 1) for m, n in zip(a.shape, b.shape, strict=True)]
        return torch.empty(sizes, dtype=federation.torch_dtype, device="meta")

    return tree_map(grow, one, two)


def _zero_oracle(nodes: int, node: int, dim: int, round: int = 0) -> BatchOracle:
    return BatchOracle(ZeroObjective(nodes, dim), torch.tensor([node]), 0, round, Work())
