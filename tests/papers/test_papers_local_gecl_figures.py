"""The figures and Table IV of Local G-ECL, made up: as in the paper every claim holds, and each can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from paper_checks import failing, verdicts
from sample_run import accuracies, job, write_run

from holdfast.experiments.record import RunRecord, load_record
from holdfast_papers.base import PaperExperiment, Verdict
from holdfast_papers.evidence import Evidence, TableRow
from holdfast_papers.local_gecl import figure_6, table_4
from holdfast_papers.local_gecl.curves import FIGURE_3, FIGURE_4, FIGURE_8
from holdfast_papers.local_gecl.figure_1 import FIGURE_1
from holdfast_papers.local_gecl.figure_7 import COLD, FIGURE_7, WARM

Curves = dict[tuple[str, ...], tuple[float, ...]]  # method and swept value -> accuracies


def record(folder: Path, curves: Curves, axis: str = "") -> RunRecord:
    """A run with one seed; curves start at 10 %, and the loss is what is missing of all accuracy."""
    jobs = [
        job(method, 0, accuracies(0.1, *values), axes={axis: at[0]} if at else {})
        for (method, *at), values in curves.items()
    ]
    return load_record(write_run(folder, jobs, axes=(axis,) if axis else ()))


# --- Fig. 1 ------------------------------------------------------------------------------------------------

NETWORKS = {
    "ring": ("local-gecl", "d-scaffold", "gossip"),
    "server": ("local-gecl-server", "scaffold", "fedavg"),
}
LIKE = (0.6, 0.7, 0.75, 0.81)


def figure_1(folder: Path, network: str, by_h: Curves, by_k: dict[str, float]) -> Evidence:
    """All of Fig. 1, with changes in one of its rows."""
    runs = {}
    for name, (gecl, scaffold, plain) in NETWORKS.items():
        early = 0.55 if name == "server" else 0.5
        heterogeneous = (early, 0.6, 0.65, 0.8)
        curves: Curves = {
            (gecl, "0.1"): heterogeneous,
            (scaffold, "0.1"): heterogeneous,
            (plain, "0.1"): (0.4, 0.45, 0.5, 0.6),
            **{(method, "inf"): LIKE for method in (gecl, scaffold, plain)},
        }
        ends = {"1": 0.3, "64": 0.8, "128": 0.805, "256": 0.81}
        if name == network:
            curves |= by_h
            ends |= by_k
        runs[f"figure-1-{name}-h"] = record(folder / f"{name}-h", curves, "problem.partition.h")
        steps: Curves = {(gecl, k): (end,) for k, end in ends.items()}
        runs[f"figure-1-{name}-k"] = record(folder / f"{name}-k", steps, "algorithm.local_steps")
    return Evidence("full", runs)


def test_the_papers_figure_1_passes_every_claim(tmp_path: Path) -> None:
    assert verdicts(FIGURE_1, figure_1(tmp_path, "ring", {}, {})) == [Verdict.PASS] * 15


@pytest.mark.parametrize(("network", "first"), [("ring", 0), ("server", 7)])
@pytest.mark.parametrize(
    ("place", "method", "h", "values"),
    [
        (0, 2, "0.1", (0.4, 0.65, 0.5, 0.6)),  # plain averaging has the lower loss in between
        (1, 2, "0.1", (0.4, 0.45, 0.5, 0.765)),  # it ends 3.5 points below
        (2, 1, "0.1", (0.56, 0.6, 0.65, 0.79)),  # SCAFFOLD ends a point below
        (4, 2, "inf", (0.6, 0.7, 0.75, 0.63)),  # plain averaging hardly gains from homogeneous nodes
    ],
)
def test_each_claim_about_heterogeneous_nodes_can_fail(
    network, first, place, method, h, values, tmp_path: Path
) -> None:
    changes: Curves = {(NETWORKS[network][method], h): values}
    assert failing(FIGURE_1, figure_1(tmp_path, network, changes, {})) == [first + place]


@pytest.mark.parametrize(("network", "first"), [("ring", 0), ("server", 7)])
def test_accuracy_that_depends_on_h_fails(network: str, first: int, tmp_path: Path) -> None:
    both: Curves = {(method, "inf"): (0.6, 0.7, 0.75, 0.83) for method in NETWORKS[network][:2]}
    assert failing(FIGURE_1, figure_1(tmp_path, network, both, {})) == [first + 3]


@pytest.mark.parametrize(("network", "first"), [("ring", 0), ("server", 7)])
@pytest.mark.parametrize(
    ("place", "steps", "end"),
    [
        (5, "1", 0.78),  # one step does nearly as well as 64
        (6, "256", 0.83),  # more than 64 still help
        (6, "256", 0.77),  # or do harm
    ],
)
def test_each_claim_about_local_steps_can_fail(network, first, place, steps, end, tmp_path: Path) -> None:
    assert failing(FIGURE_1, figure_1(tmp_path, network, {}, {steps: end})) == [first + place]


def test_a_server_that_is_no_faster_fails(tmp_path: Path) -> None:
    slow: Curves = {("local-gecl-server", "0.1"): (0.45, 0.6, 0.65, 0.8)}
    assert failing(FIGURE_1, figure_1(tmp_path, "server", slow, {})) == [14]


# --- Figs. 3, 4 and 8 --------------------------------------------------------------------------------------

ON_A_GRAPH = NETWORKS["ring"]


def sweep(folder: Path, experiment: PaperExperiment, axis: str, usual: Curves, changes: Curves) -> Evidence:
    return Evidence("full", {experiment.id: record(folder / "run", usual | changes, axis)})


FIGURE_3_ENDS = {
    "local-gecl": (0.83, 0.83, 0.83),
    "d-scaffold": (0.83, 0.83, 0.83),
    "gossip": (0.7, 0.8, 0.83),
}
FIGURE_3_USUAL: Curves = {
    (method, h): 10 * (end,)  # up to round 100
    for method, ends in FIGURE_3_ENDS.items()
    for h, end in zip(("0.1", "0.5", "inf"), ends, strict=True)
}
FIGURE_4_USUAL: Curves = {
    (method, k): (end,) for method in ON_A_GRAPH for k, end in (("1", 0.7), ("64", 0.8), ("256", 0.81))
}
FIGURE_8_USUAL: Curves = {
    (method, lr): (end - 0.05 * (method == "gossip"),)
    for method in ON_A_GRAPH
    for lr, end in (("0.05", 0.5), ("0.0125", 0.58))
}


@pytest.mark.parametrize(
    ("experiment", "axis", "usual", "changes", "places"),
    [
        (FIGURE_3, "problem.partition.h", FIGURE_3_USUAL, {}, []),
        (FIGURE_3, "problem.partition.h", FIGURE_3_USUAL, {("d-scaffold", "0.5"): 10 * (0.8,)}, [0, 1, 2]),
        (FIGURE_3, "problem.partition.h", FIGURE_3_USUAL, {("gossip", "0.5"): 10 * (0.69,)}, [3]),
        (FIGURE_4, "algorithm.local_steps", FIGURE_4_USUAL, {}, []),
        (FIGURE_4, "algorithm.local_steps", FIGURE_4_USUAL, {("gossip", "1"): (0.78,)}, [0]),
        (FIGURE_4, "algorithm.local_steps", FIGURE_4_USUAL, {("d-scaffold", "256"): (0.83,)}, [1]),
        (FIGURE_4, "algorithm.local_steps", FIGURE_4_USUAL, {("local-gecl", "256"): (0.77,)}, [1]),
        (FIGURE_8, "algorithm.lr", FIGURE_8_USUAL, {}, []),
        (
            FIGURE_8,
            "algorithm.lr",
            FIGURE_8_USUAL,
            {("gossip", "0.05"): (0.575,)},
            [0],
        ),  # at its own best step
        (FIGURE_8, "algorithm.lr", FIGURE_8_USUAL, {("d-scaffold", "0.05"): (0.6,)}, [1]),
    ],
)
def test_each_claim_about_curves_can_fail(experiment, axis, usual, changes, places, tmp_path: Path) -> None:
    assert failing(experiment, sweep(tmp_path, experiment, axis, usual, changes)) == places


def test_overlapping_curves_say_in_how_many_partitions_they_do(tmp_path: Path) -> None:
    jobs = [
        job(method, seed, [{"round": 100, "test_accuracy": end}], axes={"problem.partition.h": h})
        for method in ON_A_GRAPH
        for h, ends in (("0.1", (0.80, 0.81, 0.82)), ("inf", (0.83, 0.83, 0.83)))
        for seed, end in enumerate(ends)
    ]
    run = load_record(write_run(tmp_path / "run", jobs, axes=("problem.partition.h",)))
    found = FIGURE_3.claims[0].check(Evidence("full", {"figure-3": run}))
    assert found.sure.startswith("1 of 3 seeds")


# --- Figs. 6 and 7 -----------------------------------------------------------------------------------------


def networks(folder: Path, scale: str, apart: float, **ends: float) -> Evidence:
    """All networks at 80 %; ``ends`` are those of methods on the ring."""
    graphs: Curves = {
        (method, topology): (ends.get(method.replace("-", "_"), 0.8) if topology == "ring" else 0.8,)
        for method in ON_A_GRAPH
        for topology in figure_6.TOPOLOGIES
    }
    server: Curves = {(method,): (0.8,) for method in NETWORKS["server"]}
    runs = {
        figure_6.GRAPHS: record(folder / "graphs", graphs, "network.topology"),
        figure_6.SERVER: record(folder / "server", server),
    }
    return Evidence(scale, runs, [{"round": 1, "relative_difference": apart}])


@pytest.mark.parametrize(
    ("scale", "apart", "ends", "places"),
    [
        ("full", 1e-15, {}, []),
        ("full", 1e-15, {"local_gecl": 0.78}, [0]),
        ("full", 1e-15, {"d_scaffold": 0.82}, [0]),
        ("full", 2e-5, {}, [1]),
        ("small", 1e-15, {"gossip": 0.77, "local_gecl": 0.78}, []),
        ("small", 1e-15, {"gossip": 0.79, "local_gecl": 0.78}, [0]),
    ],
)
def test_each_claim_about_networks_can_fail(scale, apart, ends, places, tmp_path: Path) -> None:
    assert failing(figure_6.FIGURE_6, networks(tmp_path, scale, apart, **ends)) == places


@pytest.mark.parametrize(
    ("warm", "gossip", "error", "places"),
    [
        (0.81, 0.75, 1e-3, []),
        (0.82, 0.75, 1e-3, [0]),
        (0.78, 0.74, 1e-3, [0]),
        (0.81, 0.775, 1e-3, [1]),  # the weaker of the two leads by 2.5 points
        (0.81, 0.75, 1e-2, [2]),  # 0.8^20 is 0.0115
    ],
)
def test_each_claim_about_the_warm_start_can_fail(warm, gossip, error, places, tmp_path: Path) -> None:
    run = record(tmp_path / "run", {(WARM,): (warm,), (COLD,): (0.8,), ("gossip",): (gossip,)})
    rows: list[TableRow] = [
        {"start": WARM, "error": error, "spectral_lambda": 0.8},
        {"start": COLD, "error": 0.8, "spectral_lambda": 0.8},
    ]
    assert failing(FIGURE_7, Evidence("full", {"figure-7": run}, rows)) == places


# --- Table IV ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({}, []),
        ({"gossip": {"payload_gib": 45.9}}, [0]),  # not the exact count
        ({"scaffold": {"payload_gib": 45.94}}, [0, 1]),  # one vector instead of two
        ({"local-gecl": {"gradients": 51_600}}, [2]),
    ],
)
def test_each_claim_about_traffic_can_fail(changes, places, tmp_path: Path) -> None:
    single = table_4.ROUNDS * 20 * table_4.DIM * table_4.BYTES / table_4.GIB
    doubled = ("scaffold", "d-scaffold", "local-gecl")
    rows: list[TableRow] = [
        {"algorithm": name, "payload_gib": single * (2 if name in doubled else 1), "gradients": 51_200}
        | changes.get(name, {})
        for name in table_4.PRINTED
    ]
    runs = {
        preset: record(tmp_path / preset, {(name,): (0.5,) for name in names})
        for preset, names in table_4.PRESETS.items()
    }
    assert failing(table_4.TABLE_4, Evidence("full", runs, rows)) == places
