"""The rules of ``holdfast recommend``, and what the command makes of an experiment."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from command_line import holdfast

from holdfast.algorithms.load import algorithm_class
from holdfast.experiments.config import read_experiment
from holdfast.experiments.plan import Plan
from holdfast.experiments.recommendation import RULES, Facts, Topic, advise

DOCS = Path(__file__).parents[2] / "docs"
RING = Facts(
    nodes=10,
    server=False,
    cohort=False,
    constant=True,
    sporadic=False,
    mixing_lambda=0.87,
    least_eigenvalue=-1 / 3,
    skew=0.6,
    strongly_convex=False,
    exact_gradients=False,
    local_steps=4,
)
SERVER = replace(RING, server=True, mixing_lambda=0.0, least_eigenvalue=0.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.topic}: {rule.name}")
def test_every_rule_rests_on_a_page_that_exists(rule: object) -> None:
    page, _, anchor = rule.source.partition("#")
    text = (DOCS / page).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    assert not anchor or anchor in slugs
    if "algorithm" in rule.settings:
        algorithm_class(rule.settings["algorithm"]["name"])


@pytest.mark.parametrize("topic", get_args(Topic))
def test_some_rule_always_applies(topic: Topic) -> None:
    last = [rule for rule in RULES if rule.topic == topic][-1]
    odd = replace(RING, nodes=1000, mixing_lambda=1.0, least_eigenvalue=-1.0, skew=0.0, over_budget=1e9)
    assert last.when(odd)


@pytest.mark.parametrize(
    ("facts", "topic", "expected"),
    [
        (RING, "method", {"algorithm": {"name": "led", "share": 0.9, "local_steps": 4}}),
        (replace(RING, least_eigenvalue=-0.6), "method", {"algorithm": {"name": "led", "local_steps": 4}}),
        (replace(RING, constant=False), "method", {"algorithm": {"name": "k-gt", "local_steps": 4}}),
        (SERVER, "method", {"algorithm": {"name": "vrl-sgd", "local_steps": 4}}),
        (replace(SERVER, cohort=True), "method", {"algorithm": {"name": "scaffold", "local_steps": 4}}),
        (
            replace(SERVER, strongly_convex=True, exact_gradients=True),
            "method",
            {"algorithm": {"name": "dualfl", "curvature": "estimate"}},
        ),
        (RING, "graph", {}),
        (replace(RING, nodes=16, mixing_lambda=0.95), "graph", {"network": {"topology": "exponential"}}),
        (RING, "compression", {}),
        (replace(RING, over_budget=5.0), "compression", {"channel": {"name": "natural", "bits": 4}}),
        (replace(RING, over_budget=5.0, constant=False), "compression", {"channel": "half"}),
    ],
)
def test_what_is_advised(facts: Facts, topic: Topic, expected: dict[str, object]) -> None:
    assert advise(topic, facts).settings == expected


@pytest.mark.parametrize(
    ("overrides", "options", "names"),
    [
        ([], ["--megabytes", "2"], ["led", "gossip"]),
        (["problem.nodes=20"], [], ["led", "gossip"]),  # on another graph than the ring it has
        (["network.topology=server", "network.cohort=3"], [], ["scaffold", "fedavg"]),
    ],
)
def test_what_the_command_says_can_be_run(overrides: list[str], options: list[str], names: list[str]) -> None:
    said = json.loads(holdfast("recommend", *overrides, *options, "--json").out)
    plan = Plan(read_experiment(None, [*overrides, *said["overrides"]]), None, "cpu")
    plan.check()
    assert [job.experiment.algorithm.name for job in plan.jobs] == names
    assert said["bytes"] > 0


def test_people_read_why() -> None:
    outcome = holdfast("recommend", "--megabytes", "0")
    assert outcome.code == 2
    assert "greater than 0" in outcome.err
    shown = " ".join(holdfast("recommend").out.split())
    assert "led" in shown
    assert "one vector per link" in shown
    assert "docs/which.md#what-stands-out" in shown
    assert "holdfast tune" in shown
