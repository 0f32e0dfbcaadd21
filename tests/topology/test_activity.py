"""Sporadic and varying networks: probabilities, drawn links and expected mixing."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest

import holdfast as hf
from holdfast.topology import (
    BetaChance,
    Network,
    UniformChance,
    build_network,
    expected_p,
    expected_p_squared,
    rho_tilde,
    server,
)

RING = Network.of(hf.ring(5))  # links (0, 1), (0, 4), (1, 2), (2, 3), (3, 4)


def draws(network: Network, rounds: int, seed: int = 0) -> np.ndarray:
    """[rounds, E]: which links are available in each round."""
    return np.stack([network.available_links(seed, round, 1) for round in range(rounds)])


# --- probabilities ------------------------------------------------------------------------------------------


def test_probabilities_are_given_in_many_ways() -> None:
    compute, links = RING.probabilities(0)
    assert compute.tolist() == links.tolist() == [1.0] * 5
    compute, links = RING.sporadic(0.3, [0.1, 0.2, 0.3, 0.4, 0.5]).probabilities(7)
    assert compute.tolist() == [0.3] * 5
    assert links.tolist() == [0.1, 0.2, 0.3, 0.4, 0.5]
    links = RING.sporadic(links={(0, 4): 0.4, (3, 2): 0.3}).probabilities(0).links
    assert links.tolist() == [1.0, 0.4, 1.0, 0.3, 1.0]
    moving = RING.sporadic(compute=lambda round: 1 / (1 + round), links=lambda round: {(0, 1): 0.5})
    assert moving.probabilities(0).compute.tolist() == [1.0] * 5
    assert moving.probabilities(3).compute.tolist() == [0.25] * 5
    assert moving.probabilities(3).links.tolist() == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_quantiles_by_hand() -> None:
    u = np.array([0.0, 0.5, 0.75])
    assert UniformChance(0.2, 0.6).quantile(u).tolist() == pytest.approx([0.2, 0.4, 0.5])
    assert UniformChance(floor=0.01).quantile(u).tolist() == [0.01, 0.5, 0.75]
    arcsine = np.sin(np.pi * u / 2) ** 2  # Beta(1/2, 1/2)
    assert BetaChance(floor=1e-9).quantile(u)[1:] == pytest.approx(arcsine[1:], rel=1e-12)
    assert BetaChance(a=1, b=1).quantile(u).tolist() == pytest.approx([1e-3, 0.5, 0.75])


def test_drawn_probabilities_follow_their_distribution() -> None:
    network = Network.of(hf.complete(60)).sporadic(UniformChance(high=0.1), UniformChance(), seed=4)
    compute, links = network.probabilities(0)
    assert compute.min() > 0
    assert compute.max() <= 0.1
    assert abs(links.mean() - 0.5) < 4 * (1 / 12 / len(links)) ** 0.5
    quartiles = np.histogram(links, bins=4, range=(0, 1))[0] / len(links)
    assert np.abs(quartiles - 0.25).max() < 4 * (0.25 * 0.75 / len(links)) ** 0.5
    other = Network.of(hf.complete(60)).sporadic(UniformChance(high=0.1), UniformChance(), seed=5)
    assert (links != other.probabilities(0).links).mean() > 0.99


def test_a_link_keeps_its_draw_whatever_the_graph_around_it() -> None:
    chance = UniformChance()
    in_ring = Network.of(hf.ring(5)).sporadic(links=chance).probabilities(0).links
    everywhere = Network.of(hf.complete(5))
    by_pair = dict(
        zip(
            map(tuple, everywhere.links()),
            everywhere.sporadic(links=chance).probabilities(0).links,
            strict=True,
        )
    )
    assert in_ring.tolist() == [by_pair[tuple(link)] for link in RING.links()]


def test_probabilities_are_drawn_anew_as_often_as_asked() -> None:
    chance = UniformChance()
    for compute in (chance, lambda round: 0.5):  # a function of the round must not hurry the links' draws
        network = RING.sporadic(compute, chance, redraw_every=10)
        epochs = [network.probabilities(round).links.tolist() for round in (0, 9, 10, 19, 20)]
        assert epochs[0] == epochs[1] != epochs[2] == epochs[3] != epochs[4] != epochs[0]
    assert network.probabilities(0).links.tolist() == epochs[0]  # going back changes nothing
    constant = RING.sporadic(links=chance)
    assert constant.probabilities(0).links.tolist() == constant.probabilities(10**6).links.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute": 0}, r"^compute: probabilities should lie in \(0, 1\], got 0$"),
        ({"compute": 1.5}, r"^compute: .* got 1.5$"),
        ({"compute": float("nan")}, r"^compute: .* got nan$"),
        ({"links": [0.5, 0.5, -0.1, 0.5, 0.5]}, r"^links: .* got -0.1$"),
        ({"compute": [0.5] * 3}, r"^compute: expected one probability for each of the 5 nodes, .* got 3$"),
        ({"links": [[0.5] * 5]}, r"^links: expected one probability for each of the 5 links, .* got 1 x 5$"),
        ({"links": [[0.5], 0.5]}, r"^links: expected probabilities, got "),
        ({"compute": "often"}, r"^compute: expected probabilities, got 'often'$"),
        ({"compute": None}, r"^compute: expected probabilities, got 'None'$"),
        ({"compute": True}, r"^compute: expected probabilities, got 'True'$"),
        ({"compute": {(0, 1): 0.5}}, r"^compute: pairs are for links; give a number or one per node$"),
        ({"links": {(0, 2): 0.5}}, r"^links: there is no link between 0 and 2$"),
        ({"links": {(0, 1): 2.0}}, r"^links: probabilities should lie in \(0, 1\], got 2$"),
        ({"links": {0: 0.5}}, r"^links: should be a valid tuple, got 0$"),
        ({"links": lambda round: 0.5 - round}, r"^links at round 1: .* got -0.5$"),
        ({"compute": 0.5, "redraw_every": 5}, r"^redraw_every: neither compute nor links is drawn "),
        ({"links": UniformChance(), "redraw_every": 0}, r"^redraw_every: should be greater .* got 0$"),
        ({"links": lambda round: 0.5, "link_draws": "latched"}, r"^link_draws: .* must not change$"),
        ({"links": UniformChance(), "redraw_every": 3, "link_draws": "latched"}, r"^link_draws: "),
        ({"seed": -1}, r"^seed: should be greater than or equal to 0, got -1$"),
    ],
)
def test_bad_probabilities(options: dict, message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message) as caught:
        RING.sporadic(**options).probabilities(1)
    assert "\n" not in str(caught.value)


def test_bad_distributions() -> None:
    for make, message in (
        (lambda: UniformChance(0.5, 0.2), r"UniformChance.low: should be at most high = 0.2, got 0.5"),
        (
            lambda: UniformChance(high=1e-4),
            r"UniformChance.floor: should be at most high = 0.0001, got 0.001",
        ),
        (lambda: UniformChance(high=2.0), r"UniformChance.high: .* got 2.0"),
        (lambda: BetaChance(a=0), r"BetaChance.a: should be greater than 0, got 0"),
    ):
        with pytest.raises(hf.HoldfastError, match=message):
            make()


def test_a_server_is_not_sporadic() -> None:
    with pytest.raises(hf.HoldfastError, match="a server has no sporadic links or nodes: use a graph"):
        server(5).sporadic(compute=0.5)


# --- drawn links --------------------------------------------------------------------------------------------


def test_links_are_drawn_with_their_probability_and_independently() -> None:
    chances = np.array([0.1, 0.3, 0.5, 0.7, 1.0])
    up = draws(RING.sporadic(links=chances), 1500)
    error = 4 * np.sqrt(chances * (1 - chances) / len(up))  # four standard deviations
    assert (np.abs(up.mean(0) - chances) <= error).all()
    together = up[:, :4].T.astype(float) @ up[:, :4] / len(up)
    for i, j in itertools.combinations(range(4), 2):
        expected = chances[i] * chances[j]
        assert abs(together[i, j] - expected) < 4 * (expected * (1 - expected) / len(up)) ** 0.5
    one, next_one = up[:-1, 2], up[1:, 2]  # the same link in successive rounds
    assert abs((one & next_one).mean() - 0.25) < 4 * (0.25 * 0.75 / len(up)) ** 0.5


def test_draws_depend_on_seed_round_and_draw_alone() -> None:
    network = RING.sporadic(links=0.5)
    up = draws(network, 40)
    assert (up == draws(RING.sporadic(links=0.5), 40)).all()
    assert (network.available_links(0, 17, 1) == up[17]).all()
    assert (up != draws(network, 40, seed=1)).any()
    assert any((network.available_links(0, round, 2) != up[round]).any() for round in range(40))
    assert draws(RING, 3).all()


def test_every_drawn_matrix_is_symmetric_and_doubly_stochastic() -> None:
    network = Network.of(hf.random_geometric(12, radius=0.5, seed=2)).sporadic(links=UniformChance())
    W = network.dense()
    for round in range(50):
        available = network.available_links(3, round, 1)
        P = network.weights_over(available).toarray()
        assert (P == P.T).all()
        assert np.abs(P.sum(0) - 1).max() < 1e-15
        assert P.min() >= 0
        for (i, j), up in zip(network.links(), available, strict=True):
            assert P[i, j] == (W[i, j] if up else 0)
        P[tuple(network.links().T)] = 0
        assert not np.triu(P, 1).any()  # nothing where there is no link


def test_all_links_together_are_the_mixing_matrix_itself() -> None:
    assert (RING.weights_over(np.ones(5, dtype=bool)).toarray() == RING.dense()).all()
    assert (RING.weights_over(np.zeros(5, dtype=bool)).toarray() == np.eye(5)).all()


def test_weights_that_are_only_row_stochastic_keep_their_rows() -> None:
    network = Network.of(hf.star(4), "uniform-neighbour", allow_row_stochastic=True)
    P = network.weights_over(np.array([True, False, True])).toarray()
    expected = [[0.5, 0.25, 0, 0.25], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.5, 0, 0, 0.5]]
    assert np.abs(P - expected).max() < 1e-15


def test_latched_links_stay_and_come_up_at_the_usual_rate() -> None:
    network = Network.of(hf.complete(60)).sporadic(links=0.2, link_draws="latched")
    up = draws(network, 12)
    assert (up[1:] >= up[:-1]).all()
    expected = 1 - 0.8 ** np.arange(1, 13)
    assert (np.abs(up.mean(1) - expected) < 4 * np.sqrt(expected * (1 - expected) / up.shape[1])).all()


def test_links_drawn_by_each_end_are_available_if_either_end_is_able() -> None:
    network = Network.of(hf.complete(60)).sporadic(links=0.2, link_draws="each-end")
    up = draws(network, 12).mean()
    assert abs(up - 0.36) < 4 * np.sqrt(0.36 * 0.64 / (12 * 60 * 59 / 2))
    assert network.link_time(0) == pytest.approx(5)  # a vector still takes 1/b
    both = Network.of(hf.ring(5)).sporadic(links=0.36)
    drawn_twice = Network.of(hf.ring(5)).sporadic(links=0.2, link_draws="each-end")
    assert np.abs(expected_p(drawn_twice) - expected_p(both)).max() < 1e-15


# --- expected mixing ----------------------------------------------------------------------------------------


def all_outcomes(network: Network) -> list[tuple[float, np.ndarray]]:
    """Every set of available links: its probability and its P."""
    chances = network.availability(0)
    outcomes = []
    for pattern in itertools.product([False, True], repeat=len(chances)):
        available = np.array(pattern)
        probability = float(np.where(available, chances, 1 - chances).prod())
        outcomes.append((probability, network.weights_over(available).toarray()))
    return outcomes


@pytest.mark.parametrize("mixing", ["metropolis", "laplacian"])
def test_expected_mixing_equals_the_sum_over_all_outcomes(mixing: str) -> None:
    graph = nx.Graph([(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (1, 3)])
    network = Network.of(graph, mixing).sporadic(links=[0.1, 0.9, 0.5, 0.3, 1.0, 0.7])
    outcomes = all_outcomes(network)
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1, abs=1e-15)
    mean = sum(probability * P for probability, P in outcomes)
    square = sum(probability * P @ P for probability, P in outcomes)
    assert np.abs(expected_p(network) - mean).max() < 1e-15
    assert np.abs(expected_p_squared(network) - square).max() < 1e-15
    assert rho_tilde(network) == pytest.approx(np.linalg.norm(square - 1 / 5, 2), abs=1e-14)


def test_expected_mixing_equals_the_average_over_drawn_links() -> None:
    network = Network.of(hf.random_geometric(8, radius=0.5, seed=1)).sporadic(links=UniformChance())
    squares = []
    for available in draws(network, 1500):
        P = network.weights_over(available).toarray()
        squares.append(P @ P)
    assert np.abs(np.mean(squares, axis=0) - expected_p_squared(network)).max() < 1e-2


def test_rho_tilde_by_hand() -> None:
    assert rho_tilde(RING) == pytest.approx(RING.spectral_lambda**2)
    pair = Network.of(hf.ring(2)).sporadic(links=0.3)  # W = J: one round agrees or does nothing
    assert rho_tilde(pair) == pytest.approx(0.7)
    assert rho_tilde(RING.sporadic(links=1e-9)) == pytest.approx(1, abs=1e-8)
    with pytest.raises(hf.HoldfastError, match="symmetric weights"):
        rho_tilde(server(3))


# --- varying graphs -----------------------------------------------------------------------------------------


def lonely_pairs(epoch: int) -> nx.Graph:
    """Two of four nodes are linked at a time; only over time is everybody connected."""
    graph = nx.empty_graph(4)
    graph.add_edge(epoch % 3, epoch % 3 + 1)
    return graph


def test_a_varying_network_has_a_graph_for_every_round() -> None:
    network = Network.varying(lonely_pairs, every=2)
    links = [network.at(round).links().tolist() for round in range(8)]
    assert links == [[[0, 1]]] * 2 + [[[1, 2]]] * 2 + [[[2, 3]]] * 2 + [[[0, 1]]] * 2
    assert network.links().tolist() == [[0, 1]]
    sporadic = network.sporadic(links=UniformChance())
    chances = [float(sporadic.probabilities(round).links[0]) for round in range(8)]
    assert chances[0] == chances[1] == chances[6] != chances[2] == chances[3]
    assert (RING.at(3).weights != RING.weights).nnz == 0


def test_bad_varying_networks() -> None:
    with pytest.raises(hf.HoldfastError, match="varying: the first graph has no links"):
        Network.varying(lambda epoch: nx.empty_graph(4))
    with pytest.raises(hf.HoldfastError, match="varying: graph 1 has 5 nodes, but the first has 4"):
        Network.varying(lambda epoch: hf.ring(4 + epoch)).at(1)
    with pytest.raises(hf.HoldfastError, match="every: should be greater than or equal to 1, got 0"):
        Network.varying(lonely_pairs, every=0)
    for links in ([0.5], {(0, 1): 0.5}):
        with pytest.raises(hf.HoldfastError, match="links: those of a varying network change"):
            Network.varying(lonely_pairs).sporadic(links=links)


def test_graphs_drawn_anew_take_their_mixing_along() -> None:
    network = build_network("erdos-renyi", {"p": 0.6}, "laplacian", {}, nodes=6, seed=0, graph_every=2)
    for round in (0, 2):
        now = network.at(round)
        assert (now.dense() == Network.of(now.graph, "laplacian").dense()).all()
