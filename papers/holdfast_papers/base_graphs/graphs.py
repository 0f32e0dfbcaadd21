"""How fast nodes agree on base graphs, and what that does for DSGD and for corrected methods, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.algorithms import DSGD, KGT, LED
from holdfast.contract import Algorithm
from holdfast.engines.common.simulation import Simulation
from holdfast.topology import (
    Network,
    base_graph,
    equi_dynamic,
    exponential,
    one_peer_exponential,
    ring,
    torus,
)
from holdfast.topology.base_graph import base_weights
from holdfast_papers.base import (
    Circumstances,
    Claim,
    Finding,
    Layout,
    Line,
    Panel,
    PaperExperiment,
    judged,
    not_comparable,
)
from holdfast_papers.evidence import Evidence, TableRow
from holdfast_papers.led.theory import heterogeneous
from holdfast_papers.quadratics import visited

NODES, STEPS = 25, 4
DEGREES = (1, 2, 4)
EVERY_SIZE = range(2, 201)
GRID = tuple(np.geomspace(0.12, 0.001, 14).tolist())
MOST = 1500  # rounds


def networks() -> dict[str, Network]:
    """What the paper compares on 25 nodes; exponential graphs are undirected here."""
    return {
        "ring": Network.of(ring(NODES)),
        "torus": Network.of(torus(NODES)),
        "exponential": Network.of(exponential(NODES)),
        "one-peer exponential": one_peer_exponential(NODES),
        "equi-dynamic": equi_dynamic(NODES, seed=0),
        **{f"Base-{k + 1}": base_graph(NODES, k) for k in (1, 2, 3, 4)},
    }


def finite_time(where: Circumstances) -> list[TableRow]:
    """The error after one period, and the period against its bound, for every n up to 200."""
    rng = np.random.default_rng(0)
    rows: list[TableRow] = []
    for degree in DEGREES:
        for nodes in EVERY_SIZE:
            values = rng.standard_normal(nodes)
            mean, period = values.mean(), base_weights(nodes, degree)
            for W in period:
                values = W @ values
            bound = 2 * np.log(nodes) / np.log(degree + 1) + 2
            worst = float(np.abs(values - mean).max())
            most = max(int(np.diff(W.indptr).max()) - 1 for W in period)
            rows.append(
                {
                    "what": "every size",
                    "k": degree,
                    "n": nodes,
                    "left": worst,
                    "over": len(period) - bound,
                    "links": most - degree,
                }
            )
    for name, network in networks().items():
        values = np.random.default_rng(1).standard_normal(NODES)
        mean = values.mean()
        for round in range(21):
            rows.append(
                {"what": name, "round": round, "disagreement": float(np.abs(values - mean).max()) + 1e-17}
            )
            values = network.at(round).dense() @ values
    return rows


def _all(e: Evidence, column: str) -> np.ndarray:
    return e.column(column, what="every size")


def is_finite(e: Evidence) -> Finding:
    worst = float(_all(e, "left").max())
    return judged(worst < 1e-12, f"{worst:.0e} for n = 2 to 200, k = 1, 2, 4", "below 1e-12 after one period")


def within_bound(e: Evidence) -> Finding:
    over = float(_all(e, "over").max())
    return judged(over <= 0, f"{-over:.1f} rounds below it at the least", "at most 2 log_{k+1} n + 2 rounds")


def within_degree(e: Evidence) -> Finding:
    return judged(bool(_all(e, "links").max() <= 0), "at most k links at a node", "at most k")


def others_do_not(e: Evidence) -> Finding:
    left = {name: float(e.column("disagreement", what=name)[9]) for name in networks()}
    others = {name: value for name, value in left.items() if not name.startswith("Base")}
    text = ", ".join(f"{name} {value:.0e}" for name, value in others.items())
    holds = left["Base-2"] < 1e-12 and min(others.values()) > 1e-6
    return judged(holds, f"after 9 rounds Base-2 {left['Base-2']:.0e}; {text}", "Base-2 alone below 1e-12")


CONSENSUS = PaperExperiment(
    id="consensus",
    title="Theorem 1 and Fig. 1: exact averages after finitely many rounds",
    compute=finite_time,
    claims=[
        Claim("Any number of nodes averages exactly after finitely many rounds", "yes", is_finite),
        Claim("The number of rounds is at most 2 log_{k+1} n + 2", "bound", within_bound),
        Claim("Every node has at most k neighbours in a round", "yes", within_degree),
        Claim("25 nodes: the other graphs agree in the limit only", "yes", others_do_not),
    ],
    layout=Layout(
        [
            Panel(
                "25 nodes",
                [Line(name, name) for name in networks()],
                x="round",
                y="disagreement",
                y_label="largest |x_i − mean|",
                log_y=True,
                by="what",
            )
        ],
        columns=1,
    ),
)


# --- learning -----------------------------------------------------------------------------------------------


def bias(network: Network, lr: float) -> float:
    """Mean ‖X - x*‖ of DSGD (adapt then combine) once settled, with exact gradients."""
    problem = heterogeneous(NODES)
    method = DSGD(lr=lr, order="atc")
    errors = [
        float((at.models - problem.optimum).norm()) for at in visited(method, problem, network, int(10 / lr))
    ]
    return float(np.mean(errors[-90:]))  # whole periods of every graph


def fewest(build: Callable[[float], Algorithm], network: Network) -> tuple[float, float]:
    """(rounds, vectors sent by a node) until the error is 1e-6 of the start, step size tuned."""
    problem = heterogeneous(NODES)
    rounds, vectors = np.inf, np.inf
    for lr in GRID:
        simulation = Simulation(build(lr), problem, network)
        start = error = float((simulation.models - problem.optimum).norm())
        while 1e-6 * start < error < 1e3 * start and simulation.round < min(rounds, MOST):
            simulation.step()
            error = float((simulation.models - problem.optimum).norm())
        if error <= 1e-6 * start:
            rounds, vectors = simulation.round, simulation.traffic.numbers / problem.dim / NODES
        elif np.isfinite(rounds):
            break
    return rounds, vectors


def learning(where: Circumstances) -> list[TableRow]:
    """DSGD's bias, and what corrected methods need for 1e-6, on all graphs."""
    rows: list[TableRow] = []
    for name, network in networks().items():
        row: TableRow = {"graph": name, "bias": bias(network, 0.05)}
        row["K-GT rounds"], row["K-GT vectors"] = fewest(lambda lr: KGT(lr=lr, local_steps=STEPS), network)
        if network.sequence is None:
            found = fewest(lambda lr: LED(lr=lr, local_steps=STEPS, share=0.9), network)
            row["LED rounds"], row["LED vectors"] = found
        rows.append(row)
    return rows


def _of(e: Evidence, graph: str, column: str) -> float:
    return float(e.column(column, graph=graph)[0])


def _less(e: Evidence, column: str, smaller: str, larger: str) -> Finding:
    a, b = _of(e, smaller, column), _of(e, larger, column)
    return judged(a < b, f"{smaller} {a:.3g}, {larger} {b:.3g}", "less")


def more_links_help(e: Evidence) -> Finding:
    found = [_of(e, f"Base-{k}", "bias") for k in (2, 3, 4, 5)]
    return judged(found == sorted(found, reverse=True), ", ".join(f"{b:.2f}" for b in found), "falling")


def against_exponential(e: Evidence) -> Finding:
    ours, theirs = (_of(e, graph, "bias") for graph in ("Base-5", "exponential"))
    why = "the paper's exponential graph is directed with 5 links at a node; undirected it has 10 here"
    return not_comparable(f"Base-5 {ours:.2f} with 4 links, exponential {theirs:.2f} with 10", why)


def fewest_vectors(e: Evidence) -> Finding:
    costs = {f"K-GT on {name}": _of(e, name, "K-GT vectors") for name in networks()}
    costs |= {f"LED on {name}": _of(e, name, "LED vectors") for name in ("ring", "torus", "exponential")}
    ranked = sorted(costs.items(), key=lambda item: item[1])
    text = ", ".join(f"{name} {value:.0f}" for name, value in ranked[:4])
    of_led = min(value for name, value in costs.items() if name.startswith("LED"))
    return judged(
        ranked[0][1] < of_led, text, "K-GT where one pair of nodes meets, below LED on any constant graph"
    )


LEARNING = PaperExperiment(
    id="learning",
    title="Section 5: DSGD on base graphs; and corrected methods, which the paper does not try",
    compute=learning,
    claims=[
        Claim(
            "DSGD: Base-2, with one link, has less bias than a ring, with two",
            "yes",
            lambda e: _less(e, "bias", "Base-2", "ring"),
        ),
        Claim(
            "DSGD: Base-5 has less bias than a torus of the same degree",
            "yes",
            lambda e: _less(e, "bias", "Base-5", "torus"),
        ),
        Claim("DSGD: bias falls with the degree", "yes", more_links_help),
        Claim("DSGD: Base-5 does at least as well as the exponential graph", "yes", against_exponential),
        Claim(
            "K-GT: Base-5 needs fewer rounds than a torus of the same degree",
            "-",
            lambda e: _less(e, "K-GT rounds", "Base-5", "torus"),
            kind="ours",
        ),
        Claim(
            "K-GT: Base-2 needs fewer rounds than a ring",
            "-",
            lambda e: _less(e, "K-GT rounds", "Base-2", "ring"),
            kind="ours",
        ),
        Claim(
            "LED on a torus sends less than K-GT on Base-5",
            "-",
            lambda e: judged(
                _of(e, "torus", "LED vectors") < _of(e, "Base-5", "K-GT vectors"),
                f"{_of(e, 'torus', 'LED vectors'):.0f} vectors a node, "
                f"K-GT {_of(e, 'Base-5', 'K-GT vectors'):.0f}",
                "less",
            ),
            kind="ours",
        ),
        Claim("The fewest vectors of all: K-GT on random pairs", "-", fewest_vectors, kind="ours"),
    ],
    table=lambda e: (
        ["graph", "DSGD: ‖X − x*‖", "K-GT: rounds", "vectors a node", "LED: rounds", "vectors a node"],
        [
            [name, f"{_of(e, name, 'bias'):.2f}"]
            + [f"{_of(e, name, f'K-GT {what}'):.0f}" for what in ("rounds", "vectors")]
            + (
                [f"{_of(e, name, f'LED {what}'):.0f}" for what in ("rounds", "vectors")]
                if name in ("ring", "torus", "exponential")
                else ["refused", ""]
            )
            for name in networks()
        ],
    ),
    note="Quadratics in two dimensions on 25 nodes; K = 4 and tuned steps to 1e-6; LED with share 0.9.",
)
