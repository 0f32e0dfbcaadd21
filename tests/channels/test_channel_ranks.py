"""Channels between the ranks of a cluster, and in runs that are resumed."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from cluster_ranks import Task, build, conformance_problems, leave_traces, on_rank, run_worlds
from command_line import experiment_file
from test_cluster import EXPERIMENT, assert_same, differences, figures, plan_in, run_in_world
from test_cluster import SERVER as SERVER_RUN
from toy_channels import Grid

import holdfast as hf
from holdfast.core.tree import tree_map
from holdfast.engines.cluster.ranks import AgreedError, Ranks
from holdfast.experiments.runner import Runner

HALF, GRID = hf.Half(), Grid()
COMPRESSED = [hf.chain(hf.TopK(0.3), hf.Uniform(8)), hf.RandomK(0.5), hf.LowRank(1)]
ROUNDS = 4


def rank_problems() -> list[Task]:
    """A channel with every kind of exchange between ranks."""
    names = ("local-gecl", "ecl", "scaffold", "fedavg", "dualfl", "gt-sgd")
    chosen = {problem.name.split()[0]: problem for problem in conformance_problems("quadratics")}
    some = [chosen[name] for name in names]
    some += [Task("a cohort of 2", build("fedavg", lr=0.05), hf.server(7), "samples", cohort=2)]
    with_memory = [Grid(dithered=True), *COMPRESSED]
    return [problem._replace(channel=HALF) for problem in some] + [
        problem._replace(name=f"{problem.name}, {type(channel).__name__}", channel=channel)
        for channel in with_memory
        for problem in some
        if problem.name[:3] != "ecl" and (problem.name[:8] != "scaffold" or not isinstance(channel, Grid))
    ]


def overflow_on_one_rank(world: Ranks, folder: Path) -> None:
    problem = Task("far", build("dsgd", lr=0.05), hf.Network.of(hf.ring(7)), "quadratics", channel=HALF)
    simulation = on_rank(problem, world)
    if world.rank == 1:
        simulation.state = tree_map(lambda t: t + 1e6, simulation.state)
    with pytest.raises(AgreedError, match=r"^rank 1: channel Half: a number is beyond 65504"):
        simulation.step()
    (folder / f"noticed-{world.rank}").touch()


def run_with_grid(*arguments) -> None:
    """As a function of this module, it knows the toy channel in every process."""
    run_in_world(*arguments)


RUNS = {"graph": ["channel=grid", "algorithm={name='local-gecl',lr=0.1,local_steps=2}"]}
RUNS["top-k"] = ["channel={name='top-k',share=0.2,gamma=0.3}", *RUNS["graph"][1:]]
RUNS["server"] = [*SERVER_RUN, "channel={name='uniform',bits=4}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the ranks left behind."""
    folder = tmp_path_factory.mktemp("channels")
    experiment_file(folder, EXPERIMENT)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((210, 4)), rng.integers(0, 3, 210)
    x += y[:, None]
    np.savez(folder / "own.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    run_worlds(
        (2, leave_traces, (rank_problems, ROUNDS, folder)),
        (2, overflow_on_one_rank, (folder,)),
        *((2, run_with_grid, (folder, overrides, name, 5)) for name, overrides in RUNS.items()),
        *((3, run_with_grid, (folder, overrides, name, 99)) for name, overrides in RUNS.items()),
    )
    return folder


def test_ranks_follow_the_simulator(folder):
    far = differences(rank_problems(), 2, folder)
    assert max(far.values()) < 1e-6, far


def test_lost_numbers_of_one_rank_are_everybodys_error(folder):
    assert all((folder / f"noticed-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_begun_on_two_ranks_and_resumed_on_three(name, folder, tmp_path):
    whole = Runner.start(plan_in(folder, RUNS[name]), tmp_path)
    whole.execute()
    run = Path((folder / f"{name}.txt").read_text())
    assert_same(figures(run), figures(whole.folder))


def test_an_experiment_sweeps_over_channels(folder, tmp_path):
    overrides = ["algorithm={name='local-gecl',lr=0.1}", 'channel=["identity","half"]', "rounds=2"]
    runner = Runner.start(plan_in(folder, overrides), tmp_path)
    runner.execute()
    with (runner.folder / "metrics.csv").open(newline="") as file:
        last = {row["channel"]: row for row in csv.DictReader(file) if row["round"] == "2"}
    assert int(last["identity"]["payload_bytes"]) == 4 * int(last["half"]["payload_bytes"]) > 0


def test_the_steps_of_a_chain_are_no_sweep(folder, tmp_path):
    chain = "{name='chain',steps=[{name='top-k',share=0.2},'half'],gamma=[0.2,0.4]}"
    overrides = ["algorithm={name='local-gecl',lr=0.1}", f"channel={chain}", "rounds=2"]
    runner = Runner.start(plan_in(folder, overrides), tmp_path)
    runner.execute()
    with (runner.folder / "metrics.csv").open(newline="") as file:
        last = {row["channel.gamma"]: row for row in csv.DictReader(file) if row["round"] == "2"}
    assert set(last) == {"0.2", "0.4"}
