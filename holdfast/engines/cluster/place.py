"""One rank's place in a simulation: the rows of the nodes that it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.engines.cluster.exchange import ClusterLinks, ClusterPeers, crossing_links, place
from holdfast.engines.cluster.ranks import Ranks
from holdfast.engines.common.channel_run import ChannelRun
from holdfast.engines.common.counters import Counters, Work
from holdfast.engines.common.links import StackedLinks
from holdfast.engines.common.oracle import Guard
from holdfast.engines.common.peers import Place
from holdfast.topology import Network


class RankPlace(Place):
    """The nodes of ``network`` that this rank of ``world`` holds."""

    world: Ranks

    def __init__(self, world: Ranks, network: Network) -> None:
        self.world = world
        self.blocks = place(network, world.size)
        self.solved = False  # whether there was a local solve in this round
        self.failure = ""  # of the first that failed

    def nodes(self, network: Network) -> Tensor:
        return torch.as_tensor(self.blocks[self.world.rank])

    def links(self, network: Network, like: Tensor) -> StackedLinks:
        return ClusterLinks(network, like, self.blocks, self.world.rank)

    def peers(
        self,
        network: Network,
        links: StackedLinks,
        seed: int,
        round: int,
        counters: Counters,
        channel_run: ChannelRun,
    ) -> ClusterPeers:
        assert isinstance(links, ClusterLinks)
        return ClusterPeers(network, links, seed, round, counters.traffic, channel_run, world=self.world)

    def guard(self, counts: bool) -> Guard:
        """Notes a solve that fails and continues with NaN: what is exchanged never depends on values.

        So no rank waits for the messages of one where a solve failed. After the round all ranks hear of it,
        and raise the error together (``raise_pending``).
        """

        def attempt(solve: Callable[[], Tensor], start: Tensor) -> Tensor:
            self.solved = True
            try:
                return solve()
            except HoldfastError as error:
                if counts:
                    self.failure = self.failure or str(error)
                return torch.full_like(start, torch.nan)

        return attempt

    def held(self, nodes: Tensor, chosen: Tensor) -> Tensor:
        return chosen[torch.isin(chosen, nodes)]

    def rows(self, nodes: Tensor, chosen: Tensor) -> Tensor:
        return torch.searchsorted(nodes, chosen)

    def raise_pending(self) -> None:
        solved, failure = self.solved, self.failure
        self.solved, self.failure = False, ""
        if solved:
            self.world.raise_alike(failure)

    def total(self, work: Work) -> Work:
        own = astuple(work)
        total = self.world.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        return Work(*(type(mine)(everybodys) for mine, everybodys in zip(own, total, strict=True)))

    def describe(self, network: Network) -> str:
        links, cut = len(network.links()), crossing_links(network, self.blocks)
        crossing = "" if network.is_server else f", {cut} of {links} links cross"
        return f"{self.world.size} ranks{crossing}"
