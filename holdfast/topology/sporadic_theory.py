"""What sporadic links do on average. P is the mixing matrix of one round: W over the available links.

Links are independent, so P = I - sum_e w_e v_e B_e, with weights w_e, coins v_e ~ Bernoulli(b_e) and
B_e = (e_i - e_j)(e_i - e_j)^T for the link e = (i, j).
"""

from __future__ import annotations

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.topology.activity import Floats
from holdfast.topology.mixing import is_symmetric
from holdfast.topology.network import Network


def expected_p(network: Network, round: int = 0) -> Floats:
    """E[P] = I - sum_e w_e b_e B_e in ``round``, [n, n]."""
    now, chances = network.at(round), network.availability(round)
    return np.eye(now.nodes) - _laplacian(now, _weights(now) * chances)


def expected_p_squared(network: Network, round: int = 0) -> Floats:
    """E[P^2] = E[P]^2 + sum_e 2 w_e^2 b_e (1 - b_e) B_e in ``round``, [n, n]."""
    now, chances = network.at(round), network.availability(round)
    mean = expected_p(network, round)
    return mean @ mean + _laplacian(now, 2 * _weights(now) ** 2 * chances * (1 - chances))


def rho_tilde(network: Network, round: int = 0) -> float:
    """lambda_max(E[P^2] - J): the factor by which one round shrinks squared disagreement, on average."""
    return float(np.linalg.eigvalsh(expected_p_squared(network, round) - 1 / network.nodes)[-1])


def _weights(network: Network) -> Floats:
    """The weight of every link, [E]."""
    if network.weights is None or not is_symmetric(network.weights):
        raise HoldfastError(
            "expected mixing needs links with symmetric weights, such as those of 'metropolis'"
        )
    i, j = network.links().T
    return np.asarray(network.weights[i, j])


def _laplacian(network: Network, weights: Floats) -> Floats:
    """sum_e weights_e B_e, [n, n]."""
    crossing = np.zeros((network.nodes, network.nodes))
    i, j = network.links().T
    crossing[i, j] = crossing[j, i] = weights
    return np.diag(crossing.sum(axis=1)) - crossing
