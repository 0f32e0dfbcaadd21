"""Differential privacy in a real federation: noise of each node's own, and what it has spent."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_runs import (
    CLASSES,
    PATIENCE,
    SAMPLES,
    DeployedRun,
    Started,
    deploy,
    describe,
    forked_member,
    make_data,
    stopped,
    write_federation,
)
from roster_runs import Threads
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.data.federated import FederatedData
from holdfast.engines.common.simulation import Simulation
from holdfast.privacy import DP
from holdfast.privacy.ledger import composed_epsilon, epsilon_of
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.private import PrivateGradients, Release, counted_noise
from holdfast_deploy.cli import orders
from holdfast_deploy.cli.description import describe_federation
from holdfast_deploy.consent import Policy
from holdfast_deploy.federation_file import FederationFile, make_federation
from holdfast_deploy.member.node import Node
from holdfast_deploy.membership import service
from holdfast_deploy.noise import OwnNoise, normals, read_key
from holdfast_deploy.site import initial_model, open_site
from holdfast_deploy.storage.messages import MessageFile
from holdfast_deploy.storage.privacy_spent import BudgetSpentError, Spent

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
BUDGET = {"epsilon": 50.0, "delta": 1e-3, "clip": 1.0, "noise_multiplier": 1.0}


DRAWS = 150  # enough that numbers of the operating system fail no test by chance


def private(
    algorithm: dict[str, Any], rounds: int = 4, budget: dict[str, Any] = BUDGET, **changes: Any
) -> Any:
    raw = describe(algorithm, rounds=rounds, **changes)
    raw["problem"] |= {"sampling": "poisson", "private": budget}
    for i, node in enumerate(raw["node"]):
        node["samples"] = SAMPLES + i
    return raw


def simulate(federation: FederationFile) -> Simulation:
    problem, plan = federation.problem, federation.protection
    assert plan is not None
    data = [make_data(i) for i in range(len(federation.node))]
    objective = ModelProblem(
        initial_model(federation),
        CrossEntropy(),
        FederatedData.of_nodes([(d.x_train, d.y_train) for d in data]),
        batch_size=problem.batch_size,
        sampling="poisson",
        seed=federation.seed,
    ).protected(Release(plan.budget.clip, plan.multiplier, counted_noise(federation.seed)))
    options = {"seed": federation.seed, "cohort": federation.network.cohort}
    simulation = Simulation(federation.method, objective, federation.member_network, **options, ledger=plan)
    for _ in range(federation.rounds):
        simulation.step()
    return simulation


# --- random numbers that are a node's own ------------------------------------------------------------------


def test_numbers_follow_from_the_key_and_from_what_they_are_for() -> None:
    told: list[bytes] = []
    key, sums, one = b"k" * 32, torch.zeros(1, 7), torch.ones(1, 1)
    own = OwnNoise(key, "run", told.append)
    first = own.noised(sums, one, 1.0, 3, 4, 0)
    assert torch.equal(OwnNoise(key, "run", told.append).noised(sums, one, 1.0, 3, 4, 0), first)
    others = [own.noised(sums, one, 1.0, *at) for at in ((2, 4, 0), (3, 5, 0), (3, 4, 1))]
    others += [OwnNoise(b"l" * 32, "run", told.append).noised(sums, one, 1.0, 3, 4, 0)]
    others += [OwnNoise(key, "run after", told.append).noised(sums, one, 1.0, 3, 4, 0)]
    others += [
        own.noised(sums + 1e-3, one, 1.0, 3, 4, 0)
    ]  # other sums: their difference must not be free of noise
    for other in others:
        assert (other - first).abs().min() > 1e-6
    assert told[0] == told[1]
    assert len(set(told)) == len(told) - 1
    nodes, counts = torch.tensor([2]), torch.tensor([50])
    words, places = own.shuffle(nodes, counts, 60, 1, 2)
    assert sorted(places[0, :50].tolist()) == list(range(50))
    assert (words[0, :50] < 2**32).all()
    assert (words[0, 50:] == 2**32).all()
    assert not torch.equal(own.shuffle(nodes, counts, 60, 1, 3)[1], places)


def test_noise_is_normal_and_as_large_as_accounted_for() -> None:
    numbers = normals(np.random.default_rng(0).bytes(8 * 200_000))
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs((numbers**power).mean() - moment) < 0.05
    assert np.isfinite(normals(bytes(16))).all()
    assert np.abs(normals(bytes(16))).max() > 9
    own = OwnNoise(b"k" * 32, "run", lambda _: None)
    noise = own.noised(torch.zeros(1, 100_000, dtype=torch.float64), torch.tensor([[0.3]]), 2.0, 0, 0, 0)
    assert abs(float(noise.std()) / 0.6 - 1) < 0.01


def test_sums_and_noise_lie_on_one_grid() -> None:
    """So no low bits of a sum show through the gaps between floating-point numbers."""
    own = OwnNoise(b"k" * 32, "run", lambda _: None)
    sums = torch.rand(1, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noised = own.noised(sums, torch.tensor([[1.0]]), 1.0, 0, 0, 0)
    units = noised * 2**30
    assert torch.equal(units, units.round())
    assert not torch.equal(sums * 2**30, (sums * 2**30).round())


def test_a_key_is_drawn_once_and_nobody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "noise.key"
    key = read_key(path)
    assert read_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(HoldfastError, match="others may read the key"):
        read_key(path)


# --- trajectories ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "changes"), [(GECL, {}), (FEDAVG, {"network": {"topology": "server"}})]
)
def test_with_noise_from_the_seed_it_is_the_simulators(algorithm: Any, changes: Any, tmp_path: Path) -> None:
    federation = make_federation(private(algorithm, **changes), "test")
    run = DeployedRun(federation, tmp_path, counted_noise=True).carry_out()
    assert not run.errors
    expected = simulate(federation)
    models = torch.stack([run.models[name] for name in federation.names])
    assert (models - expected.models).norm() <= 1e-5 * expected.models.norm()
    spent = [run.members[name].program.releases.epsilon for name in federation.names]
    assert max(spent) == pytest.approx(expected.ledger.epsilon)
    assert any(entry["event"] == "noise from the seed" for entry in run.log)


def test_the_seed_does_not_give_the_noise(tmp_path: Path) -> None:
    """What a node releases is not the simulator's, nor that of a node with the same data and seed."""
    federation = make_federation(private(GECL), "test")
    released = []
    quiet = open_site(federation, "a", make_data(0)).problem.protected(Release(1.0, 0.0, counted_noise(3)))
    for folder in ("one", "two"):
        with DeployedRun(federation, tmp_path / folder).member("a") as member:
            assert isinstance(member.program, Node)
            problem = member.program.site.problem
            rows, nodes = problem.x0[None], torch.tensor([0])
            draws = [problem.full_grads(rows, nodes, 0, step)[0] for step in range(DRAWS)]
            released.append(torch.stack(draws) - quiet.full_grads(rows, nodes, 0, 0)[0])
            batches = [problem.source.batch(nodes, 0, step).weight.sum() for step in range(DRAWS)]
            released.append(torch.stack(batches))
    counted = [counted_noise(3)(nodes, 0, step, 1 << 16, quiet.dim)[0] for step in range(DRAWS)]
    counted_batches = [quiet.source.batch(nodes, 0, step).weight.sum() for step in range(DRAWS)]
    one, two, theirs = released[0], released[2], torch.stack(counted)
    assert abs(float(one.std()) / (1 / SAMPLES) - 1) < 0.1  # it is noise, and of the promised size
    for a, b in ((one, two), (one, theirs), (two, theirs)):
        assert (
            abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.1
        )  # more than five deviations
    for sizes in (released[1], released[3]):
        assert not torch.equal(sizes, torch.stack(counted_batches))
    assert not torch.equal(released[1], released[3])


def test_a_round_that_is_computed_again_sends_the_identical_message(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(private(GECL), "test"), tmp_path)
    contents, lines = [], []
    for _ in range(2):
        started = Started(run, ["a"])  # alone
        sent = tmp_path / "a" / "outbox" / "1-0"
        started.until(sent.exists)
        started.stop()
        contents.append(MessageFile(sent).header.content)
        lines.append((tmp_path / "a" / "privacy.jsonl").read_text())
        sent.unlink()
    assert contents[0] == contents[1]
    assert lines[0] == lines[1]


def test_the_same_samples_with_other_noise_cost_more_than_other_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash the round is computed again, with other digits, as a GPU may: of the same Poisson sample.

    Two releases of it tell as much as one with noise that is smaller by the root of two.
    """
    run = DeployedRun(make_federation(private(GECL), "test"), tmp_path)
    exact, attempts = PrivateGradients.values_and_gradients, []

    def other_digits(self: Any, *given: Any) -> Any:
        values, sums = exact(self, *given)
        return values, sums * (1 + attempts[-1] * 1e-6)

    monkeypatch.setattr(PrivateGradients, "values_and_gradients", other_digits)
    sent, epsilons = tmp_path / "a" / "outbox" / "1-0", []
    for attempt in (0, 1, 2, 1):
        attempts.append(attempt)
        started = Started(run, ["a"])  # alone
        started.until(sent.exists)
        started.stop()
        sent.unlink()
        node = run.members["a"]
        assert isinstance(node.program, Node)
        epsilons.append(node.program.releases.epsilon)
    once, twice, thrice = (
        composed_epsilon(1e-3, ((1 / math.sqrt(times), 4 / SAMPLES, 2),)) for times in (1, 2, 3)
    )
    assert epsilons == [once, twice, thrice, thrice]  # the last is the second, which was paid for
    assert twice > epsilon_of(1.0, 1e-3, 4 / SAMPLES, 4, 0)
    assert [e["event"] for e in run.log].count("the same secret sample is released again") == 2
    assert Spent(tmp_path / "a" / "privacy.jsonl", begun=True).epsilon(1e-3) == thrice


def test_a_node_that_starts_anew_goes_on_with_the_account_that_it_is_given(tmp_path: Path) -> None:
    first = deploy(private(GECL, rounds=2), tmp_path / "first")
    spent = tmp_path / "first" / "a" / "privacy.jsonl"
    assert first.members["a"].store.identity["data"] not in spent.read_text()  # it may be shown to others
    (tmp_path / "again" / "a").mkdir(parents=True)
    (tmp_path / "again" / "a" / "privacy.jsonl").write_bytes(spent.read_bytes())
    again = deploy(private(GECL, rounds=2), tmp_path / "again")
    epsilons = {}
    for name in "ab":
        node = again.members[name]
        assert isinstance(node.program, Node)
        epsilons[name] = node.program.releases.epsilon
    assert epsilons["a"] == epsilon_of(1.0, 1e-3, 4 / SAMPLES, 8, 0)
    assert epsilons["b"] == epsilon_of(1.0, 1e-3, 4 / (SAMPLES + 1), 4, 0)
    warned = [e["node"] for e in again.log if e["event"] == "nothing is spent of the privacy budget"]
    assert sorted(warned) == ["b", "c"]


def test_an_account_that_is_older_than_the_state_is_refused(tmp_path: Path) -> None:
    """As one from a backup: what was released since would be forgotten."""
    run = stopped(private(GECL), tmp_path, at=2)
    spent = tmp_path / "a" / "privacy.jsonl"
    newest = spent.read_bytes()
    spent.write_bytes(b"")
    with (
        pytest.raises(HoldfastError, match=r"has 0 releases, and there were \d when the state was saved"),
        run.member("a") as member,
    ):
        member.run()
    spent.write_bytes(newest)
    Started(run).end()
    assert not run.errors


def test_only_what_is_released_again_of_a_sample_is_charged_as_such(tmp_path: Path) -> None:
    budget, path = DP(epsilon=20.0, delta=1e-3, clip=1.0), tmp_path / "privacy.jsonl"
    spent = Spent(path, begun=False)
    spent.charge("one", [(0.1, 3), (1.0, 1)], 2.0, budget, draw="round 1")
    spent.charge("two", [(0.1, 2)], 2.0, budget, draw="round 1", first=3)
    spent.charge("two again", [(0.1, 1), (1.0, 1)], 2.0, budget, draw="round 1", first=4)
    spent.charge("next", [(0.1, 5)], 2.0, budget, draw="round 2")
    expected = ((2.0, 0.1, 9), (2.0 / math.sqrt(2), 0.1, 1), (2.0, 1.0, 2))
    assert spent.epsilon(1e-3) == pytest.approx(composed_epsilon(1e-3, expected), rel=1e-12)
    assert Spent(path, begun=True).epsilon(1e-3) == spent.epsilon(1e-3)


@pytest.mark.slow
def test_a_killed_round_sends_the_identical_message(tmp_path: Path) -> None:
    """SIGKILL while the round is under way; its message is lost, too, so that it is computed again."""
    path = write_federation(private(GECL, nodes=2, rounds=2, network={"topology": "line"}), tmp_path)
    outbox, spent = tmp_path / "node-a" / "outbox", tmp_path / "node-a" / "privacy.jsonl"
    contents, lines = [], []
    for _ in range(2):
        process = forked_member(path, "a")  # b never comes
        while not (sent := [p for p in outbox.glob("1-*") if not p.name.startswith(".")]):
            process.join(0.05)
            assert process.is_alive(), (tmp_path / "a.log").read_text()
        process.kill()
        process.join()
        contents.append(MessageFile(sent[0]).header.content)
        lines.append(spent.read_text())
        sent[0].unlink()
    assert contents[0] == contents[1]
    assert lines[0] == lines[1]
    assert len(lines[0].splitlines()) == 1
    (tmp_path / "node-a" / "noise.key").write_bytes(b"another key of thirty-two bytes!")
    (tmp_path / "node-a" / "noise.key").chmod(0o600)
    process = forked_member(path, "a")
    while not (sent := [p for p in outbox.glob("1-*") if not p.name.startswith(".")]):
        process.join(0.05)
    process.kill()
    process.join()
    assert MessageFile(sent[0]).header.content != contents[0]  # the key is all that it hangs on
    assert len(spent.read_text().splitlines()) == 2  # and it is paid for once more


# --- what was spent ----------------------------------------------------------------------------------------


def test_what_was_spent_is_written_down_and_shown(tmp_path: Path) -> None:
    raw = private(FEDAVG, network={"topology": "server", "cohort": 2})
    run = deploy(raw, tmp_path)
    for i, name in enumerate("abc"):
        rounds = len((tmp_path / name / "privacy.jsonl").read_text().splitlines())
        node = run.members[name]
        assert isinstance(node.program, Node)
        assert node.program.releases.epsilon == epsilon_of(1.0, 1e-3, 4 / (SAMPLES + i), 2 * rounds, 0)
        told = json.loads((tmp_path / name / "report.json").read_text())
        assert told["epsilon"] == pytest.approx(node.program.releases.epsilon, abs=1e-4)
    assert sum(len((tmp_path / n / "privacy.jsonl").read_text().splitlines()) for n in "abc") == 2 * 4


def test_going_back_does_not_take_back_what_was_spent(tmp_path: Path) -> None:
    raw = private(GECL, rounds=6, limits={"snapshots": 4, "snapshot_every": 1})
    run = stopped(raw, tmp_path / "run", at=4)
    path = write_federation(raw, _made(tmp_path / "file"))
    spent = run.folder / "a" / "privacy.jsonl"
    before = spent.read_text()
    for name in "abc":
        orders.rollback(path, 2, name, run.folder / name)
    started = Started(run)
    started.end()
    assert not run.errors
    after = spent.read_text()
    assert after.startswith(before)
    done_before = len(before.splitlines())
    assert done_before in (4, 5)
    assert len(after.splitlines()) == done_before + 4  # rounds 3 to 6: with other noise, so paid for again


def test_nothing_is_sent_beyond_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    budget, spent = DP(epsilon=3.0, delta=1e-3, clip=1.0), Spent(path, begun=False)
    number = 0
    while epsilon_of(3.0, 1e-3, 0.2, 2 * number + 2, number + 1) <= 3.0:
        spent.charge(f"release {number}", [(0.2, 2), (1.0, 1)], 3.0, budget)
        number += 1
    assert number > 2
    with pytest.raises(
        BudgetSpentError, match=r"epsilon 2\.\d+ of 3 at delta 0.001, and another round would"
    ):
        spent.charge("one more", [(0.2, 2), (1.0, 1)], 3.0, budget)
    assert len(path.read_text().splitlines()) == number
    spent.charge("release 0", [(0.2, 2), (1.0, 1)], 3.0, budget)  # known: it is the same message
    again = Spent(path, begun=True)
    assert again.epsilon(1e-3) == spent.epsilon(1e-3) == epsilon_of(3.0, 1e-3, 0.2, 2 * number, number)
    path.write_text(path.read_text() + '{"release": "half a li')
    assert Spent(path, begun=True).epsilon(1e-3) == spent.epsilon(1e-3)
    path.unlink()
    with pytest.raises(HoldfastError, match="nobody knows what was spent"):
        Spent(path, begun=True)


@pytest.mark.slow
def test_other_members_do_not_reset_what_was_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_deploy_rosters import KEY, changing, drop_in, order

    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 3, 8, coordinator=KEY.public_key().public_bytes_raw().hex())
    raw["membership"] = {}
    raw["problem"] |= {"sampling": "poisson", "private": BUDGET}
    for i, node in enumerate(raw["node"]):
        node["samples"] = SAMPLES + i
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in "abc":
        threads.start(name)
    threads.hold(3)
    drop_in(threads, "b", order(threads, "remove", "c"))
    threads.agreed(1)
    threads.limit = 9
    threads.threads.pop("c").join(PATIENCE)
    threads.errors.pop("c")
    threads.end()
    lines = (tmp_path / "a" / "privacy.jsonl").read_text().splitlines()
    assert len(lines) >= 8  # all rounds of both rosters; those after the border may be there twice
    assert len({json.loads(line)["release"] for line in lines}) == len(lines)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --- what is agreed on, and what is refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_metrics": ["test_accuracy"]}, "computed from private data without noise"),
        ({"rounds": 900}, r"900 rounds with noise_multiplier = 1 spend epsilon .* of 50"),
        ({"node": None}, "problem.private: say how many samples 'a' has"),
    ],
)
def test_what_would_give_more_away_is_refused(changes: Any, message: str) -> None:
    raw = private(GECL)
    if "node" in changes:
        changes = {"node": [{k: v for k, v in node.items() if k != "samples"} for node in raw["node"]]}
    with pytest.raises(HoldfastError, match=message):
        make_federation(raw | changes, "test")


def test_dropout_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, CLASSES))
    data = FederatedData.of_nodes([(make_data(0).x_train, make_data(0).y_train)])
    objective = ModelProblem(
        FlatModel(model, torch.device("cpu"), torch.float32), CrossEntropy(), data, seed=3
    )
    with pytest.raises(HoldfastError, match="dropout draws from the seed"):
        objective.protected(Release(1.0, 1.0, OwnNoise(b"k" * 32, "run", lambda _: None)))


def test_a_policy_that_demands_privacy_accepts_it() -> None:
    federation = make_federation(private(GECL), "test")
    asked = {"own_code": False, "signed": True}
    assert not list(Policy(require_dp=True).objections(federation, **asked))
    [objection] = Policy(require_dp=True, max_epsilon=8.0).objections(federation, **asked)
    assert objection.startswith("epsilon = 50 (max_epsilon = 8)")
    told = " ".join(
        line for paragraph in describe_federation(federation, "a") for line in paragraph.sentences
    )
    assert "differentially private for each of your samples: epsilon at most 50 at delta 0.001" in told
