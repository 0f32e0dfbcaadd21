"""What to start with, for a network and a budget: rules, each with the measurement or theorem it rests on.

The rules of a topic are asked in their order, and the first that applies is taken; of compressions, the
first that applies and whose bytes are within the budget. ``source`` is a page of the documentation, with the
heading where the figures or the proof are; a test checks that it exists. Figures stand there, beside the runs
that they are of. The reasons here have none, as what was measured is never quite what is advised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.algorithms import LED

Topic = Literal["method", "control", "graph", "compression"]
# What the measurements in docs/which.md#compression cover.
MOST_PARAMETERS = 40_000
MANY_ROUNDS = 100  # for signs: with few, they lag behind
FEW_LINKS = 4  # of a node, for signs: on denser graphs they ended lower


@dataclass(frozen=True)
class Facts:
    """What the rules look at."""

    nodes: int
    server: bool  # that all nodes reach
    cohort: bool  # only some clients take part in a round
    constant: bool  # links are the same in every round
    sporadic: bool  # nodes or links are there only now and then
    mixing_lambda: float  # how much of the nodes' disagreement one exchange leaves; 0 with a server
    least_eigenvalue: float  # of the mixing matrix
    skew: float | None  # mean total variation distance of a node's labels from all labels; None: no classes
    steps: dict[str, int]  # of a round: local_steps or local_epochs, as the experiment has it
    dim: int  # parameters of the model
    rounds: int
    links: float  # of a node
    plain: bool  # messages are averaged, by honest nodes, and nothing is kept private


@dataclass(frozen=True)
class Rule:
    """``settings`` are what an experiment file would say."""

    topic: Topic
    name: str
    when: Callable[[Facts], bool]
    settings: dict[str, Any]
    why: str
    source: str


def _local(name: str, **more: Any) -> dict[str, Any]:
    return {"algorithm": {"name": name, **more, "local_steps": "K"}}


def _measured(f: Facts) -> bool:
    return why_not_known(f) == ""


def _fixed_links(f: Facts) -> bool:
    return f.constant and not f.server and not f.sporadic


RULES = [
    # --- which method ---------------------------------------------------------------------------------
    Rule(
        "method",
        "sporadic nodes or links",
        lambda f: f.sporadic,
        {"algorithm": {"name": "dspodfl", "bias_correction": True}},
        "nodes or links are missing now and then, which DSpodFL is made for; bias_correction removes the "
        "pull towards nodes that compute more often. It takes one step in a round, so give it more rounds "
        "where others take local steps: these rounds wait for nobody",
        "dspodfl-bias.md",
    ),
    Rule(
        "method",
        "server, cohorts",
        lambda f: f.server and f.cohort,
        _local("scaffold"),
        "only a cohort takes part: SCAFFOLD's control variates stay right at clients that are absent, and "
        "its rate does not depend on how different the clients are (Karimireddy et al. 2020, Theorem III)",
        "methods/scaffold.md",
    ),
    Rule(
        "method",
        "server, everybody",
        lambda f: f.server,
        _local("vrl-sgd"),
        "everybody takes part: VRL-SGD has SCAFFOLD's iterates for half its traffic, and sends no more "
        "than FedAvg, so the correction is free. On three data sets it ended close to the best of nine "
        "methods, however different the clients were",
        "which.md#what-stands-out",
    ),
    Rule(
        "method",
        "graph that changes",
        lambda f: not f.constant,
        _local("k-gt"),
        "links change: gradient tracking stays exact on graphs that are connected over time (Nedić et al. "
        "2017), where methods with one vector per link, such as LED, may diverge",
        "graphs-that-change.md",
    ),
    Rule(
        "method",
        "constant graph that mixes without oscillating",
        lambda f: f.least_eigenvalue >= LED(lr=1.0, share=0.9).capabilities.least_eigenvalue,
        _local("led", share=0.9),
        "the graph is constant: LED is as exact as K-GT with one vector per link instead of two, as many "
        "as Gossip. On rings it was the best of eight methods on three data sets, or next to it",
        "which.md#what-stands-out",
    ),
    Rule(
        "method",
        "constant graph",
        lambda f: True,
        _local("led"),
        "the graph is constant, and its mixing matrix has eigenvalues near -1, so LED mixes with half of "
        "it; one vector per link instead of K-GT's two",
        "methods/led.md",
    ),
    # --- what to compare it with ----------------------------------------------------------------------
    Rule(
        "control",
        "sporadic nodes or links",
        lambda f: f.sporadic,
        {"algorithm": {"name": "gossip", "local_steps": 1}},
        "run it beside, with one step in a round as well: it computes as if nobody were missing, and its "
        "delay says how long that would take",
        "dspodfl-bias.md",
    ),
    Rule(
        "control",
        "server",
        lambda f: f.server,
        _local("fedavg"),
        "run it beside: FedAvg ended below the corrected methods where labels differ much, and hardly below "
        "where they hardly do. If yours ends as high, take it",
        "which.md#what-stands-out",
    ),
    Rule(
        "control",
        "graph, labels differ much",
        lambda f: f.skew is None or f.skew > 0.5,
        _local("gossip"),
        "run it beside, to see what the correction brings: on a ring, with labels as different as these, "
        "Gossip ended far below LED",
        "which.md#what-stands-out",
    ),
    Rule(
        "control",
        "graph, labels differ little",
        lambda f: True,
        _local("gossip"),
        "run it beside: where labels differ as little as here, Gossip ended a little below LED on a ring, or "
        "next to it",
        "which.md#what-stands-out",
    ),
    # --- which graph ----------------------------------------------------------------------------------
    Rule(
        "graph",
        "server",
        lambda f: f.server,
        {},
        "a server averages exactly; no graph mixes better",
        "howto/which-graph.md",
    ),
    Rule(
        "graph",
        "mixes well",
        lambda f: not f.constant or f.mixing_lambda <= 0.9,
        {},
        "keep it: it mixes well enough that rounds are not lost to the graph",
        "howto/which-graph.md",
    ),
    Rule(
        "graph",
        "large and slow",
        lambda f: f.nodes >= 16,
        {"network": {"topology": "exponential"}},
        "it mixes slowly: to the same error, LED took several times as many rounds on a ring as on this "
        "graph, which sends more in a round. If firewalls fix the links, keep yours and give it more rounds",
        "papers/base-graphs.md",
    ),
    Rule(
        "graph",
        "small and slow",
        lambda f: True,
        {},
        "it mixes slowly, but up to about 16 nodes a correction makes up for it at bearable cost",
        "howto/which-graph.md",
    ),
    # --- which compression: the first whose bytes are within the budget; each sends fewer than the last -----
    Rule(
        "compression",
        "within the budget",
        lambda f: True,
        {},
        "none is needed",
        "channels.md",
    ),
    Rule(
        "compression",
        "links change",
        lambda f: _measured(f) and not f.constant and not f.sporadic,
        {"channel": "half"},
        "where links change, error feedback is refused, as it needs the same neighbours in every round. "
        "Numbers of 16 bits need none",
        "which.md#compression",
    ),
    Rule(
        "compression",
        "a server that leads",
        lambda f: _measured(f) and f.server and f.cohort,
        {"channel": "half"},
        "numbers of 16 bits travel in both directions. With coarser channels the server answers in full, so "
        "that all bytes together would not be fewer",
        "which.md#compression",
    ),
    Rule(
        "compression",
        "a server that averages",
        lambda f: _measured(f) and f.server and not f.cohort,
        {"channel": {"name": "natural", "bits": 4}},
        "uploads shrink, and the server's answers travel in full: all bytes together at most halve, with any "
        "channel, so a coarser one would lose accuracy for nearly nothing",
        "which.md#compression",
    ),
    Rule(
        "compression",
        "constant graph",
        lambda f: _measured(f) and _fixed_links(f),
        {"channel": {"name": "natural", "bits": 4, "gamma": 1.0}},
        "so fine a channel bears the full step, also with LED, which adds up what mixing changes. The "
        "default step bears any message, and is slower",
        "which.md#compression",
    ),
    Rule(
        "compression",
        "constant graph, few bytes",
        lambda f: _measured(f) and _fixed_links(f) and f.links <= FEW_LINKS and f.rounds >= MANY_ROUNDS,
        _local("k-gt") | {"channel": {"name": "uniform", "bits": 1, "gamma": "tuned"}},
        "signs, and K-GT in place of LED: through so coarse a channel LED bears small steps only, and ended "
        "far below where it ends without. K-GT sends two vectors where LED sends one",
        "which.md#compression",
    ),
]


def why_not_known(facts: Facts) -> str:
    """Why nothing is known about what compression would cost here, in words; empty if something is."""
    if not facts.plain:
        return "compression was not measured together with attacks, robust rules or privacy"
    if facts.skew is None:
        return "compression was measured on classification only"
    if facts.dim > MOST_PARAMETERS:
        return f"no model of more than {MOST_PARAMETERS:,} parameters was measured"
    return ""
