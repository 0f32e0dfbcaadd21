"""Networks: graphs, mixing matrices and their spectral figures."""

from holdfast.topology.activity import (
    DISTRIBUTIONS,
    Activity,
    BetaChance,
    Distribution,
    UniformChance,
    read_chance,
)
from holdfast.topology.base_graph import base_graph
from holdfast.topology.graphs import (
    TOPOLOGIES,
    Graph,
    complete,
    double_ring,
    edge_list,
    erdos_renyi,
    exponential,
    hypercube,
    line,
    random_geometric,
    ring,
    star,
    torus,
)
from holdfast.topology.mixing import (
    MIXINGS,
    laplacian,
    metropolis,
    uniform,
    uniform_neighbour,
    validate_mixing,
)
from holdfast.topology.named import build_network
from holdfast.topology.network import Network, server
from holdfast.topology.one_peer import equi_dynamic, equi_static, one_peer_exponential
from holdfast.topology.sporadic_theory import expected_p, expected_p_squared, rho_tilde

__all__ = [
    "DISTRIBUTIONS",
    "MIXINGS",
    "TOPOLOGIES",
    "Activity",
    "BetaChance",
    "Distribution",
    "Graph",
    "Network",
    "UniformChance",
    "base_graph",
    "build_network",
    "complete",
    "double_ring",
    "edge_list",
    "equi_dynamic",
    "equi_static",
    "erdos_renyi",
    "expected_p",
    "expected_p_squared",
    "exponential",
    "hypercube",
    "laplacian",
    "line",
    "metropolis",
    "one_peer_exponential",
    "random_geometric",
    "read_chance",
    "rho_tilde",
    "ring",
    "server",
    "star",
    "torus",
    "uniform",
    "uniform_neighbour",
    "validate_mixing",
]
