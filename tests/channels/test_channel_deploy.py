"""Channels in deployed federations: the simulator's models and bytes, and members that come back."""

from __future__ import annotations

import pytest
import torch
import toy_channels  # noqa: F401 - registers "grid"
from federation_runs import DeployedRun, Started, calm_run, deploy, describe, saved_model, stopped
from federation_runs import simulate as simulate_federation
from member_processes import Members
from test_deploy import run_with_interruptions
from test_deploy_damage import damage

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.node import Node
from holdfast_deploy.member.template import state_template
from holdfast_deploy.storage.messages import MessageFile, specs

LOCAL = {"lr": 0.1, "local_steps": 2}
GRAPH_CASE = ({"name": "local-gecl", **LOCAL}, {"network": {"topology": "ring"}})
COHORT_CASE = (
    {"name": "scaffold", **LOCAL},
    {"network": {"topology": "server", "cohort": 2}},
)
GRID_CASE = ({"name": "fedavg", **LOCAL}, COHORT_CASE[1])  # SCAFFOLD counts on what arrives
CHAIN = {"name": "chain", "steps": [{"name": "top-k", "share": 0.2}, {"name": "uniform", "bits": 8}]}
DITHERED = {"name": "grid", "dithered": True}
RANDOM = {
    "name": "chain",
    "steps": [{"name": "random-k", "share": 0.5}, {"name": "natural", "dithered": True}],
}
DEPLOYED = {
    "half, graph": ("half", *GRAPH_CASE),
    "half, sums": ("half", {"name": "local-gecl", **LOCAL, "alpha": 0.1}, GRAPH_CASE[1]),
    "half, links": ("half", {"name": "ecl", **LOCAL}, GRAPH_CASE[1]),
    "half, server": ("half", {"name": "fedlin", **LOCAL}, {"network": {"topology": "server"}}),
    "half, cohorts, lossless": ("half", COHORT_CASE[0], COHORT_CASE[1] | {"compression": "lossless"}),
    "half, sporadic": (
        "half",
        {"name": "dspodfl", "lr": 0.1},
        {"network": {"links": 0.5, "compute": 0.6}, "rounds": 8},
    ),
    "grid, two exchanges": ("grid", {"name": "gt-sgd", "lr": 0.05, "order": "atc"}, GRAPH_CASE[1]),
    "grid, lossless": ("grid", GRAPH_CASE[0], GRAPH_CASE[1] | {"compression": "lossless"}),
    "grid, warm start": ("grid", {"name": "local-gecl", **LOCAL, "warm_start_rounds": 2}, GRAPH_CASE[1]),
    "grid, server that skips": (
        {"name": "grid", "dithered": True},
        {"name": "fedpd", "eta": 1.0, **LOCAL, "skip": 0.4},
        {"network": {"topology": "server"}, "rounds": 8},
    ),
    "grid, cohorts": ({"name": "grid", "dithered": True}, *GRID_CASE),
    "top-k, graph": ({"name": "top-k", "share": 0.2, "gamma": 0.5}, *GRAPH_CASE),
    "chain, two exchanges": (
        {**CHAIN, "gamma": "tuned"},
        {"name": "gt-sgd", "lr": 0.05, "order": "atc"},
        GRAPH_CASE[1],
    ),
    "chain, cohorts": (CHAIN, *COHORT_CASE),
    "random-k, server that skips": (
        {"name": "random-k", "share": 0.3},
        {"name": "fedpd", "eta": 1.0, **LOCAL, "skip": 0.4},
        {"network": {"topology": "server"}, "rounds": 8},
    ),
    "sign, server": (
        {"name": "uniform", "bits": 1},
        {"name": "fedlin", **LOCAL},
        {"network": {"topology": "server"}},
    ),
    "natural, lossless": (
        {"name": "natural", "bits": 4, "dithered": True},
        GRAPH_CASE[0],
        GRAPH_CASE[1] | {"compression": "lossless"},
    ),
    "low rank, graph": ({"name": "low-rank", "rank": 1}, *GRAPH_CASE),
    "bfloat16, links": ({"name": "bfloat16", "feedback": False}, {"name": "ecl", **LOCAL}, GRAPH_CASE[1]),
}


# Slow: those whose channel and whose way of exchanging others have, too.
LIKE_OTHERS = {"half, graph", "half, links", "half, server", "half, cohorts, lossless", "grid, two exchanges"}
LIKE_OTHERS |= {"grid, lossless", "grid, cohorts"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c in LIKE_OTHERS else []) for c in DEPLOYED]
)
def test_deployed_models_and_bytes_are_the_simulators(case, tmp_path):
    channel, algorithm, changes = DEPLOYED[case]
    # In float64: rounding to a grid may tell numbers apart that differ in their last bits.
    raw = describe(algorithm, **changes) | {"channel": channel, "dtype": "float64"}
    run = deploy(raw, tmp_path)
    simulation = simulate_federation(run.federation)
    deployed = torch.stack([run.models[name] for name in run.federation.names])
    assert (deployed - simulation.models).norm() <= 1e-5 * simulation.models.norm()
    if "half" not in case:  # rows are added up in another order, so the last bits may differ
        assert (deployed - simulation.models).abs().max() < 1e-14
    assert sum(member.accounts.payload_bytes for member in run.members.values()) == simulation.payload_bytes
    if "sporadic" not in case and "lossless" not in case:
        delivered = sum(member.accounts.costs.delivery_bytes for member in run.members.values())
        wire = sum(member.accounts.wire_bytes[0] for member in run.members.values())
        assert wire == simulation.payload_bytes + delivered
    for node in run.members.values():
        if isinstance(node.program, Node):  # what a restart fills looks like what was saved
            saved = MessageFile(node.folder / "state").header.tensors
            assert specs(state_template(run.federation, node.program.node, node.x0)) == saved


@pytest.mark.parametrize(
    ("channel", "algorithm", "changes", "victim"),
    [
        (RANDOM, *GRAPH_CASE, "b"),
        (DITHERED, *GRID_CASE, "hub"),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                (DITHERED, *GRAPH_CASE, "b"),
                (DITHERED, *GRID_CASE, "b"),
                (RANDOM, *COHORT_CASE, "b"),
            )
        ),
    ],
)
def test_an_interrupted_member_comes_back_as_if_nothing_had_happened(
    channel, algorithm, changes, victim, tmp_path
):
    raw = describe(algorithm, rounds=16, **changes) | {"channel": channel}
    calm = calm_run(raw)
    disturbed = DeployedRun(make_federation(raw, "test"), tmp_path / "disturbed")
    run_with_interruptions(disturbed, victim, at_rounds=[0, 4, 9])
    assert disturbed.models.keys() == calm.models.keys()
    for name in calm.models:
        assert torch.equal(disturbed.models[name], calm.models[name])
    assert not [entry for entry in disturbed.log if entry["level"] == "error" or "differs" in entry["event"]]


@pytest.mark.parametrize("what", ["state", "outbox"])
@pytest.mark.parametrize(("algorithm", "changes", "victim"), [(*GRAPH_CASE, "b"), (*GRID_CASE, "hub")])
def test_what_a_channel_remembers_is_made_good_after_damage(algorithm, changes, victim, what, tmp_path):
    raw = describe(algorithm, rounds=8, **changes) | {"channel": {"name": "grid", "dithered": True}}
    calm = calm_run(raw)
    run = stopped(raw, tmp_path / "damaged", at=4)
    damage(run.folder / victim, what)
    Started(run).end()
    assert not run.errors
    for name, model in calm.models.items():
        assert torch.equal(run.models[name], model)
    payload = {name: member.accounts.payload_bytes for name, member in calm.members.items()}
    assert {name: member.accounts.payload_bytes for name, member in run.members.items()} == payload


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channel", "algorithm", "changes"),
    [("grid", *GRAPH_CASE), ("grid", *GRID_CASE), (RANDOM, *GRAPH_CASE), (RANDOM, *COHORT_CASE)],
    ids=["grid, graph", "grid, cohorts", "chain, graph", "chain, cohorts"],
)
def test_killed_processes_end_with_the_same_models(algorithm, changes, channel, tmp_path):
    raw = describe(algorithm, rounds=30, **changes) | {"channel": channel}
    calm = deploy(raw, tmp_path / "calm")
    with Members(raw, tmp_path / "federation") as members:
        for name in members.names:
            members.start(name)
        for number, victim in ((5, "b"), (12, members.names[-1]), (20, "b")):
            members.wait_for_round(number)
            members.kill(victim)
            members.start(victim)
        members.finish()
        models = {name: saved_model(members.path, name) for name in members.nodes}
    for name, model in calm.models.items():
        # A module's state is in alphabetical order: the biases [3] before the weights [3, 6].
        assert torch.equal(models[name], torch.cat([model[18:], model[:18]]))


def test_fp16_compression_says_that_it_is_a_channel():
    with pytest.raises(HoldfastError, match=r"compression: .*'fp16' has become a channel: write channel = "):
        make_federation(describe({"name": "local-gecl", "lr": 0.1}, compression="fp16"), "test")


def test_the_channel_is_part_of_a_federations_digest():
    raw = describe({"name": "local-gecl", "lr": 0.1})
    known = make_federation(raw, "test").id
    assert make_federation(raw | {"channel": "identity"}, "test").id == known
    assert make_federation(raw | {"channel": "half"}, "test").id != known


def test_numbers_beyond_half_precision_stop_a_deployed_node(tmp_path):
    raw = describe({"name": "local-gecl", "lr": 1e9}, rounds=8) | {"channel": "half"}
    run = DeployedRun(make_federation(raw, "test"), tmp_path).carry_out(20.0)
    assert any("channel Half: a number is beyond 65504" in str(error) for error in run.errors.values())
