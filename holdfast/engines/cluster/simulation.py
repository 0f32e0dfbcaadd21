"""One rank's part of a simulation: the same rounds on the rows of the nodes that it holds."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from holdfast.contract import Method, ServerAlgorithm
from holdfast.core.tree import tree_map
from holdfast.engines.cluster.links import ClusterLinks
from holdfast.engines.cluster.oracle import CautiousOracle, Solves
from holdfast.engines.cluster.peers import ClusterPeers
from holdfast.engines.cluster.placement import crossing_links, place
from holdfast.engines.cluster.ranks import Ranks
from holdfast.engines.common.counters import Work
from holdfast.engines.common.links import StackedLinks
from holdfast.engines.common.oracle import BatchOracle
from holdfast.engines.simulate.executors.captured import CapturedSimulation
from holdfast.engines.simulate.executors.inputs import NotReplayableError
from holdfast.engines.simulate.executors.replayed import REFUSALS, Advance, first_line
from holdfast.engines.simulate.simulation import Simulation
from holdfast.problem.problem import Objective
from holdfast.topology import Network


class ClusterSimulation(Simulation):
    """A ``Simulation`` whose nodes are spread over ``world``."""

    def __init__(
        self,
        method: Method,
        objective: Objective,
        network: Network,
        world: Ranks,
        *,
        seed: int = 0,
        cohort_size: int | None = None,
    ) -> None:
        self.ranks = self.world = world
        self.blocks = place(network, world.size)
        self.solves = Solves()
        super().__init__(method, objective, network, seed=seed, cohort_size=cohort_size)
        self._hear_of_failures()  # solves before the first round

    def prepare(self, rounds: int) -> str:
        links, cut = len(self.network.links()), crossing_links(self.network, self.blocks)
        crossing = "" if self.network.is_server else f", {cut} of {links} links cross"
        return f"{self.world.size} ranks{crossing}; {super().prepare(rounds)}"

    def step(self) -> None:
        self.solves = Solves()
        super().step()
        self.round -= 1  # it does not count if a solve failed
        self._hear_of_failures()
        self.round += 1

    def _hear_of_failures(self) -> None:
        if self.solves.tried:
            self.ranks.raise_alike(self.solves.failure)

    def _nodes_here(self) -> Tensor:
        return torch.as_tensor(self.blocks[self.world.rank])

    def _places(self, nodes: Tensor) -> Tensor:
        return torch.searchsorted(self.everybody, nodes)

    def _links(self, network: Network) -> StackedLinks:
        return ClusterLinks(network, self.objective.x0, self.blocks, self.world.rank)

    def _peers_over(self, links: StackedLinks, round: int) -> ClusterPeers:
        assert isinstance(links, ClusterLinks)
        return ClusterPeers(self.network, links, self.seed, round, self.traffic, world=self.world)

    def _oracle(self, nodes: Tensor, round: int) -> BatchOracle:
        plain = super()._oracle(nodes, round)
        return CautiousOracle(**vars(plain), solves=self.solves)

    def _cohort(self) -> Tensor:
        """Those of the cohort that are here; perhaps none."""
        chosen = super()._cohort()
        return chosen[torch.isin(chosen, self.everybody)]

    def _client_work(
        self, method: ServerAlgorithm[Any], clients: Any, received: Any, chosen: Tensor, round: int
    ) -> tuple[Any, Any]:
        if len(chosen):
            return super()._client_work(method, clients, received, chosen, round)
        # Nobody here was drawn. What a message looks like is found out by one client whose work counts for
        # nothing; the others compute meanwhile.
        (self.work, work), (self.solves, solves) = (Work(), self.work), (Solves(), self.solves)
        stand_in = super()._client_work(method, clients, received, self.everybody[:1], round)
        solves.tried = self.solves.tried
        self.work, self.solves = work, solves
        after, message = (tree_map(lambda rows: rows[:0], part) for part in stand_in)
        return after, message

    def total_work(self) -> Work:
        own = astuple(self.work)
        total = self.world.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        return Work(*(type(mine)(everybodys) for mine, everybodys in zip(own, total, strict=True)))

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The rows here, and everybody's counters."""
        tensors, counters = super().snapshot()
        counters["work"] = vars(self.total_work())
        return tensors, counters

    def restore(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        super().restore(tensors, counters)
        if not self.world.leads:
            self.work = Work()  # the leader's counts what was done before


class CapturedClusterSimulation(ClusterSimulation, CapturedSimulation):
    """The same on GPUs: rounds are replayed from a recording, if all ranks can record theirs."""

    traceable = False  # it waits for other ranks in the middle

    def buffered(self, rounds: int = 1) -> Advance:
        if self.cohort_size < self.objective.nodes:
            raise NotReplayableError("how many clients of a cohort are on a rank differs from round to round")
        return super().buffered(rounds)

    def _record(self, advance: Advance) -> None:
        problem = ""
        try:
            super()._record(advance)
        except REFUSALS as error:
            torch.cuda.synchronize()
            problem = first_line(error)
        self.ranks.raise_alike(problem)


def cluster_simulation_class(device: torch.device) -> type[ClusterSimulation]:
    """The executor for a device, on a rank."""
    return CapturedClusterSimulation if device.type == "cuda" else ClusterSimulation
