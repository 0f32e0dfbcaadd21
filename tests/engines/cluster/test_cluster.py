"""Ranks of a cluster compute what the simulator does. All of it in three processes that are started once."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cluster_ranks import (
    Task,
    build,
    conformance_problems,
    leave_traces,
    on_rank,
    other_problems,
    random_graph,
    read_traces,
    run_worlds,
    simulate,
)
from command_line import experiment_file
from test_resume import StopAfter

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.core.world import ALONE, World
from holdfast.engines.cluster.exchange import crossing_links, owners, place
from holdfast.engines.cluster.place import RankPlace
from holdfast.engines.cluster.ranks import AgreedError, Ranks
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.plan import Plan
from holdfast.experiments.runner import Interrupted, Runner
from holdfast.problem.problem import FunctionProblem
from holdfast.topology import Network, server

ROUNDS = 4
RANKS = 3

# Small and convex, so that every metric applies.
EXPERIMENT = """\
name = "cluster"
rounds = 7
checkpoint_every = 3
dtype = "float64"
evaluate_every = 2
metrics = [
    "test_accuracy", "worst_accuracy", "average_accuracy", "average_loss", "train_loss", "consensus",
    "grad_norm2", "stationarity", "rel_energy", "optimum_distance",
]

[problem]
dataset = { name = "npz", file = "own.npz" }
nodes = 5
partition = { name = "dirichlet", h = 0.5 }
model = "linear"
batch_size = 8
l2 = 0.1

[network]
topology = "ring"

[[algorithm]]
name = "local-gecl"
lr = 0.1
local_steps = 2

[[algorithm]]
name = "ecl"
lr = 0.1
local_steps = 2
"""
SERVER = ["network.topology=server", "network.cohort=2", 'algorithm={name="scaffold",lr=0.1}']
CURVATURE = [
    "network.topology=server",
    'algorithm={name="dualfl",curvature="estimate",solver={name="sgd",lr=0.1,steps=3}}',
]
DUALS = ["algorithm={name='local-gecl',lr=0.1}", 'metrics=["dual_error"]']


def some_problems() -> list[Task]:
    """One of every kind of exchange."""
    names = ("dsgd", "local-gecl", "ecl", "scaffold", "dualfl")
    chosen = {problem.name.split()[0]: problem for problem in conformance_problems("quadratics")}
    return [chosen[name] for name in names] + other_problems()


def crossing_problems() -> list[Task]:
    """Methods that send one vector over every link, that keep one for every link, and over some links."""
    ring, graph = Network.of(hf.ring(7)), Network.of(random_graph())
    return [
        Task("ring", build("dsgd", lr=0.05), ring, "quadratics"),
        Task("ring, a vector per link", build("ecl", lr=0.05), ring, "quadratics"),
        Task("graph, a vector per link", build("ecl", lr=0.05), graph, "quadratics"),
        Task("graph", build("dsgd", lr=0.05), graph, "quadratics"),
        Task("sporadic", build("dspodfl", lr=0.05), graph.sporadic(1.0, 0.3, seed=1), "quadratics"),
    ]


# --- what the ranks do -------------------------------------------------------------------------------------


def run_in_world(world: Ranks, folder: Path, overrides: list[str], name: str, stop_after: int) -> None:
    """A run, stopped after so many rounds in all; ``name`` keeps where it is. The leader alone is told to."""
    plan = plan_in(folder, overrides, world)
    plan.check()
    known = folder / f"{name}.txt"
    runner = Runner.reopen(plan, Path(known.read_text())) if known.exists() else Runner.start(plan, folder)
    with contextlib.suppress(Interrupted):
        runner.execute([StopAfter(stop_after, signal.SIGTERM)] if world.leads else [])
    if world.leads:
        known.write_text(str(runner.folder))


def count_crossing(world: Ranks, folder: Path) -> None:
    """What each round of some problems hands to ``all_to_all_single`` for other ranks, in bytes."""
    sent: list[int] = []
    plain = dist.all_to_all_single

    def counting(output: Any, input: Any, received: list[int], given: list[int], **options: Any) -> Any:
        assert (len(output), len(input)) == (sum(received), sum(given))
        assert given[world.rank] == 0
        sent.append(input.numel() * input.element_size())
        return plain(output, input, received, given, **options)

    dist.all_to_all_single = counting
    found = {}
    for problem in crossing_problems():
        simulation = on_rank(problem, world)
        sent.clear()
        for _ in range(ROUNDS):
            simulation.step()
        found[problem.name] = int(world.sum(torch.tensor(sum(sent))))
    dist.all_to_all_single = plain
    if world.leads:
        (folder / "crossing.json").write_text(json.dumps(found))


def fail_on_one_rank(world: Ranks, folder: Path) -> None:
    """A local solve that cannot succeed on the last node, and what every rank hears of it."""
    functions = [lambda x: 0.5 * (x - 1).square().sum()] * 4 + [lambda x: (1 + x.square()).sqrt().sum()]
    objective = FunctionProblem(functions, torch.full((2,), 3.0, dtype=torch.float64))
    method = build("fedpd", eta=1e9, solver="exact")
    simulation = Simulation(method, objective, server(5), place=RankPlace(world, server(5)))
    with pytest.raises(AgreedError, match=f"^rank {world.size - 1}: the solver 'newton' did not settle"):
        simulation.step()
    assert simulation.round == 0
    with pytest.raises(AgreedError, match=r"^rank 1: no data there$"):
        world.raise_on_all(partial(complain, world.rank))
    with pytest.raises(AgreedError, match=r"^rank 1 has another version than rank 0: update$"):
        world.agree("version", "2" if world.rank == 1 else "1", "update")
    assert world.texts("ü" * world.rank) == ["ü" * rank for rank in range(world.size)]
    (folder / f"failed-{world.rank}").touch()


def complain(rank: int) -> None:
    if rank == 1:
        raise HoldfastError("no data there")


def plan_in(folder: Path, overrides: list[str], world: World = ALONE) -> Plan:
    return Plan.of_file(folder / "small.toml", overrides, folder, "cpu", world)


RUNS = {"graph": [], "server": SERVER, "duals": DUALS, "curvature": CURVATURE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks left behind."""
    folder = tmp_path_factory.mktemp("cluster")
    experiment_file(folder, EXPERIMENT)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((210, 4)), rng.integers(0, 3, 210)
    x += y[:, None]
    np.savez(folder / "own.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    run_worlds(
        (RANKS, leave_traces, (some_problems, ROUNDS, folder)),
        (RANKS, count_crossing, (folder,)),
        (RANKS, fail_on_one_rank, (folder,)),
        *((2, run_in_world, (folder, overrides, name, 5)) for name, overrides in RUNS.items()),
        *((3, run_in_world, (folder, overrides, name, 99)) for name, overrides in RUNS.items()),
        (3, run_in_world, (folder, [], "alone", 5)),
    )
    return folder


# --- what comes of it --------------------------------------------------------------------------------------


def differences(problems: list[Task], size: int, folder: Path) -> dict[str, float]:
    """How far the ranks' trajectories and costs are from the simulator's, relative to the largest entry."""
    far = {}
    for index, problem in enumerate(problems):
        expected, seen = simulate(problem, ROUNDS), read_traces(index, size, folder)
        assert seen.models.shape == expected.models.shape
        away = (seen.models - expected.models).abs().max() / expected.models.abs().max()
        costs = ((seen.costs - expected.costs).abs() / expected.costs.clamp(min=1)).max()
        far[problem.name] = max(float(away), float(costs))
    return far


def test_ranks_follow_the_simulator(folder: Path) -> None:
    far = differences(some_problems(), RANKS, folder)
    assert max(far.values()) < 1e-6, far


def figures(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.csv without the wall times, numbers as numbers."""
    with (run / "metrics.csv").open(newline="") as file:
        return [
            {
                key: cell if key == "algorithm" else float(cell)
                for key, cell in row.items()
                if key != "seconds"
            }
            for row in csv.DictReader(file)
        ]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == {
            key: value if isinstance(value, str) else pytest.approx(value, rel=1e-6, abs=1e-12)
            for key, value in other.items()
        }


@pytest.mark.parametrize("name", RUNS)
def test_a_run_begun_on_two_ranks_and_resumed_on_three(name: str, folder: Path, tmp_path: Path) -> None:
    whole = Runner.start(plan_in(folder, RUNS[name]), tmp_path)
    whole.execute()
    run = Path((folder / f"{name}.txt").read_text())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "complete"
    assert summary["jobs"][0]["executor"].startswith("3 ranks")
    assert_same(figures(run), figures(whole.folder))
    names = {path.relative_to(whole.folder) for path in whole.folder.rglob("*.*")}
    assert {path.relative_to(run) for path in run.rglob("*.*")} >= names
    for name in ("partition.csv", "network.csv", "experiment.toml"):
        assert (run / name).read_bytes() == (whole.folder / name).read_bytes()


def test_a_process_alone_goes_on_from_shards(folder: Path, tmp_path: Path) -> None:
    run = Path((folder / "alone.txt").read_text())
    assert len(list((run / "checkpoints").glob("*of3.safetensors"))) == 3
    runner = Runner.reopen(plan_in(folder, []), run)
    runner.execute()
    whole = Runner.start(plan_in(folder, []), tmp_path)
    whole.execute()
    assert_same(figures(run), figures(whole.folder))
    assert not list((run / "checkpoints").glob("*of3.safetensors"))


def test_rows_cross_only_where_links_do(folder: Path) -> None:
    bytes_sent = json.loads((folder / "crossing.json").read_text())
    row = 4 * 8  # float64, of the quadratics
    for problem in crossing_problems():
        blocks = place(problem.network, RANKS)
        rank, links = owners(blocks), problem.network.links()
        cut = links[rank[links[:, 0]] != rank[links[:, 1]]]
        assert len(cut) == crossing_links(problem.network, blocks) > 0
        payload = 2 * len(cut) * row * ROUNDS  # of the cut links, both ways
        if problem.name == "sporadic":
            up = [problem.network.available_links(7, round, 1) for round in range(ROUNDS)]
            crossing = [links[here & (rank[links[:, 0]] != rank[links[:, 1]])] for here in up]
            assert bytes_sent[problem.name] == row * sum(len(rows_needed(some, rank)) for some in crossing)
            assert bytes_sent[problem.name] < payload / 2
        elif problem.name == "graph":  # a row that several nodes of a rank need goes there once
            assert bytes_sent[problem.name] == row * len(rows_needed(cut, rank)) * ROUNDS
            assert bytes_sent[problem.name] <= payload
        else:
            assert bytes_sent[problem.name] == payload


def rows_needed(cut: np.ndarray, rank: np.ndarray) -> set[tuple[int, int]]:
    """(node, rank): who needs whose row."""
    both = np.concatenate([cut, cut[:, ::-1]])
    return {(int(i), int(rank[j])) for i, j in both}


def test_errors_of_one_rank_are_everybodys(folder: Path) -> None:
    assert all((folder / f"failed-{rank}").exists() for rank in range(RANKS))


def test_a_shard_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    run = Path((folder / "graph.txt").read_text())
    copy = tmp_path / "copy"
    (copy / "checkpoints").mkdir(parents=True)
    for path in run.rglob("*.*"):
        if path.is_file() and "1of3" not in path.name:
            (copy / path.relative_to(run)).parent.mkdir(exist_ok=True)
            (copy / path.relative_to(run)).write_bytes(path.read_bytes())
    summary = json.loads((copy / "summary.json").read_text())
    for job in summary["jobs"]:
        job.update(status="running")
    (copy / "summary.json").write_text(json.dumps(summary))
    runner = Runner.reopen(plan_in(folder, []), copy)
    with pytest.raises(
        HoldfastError, match=r"1of3.safetensors is not a checkpoint of holdfast, or it is dam"
    ):
        runner.execute()


# --- the whole battery -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["samples", "quadratics"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_algorithm_follows_the_simulator(size: int, objective: str, tmp_path: Path) -> None:
    problems: Callable[[], list[Task]] = partial(conformance_problems, objective)
    run_worlds((size, leave_traces, (problems, ROUNDS, tmp_path)))
    far = differences(problems(), size, tmp_path)
    assert max(far.values()) < 1e-6, far
