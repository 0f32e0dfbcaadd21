"""Where the rows of the nodes are: all of them in this process, or some on one rank of several."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.world import ALONE, World
from holdfast.engines.common.channel_run import ChannelRun
from holdfast.engines.common.counters import Counters, Work
from holdfast.engines.common.links import StackedLinks
from holdfast.engines.common.oracle import Guard, unguarded
from holdfast.engines.common.peers import StackedPeers
from holdfast.topology import Network


class Place:
    """All nodes are here. A rank of a cluster holds some of them and reaches the others over its world."""

    world: World = ALONE

    def nodes(self, network: Network) -> Tensor:
        """[m]: the numbers of the nodes here, ascending."""
        return torch.arange(network.nodes)

    def links(self, network: Network, like: Tensor) -> StackedLinks:
        """The links of the nodes here; messages have the device and type of ``like``."""
        return StackedLinks(network, like)

    def peers(
        self,
        network: Network,
        links: StackedLinks,
        seed: int,
        round: int,
        counters: Counters,
        channel_run: ChannelRun,
    ) -> StackedPeers:
        """The links of the nodes here in one round."""
        return StackedPeers(network, links, seed, round, counters.traffic, channel_run)

    def guard(self, counts: bool) -> Guard:
        """How local solves are tried; ``counts``: whether anybody needs their solutions."""
        return unguarded

    def held(self, nodes: Tensor, chosen: Tensor) -> Tensor:
        """Those of ``chosen`` that are among the ``nodes`` here."""
        return chosen

    def rows(self, nodes: Tensor, chosen: Tensor) -> Tensor:
        """The rows of ``chosen``, all of them among the ``nodes`` here."""
        return chosen

    def raise_pending(self) -> None:
        """Called after every round: the place to raise what must be raised everywhere alike."""

    def total(self, work: Work) -> Work:
        """What all nodes, here and elsewhere, have computed so far."""
        return work

    def describe(self, network: Network) -> str:
        """How the nodes are spread, for people; empty if they are all here."""
        return ""


HERE = Place()
