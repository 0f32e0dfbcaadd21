"""Sporadic and varying networks in an experiment file."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.experiments.experiment_file import read_experiment
from holdfast.experiments.setting import build_setting
from holdfast.experiments.sweep import expand
from holdfast.topology import Activity, Network

BASE = ["problem.nodes=5", "rounds=1", "network.topology=ring"]


def network_of(*overrides: str, seed: int = 0) -> Network:
    (variant, *_) = expand(read_experiment(None, [*BASE, *overrides]))
    return build_setting(variant.experiment, seed, None, "cpu").network


def test_probabilities_in_a_file() -> None:
    assert network_of().activity is None
    network = network_of('network.compute={distribution="uniform",high=0.1}', 'network.links={"0-1"=0.5}')
    compute, links = network.probabilities(0)
    assert compute.max() <= 0.1
    assert links.tolist() == [0.5, 1.0, 1.0, 1.0, 1.0]
    again = network_of('network.compute={distribution="uniform",high=0.1}', "network.redraw_every=3", seed=1)
    assert again.probabilities(0).compute.tolist() != compute.tolist()  # every seed draws its own
    assert again.probabilities(0).compute.tolist() != again.probabilities(3).compute.tolist()
    latched = network_of("network.links=0.5", 'network.link_draws="latched"')
    assert isinstance(latched.activity, Activity)
    assert latched.activity.link_draws == "latched"


def test_a_list_of_probabilities_is_no_sweep() -> None:
    chances = [0.1, 0.2, 0.3, 0.2, 0.2]
    raw = read_experiment(None, [*BASE, f"network.compute={chances}", f"network.links={chances}"])
    variants = expand(raw)
    assert len(variants) == 3  # the algorithms of the default experiment
    assert all(not variant.axes for variant in variants)
    network = build_setting(variants[0].experiment, 0, None, "cpu").network
    assert network.probabilities(0).compute.tolist() == chances
    swept = expand(read_experiment(None, [*BASE, 'network.compute={distribution="uniform",high=[0.1,1.0]}']))
    assert {variant.axes["network.compute.high"] for variant in swept} == {0.1, 1.0}
    swept = expand(read_experiment(None, [*BASE, f"network.compute=[{chances},{chances[::-1]}]"]))
    assert [variant.axes["network.compute"] for variant in swept] == [chances] * 3 + [chances[::-1]] * 3


def test_random_graphs_may_be_drawn_anew() -> None:
    options = ('network.topology={name="erdos-renyi",p=0.5}', "network.graph_every=10")
    network = network_of(*options)
    first, same, other = (network.at(round).links().tolist() for round in (0, 9, 10))
    assert first == same != other
    assert network_of(*options).at(10).links().tolist() == other
    assert network_of(*options, seed=1).links().tolist() != first


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["network.comput=0.5"], r"unknown key in \[network\] 'comput': did you mean 'compute'\?"),
        (["network.compute=0.0"], r"compute: probabilities should lie in \(0, 1\], got 0"),
        (["network.compute=often"], r"compute: expected probabilities, got 'often'"),
        (["network.compute=[0.1,0.2]"], r"compute: expected one probability for each of the 5 nodes"),
        (['network.links={"0-2"=0.5}'], r"links: there is no link between 0 and 2"),
        (['network.links={"0-1"=1.5}'], r"links: probabilities should lie in \(0, 1\], got 1.5"),
        (['network.links={"0:1"=0.5}'], r"links: expected 'distribution' or a link such as '0-1', got '0:1'"),
        (['network.compute={"0-1"=0.5}'], r"compute: pairs are for links"),
        (['network.links={distribution="unifrm"}'], r"unknown distribution 'unifrm': did you mean 'uniform'"),
        (['network.links={distribution="uniform",hi=1.0}'], r"unknown key in distribution 'uniform' 'hi'"),
        (["network.redraw_every=5"], r"redraw_every: neither compute nor links is drawn"),
        (
            ["network.graph_every=5"],
            r"graph_every: topology 'ring' has nothing to draw anew; choose erdos-renyi",
        ),
        (["network.graph_every=0"], r"network.graph_every: should be greater than or equal to 1, got 0"),
        (["network.topology=server", "network.links=0.5"], r"a server has no sporadic links"),
        (["network.topology=rng", "network.graph_every=5"], r"unknown topology 'rng': did you mean 'ring'"),
    ],
)
def test_bad_networks_in_a_file(overrides: list[str], message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message) as caught:
        network_of(*overrides)
    assert "\n" not in str(caught.value)
