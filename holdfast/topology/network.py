"""A network as the rest of holdfast sees it: a graph with mixing weights, or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, cast

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, issparse, triu

from holdfast.contract.aggregation import MEAN, Aggregation, Attack
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, check
from holdfast.topology.activity import Activity, Chance, LinkDraws, Probabilities
from holdfast.topology.graphs import Graph
from holdfast.topology.mixing import (
    MIXINGS,
    adjacency,
    least_eigenvalue,
    require_connected,
    spectral_lambda,
    validate_mixing,
)

ALWAYS = Activity()
GraphOrWeights: TypeAlias = Graph | csr_array | NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """Who talks to whom and with which weights; ``graph is None`` means a server that averages all nodes.

    Made by ``Network.of``, ``server`` or ``build_network``, which check everything.
    """

    nodes: int
    graph: Graph | None
    weights: csr_array | None  # [nodes, nodes] float64; None for a server, where W = J
    activity: Activity | None = None  # how often nodes compute and links transmit; None: always
    sequence: Callable[[int], Network] | None = None  # the network of each round, if it varies
    period: int | None = None  # the rounds after which a varying network begins again, if it does
    aggregation: Aggregation = MEAN  # how received messages are put together
    attack: Attack | None = None  # what some nodes send in place of their messages, in simulations

    @classmethod
    def of(
        cls, graph: Graph, mixing: str | csr_array | NDArray[Any] = "metropolis", **mixing_params: Any
    ) -> Network:
        """The network of a graph on nodes 0..n-1, with weights by name or as a matrix [n, n]."""
        require_connected(adjacency(graph), "the graph is", "add links")
        network = cls._of_any(graph, mixing, **mixing_params)
        require_connected(
            network.weights, "the mixing matrix leaves the nodes", "give every link a positive weight"
        )
        return network

    @classmethod
    def varying(
        cls,
        graphs: Callable[[int], GraphOrWeights] | Sequence[GraphOrWeights],
        every: int = 1,
        mixing: str = "metropolis",
        **mixing_params: Any,
    ) -> Network:
        """A network that changes: ``graphs(e)`` is its graph in rounds e * every to (e + 1) * every - 1.

        ``graphs`` may also be a list, which begins again after its last. In the place of a graph may stand a
        matrix [n, n] of weights, whose links are where it is not zero; graphs get the ``mixing``.
        The single graphs need not be connected, as long as the nodes are connected over time. Asked twice
        for the same e, ``graphs`` must return the same graph, or a run could not be resumed.
        Degrees, links and spectral figures of the whole network are those of the first graph.
        """
        check("every", Count, every)
        if not callable(graphs):
            return cls._periodic([cls._of_any(graph, mixing, **mixing_params) for graph in graphs], every)
        first = cls._of_any(graphs(0), mixing, **mixing_params)
        _check_epoch(0, first, first)

        @lru_cache(maxsize=4)
        def of_epoch(epoch: int) -> Network:
            network = cls._of_any(graphs(epoch), mixing, **mixing_params) if epoch else first
            _check_epoch(epoch, network, first)
            return network

        return replace(first, sequence=lambda round: of_epoch(round // every))

    @classmethod
    def _periodic(cls, networks: list[Network], every: int) -> Network:
        if not networks:
            raise HoldfastError("varying: the list of graphs is empty; give at least one")
        for epoch, network in enumerate(networks):
            _check_epoch(epoch, network, networks[0])
        together = csr_array(sum(network.adjacency for network in networks))
        require_connected(together, "varying: all graphs together are", "add links to one of them")
        return replace(
            networks[0],
            sequence=lambda round: networks[round // every % len(networks)],
            period=len(networks) * every,
        )

    @classmethod
    def _of_any(
        cls, graph: GraphOrWeights, mixing: str | csr_array | NDArray[Any], **mixing_params: Any
    ) -> Network:
        """As ``of``, but the graph may be disconnected, or a matrix of weights."""
        if not isinstance(graph, nx.Graph):
            graph, mixing, mixing_params = *_with_links(graph), {}
        size = adjacency(graph).shape[0]
        if isinstance(mixing, str):
            weights = MIXINGS.build(mixing, mixing_params, graph=graph)
        elif mixing_params:
            raise HoldfastError(
                f"mixing parameters ({', '.join(mixing_params)}) go with a mixing chosen by name, "
                "not with a matrix"
            )
        else:
            weights = _as_csr(mixing)
        validate_mixing(weights, graph, bool(mixing_params.get("allow_row_stochastic")))
        return cls(size, nx.freeze(graph.copy()), weights)

    def sporadic(
        self,
        compute: Chance = 1.0,
        links: Chance = 1.0,
        *,
        seed: int = 0,
        redraw_every: int | None = None,
        link_draws: LinkDraws = "once",
    ) -> Network:
        """This network with nodes that compute, and links that transmit, only now and then.

        Only methods made for it leave nodes and links out; the others wait for all nodes, which shows in the
        measured delays. See ``Activity`` for how probabilities are given.
        """
        if self.is_server:
            raise HoldfastError("a server has no sporadic links or nodes: use a graph such as 'ring'")
        if self.sequence is not None and isinstance(links, Mapping | Sequence | np.ndarray):
            raise HoldfastError(
                "links: those of a varying network change; give one probability for all, a distribution or "
                "a function of the round"
            )
        activity = Activity(compute, links, seed, redraw_every, link_draws)
        network = replace(self, activity=activity)
        network.probabilities(0)
        return network

    @property
    def trusting(self) -> bool:
        """Whether messages are put together by the plain weighted mean, and none of them is false."""
        return self.aggregation.plain and self.attack is None

    def attackers(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[m]: which of ``nodes`` [m] attack."""
        return np.isin(nodes, [] if self.attack is None else self.attack.nodes)

    @property
    def honest(self) -> int:
        """How many nodes do not attack."""
        return self.nodes - (0 if self.attack is None else len(set(self.attack.nodes)))

    def at(self, round: int) -> Network:
        """The network in ``round``, without activity: itself, unless it varies in time."""
        return self if self.sequence is None else self.sequence(round)

    def probabilities(self, round: int) -> Probabilities:
        """Of every node to compute, [n], and of every link to transmit, [E], in ``round``."""
        activity = self.activity or ALWAYS
        return _probabilities(activity, activity.since(round), self.at(round))

    def availability(self, round: int) -> NDArray[np.float64]:
        """How likely each link is available in ``round``, [E]; its probability, if drawn once."""
        chances = self.probabilities(round).links
        return chances if self.activity is None else self.activity.availability(chances, round)

    def link_times(self, round: int) -> NDArray[np.float64]:
        """What a vector over each link takes in ``round``, [E]: 1/b_ij over the degree, of both ends."""
        network = self.at(round)
        ends, per_node = network.links(), 1 / np.maximum(network.degrees, 1)
        return np.asarray((per_node[ends[:, 0]] + per_node[ends[:, 1]]) / self.probabilities(round).links)

    def link_time(self, round: int) -> float:
        """What a vector over all links takes, (1/n) sum_i (1/deg_i) sum_j 1/b_ij; 1 if always available."""
        if self.activity is None or self.is_server:
            return 1.0
        return float(self.link_times(round).sum() / self.nodes)

    def available_links(self, seed: int, round: int, draw: int) -> NDArray[np.bool_]:
        """Which links, [E], are available for the ``draw``-th sporadic exchange of ``round``."""
        chances, links = self.probabilities(round).links, self.at(round).links()
        if self.activity is None:
            return np.ones(len(links), dtype=bool)
        return self.activity.available(chances, self.nodes, links, seed, round, draw)

    def weights_over(self, available: NDArray[np.bool_]) -> csr_array:
        """P, [n, n]: W with only the ``available`` links, [E]; the others' weight stays with the node."""
        assert self.weights is not None, "a server has no links"
        if available.all():
            return self.weights
        own, other, link = self.directed
        crossing = self._directed_weights * available[link]
        home = 1 - np.bincount(own, crossing, self.nodes)
        diagonal = np.arange(self.nodes)
        rows, columns = np.concatenate([own, diagonal]), np.concatenate([other, diagonal])
        return csr_array((np.concatenate([crossing, home]), (rows, columns)), shape=self.weights.shape)

    def __repr__(self) -> str:
        """Such as ``Network(5 nodes, 5 links)``."""
        if self.is_server:
            return f"Network({self.nodes} nodes and a server)"
        changing = "links change" + (f", period {self.period}" if self.period else "")
        return f"Network({self.nodes} nodes, {changing if self.sequence else f'{len(self.links())} links'})"

    @property
    def is_server(self) -> bool:
        """Whether a server averages all nodes, instead of nodes exchanging with neighbours."""
        return self.graph is None

    @property
    def directed_links(self) -> int:
        """How many messages one exchange takes: two per link, or one up and one down per node of a server."""
        return 2 * self.nodes if self.is_server else int(self.degrees.sum())

    @cached_property
    def degrees(self) -> NDArray[np.int64]:
        """The number of neighbours of each node [n]; zeros for a server."""
        return np.asarray(np.diff(self.adjacency.indptr), dtype=np.int64)

    def neighbours(self, node: int) -> NDArray[np.int64]:
        """The nodes linked with ``node``, in ascending order; none for a server."""
        return np.asarray(self.adjacency[[node]].indices, dtype=np.int64)

    def links(self) -> NDArray[np.int64]:
        """The undirected links [E, 2] with i < j, in ascending order; none for a server."""
        return self._links

    @cached_property
    def _links(self) -> NDArray[np.int64]:
        upper = triu(self.adjacency, k=1, format="coo")
        return np.stack([upper.row, upper.col], axis=1).astype(np.int64)

    @cached_property
    def directed(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(own, other, link), each [2E]: both directions of every link, sorted by the end they belong to."""
        links = self.links()
        own, other = np.concatenate([links, links[:, ::-1]]).T
        order = np.lexsort((other, own))
        return own[order], other[order], np.tile(np.arange(len(links)), 2)[order]

    @cached_property
    def _directed_weights(self) -> NDArray[np.float64]:
        own, other, _ = self.directed
        return np.asarray(cast(csr_array, self.weights)[own, other])

    def weighted_links(self) -> list[tuple[int, int, float]]:
        """The undirected links (i, j, W_ij) with i < j; none for a server."""
        if self.weights is None:
            return []
        i, j = self.links().T
        return list(zip(i.tolist(), j.tolist(), self.weights[i, j].tolist(), strict=True))

    @cached_property
    def spectral_lambda(self) -> float:
        """lambda = ‖W - J‖₂: the factor by which one exchange shrinks disagreement, at worst."""
        return 0.0 if self.weights is None else spectral_lambda(self.weights)

    @cached_property
    def least_eigenvalue(self) -> float:
        """The smallest eigenvalue of W (its real part, if W is only row-stochastic); 0 for a server."""
        return 0.0 if self.weights is None else least_eigenvalue(self.weights)

    @property
    def mixing_parameter(self) -> float:
        """p = 1 - lambda²: 1 for exact averaging, near 0 for slow networks."""
        return 1 - self.spectral_lambda**2

    def dense(self) -> NDArray[np.float64]:
        """W as a dense matrix [n, n]; J = 11ᵀ/n for a server."""
        if self.weights is None:
            return np.full((self.nodes, self.nodes), 1 / self.nodes)
        return np.asarray(self.weights.toarray())

    @cached_property
    def adjacency(self) -> csr_array:
        """1 on links, 0 elsewhere, [n, n]; empty for a server."""
        return csr_array((self.nodes, self.nodes)) if self.graph is None else adjacency(self.graph)


@lru_cache(maxsize=8)
def _probabilities(activity: Activity, round: int, network: Network) -> Probabilities:
    return activity.at(round, network.nodes, network.links())


def _check_epoch(epoch: int, network: Network, first: Network) -> None:
    if not first.directed_links:
        raise HoldfastError("varying: the first graph has no links; begin with one that has some")
    if network.nodes != first.nodes:
        raise HoldfastError(
            f"varying: graph {epoch} has {network.nodes} nodes, but the first has {first.nodes}"
        )


def _with_links(matrix: Any) -> tuple[Graph, csr_array]:
    """The graph of a matrix of weights, [n, n], and the matrix in our format."""
    weights = _as_csr(matrix)
    if weights.shape[0] != weights.shape[1]:
        raise HoldfastError(f"varying: a matrix of weights must be square, got shape {weights.shape}")
    upper = triu(weights + weights.T, k=1, format="coo")
    graph: Graph = nx.empty_graph(weights.shape[0])
    graph.add_edges_from(zip(upper.row.tolist(), upper.col.tolist(), strict=True))
    return graph, weights


def server(nodes: int) -> Network:
    """A network of ``nodes`` clients whose messages a server averages."""
    return Network(check("server.nodes", Count, nodes), graph=None, weights=None)


def _as_csr(matrix: Any) -> csr_array:
    """A copy of a user's matrix in our format, without stored zeros."""
    if not (issparse(matrix) or isinstance(matrix, np.ndarray)) or matrix.ndim != 2:
        raise HoldfastError(
            "mixing must be a name, a 2-D numpy array or a scipy sparse array, "
            f"got {type(matrix).__name__} of shape {getattr(matrix, 'shape', 'unknown')}"
        )
    if matrix.dtype.kind not in "biuf":
        raise HoldfastError(f"mixing matrix: expected real numbers, got dtype {matrix.dtype}")
    weights = csr_array(matrix, dtype=np.float64, copy=True)
    weights.sum_duplicates()
    weights.eliminate_zeros()
    return weights
