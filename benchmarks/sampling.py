"""What client sampling costs: a round with 50 clients out of 10,000 against one of a 50-client federation.

Run it with ``python benchmarks/sampling.py``. SCAFFOLD on softmax regression 784-10, with synthetic images
(random pixels and labels of the right shape: the time of a round does not depend on their content).
"""

from __future__ import annotations

import os
import statistics
import time

import numpy as np
import torch

import holdfast as hf
from holdfast.engines.common.simulation import Simulation
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem

COHORT = 50
CLIENTS = 10_000
SAMPLES_PER_CLIENT = 20
ROUNDS = 60
WARM_UP = 5
SETTINGS = [(1, 10), (1, 32), (10, 32)]  # local steps, batch size


def federation(clients: int, local_steps: int, batch_size: int) -> Simulation:
    """A federation of ``clients``, of which a cohort trains in every round."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * SAMPLES_PER_CLIENT, 784), dtype=np.uint8)
    y = rng.integers(0, 10, clients * SAMPLES_PER_CLIENT)
    data = hf.FederatedData(x, y, np.full(clients, SAMPLES_PER_CLIENT))
    model = FlatModel(
        MODELS.build("linear", {}, input_shape=(784,), outputs=10), torch.device("cpu"), torch.float32
    )
    problem = ModelProblem(model, CrossEntropy(), data, batch_size=batch_size, seed=0, mean=0.5, std=0.5)
    algorithm = hf.SCAFFOLD(lr=0.01, local_steps=local_steps)
    return Simulation(algorithm, problem, hf.server(clients), cohort=COHORT)


def median_times(simulations: list[Simulation]) -> list[float]:
    """Median seconds per round of each, measured in turns so that a busy machine disturbs all alike."""
    seconds: list[list[float]] = [[] for _ in simulations]
    for _ in range(WARM_UP + ROUNDS):
        for simulation, times in zip(simulations, seconds, strict=True):
            start = time.perf_counter()
            simulation.step()
            times.append(time.perf_counter() - start)
    return [statistics.median(times[WARM_UP:]) for times in seconds]


def main() -> None:
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    print(f"SCAFFOLD, softmax regression 784-10, synthetic data, {torch.get_num_threads()} threads")
    print(f"median of {ROUNDS} rounds, {COHORT} clients train in each")
    names = f"{COHORT} of {COHORT}", f"{COHORT} of {CLIENTS:,}"
    print(f"{'local steps':>11}  {'batch':>5}  {names[0]:>12}  {names[1]:>12}  {'ratio':>5}")
    for local_steps, batch_size in SETTINGS:
        few, many = median_times(
            [federation(clients, local_steps, batch_size) for clients in (COHORT, CLIENTS)]
        )
        times = f"{few * 1e3:>9.1f} ms  {many * 1e3:>9.1f} ms  {many / few:>5.2f}"
        print(f"{local_steps:>11}  {batch_size:>5}  {times}")


if __name__ == "__main__":
    main()
