"""Privacy of whole nodes in a real federation: at the server, at each client, or shared under masks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_runs import (
    DeployedRun,
    Started,
    deploy,
    describe,
    make_data,
    stopped,
    write_federation,
)
from member_processes import Members

from holdfast.core.errors import HoldfastError
from holdfast.data.federated import FederatedData
from holdfast.engines.common.simulation import Simulation
from holdfast.privacy import NodeDP
from holdfast.privacy.aggregation.arithmetic import PRECISION, encode
from holdfast.privacy.ledger import composed_epsilon, epsilon_of
from holdfast.privacy.messages import PrivateMessages
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast_deploy.cli import orders
from holdfast_deploy.cli.description import describe_federation
from holdfast_deploy.consent import Policy
from holdfast_deploy.federation_file import FederationFile, make_federation
from holdfast_deploy.member.state import MemberState
from holdfast_deploy.noise import OwnNoise
from holdfast_deploy.site import initial_model
from holdfast_deploy.storage.privacy_spent import BudgetSpentError, Spent
from holdfast_deploy.storage.results import read_cohorts

FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
BUDGET = {"unit": "node", "epsilon": 50.0, "delta": 1e-3, "clip": 0.2, "noise_multiplier": 1.0}
SERVER = {"network": {"topology": "server"}}
MASKED = SERVER | {"secure_aggregation": {}}
POISSON = {"network": {"topology": "server", "cohort": 2}}


def private(budget: dict[str, Any] | None = None, rounds: int = 4, nodes: int = 4, **changes: Any) -> Any:
    raw = describe(FEDAVG, nodes=nodes, rounds=rounds, **(SERVER | changes))
    raw["problem"]["private"] = BUDGET | (budget or {})
    return raw


def simulate(federation: FederationFile, rounds: int | None = None, quiet: bool = False) -> Simulation:
    data = [make_data(i) for i in range(len(federation.node))]
    objective = ModelProblem(
        initial_model(federation),
        CrossEntropy(),
        FederatedData.of_nodes([(d.x_train, d.y_train) for d in data]),
        batch_size=federation.problem.batch_size,
        seed=federation.seed,
    )
    method = federation.member_method
    assert isinstance(method, PrivateMessages)
    if quiet:
        method = PrivateMessages(method.inner, method.budget, 1e-12, method.expected, method.seed)
    options = {"seed": federation.seed, "cohort": federation.network.cohort}
    simulation = Simulation(method, objective, federation.member_network, **options)
    for _ in range(federation.rounds if rounds is None else rounds):
        simulation.step()
    return simulation


# --- trajectories ------------------------------------------------------------------------------------------


SLOW = pytest.mark.slow
LITTLE = {"quantile": 0.5, "noise_multiplier": 0.3}  # a count of four bears no more


@pytest.mark.parametrize(
    ("budget", "changes"),
    [
        ({"cohorts": "poisson"}, POISSON),
        ({"noise": "distributed"}, MASKED),
        pytest.param({}, {}, marks=SLOW),
        pytest.param({}, {"network": {"topology": "server", "cohort": 2}}, marks=SLOW),
        pytest.param({}, MASKED, marks=SLOW),
        pytest.param(LITTLE, {}, marks=SLOW),
        pytest.param({"noise": "clients"}, {}, marks=SLOW),
        pytest.param({"noise": "distributed", **LITTLE}, MASKED, marks=SLOW),
    ],
)
def test_with_noise_from_the_seed_it_is_the_simulators(budget: Any, changes: Any, tmp_path: Path) -> None:
    federation = make_federation(private(budget, **changes), "test")
    run = DeployedRun(federation, tmp_path, counted_noise=True).carry_out()
    assert not run.errors
    expected = simulate(federation).models[0]
    for model in run.models.values():
        assert (model - expected).norm() <= 1e-5 * expected.norm()
    assert any(entry["event"] == "noise from the seed" for entry in run.log)


@pytest.mark.parametrize(
    ("budget", "changes"),
    [
        ({"cohorts": "poisson"}, POISSON),
        ({"noise": "distributed"}, MASKED),
        pytest.param({}, {}, marks=SLOW),
        pytest.param({"noise": "clients"}, {}, marks=SLOW),
    ],
)
def test_the_seed_gives_neither_noise_nor_cohorts(budget: Any, changes: Any, tmp_path: Path) -> None:
    """Two runs with the same seed and data, and the simulator: three models that nothing relates."""
    federation = make_federation(private(budget | {"noise_multiplier": 5.0}, rounds=2, **changes), "test")
    models = [simulate(federation).models[0]]
    for folder in ("one", "two"):
        models.append(deploy_as(federation, tmp_path / folder).models["a"])
    quiet = simulate(federation, quiet=True).models[0]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (models[one] - models[other]).norm() > 0.5 * (models[one] - quiet).norm()
    if changes is POISSON:
        hubs = [tmp_path / folder / "hub" for folder in ("one", "two")]
        draws = [OwnNoise((hub / "noise.key").read_bytes(), "run", print) for hub in hubs]
        first, second = ([own.chosen(40, 0.5, round) for round in range(8)] for own in draws)
        assert first != second


def deploy_as(federation: FederationFile, folder: Path) -> DeployedRun:
    run = DeployedRun(federation, folder).carry_out()
    assert not run.errors, run.errors
    return run


# --- noise -------------------------------------------------------------------------------------------------


def noised_messages(noise: str, contributors: int, senders: int, dim: int) -> tuple[PrivateMessages, Any]:
    """A method with noise of its own, and the noise in the sum of ``senders`` messages of zeros."""
    budget = NodeDP(epsilon=1.0, delta=1e-3, clip=0.5, noise=noise)
    grid = 2.0**-PRECISION if noise == "distributed" else None
    total = torch.zeros(1, dim, dtype=torch.float64)
    for sender in range(senders):
        own = OwnNoise(bytes([sender]) * 32, "run", lambda _: None, grid)
        method = PrivateMessages(_zero_sender(), budget, 3.0, senders, 0, contributors, own)
        total += method._noised(torch.zeros_like(total), 0.5, torch.tensor([sender]), 0, contributors**-0.5)
    return method, total


def _zero_sender() -> Any:
    return make_federation(private(), "test").method


@pytest.mark.parametrize(
    ("noise", "contributors", "senders", "times"),
    [
        ("server", 1, 1, 1.0),
        ("clients", 1, 4, 2.0),
        ("distributed", 4, 4, 1.0),
        ("distributed", 4, 6, 1.5**0.5),
    ],
)
def test_noise_of_ones_own_has_the_size_that_is_accounted_for(
    noise: str, contributors: int, senders: int, times: float
) -> None:
    _, total = noised_messages(noise, contributors, senders, 40_000)
    assert float(total.std()) == pytest.approx(times * 3.0 * 0.5, rel=0.02)
    assert abs(float(total.mean())) < 0.03


def test_what_is_masked_is_whole_and_nothing_is_rounded_after_the_noise() -> None:
    """A second rounding, of the noised message, would not be covered by what is accounted for."""
    _, total = noised_messages("distributed", 4, 1, 1000)
    units = total * 2.0**PRECISION
    assert torch.equal(units, units.round())
    assert torch.equal(encode(total[0], 10).double(), units[0])


def test_noise_that_the_grid_would_swallow_is_refused() -> None:
    own = OwnNoise(b"k" * 32, "run", lambda _: None, grid=2.0**-PRECISION)
    with pytest.raises(HoldfastError, match=r"noise of 1.4e-09 is too small to be rounded"):
        own.noised(torch.zeros(1, 3), torch.tensor([[1e-9]]), 1.0, 0, 0, 0)


@pytest.mark.parametrize("senders", [2, 5])
def test_a_sum_of_rounded_normal_numbers_is_a_rounded_sum_with_more_noise(senders: int) -> None:
    """The argument of docs/privacy.md, at a deviation of 3 steps; ours are of 100 or more.

    Rounded and summed, as the server sees it, against summed and then rounded with independent uniform noise,
    which is post-processing of the continuous sum.
    """
    deviation, reach = 3.0, 80
    whole = np.arange(-reach, reach + 1)
    edges = np.array([math.erf(x / (deviation * math.sqrt(2))) for x in np.arange(-reach - 0.5, reach + 1)])
    rounded = np.diff(edges) / 2
    seen = rounded
    for _ in range(senders - 1):
        seen = np.convolve(seen, rounded, mode="same")
    fine = 200  # steps in one of the grid, by which the second is integrated
    spread = deviation * math.sqrt(senders)
    x = np.arange(-reach * fine, reach * fine + 1) / fine
    density = np.exp(-((x / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))
    box = np.full(fine + 1, 1 / fine)
    box[[0, -1]] /= 2
    for _ in range(senders):  # one for each message, the last being the rounding
        density = np.convolve(density, box, mode="same")
    claimed = density[::fine]
    assert len(claimed) == len(whole)
    assert np.abs(seen - claimed).sum() < 1e-6  # by the quadrature, not by the argument


# --- nothing is released twice -----------------------------------------------------------------------------


def crashing(run: DeployedRun, at: int) -> list[torch.Tensor]:
    """Runs ``run`` until the hub is about to save round ``at``; the model that it would have saved."""
    started, found = Started(run), []
    hub = run.members["hub"]
    save = hub.save

    def crash(state: MemberState, **said: Any) -> None:
        if state.round == at:
            found.append(state.method.tree.inner.x.clone())
            for member in run.members.values():
                member.stop()
            raise HoldfastError("crashed")
        save(state, **said)

    hub.save = crash  # type: ignore[method-assign]
    started.end()
    assert str(run.errors.pop("hub")) == "crashed"
    run.errors.clear()
    return found


@pytest.mark.parametrize("budget", [pytest.param({}, marks=SLOW), {"cohorts": "poisson"}])
def test_a_server_that_crashes_before_it_saves_makes_the_very_same_model(budget: Any, tmp_path: Path) -> None:
    changes = POISSON if budget else {}
    run = DeployedRun(make_federation(private(budget, **changes), "test"), tmp_path)
    spent = tmp_path / "hub" / "privacy.jsonl"
    models, lines = [], []
    for _ in range(2):
        models += crashing(run, at=2)
        lines.append(spent.read_text())
    assert torch.equal(*models)
    assert lines[0] == lines[1]
    assert len(lines[0].splitlines()) == 2
    Started(run).end()
    assert not run.errors
    assert len(spent.read_text().splitlines()) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "changes"),
    [
        ({}, {}),
        ({"cohorts": "poisson"}, POISSON),
        ({"noise": "clients"}, {}),
        ({"noise": "distributed"}, MASKED),
    ],
)
def test_killed_at_any_time_every_round_is_paid_for_once(budget: Any, changes: Any, tmp_path: Path) -> None:
    """Eight SIGKILLs, mostly of the server. Whoever pays, pays once a round, and all have the same model."""
    rounds, draw = 12, np.random.default_rng(0)
    with Members(private(budget, rounds=rounds, **changes), tmp_path / "run") as members:
        for name in members.names:
            members.start(name)
        for number in range(1, 9):
            members.wait_for_round(number)
            victim = "hub" if draw.random() < 0.6 else str(draw.choice(members.nodes))
            members.kill(victim)
            members.start(victim)
        members.finish()
        payers = members.nodes if budget.get("noise") else ["hub"]
        for name in payers:
            folder = members.folder / (f"server-{name}" if name == "hub" else f"node-{name}")
            lines = [json.loads(line) for line in (folder / "privacy.jsonl").read_text().splitlines()]
            assert len(lines) == rounds
            assert len({line["release"] for line in lines}) == rounds
        models = {
            (members.folder / f"node-{n}" / "model.safetensors").read_bytes()[-84:] for n in members.nodes
        }
        assert len(models) == 1


@pytest.mark.slow
def test_going_back_draws_anew_and_pays_again(tmp_path: Path) -> None:
    raw = private({"cohorts": "poisson"}, rounds=6, limits={"snapshots": 4, "snapshot_every": 1}, **POISSON)
    run = stopped(raw, tmp_path / "run", at=4)
    (tmp_path / "file").mkdir()
    path = write_federation(raw, tmp_path / "file")
    spent, hub = run.folder / "hub" / "privacy.jsonl", run.folder / "hub"
    before, key = spent.read_text(), (hub / "noise.key").read_bytes()
    cohorts = read_cohorts(hub / "cohorts.csv", run.federation.names)
    for name in ("hub", *run.federation.names):
        orders.rollback(path, 2, name, run.folder / name)
    Started(run).end()
    assert not run.errors
    after = spent.read_text()
    assert after.startswith(before)
    assert len(before.splitlines()) >= 3  # a client that was not asked may be a round ahead
    assert len(after.splitlines()) == len(before.splitlines()) + 4  # rounds 3 to 6
    draws = [json.loads(line)["draw"] for line in after.splitlines()]
    assert len(set(draws)) == len(draws)
    assert (hub / "noise.key").read_bytes() == key
    assert read_cohorts(hub / "cohorts.csv", run.federation.names)[:2] == cohorts[:2]


# --- what was spent ----------------------------------------------------------------------------------------


def test_the_server_keeps_account_of_who_was_asked(tmp_path: Path) -> None:
    raw = private(network={"topology": "server", "cohort": 2}, rounds=5)
    run = deploy(raw, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "hub" / "privacy.jsonl").read_text().splitlines()]
    asked = [name for line in lines for name in line["nodes"]]
    assert len(asked) == 2 * 5
    most = max(asked.count(name) for name in "abcd")
    told = json.loads((tmp_path / "hub" / "report.json").read_text())
    assert told["epsilon"] == pytest.approx(epsilon_of(1.0, 1e-3, 1.0, 0, most), abs=1e-4)
    plan = run.federation.protection
    assert plan is not None
    assert plan.epsilon_of(plan.safe) == pytest.approx(told["epsilon"], abs=1e-4)
    assert "epsilon" not in json.loads((tmp_path / "a" / "report.json").read_text())
    assert not (tmp_path / "a" / "noise.key").exists()


@pytest.mark.parametrize(
    ("budget", "changes"), [({"noise": "clients"}, {}), ({"noise": "distributed"}, MASKED)]
)
def test_a_client_that_adds_noise_keeps_account_itself(budget: Any, changes: Any, tmp_path: Path) -> None:
    deploy(private(budget, **changes), tmp_path)
    for name in "abcd":
        assert len((tmp_path / name / "privacy.jsonl").read_text().splitlines()) == 4
        told = json.loads((tmp_path / name / "report.json").read_text())
        assert told["epsilon"] == pytest.approx(epsilon_of(1.0, 1e-3, 1.0, 0, 4), abs=1e-4)
    assert not (tmp_path / "hub" / "privacy.jsonl").exists()


def test_a_second_release_of_a_secret_cohort_costs_more_than_another_cohort(tmp_path: Path) -> None:
    budget = NodeDP(epsilon=3.0, delta=1e-3, clip=1.0)
    spent = Spent(tmp_path / "privacy.jsonl", begun=False)
    spent.charge("one", [(0.1, 1)], 2.0, budget, draw="round 1")
    spent.charge("one", [(0.1, 1)], 2.0, budget, draw="round 1")  # computed again
    assert spent.epsilon(1e-3) == epsilon_of(2.0, 1e-3, 0.1, 1, 0)
    again = Spent(tmp_path / "privacy.jsonl", begun=True)
    again.charge("with other messages", [(0.1, 1)], 2.0, budget, draw="round 1")
    assert again.epsilon(1e-3) == epsilon_of(2.0 / math.sqrt(2), 1e-3, 0.1, 1, 0)
    assert again.epsilon(1e-3) > epsilon_of(2.0, 1e-3, 0.1, 2, 0)
    again.charge("of the next", [(0.1, 1)], 2.0, budget, draw="round 2")
    expected = ((2.0 / math.sqrt(2), 0.1, 1), (2.0, 0.1, 1))
    assert again.epsilon(1e-3) == composed_epsilon(1e-3, expected)


def test_a_node_that_was_asked_more_often_ends_it_for_all(tmp_path: Path) -> None:
    budget, spent = NodeDP(epsilon=3.0, delta=1e-3, clip=1.0), Spent(tmp_path / "privacy.jsonl", begun=False)
    most = 0
    while epsilon_of(3.0, 1e-3, 1.0, 0, most + 1) <= 3.0:
        spent.charge(f"{most}", [(1.0, 1)], 3.0, budget, ["a", "b" if most % 2 else "c"])
        most += 1
    assert most > 2
    with pytest.raises(BudgetSpentError, match="another round would exceed it"):
        spent.charge("one more", [(1.0, 1)], 3.0, budget, ["a"])
    spent.charge("without a", [(1.0, 1)], 3.0, budget, ["b", "c"])
    assert Spent(tmp_path / "privacy.jsonl", begun=True).epsilon(1e-3) == epsilon_of(3.0, 1e-3, 1.0, 0, most)


# --- what others see ---------------------------------------------------------------------------------------


def test_nobody_hears_of_a_secret_cohort_but_of_itself(tmp_path: Path) -> None:
    raw = private({"cohorts": "poisson"}, rounds=6, **POISSON)
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    started = Started(run)
    hub, told = run.members["hub"], []
    publish = hub.outbox.publish

    def listen(header: Any, tree: Any, recipient: str = "") -> Any:
        told.append((header, hub.status_for_others()))
        return publish(header, tree, recipient)

    hub.outbox.publish = listen  # type: ignore[method-assign]
    started.end()
    assert not run.errors, run.errors
    cohorts = read_cohorts(tmp_path / "hub" / "cohorts.csv", run.federation.names)
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    trail = [json.loads(line) for line in (tmp_path / "hub" / "audit.jsonl").read_text().splitlines()]
    for event in ("sent", "received"):
        passed = {(line["round"], line["peer"]) for line in trail if line["event"] == event}
        asked = {(r, run.federation.names[i]) for r, cohort in enumerate(cohorts, 1) for i in cohort}
        assert {one for one in passed if one[0] <= 6} == asked
    for header, status in told:
        assert set(header.depends_on) == {"hub"}
        assert not any(status[key] for key in ("messages", "clients", "peers", "payload_bytes", "refused"))
        assert not any(status[key] for key in ("wire_bytes_sent", "wire_bytes_received", "waiting_seconds"))
    told_so = [entry["round"] for entry in run.log if entry["event"] == "not asked in a round"]
    for r, cohort in enumerate(cohorts, 1):  # who is slow may skip rounds that are over
        assert told_so.count(r) <= 4 - len(cohort)
    assert told_so


@pytest.mark.slow
def test_norms_of_single_messages_stay_at_the_server(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(private(), "test"), tmp_path).carry_out()
    hub = run.members["hub"]
    assert hub.status()["messages"]
    assert not hub.status_for_others()["messages"]


@pytest.mark.parametrize(
    ("budget", "changes", "message"),
    [
        ({"noise": "distributed"}, {}, r"a single message has too little noise.*add \[secure_aggregation\]"),
        ({"cohorts": "poisson"}, {**MASKED, "network": {"topology": "server", "cohort": 3}}, "is no secret"),
        (
            {},
            {"membership": {}},
            r"the noise is found for the nodes that there are; leave \[membership\] out",
        ),
        ({}, {"shared_metrics": ["test_accuracy"]}, "computed from private data without noise"),
        ({}, {"rounds": 200}, r"200 rounds with noise_multiplier = 1 spend epsilon .* of 50"),
        ({}, {"channel": "half"}, "may make them longer than they were clipped to"),
        ({}, {"algorithm": {"name": "scaffold", "lr": 0.1}}, "how a client's own memory changes"),
        ({}, {"network": {"topology": "ring"}}, "server"),
        (
            {},
            {"round": {"quorum": 2, "deadline": 1.0}},
            "the noise is for the mean over all clients that are asked",
        ),
        ({"quantile": 0.5}, {}, "more than a count of 4 clients bears"),
    ],
)
def test_what_would_give_more_away_is_refused(budget: Any, changes: Any, message: str) -> None:
    with pytest.raises(HoldfastError, match=message):
        make_federation(private(budget) | changes, "test")


def test_policies_and_plain_words_tell_whom_it_keeps_out() -> None:
    def told(budget: Any, changes: Any) -> str:
        federation = make_federation(private(budget, **changes), "test")
        return " ".join(s for paragraph in describe_federation(federation, "a") for s in paragraph.sentences)

    assert "The server itself sees your clipped messages without noise: you trust it" in told({}, {})
    assert "the sums of a round's clipped messages without noise" in told({}, MASKED)
    assert "asks every node with probability 2 / 4" in told({"cohorts": "poisson"}, POISSON)
    assert "This also protects you from the server" in told({"noise": "clients"}, {})
    assert "sums over 3 nodes or more" in told({"noise": "distributed"}, MASKED)
    asked = {"own_code": False, "signed": True}
    central, local = (make_federation(private({"noise": who}), "test") for who in ("server", "clients"))
    [objection] = Policy(require_dp=True).objections(central, **asked)
    assert objection.startswith("noise that the server adds (require_dp)")
    assert not list(Policy(require_dp=True, trust_server=True).objections(central, **asked))
    assert not list(Policy(require_dp=True).objections(local, **asked))
    [objection] = Policy(max_epsilon=8.0).objections(local, **asked)
    assert objection.startswith("epsilon = 50 (max_epsilon = 8)")
