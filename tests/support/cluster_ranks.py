"""Real ranks for tests: processes that meet over gloo, work through some problems and leave what they saw."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import make_quadratics
from forks import FORKS
from test_conformance import CASES, NODES, Case, case_id, method

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.contract import IDENTITY, Channel, Method
from holdfast.engines.cluster.exchange import place
from holdfast.engines.cluster.place import RankPlace
from holdfast.engines.cluster.ranks import LIMIT, Ranks, end_group
from holdfast.engines.common.simulation import Simulation
from holdfast.models import MODELS
from holdfast.privacy.messages import PrivateMessages
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.private import Release, counted_noise
from holdfast.problem.problem import Problem
from holdfast.topology import Network, server
from holdfast.topology.graphs import erdos_renyi


class Task(NamedTuple):
    """A method on one problem over one network."""

    name: str
    method: Method
    network: Network
    problem: str
    cohort: int | list[list[int]] | None = None
    channel: Channel = IDENTITY


def random_graph(nodes: int = 7, seed: int = 3) -> Any:
    return erdos_renyi(nodes, p=0.5, seed=seed)


def conformance_problem(case: Case, objective: str) -> Task:
    network = server(NODES) if case.server else Network.of(hf.ring(NODES))
    return Task(f"{case_id(case)} {objective}", method(case), network, objective)


def build(name: str, **options: Any) -> Method:
    return ALGORITHMS.build(name, options)


ADAMW = {
    "name": "warmup-cosine",
    "warmup": 3,
    "inner": {"name": "clip", "inner": {"name": "adamw", "keep": True}},
}


def other_problems() -> list[Task]:
    """Networks and ways to run that the conformance battery has not: on seven nodes, different degrees."""
    graph = Network.of(random_graph())
    varying = Network.varying(lambda epoch: random_graph(seed=epoch), every=2)
    sporadic = graph.sporadic(0.6, 0.5, seed=1)
    both = varying.sporadic(0.6, 0.5, seed=1)
    exact = {"gamma": 1.0, "solver": {"name": "newton"}}
    cases = [
        ("k-gt on a random graph", build("k-gt", lr=0.05, local_steps=2), graph),
        ("led, unequal steps", build("led", lr=0.05, local_steps=[1, 2, 5, 3, 1, 4, 2]), graph),
        ("local-gecl with alpha", build("local-gecl", lr=0.05, local_steps=2, alpha=0.1), graph),
        ("gecl behind a server", build("gecl", lr=0.05, alpha=0.1), server(7)),
        ("ecl on a random graph", build("ecl", lr=0.05, local_steps=2), graph),
        ("dsgt over a varying network", build("dsgt", lr=0.05, local_steps=2), varying),
        ("dspodfl, sporadic", build("dspodfl", lr=0.05), sporadic),
        ("dspodfl, sporadic and corrected", build("dspodfl", lr=0.05, bias_correction=True), sporadic),
        ("dspodfl, sporadic and varying", build("dspodfl", lr=0.05), both),
        ("fedpd that skips", build("fedpd", eta=0.5, lr=0.05, local_steps=2, skip=0.5), server(7)),
        ("scaffnew that skips", build("scaffnew", lr=0.05, p=0.3), server(7)),
        ("local-gecl with adamw", build("local-gecl", lr=0.01, local_steps=2, optimizer=ADAMW), graph),
        ("dspodfl with adamw", build("dspodfl", lr=0.01, optimizer=ADAMW), sporadic),
        ("fedrep", build("fedrep", lr=0.05, head=18, head_steps=2), server(7)),
    ]
    problems = [Task(name, how, network, "samples") for name, how, network in cases]
    problems += [Task("pdmm, exact", build("pdmm", **exact), graph, "quadratics")]
    cohorts = [
        build("scaffold", lr=0.05, local_steps=2),
        build("fedavg", lr=0.05, local_steps=2),
        build("ditto", lr=0.01, optimizer=ADAMW, server_lr=0.1, server_optimizer={"name": "fedyogi"}),
    ]
    problems += [Task(f"cohort of 2 {m}", m, server(7), "samples", cohort=2) for m in cohorts]
    recorded = [[0, 3, 6], [2], [1, 2, 3, 4, 5, 6], [0, 1]] * 3
    problems += [Task("local-gecl, private", cases[2][1], graph, "private")]
    nodes = hf.NodeDP(epsilon=9.0, delta=1e-3, clip=0.1, cohorts="poisson")
    noised = PrivateMessages(cohorts[1], nodes, 1.0, 2, 7)
    problems += [Task("fedavg, private nodes in Poisson cohorts", noised, server(7), "samples", cohort=2)]
    shares = hf.NodeDP(epsilon=9.0, delta=1e-3, clip=0.1, noise="distributed")
    noised = PrivateMessages(cohorts[1], shares, 1.0, 4, 7, 2)
    problems += [Task("fedavg, shares of noise by clients", noised, server(7), "samples", cohort=4)]
    problems += [Task("recorded cohorts", cohorts[0], server(7), "samples", cohort=recorded)]
    answered = build("tamuna", lr=0.05, p=0.5, copies=2)  # who sends which entries is known on every rank
    problems += [Task(f"tamuna {c}", answered, server(7), "samples", cohort=c) for c in (3, recorded)]
    return problems


def conformance_problems(objective: str) -> list[Task]:
    return [conformance_problem(case, objective) for case in CASES]


@lru_cache
def _samples(nodes: int) -> tuple[hf.FederatedData, torch.nn.Module]:
    """Heterogeneous nodes with different numbers of samples, and a small model."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((400, 6)), rng.integers(0, 3, 400)
    x += y[:, None]
    torch.manual_seed(0)
    model = MODELS.build("mlp", {"hidden": [5]}, input_shape=(6,), outputs=3)
    return hf.partition(x, y, hf.Dirichlet(0.5), nodes=nodes, seed=0), model


def make_problem(name: str, nodes: int, here: np.ndarray | None = None) -> Problem:
    """In float64; of "samples", only those of the nodes ``here`` are there."""
    if name == "quadratics":
        return make_quadratics(nodes, L=2.0)
    data, model = _samples(nodes)
    flat = FlatModel(model, torch.device("cpu"), torch.float64)
    held = data if here is None else data.hold(here)
    if name == "private":
        own = ModelProblem(flat, CrossEntropy(), held, batch_size=2, sampling="poisson", seed=7)
        return own.protected(Release(1.0, 1.0, counted_noise(7)))
    return ModelProblem(flat, CrossEntropy(), held, batch_size=16, seed=7)


class Seen(NamedTuple):
    """A trajectory, and what it cost everybody."""

    models: torch.Tensor  # [rounds + 1, m, d]
    costs: torch.Tensor  # numbers sent, delay of sending, and all counts of work


def trace(simulation: Simulation, rounds: int) -> Seen:
    models = [simulation.models.clone()]
    for _ in range(rounds):
        simulation.step()
        models.append(simulation.models.clone())
    traffic, work = simulation.traffic, simulation.total_work()
    costs = [traffic.numbers, traffic.delay, *vars(work).values()]
    return Seen(torch.stack(models), torch.tensor(costs, dtype=torch.float64))


def simulate(problem: Task, rounds: int) -> Seen:
    objective = make_problem(problem.problem, problem.network.nodes)
    return trace(
        Simulation(
            problem.method,
            objective,
            problem.network,
            seed=7,
            cohort=problem.cohort or "all",
            channel=problem.channel,
        ),
        rounds,
    )


def on_rank(problem: Task, world: Ranks) -> Simulation:
    here = place(problem.network, world.size)[world.rank]
    objective = make_problem(problem.problem, problem.network.nodes, here)
    place_of_rank = RankPlace(world, problem.network)
    return Simulation(
        problem.method,
        objective,
        problem.network,
        seed=7,
        cohort=problem.cohort or "all",
        place=place_of_rank,
        channel=problem.channel,
    )


Work = Callable[..., None]


def run_worlds(*worlds: tuple[int, Work, tuple[Any, ...]]) -> None:
    """Starts processes that form one world after the other: how many ranks, what each calls, with what.

    Errors in them are raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = max(size for size, *_ in worlds)
        mp.start_processes(_as_rank, (folder, worlds), ranks, start_method=FORKS.get_start_method())


def _as_rank(rank: int, folder: str, worlds: tuple[tuple[int, Work, tuple[Any, ...]], ...]) -> None:
    torch.set_num_threads(1)
    for index, (size, work, arguments) in enumerate(worlds):
        if rank < size:
            meeting = f"file://{folder}/{index}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=LIMIT)
            work(Ranks(), *arguments)
            end_group()


def leave_traces(world: Ranks, problems: Callable[[], list[Task]], rounds: int, folder: Path) -> None:
    """Runs all problems on this rank and writes what it saw."""
    for index, problem in enumerate(problems()):
        simulation = on_rank(problem, world)
        seen = trace(simulation, rounds)
        torch.save((simulation.nodes, *seen), folder / f"{index}-{world.rank}.pt")


def read_traces(index: int, size: int, folder: Path) -> Seen:
    """The rows of all ranks put together."""
    parts = [torch.load(folder / f"{index}-{rank}.pt", weights_only=True) for rank in range(size)]
    nodes = torch.cat([part[0] for part in parts])
    models = torch.cat([part[1] for part in parts], dim=1)
    assert all(torch.equal(part[2], parts[0][2]) for part in parts)
    return Seen(models[:, torch.argsort(nodes)], parts[0][2])
