"""Robust rules in deployed federations: the simulator's models."""

from __future__ import annotations

import pytest
import torch
from federation_runs import deploy, describe, simulate

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation

LOCAL = {"lr": 0.1, "local_steps": 2}
TRIMMED = {"name": "trimmed-mean", "attackers": 1}


@pytest.mark.parametrize(
    ("algorithm", "network"),
    [
        ("gossip", {"topology": "complete", "aggregation": {"name": "clipped-gossip", "radius": 0.05}}),
        ("fedavg", {"topology": "server", "aggregation": TRIMMED}),
        pytest.param("vrl-sgd", {"topology": "server", "aggregation": "median"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_deployed_models_are_the_simulators(algorithm, network, tmp_path):
    raw = describe({"name": algorithm, **LOCAL}, network=network) | {"dtype": "float64"}
    run = deploy(raw, tmp_path)
    deployed = torch.stack([run.models[name] for name in run.federation.names])
    assert (deployed - simulate(run.federation).models).abs().max() < 1e-12
    plain = describe({"name": algorithm, **LOCAL}, network={"topology": network["topology"]})
    trusting = simulate(make_federation(plain | {"dtype": "float64"}, "test"))
    assert (deployed - trusting.models).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network": {"attack": {"name": "sign-flip", "nodes": [0]}}}, "it is for simulations"),
        ({"network": {"aggregation": {"name": "krum", "attackers": 1}}}, "needs at least 5 messages"),
    ],
)
def test_what_a_federation_refuses(changes, words):
    raw = describe({"name": "gossip", **LOCAL}, **changes)
    with pytest.raises(HoldfastError, match=words):
        make_federation(raw, "test").check()
