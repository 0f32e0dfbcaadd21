"""The rounds of a method as functions from a state to a state; who runs them, and how, is not known here."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.contract import Algorithm, Method, ServerAlgorithm
from holdfast.core.randomness import cohort
from holdfast.core.tree import put_rows, row_size, tree_map
from holdfast.engines.common.counters import Counters
from holdfast.engines.common.fit import check_fit
from holdfast.engines.common.oracle import INITIAL_STEP, BatchOracle, MinibatchGradient
from holdfast.engines.common.peers import StackedPeers
from holdfast.engines.common.place import HERE, Place
from holdfast.problem.problem import Objective
from holdfast.topology import Network


class ServerState(NamedTuple):
    """State of a server method."""

    server: Any
    clients: Any  # rows of all clients here, kept once


class Inputs(NamedTuple):
    """All that differs from round to round. Where a round is replayed, tensors stand in for the numbers."""

    method: Method  # as it is in this round
    round: int
    cohort: Tensor  # [k]: the clients that take part, of those here


class Rounds:
    """The rounds of ``method`` on ``problem`` over ``network``, for the nodes at ``place``."""

    def __init__(
        self,
        method: Method,
        problem: Objective,
        network: Network,
        *,
        seed: int = 0,
        cohort_size: int | None = None,
        place: Place = HERE,
    ) -> None:
        check_fit(method, problem.nodes, network, cohort_size)
        self.method, self.problem, self.network, self.place = method, problem, network, place
        self.seed, self.cohort_size = seed, cohort_size or problem.nodes
        self.nodes = place.nodes(network).to(problem.x0.device)
        self.links = place.links(network.at(0), problem.x0)

    def initial(self, counters: Counters) -> Any:
        """The state before the first round."""
        method, x0 = self.method.at(0), self.problem.x0
        rows = x0.expand(len(self.nodes), -1)
        if isinstance(method, ServerAlgorithm):
            clients = _own_memory(method.init(rows), shared=x0)
            return ServerState(server=method.init_server(x0.clone()), clients=clients)
        assert isinstance(method, Algorithm)
        oracle = self._oracle(self.nodes, 0, counters)
        oracle.step = INITIAL_STEP
        return method.init(rows.clone(), oracle, self._peers(0, counters))

    def inputs(self, round: int) -> Inputs:
        """What ``round`` differs in from others."""
        return Inputs(self.method.at(round), round, self.cohort(round))

    def cohort(self, round: int) -> Tensor:
        """[k]: the clients of the round's cohort that are here; perhaps none."""
        if self.cohort_size == self.problem.nodes:
            return self.nodes
        chosen = cohort(self.seed, round, self.problem.nodes, self.cohort_size).to(self.nodes.device)
        return self.place.held(self.nodes, chosen)

    def advance(
        self, state: Any, now: Inputs, counters: Counters, gradient: MinibatchGradient | None = None
    ) -> Any:
        """The state after the round. ``gradient`` computes minibatch gradients, if not the problem itself."""
        if isinstance(now.method, ServerAlgorithm):
            return self._server_round(now.method, state, now, counters, gradient)
        assert isinstance(now.method, Algorithm)
        oracle = self._oracle(self.nodes, now.round, counters, gradient)
        return now.method.round(state, oracle, self._peers(now.round, counters))

    def models(self, state: Any) -> Tensor:
        """The model of each node here after the last exchange, [m, d]; a server's model is everybody's."""
        if isinstance(self.method, ServerAlgorithm):
            return self.method.model(state.server).expand(len(self.nodes), -1)
        assert isinstance(self.method, Algorithm)
        return self.method.model(state)

    def duals(self, state: Any) -> Tensor | None:
        """What the method says of ``dual``, for the nodes here."""
        return self.method.dual(state.clients if isinstance(state, ServerState) else state)

    def _server_round(
        self,
        method: ServerAlgorithm[Any],
        state: ServerState,
        now: Inputs,
        counters: Counters,
        gradient: MinibatchGradient | None,
    ) -> ServerState:
        received = method.broadcast(state.server)
        # If nobody here was drawn, one client whose work counts for nothing shows what a message looks like.
        takes_part = len(now.cohort) > 0
        chosen, counted = (now.cohort, counters) if takes_part else (self.nodes[:1], Counters())
        places = self.place.rows(self.nodes, chosen)
        before = tree_map(lambda rows: rows[places], state.clients)
        oracle = self._oracle(chosen, now.round, counted, gradient, takes_part)
        after, message = method.client(before, received, oracle)
        if takes_part:
            clients = put_rows(state.clients, places, after)
        else:
            clients, message = state.clients, tree_map(lambda rows: rows[:0], message)
        counters.traffic.numbers += self.cohort_size * (row_size(received) + row_size(message))
        mean = tree_map(lambda rows: self.place.world.mean(rows, self.cohort_size), message)
        server = method.server(state.server, mean, self.cohort_size / self.problem.nodes)
        return ServerState(server=server, clients=clients)

    def _oracle(
        self,
        nodes: Tensor,
        round: int,
        counters: Counters,
        gradient: MinibatchGradient | None = None,
        counts: bool = True,
    ) -> BatchOracle:
        chances = None
        if self.network.activity is not None:
            chances = torch.as_tensor(self.network.probabilities(round).compute, device=nodes.device)
        return self.place.oracle(self.problem, nodes, self.seed, round, counters, chances, gradient, counts)

    def _peers(self, round: int, counters: Counters) -> StackedPeers:
        now = self.network.at(round)
        if now is not self.links.network:
            self.links = self.place.links(now, self.problem.x0)
        return self.place.peers(self.network, self.links, self.seed, round, counters)


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
