"""What to start with, for a network and a budget: rules, each with the measurement or theorem it rests on.

The rules of a topic are asked in their order, and the first that applies is taken. ``source`` is a page of
the documentation, with the heading where the figures or the proof are; a test checks that it exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.algorithms import LED

Topic = Literal["method", "control", "graph", "compression"]
FULL = 4  # bytes of a number that is not compressed


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
    strongly_convex: bool  # a convex model with an l2 term
    exact_gradients: bool  # batch_size = "full"
    local_steps: int
    over_budget: float = 0.0  # bytes of the recommended method over the budget, times; 0: no budget


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


SIGNS = {"name": "uniform", "bits": 1, "block": 1024}

RULES = [
    # --- which method ---------------------------------------------------------------------------------
    Rule(
        "method",
        "sporadic nodes or links",
        lambda f: f.sporadic,
        {"algorithm": {"name": "dspodfl", "bias_correction": True}},
        "nodes or links are missing now and then, which DSpodFL is made for; bias_correction removes the "
        "pull towards nodes that compute more often",
        "dspodfl-bias.md",
    ),
    Rule(
        "method",
        "strongly convex, exact gradients, server",
        lambda f: f.server and not f.cohort and f.strongly_convex and f.exact_gradients,
        {"algorithm": {"name": "dualfl", "curvature": "estimate"}},
        "the problem is strongly convex and gradients are exact: DualFL needs about the square root of "
        "the condition number of rounds, with constants that are measured for you",
        "papers/dualfl.md",
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
        "than FedAvg, so the correction is free. On three data sets it ended within 0.6 points of the best "
        "of nine methods, however different the clients were",
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
        lambda f: f.least_eigenvalue >= LED(lr=1.0, share=0.9).least_eigenvalue,
        _local("led", share=0.9),
        "the graph is constant: LED is as exact as K-GT with one vector per link instead of two, as many "
        "as Gossip. On rings it was the best of eight methods on three data sets, or 0.2 points below",
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
        "server",
        lambda f: f.server,
        _local("fedavg"),
        "run it beside: tuned as well, FedAvg ended 0.9 to 1.7 points below the best corrected method where "
        "labels differ much, and at most 0.4 below where they hardly do. If yours ends as high, take it",
        "which.md#what-stands-out",
    ),
    Rule(
        "control",
        "graph, labels differ much",
        lambda f: f.skew is None or f.skew > 0.5,
        _local("gossip"),
        "run it beside, to see what the correction brings: on a ring, with labels as different as these, "
        "Gossip ended 9 to 12 points below LED",
        "which.md#what-stands-out",
    ),
    Rule(
        "control",
        "graph, labels differ little",
        lambda f: True,
        _local("gossip"),
        "run it beside: on a ring Gossip ended 0.2 to 2.3 points below LED where labels differ as little as "
        "here",
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
        "it mixes slowly. With 25 nodes LED took 131 rounds on a ring, 40 on a torus and 23 on an "
        "exponential graph to the same error. If firewalls fix the links, keep yours and give it more "
        "rounds",
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
    # --- which compression ----------------------------------------------------------------------------
    Rule(
        "compression",
        "within the budget",
        lambda f: f.over_budget <= 1,
        {},
        "none is needed",
        "channels.md",
    ),
    Rule(
        "compression",
        "links change",
        lambda f: not f.constant,
        {"channel": "half"},
        "where links change, only half precision is served: error feedback needs the same neighbours in "
        "every round. It halves the bytes; for the rest take fewer rounds or more local steps",
        "channels.md#what-is-refused",
    ),
    Rule(
        "compression",
        "a server answers in full",
        lambda f: f.server and f.over_budget > 1,
        {"channel": SIGNS},
        "uploads shrink 31 times; a server's answers travel in full, so all bytes together at most halve. "
        "For the rest take more local steps and fewer rounds",
        "channels.md#what-there-is",
    ),
    Rule(
        "compression",
        "some times over",
        lambda f: f.over_budget <= 7,
        {"channel": {"name": "natural", "bits": 4}},
        "4 bits per number came to float32's accuracy with 8 to 10 times fewer bytes, in as many rounds",
        "channels.md#accuracy-against-bytes",
    ),
    Rule(
        "compression",
        "many times over",
        lambda f: True,
        {"channel": SIGNS},
        "signs with error feedback ended within half a point of float32 with 24 times fewer bytes, given a "
        "third more rounds, with three seeds of three. Sparse messages were dearer in all",
        "channels.md#accuracy-against-bytes",
    ),
]


@dataclass(frozen=True)
class Advice:
    """The rule that applies, with K filled in."""

    topic: Topic
    rule: str
    why: str
    source: str
    settings: dict[str, Any] = field(default_factory=dict)


def advise(topic: Topic, facts: Facts) -> Advice:
    """The first rule of ``topic`` that applies."""
    rule = next(rule for rule in RULES if rule.topic == topic and rule.when(facts))
    settings = {
        key: {name: facts.local_steps if each == "K" else each for name, each in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in rule.settings.items()
    }
    return Advice(topic, rule.name, rule.why, rule.source, settings)
