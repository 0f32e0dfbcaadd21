"""The rules of ``holdfast recommend``, and what the command makes of an experiment."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
from command_line import holdfast
from sklearn.datasets import make_classification

from holdfast.algorithms.load import algorithm_class
from holdfast.experiments.advice import advise, applicable, compression
from holdfast.experiments.plan import Plan
from holdfast.experiments.recommendation import MOST_PARAMETERS, RULES, Facts, Topic

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
    steps={"local_steps": 4},
    dim=5000,
    rounds=100,
    links=2.0,
    plain=True,
)
NATURAL = {"name": "natural", "bits": 4}
SIGNS = {"name": "uniform", "bits": 1, "gamma": "tuned"}
SERVER = replace(RING, server=True, mixing_lambda=0.0, least_eigenvalue=0.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.topic}: {rule.name}")
def test_every_rule_rests_on_a_page_that_exists(rule: object) -> None:
    page, _, anchor = rule.source.partition("#")
    text = (DOCS / page).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    assert not anchor or anchor in slugs
    assert not re.search(r"\d[\d.,]* *(%|points|times|rounds|bytes|MB)", rule.why)  # measured on other runs
    if "algorithm" in rule.settings:
        algorithm_class(rule.settings["algorithm"]["name"])


@pytest.mark.parametrize("topic", get_args(Topic))
def test_some_rule_always_applies(topic: Topic) -> None:
    odd = replace(RING, nodes=1000, mixing_lambda=1.0, least_eigenvalue=-1.0, skew=0.0, sporadic=True)
    assert applicable(topic, odd)


@pytest.mark.parametrize(
    ("facts", "topic", "expected"),
    [
        (RING, "method", {"algorithm": {"name": "led", "share": 0.9, "local_steps": 4}}),
        (replace(RING, least_eigenvalue=-0.6), "method", {"algorithm": {"name": "led", "local_steps": 4}}),
        (replace(RING, constant=False), "method", {"algorithm": {"name": "k-gt", "local_steps": 4}}),
        (SERVER, "method", {"algorithm": {"name": "vrl-sgd", "local_steps": 4}}),
        (replace(SERVER, cohort=True), "method", {"algorithm": {"name": "scaffold", "local_steps": 4}}),
        (
            replace(RING, sporadic=True),
            "control",  # DSpodFL takes one step in a round, too
            {"algorithm": {"name": "gossip", "local_steps": 1}},
        ),
        (RING, "graph", {}),
        (replace(RING, nodes=16, mixing_lambda=0.95), "graph", {"network": {"topology": "exponential"}}),
        (
            replace(RING, steps={"local_epochs": 2}),
            "control",
            {"algorithm": {"name": "gossip", "local_epochs": 2}},
        ),
    ],
)
def test_what_is_advised(facts: Facts, topic: Topic, expected: dict[str, object]) -> None:
    assert advise(topic, facts).settings == expected


def some_bytes(settings: dict[str, Any]) -> float:
    """Of 100 without compression."""
    channel = settings.get("channel", "identity")
    name = channel if isinstance(channel, str) else channel["name"]
    return {"identity": 100.0, "half": 50.0, "natural": 13.0, "uniform": 7.0}[name]


@pytest.mark.parametrize(
    ("facts", "budget", "channel", "said"),
    [
        (RING, None, None, "none is needed"),
        (RING, 100.0, None, "none is needed"),
        (RING, 99.0, NATURAL | {"gamma": 1.0}, "full step"),
        (RING, 12.0, SIGNS, "K-GT in place of LED"),
        (RING, 5.0, SIGNS, "is not met. This sends"),
        (replace(RING, links=9.0), 12.0, NATURAL | {"gamma": 1.0}, "is not met. This sends"),
        (replace(RING, rounds=30), 12.0, NATURAL | {"gamma": 1.0}, "is not met. This sends"),
        (replace(RING, constant=False), 60.0, "half", "where links change"),
        (SERVER, 60.0, NATURAL, "the server's answers travel in full"),
        (replace(SERVER, cohort=True), 60.0, "half", "both directions"),
        (replace(RING, dim=MOST_PARAMETERS + 1), 60.0, None, "is not known here: no model of more than"),
        (
            replace(RING, skew=None),
            60.0,
            None,
            "is not known here: compression was measured on classification",
        ),
        (replace(RING, plain=False), 60.0, None, "is not known here: compression was not measured together"),
        (replace(RING, sporadic=True), 60.0, None, "is not known here: no channel was measured"),
    ],
)
def test_compression_follows_the_budget(
    facts: Facts, budget: float | None, channel: object, said: str
) -> None:
    advice, sent = compression(facts, budget, some_bytes)
    assert advice.settings.get("channel") == channel
    assert said in advice.why
    assert sent == some_bytes(advice.settings)


@pytest.mark.parametrize(
    ("overrides", "options", "names"),
    [
        ([], [], ["led", "gossip"]),
        ([], ["--megabytes", "6"], ["led", "gossip", "led", "gossip"]),
        ([], ["--megabytes", "2"], ["k-gt", "gossip", "k-gt", "gossip"]),
        (["problem.nodes=20"], [], ["led", "gossip"]),  # on another graph than the ring it has
        (["network.topology=server", "network.cohort=3"], [], ["scaffold", "fedavg"]),
    ],
)
def test_what_the_command_says_can_be_run(overrides: list[str], options: list[str], names: list[str]) -> None:
    said = json.loads(holdfast("recommend", *overrides, *options, "--json").out)
    plan = Plan.of_file(None, [*overrides, *said["overrides"]], None, "cpu")
    plan.check()
    assert [job.config.name for job in plan.jobs] == names
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


def test_users_changes_are_in_the_command_that_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "my experiment.toml"
    assert holdfast("init", path).code == 0
    given = [path, "network.topology=server", "problem.nodes=6", "algorithm.lr=0.2", "channel=half"]
    shown = holdfast("recommend", *given).out
    command = printed(shown)
    assert command[:4] == ["run", str(path), "network.topology=server", "problem.nodes=6"]
    plan = Plan.of_file(path, command[2:], None, "cpu")
    assert [job.config.name for job in plan.jobs] == ["vrl-sgd", "fedavg"]
    assert plan.jobs[0].spec.channel.name == "identity"  # what was judged, whatever the file has
    assert plan.setting(plan.jobs[0]).network.is_server


def test_what_cannot_run_is_not_proposed_as_a_command() -> None:
    private = (
        "problem.private={epsilon = 4.0, delta = 1e-5, clip = 1.0}"  # which this sampling is not fit for
    )
    shown = holdfast("recommend", private, "network.topology=server", "--megabytes", "3").out
    assert "is not known here" in " ".join(shown.split())
    assert "times fewer" not in shown
    assert "this does not run as it is: " in shown
    assert "holdfast run" not in shown


def printed(shown: str) -> list[str]:
    """The arguments of the command that ``recommend`` says to try."""
    line = next(line for line in shown.splitlines() if line.startswith("try it: holdfast "))
    return shlex.split(line.removeprefix("try it: holdfast "))


class Ended(NamedTuple):
    """The method that is advised, first without compression."""

    accuracies: list[float]
    bytes_sent: list[float]
    advice: dict[str, Any]


def ended(given: list[str], folder: Path) -> Ended:
    """Runs what is printed, as it is printed."""
    said = json.loads(holdfast("recommend", *given, "--json").out)
    command = printed(holdfast("recommend", *given).out)
    assert shlex.split(said["command"]) == ["holdfast", *command]
    run = holdfast(*command, "--json", "--runs-dir", folder)
    assert run.code == 0, run.err
    (results,) = (value for value in json.loads(run.out).values() if isinstance(value, list))
    name = results[0]["algorithm"]
    figures = [each["figures"] for each in results if each["algorithm"] == name]
    assert all(each["status"] == "done" for each in results)
    sent = [each["payload_bytes"]["mean"] for each in figures]
    assert sent == pytest.approx([said["bytes"], said["bytes_sent"]][-len(sent) :], rel=1e-3)
    return Ended([each["test_accuracy"]["mean"] for each in figures], sent, said["advice"][-1])


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Three: pictures, a table and made-up classes."""
    x, y = make_classification(
        3000, 20, n_informative=12, n_classes=6, n_clusters_per_class=1, class_sep=1.5, random_state=0
    )
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    file = tmp_path_factory.mktemp("data") / "made.npz"
    np.savez(file, x_train=x[:2000], y_train=y[:2000], x_test=x[2000:], y_test=y[2000:])
    return {
        "digits": [],
        "breast-cancer": ["problem.dataset=breast-cancer", "problem.model=linear", "problem.partition.h=0.5"],
        "made": [f'problem.dataset={{name = "npz", file = "{file.as_posix()}"}}'],
    }


NETWORKS = {
    "ring": ["algorithm.local_steps=8"],
    "many steps": [],
    "server": ["network.topology=server", "algorithm=fedavg", "algorithm.local_steps=8"],
    "cohort": ["network.topology=server", "network.cohort=3", "algorithm=fedavg", "algorithm.local_steps=8"],
    "changing": ["network.topology=equi-dynamic", "algorithm.local_steps=8"],
    "complete": ["network.topology=complete", "algorithm.local_steps=8"],
    "large": ["problem.nodes=20", "algorithm.local_steps=8"],
    "small model": ["problem.model=linear", "algorithm.local_steps=8"],
}
TRIED = [  # so many times over the budget
    ("ring", 1.5),
    ("ring", 10.0),
    ("many steps", 10.0),
    ("server", 1.5),
    ("cohort", 1.5),
    ("changing", 1.5),
    ("complete", 10.0),
    ("large", 1.5),
    ("small model", 10.0),
]


def within(megabytes: float, over: float) -> list[str]:
    return ["--megabytes", f"{megabytes / over:.6g}"]


def test_a_small_budget_on_the_default_experiment_costs_at_most_two_points(tmp_path: Path) -> None:
    got = ended(["--megabytes", "3", "algorithm.local_steps=8", "evaluate_every=50"], tmp_path)
    assert got.accuracies[1] > got.accuracies[0] - 0.02
    assert got.bytes_sent[1] <= 3e6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "breast-cancer", "made"])
@pytest.mark.parametrize(("network", "over"), TRIED)
def test_what_is_printed_costs_at_most_two_points(
    network: str, over: float, name: str, data_sets: dict[str, list[str]], tmp_path: Path
) -> None:
    given = [*data_sets[name], *NETWORKS[network], "evaluate_every=50"]
    full = json.loads(holdfast("recommend", *given, "--json").out)["bytes"]
    got = ended([*given, *within(full / 1e6, over)], tmp_path)
    assert got.accuracies[1] > got.accuracies[0] - 0.02
    assert got.bytes_sent[1] <= full / 1.5
    assert (got.bytes_sent[1] <= full / over) == ("is not met" not in got.advice["why"])
