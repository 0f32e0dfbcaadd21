"""Whether a method, a network and a cohort go together."""

from __future__ import annotations

from holdfast.contract import Algorithm, Method, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.topology import Network


def check_fit(method: Method, nodes: int, network: Network, cohort_size: int | None) -> None:
    """Refuses a method on a network it is not made for, and cohorts that cannot be drawn."""
    name = type(method).__name__
    leads = isinstance(method, ServerAlgorithm) or (isinstance(method, Algorithm) and method.needs_server)
    if network.nodes != nodes:
        raise HoldfastError(f"network: it has {network.nodes} nodes, but the data are split over {nodes}")
    if leads and not network.is_server:
        raise HoldfastError(f"{name} needs a server: use the topology 'server', not a graph")
    if isinstance(method, Algorithm) and method.needs_graph and network.is_server:
        raise HoldfastError(
            f"{name} works along links: use a graph such as the topology 'ring', not a server"
        )
    if cohort_size is None:
        return
    if not isinstance(method, ServerAlgorithm) or not method.allows_cohorts:
        raise HoldfastError(f"cohort: {name} needs every node in every round; leave the cohort out")
    if not 1 <= cohort_size <= nodes:
        raise HoldfastError(f"cohort: should be between 1 and the number of nodes {nodes}, got {cohort_size}")
