"""A simulation that goes on with other members: exact methods find the optimum of those who are there."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast.contract import Method
from holdfast.engines.common.simulation import Simulation
from holdfast.problem.problem import FunctionProblem
from holdfast.topology import Network
from holdfast.topology.graphs import ring

CENTRES = torch.tensor([[0.0, 3.0], [1.0, -1.0], [5.0, 0.5], [2.0, 2.0], [7.0, 1.0]], dtype=torch.float64)
CURVATURES = torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0], dtype=torch.float64)


def problem(members: list[int]) -> FunctionProblem:
    functions = [lambda x, i=i: CURVATURES[i] / 2 * (x - CENTRES[i]).square().sum() for i in members]
    return FunctionProblem(functions, torch.zeros(2, dtype=torch.float64))


def optimum(members: list[int]) -> torch.Tensor:
    weights = CURVATURES[members][:, None]
    return (weights * CENTRES[members]).sum(0) / weights.sum()


@pytest.mark.parametrize("method", [hf.LocalGECL(lr=0.1, local_steps=2), hf.SCAFFOLD(lr=0.1)])
def test_exact_methods_find_the_optimum_of_every_roster(method: Method) -> None:
    server = isinstance(method, hf.SCAFFOLD)
    simulation, members = None, [0, 1, 2, 3]
    for after, origins in [(members, []), ([0, 1, 3], [0, 1, 3]), ([0, 1, 3, 4], [0, 1, 2, 0])]:
        network = hf.server(len(after)) if server else Network.of(ring(len(after)))
        if simulation is None:
            simulation = Simulation(method, problem(after), network)
        else:
            before, traffic = simulation.models[origins], simulation.payload_bytes
            simulation = simulation.with_members(problem(after), network, origins)
            assert torch.equal(simulation.models, before)
            assert simulation.payload_bytes >= traffic
        for _ in range(200):
            simulation.step()
        assert (simulation.models - optimum(after)).abs().max() < 1e-10
    assert simulation.round == 600
