"""Channels on a GPU: the numbers of the CPU, and recorded rounds with the numbers of the others."""

from __future__ import annotations

import pytest
import torch
from devices import GPU_MARKS
from test_conformance import NODES

import holdfast as hf
from holdfast.core.tree import leaves
from holdfast.data import DATASETS
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem

pytestmark = GPU_MARKS
CPU, GPU = torch.device("cpu"), torch.device("cuda")
RING = hf.Network.of(hf.ring(NODES))
PLACES = [  # between neighbours, behind a server that averages, and behind one that leads
    (hf.LocalGECL(lr=0.05, local_steps=3), RING),
    (hf.VRLSGD(lr=0.05, local_steps=3), hf.server(NODES)),
    (hf.SCAFFOLD(lr=0.05, local_steps=3), hf.server(NODES)),
]
every_place = pytest.mark.parametrize(("algorithm", "where"), PLACES, ids=["neighbours", "averages", "leads"])
CHANNELS = [
    hf.Half(),
    hf.chain(hf.TopK(0.3), hf.Uniform(8)),
    hf.RandomK(0.5),
    hf.Natural(4, dithered=True),
    hf.Uniform(1),
    hf.LowRank(2),
    hf.BFloat16(),
]
every_channel = pytest.mark.parametrize("channel", CHANNELS, ids=repr)


def digits(device: torch.device) -> ModelProblem:
    """In float64: a largest entry or a nearest code must not depend on a gradient's last bits."""
    images = DATASETS.build("digits", {})
    data = hf.partition(images.x_train, images.y_train, hf.Dirichlet(0.5), nodes=NODES, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS.build("mlp", {"hidden": [12]}, input_shape=images.input_shape, outputs=10)
    return ModelProblem(FlatModel(model, device, torch.float64), CrossEntropy(), data, batch_size=16, seed=7)


def simulate(algorithm, where, channel, device, recorded=False) -> Simulation:
    executor = {"executor": executor_for(device)} if recorded else {}
    simulation = Simulation(algorithm, digits(device), where, seed=7, channel=channel, **executor)
    if recorded:
        simulation.prepare(1)
    for _ in range(8):
        simulation.step()
    return simulation


def assert_agree(one: Simulation, other: Simulation, within: float) -> None:
    for a, b in zip(leaves(one.state), leaves(other.state), strict=True):
        a, b = a.cpu().double(), b.cpu().double()
        assert (a - b).norm() <= within * max(1.0, float(a.norm()))
    assert one.traffic == other.traffic


@every_channel
@every_place
def test_a_gpu_computes_what_a_cpu_does(algorithm, where, channel):
    assert_agree(
        simulate(algorithm, where, channel, CPU), simulate(algorithm, where, channel, GPU), within=1e-6
    )


@every_channel
@every_place
def test_recorded_rounds_are_the_same_rounds(algorithm, where, channel):
    assert_agree(
        simulate(algorithm, where, channel, GPU),
        simulate(algorithm, where, channel, GPU, recorded=True),
        within=1e-9,
    )
