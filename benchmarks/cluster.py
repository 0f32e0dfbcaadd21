"""What ranks cost: weak scaling from one process to two, and time per round against the number of nodes.

Run it with ``python benchmarks/cluster.py`` on an idle machine. Every process has one thread.
Weak scaling compares n nodes in one process with 2 n nodes on two ranks, in turns, while the other process of
the two sleeps; at best both take the same time. The data are random images of the right shape.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import holdfast as hf
from holdfast.engines.cluster.exchange import crossing_links, place
from holdfast.engines.cluster.place import RankPlace
from holdfast.engines.cluster.ranks import LIMIT, Ranks
from holdfast.engines.common.simulation import Simulation
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.topology import Network
from holdfast.topology.graphs import erdos_renyi

RANKS = 2
SAMPLES_PER_NODE = 20
MODELS_MEASURED = {"linear": {}, "mlp": {"hidden": [500]}}
NODES = {"linear": 100, "mlp": 10}  # of one process
STEPS = {"linear": 10, "mlp": 16}  # as in benchmarks/speed.py
BATCH = {"linear": 32, "mlp": 128}
MANY_NODES = [100, 300, 1000, 3000, 10_000]


def ring(nodes: int) -> Network:
    return Network.of(hf.ring(nodes))


def random_graph(nodes: int) -> Network:
    """Erdős–Rényi, just dense enough to be connected: each node has about 2 log n neighbours."""
    return Network.of(erdos_renyi(nodes, p=min(1.0, 2 * math.log(nodes) / nodes), seed=0))


NETWORKS: dict[str, Callable[[int], Network]] = {"ring": ring, "erdos-renyi": random_graph}


def make_problem(model: str, nodes: int, here: np.ndarray) -> ModelProblem:
    """Only the samples of the nodes ``here`` are made."""
    rng = np.random.default_rng(0)
    samples = len(here) * SAMPLES_PER_NODE
    x = torch.as_tensor(rng.integers(0, 256, (samples, 784), dtype=np.uint8))
    y = torch.as_tensor(rng.integers(0, 10, samples))
    data = hf.FederatedData(x, y, np.full(nodes, SAMPLES_PER_NODE), held=here)
    torch.manual_seed(0)
    module = MODELS.build(model, MODELS_MEASURED[model], input_shape=(784,), outputs=10)
    flat = FlatModel(module, torch.device("cpu"), torch.float32)
    return ModelProblem(flat, CrossEntropy(), data, batch_size=BATCH[model], seed=0, mean=0.5, std=0.5)


def on_ranks(world: Ranks, model: str, network: Network, steps: int) -> Simulation:
    problem = make_problem(model, network.nodes, place(network, world.size)[world.rank])
    method = hf.LocalGECL(lr=0.01, local_steps=steps)
    simulation = Simulation(method, problem, network, place=RankPlace(world, network))
    simulation.prepare(rounds=1)
    return simulation


def timed(world: Ranks, step: Callable[[], None]) -> float:
    """Seconds until the last rank is through with ``step``."""
    world.wait()
    start = time.perf_counter()
    step()
    world.wait()
    return time.perf_counter() - start


def weak_scaling(world: Ranks, rounds: int) -> None:
    if world.leads:
        print(f"weak scaling: local-gecl, local steps {STEPS}, batches {BATCH}, medians of {rounds} rounds")
        heads = f"{'model':8} {'network':12} {'nodes':>11} {'links cut':>12}"
        print(f"{heads} {'1 process':>10} {'2 ranks':>10} {'efficiency':>10}")
    for model, nodes in NODES.items():
        for name, make in NETWORKS.items():
            network = make(RANKS * nodes)
            method = hf.LocalGECL(lr=0.01, local_steps=STEPS[model])
            alone = Simulation(method, make_problem(model, nodes, np.arange(nodes)), make(nodes))
            alone.prepare(rounds)
            both = on_ranks(world, model, network, STEPS[model])
            times: list[tuple[float, float]] = []
            for _ in range(rounds + 2):
                single = timed(world, alone.step if world.leads else lambda: None)
                times.append((single, timed(world, both.step)))
            one, two = (1e3 * statistics.median(column) for column in zip(*times[2:], strict=True))
            if world.leads:
                cut = f"{crossing_links(network, both.blocks)} of {len(network.links())}"
                what = f"{model:8} {name:12} {nodes:>4} -> {RANKS * nodes:>3} {cut:>12}"
                print(f"{what} {one:>7.1f} ms {two:>7.1f} ms {one / two:>10.0%}", flush=True)


def many_nodes(world: Ranks, rounds: int) -> None:
    if world.leads:
        print(f"\ntime per round on {RANKS} ranks: local-gecl, linear, one local step")
        print(f"{'nodes':>7} {'ring':>12} {'erdos-renyi':>12}")
    for nodes in MANY_NODES:
        columns = []
        for make in NETWORKS.values():
            simulation = on_ranks(world, "linear", make(nodes), steps=1)
            times = [timed(world, simulation.step) for _ in range(rounds + 1)]
            columns.append(f"{1e3 * statistics.median(times[1:]):>9.1f} ms")
        if world.leads:
            print(f"{nodes:>7,} {' '.join(columns)}", flush=True)


def as_rank(rank: int, meeting: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=LIMIT)
    weak_scaling(Ranks(), rounds)
    many_nodes(Ranks(), max(3, rounds // 4))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load before: {load:.1f}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(as_rank, (f"file://{folder}/meeting", given.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
