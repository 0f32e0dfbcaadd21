"""The simulator: all nodes of a federation trained at once on one device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.contract import Algorithm, Method, ServerAlgorithm
from holdfast.core.memory import keep_freed_memory
from holdfast.core.randomness import cohort
from holdfast.core.tree import from_named, named_leaves, put_rows, row_size, tree_map
from holdfast.core.world import ALONE, World
from holdfast.engines.common.counters import Traffic, Work
from holdfast.engines.common.fit import check_fit
from holdfast.engines.common.links import StackedLinks
from holdfast.engines.common.oracle import INITIAL_STEP, BatchOracle
from holdfast.engines.common.peers import StackedPeers
from holdfast.problem.model_problem import ModelObjective
from holdfast.problem.problem import Objective
from holdfast.topology import Network


class Federation(NamedTuple):
    """State of a server method."""

    server: Any
    clients: Any  # rows of all clients, kept once


class Simulation:
    """One method on one objective over one network. ``step`` runs a round; everything else looks at it.

    Here all nodes are in this process; a rank of a cluster runs the same with those it holds.
    """

    world: World = ALONE
    everybody: Tensor  # [m]: the numbers of the nodes here, ascending

    def __init__(
        self,
        method: Method,
        objective: Objective,
        network: Network,
        *,
        seed: int = 0,
        cohort_size: int | None = None,
    ) -> None:
        check_fit(method, objective.nodes, network, cohort_size)
        self.method, self.objective, self.network = method, objective, network
        self.seed, self.cohort_size = seed, cohort_size or objective.nodes
        self.work = Work()
        self.traffic = Traffic()
        self.everybody = self._nodes_here().to(objective.x0.device)
        self.links = self._links(network.at(0))
        self.round = 0
        self.state = self._initial_state()

    def _initial_state(self) -> Any:
        method, x0 = self.method.at(0), self.objective.x0
        rows = x0.expand(len(self.everybody), -1)
        if isinstance(method, ServerAlgorithm):
            clients = _own_memory(method.init(rows), shared=x0)
            return Federation(server=method.init_server(x0.clone()), clients=clients)
        assert isinstance(method, Algorithm)
        oracle = self._oracle(self.everybody, 0)
        oracle.step = INITIAL_STEP
        return method.init(rows.clone(), oracle, self._peers(0))

    def prepare(self, rounds: int) -> str:
        """Gets ready for so many rounds and says how they will be run."""
        keep_freed_memory()
        how = (
            self.objective.row_grads.how
            if isinstance(self.objective, ModelObjective)
            else "all nodes stacked"
        )
        return f"{how}, step by step"

    def step(self) -> None:
        """Runs the next communication round."""
        self.state = self._advance(self.method.at(self.round), self.state, self.round, self._cohort())
        self.round += 1

    def _advance(self, method: Method, state: Any, round: int, chosen: Tensor) -> Any:
        """The state after ``round``, in which the clients ``chosen`` take part if there is a server."""
        if isinstance(method, ServerAlgorithm):
            return self._server_round(method, state, round, chosen)
        assert isinstance(method, Algorithm)
        return method.round(state, self._oracle(self.everybody, round), self._peers(round))

    def _server_round(
        self, method: ServerAlgorithm[Any], state: Federation, round: int, chosen: Tensor
    ) -> Federation:
        received = method.broadcast(state.server)
        places = self._places(chosen)
        after, message = self._client_work(method, state.clients, received, chosen, round)
        self.traffic.numbers += self.cohort_size * (row_size(received) + row_size(message))
        mean = tree_map(lambda rows: self.world.mean(rows, self.cohort_size), message)
        server = method.server(state.server, mean, self.cohort_size / self.objective.nodes)
        return Federation(server=server, clients=put_rows(state.clients, places, after))

    def _client_work(
        self, method: ServerAlgorithm[Any], clients: Any, received: Any, chosen: Tensor, round: int
    ) -> tuple[Any, Any]:
        """The new state and the message of the clients ``chosen``."""
        places = self._places(chosen)
        before = tree_map(lambda rows: rows[places], clients)
        return method.client(before, received, self._oracle(chosen, round))

    def _cohort(self) -> Tensor:
        if self.cohort_size == self.objective.nodes:
            return self.everybody
        picked = cohort(self.seed, self.round, self.objective.nodes, self.cohort_size)
        return picked.to(self.everybody.device)

    def _oracle(self, nodes: Tensor, round: int) -> BatchOracle:
        chances = None
        if self.network.activity is not None:
            chances = torch.as_tensor(self.network.probabilities(self.round).compute, device=nodes.device)
        return BatchOracle(self.objective, nodes, self.seed, round, self.work, chances)

    def _peers(self, round: int) -> StackedPeers:
        now = self.network.at(self.round)
        if now is not self.links.network:
            self.links = self._links(now)
        return self._peers_over(self.links, round)

    # --- what differs where other processes hold the other nodes -------------------------------------------

    def _nodes_here(self) -> Tensor:
        return torch.arange(self.objective.nodes)

    def _places(self, nodes: Tensor) -> Tensor:
        """The rows of ``nodes``."""
        return nodes

    def _links(self, network: Network) -> StackedLinks:
        return StackedLinks(network, like=self.objective.x0)

    def _peers_over(self, links: StackedLinks, round: int) -> StackedPeers:
        return StackedPeers(self.network, links, self.seed, round, self.traffic)

    @property
    def models(self) -> Tensor:
        """The model after the last exchange of each node here, [m, d]; a server's model is everybody's."""
        if isinstance(self.method, ServerAlgorithm):
            return self.method.model(self.state.server).expand(len(self.everybody), -1)
        assert isinstance(self.method, Algorithm)
        return self.method.model(self.state)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all messages so far, each counted once."""
        return self.traffic.numbers * self.objective.x0.element_size()

    def total_work(self) -> Work:
        """What all nodes, here and elsewhere, have computed so far."""
        return self.work

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that ``restore`` needs to go on from here: tensors by name, and counters."""
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in named_leaves(self.state)
        }
        counters = {
            "round": self.round,
            "traffic": asdict(self.traffic),
            "work": asdict(self.work),
        }
        return tensors, counters

    def restore(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Continues from a ``snapshot``."""
        self.state = from_named(self.state, tensors)
        self.round = counters["round"]
        self.traffic = Traffic(**counters["traffic"])
        self.work = Work(**counters["work"])


def _own_memory(clients: Any, shared: Tensor) -> Any:
    """``clients`` with no memory in common: rows are put back in place. Copies nothing without need."""
    taken = {shared.data_ptr()}

    def own(rows: Tensor) -> Tensor:
        dense = rows.contiguous()
        if dense.data_ptr() in taken:
            dense = dense.clone()
        taken.add(dense.data_ptr())
        return dense

    return tree_map(own, clients)
