"""A server that goes on without those who are late; they come back as if they had not been asked."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_runs import PATIENCE, DeployedRun, Started, describe, simulate
from member_processes import Members

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import tree_map
from holdfast.engines.common.channel_run import split_channel_state, with_channel_state
from holdfast.engines.common.simulation import Simulation
from holdfast_deploy.federation_file import FederationFile, make_federation
from holdfast_deploy.member.template import channel_memories, state_template
from holdfast_deploy.ops.audit import read_audit
from holdfast_deploy.storage.messages import MessageFile
from holdfast_deploy.storage.results import read_cohorts

SCAFFOLD = {"name": "scaffold", "lr": 0.1, "local_steps": 2}


def three_of_whom_two_suffice(rounds: int = 8, deadline: str = "0.5s", **changes: Any) -> dict[str, Any]:
    given = {"network": {"topology": "server"}, "dtype": "float64", "rounds": rounds}
    return describe(SCAFFOLD, **given, round={"quorum": 2, "deadline": deadline}, **changes)


def replayed(federation: FederationFile, folder: Path) -> Simulation:
    """The simulator with the cohorts that the server in ``folder`` has recorded."""
    cohorts = read_cohorts(folder / "cohorts.csv", federation.names)
    assert len(cohorts) == federation.rounds
    return simulate(federation, cohorts)


def assert_the_simulators(
    federation: FederationFile, hub: Path, nodes: list[Path], simulation: Simulation
) -> None:
    """The server's model, and every client's control variate, are those of the simulator."""
    state, like = split_channel_state(simulation.state)[0], torch.empty_like(simulation.problem.x0)
    memories = channel_memories(federation, like)
    memory = tree_map(lambda t: t[0], memories[0].receiver) if memories else ()
    template = with_channel_state(federation.method.init_server(like), memory)
    server = split_channel_state(MessageFile(hub / "state").read(template, like.device))[0]
    assert (server.x - state.server.x).abs().max() < 1e-12
    for i, folder in enumerate(nodes):
        own = MessageFile(folder / "state").read(state_template(federation, i, like), like.device)
        assert (split_channel_state(own)[0].c[0] - state.clients.c[i]).abs().max() < 1e-12


class Stopping(list[dict[str, Any]]):
    """A log that stops a member when it writes an event for the n-th time, before it goes on."""

    def __init__(self, run: DeployedRun, *when: tuple[str, str, int]) -> None:
        super().__init__()
        self.run, self.when = run, when
        self.at: dict[str, int] = {}  # the round in which each was stopped

    def rounds(self, member: str, event: str) -> list[int]:
        return [entry.get("round", 0) for entry in self if (entry["node"], entry["event"]) == (member, event)]

    def append(self, entry: dict[str, Any]) -> None:
        super().append(entry)
        member, event = entry["node"], entry["event"]
        if (member, event, len(self.rounds(member, event))) in self.when and member not in self.at:
            self.at[member] = entry["round"]
            self.run.members[member].stop()


def test_members_killed_at_the_worst_moments_leave_the_rounds_of_the_simulator(tmp_path: Path) -> None:
    """c and b stop after they saved a round and before they sent it, the server after it decided on c."""
    run = DeployedRun(make_federation(three_of_whom_two_suffice(), "test"), tmp_path)
    log = run.log = Stopping(
        run, ("c", "round done", 3), ("b", "round done", 5), ("hub", "left out of a round", 1)
    )
    started = Started(run)

    def restart(name: str) -> None:
        started.threads[name].join(PATIENCE)
        assert not started.threads[name].is_alive()
        run.members[name].close()
        run.errors.pop(name)
        started.start(name)

    started.until(lambda: "hub" in run.errors)
    restart("hub")
    started.until(lambda: "b" in run.errors)  # now the server has one answer only: it waits
    restart("c")
    started.until(lambda: max(log.rounds("c", "round done")) > log.at["b"])
    restart("b")
    started.end()
    assert not run.errors, run.errors

    hub, names = tmp_path / "hub", run.federation.names
    cohorts = read_cohorts(hub / "cohorts.csv", names)
    for i, name in ((1, "b"), (2, "c")):
        at = log.at[name]
        assert i not in cohorts[at - 1]  # its answer was ready, and came too late
        assert (name, at) in [(line["peer"], line["round"]) for line in left_out(hub)]
        assert at in [line["round"] for line in left_out(tmp_path / name)]
    assert any(2 in chosen for chosen in cohorts[log.at["c"] :])
    simulation = replayed(run.federation, hub)
    for model in run.models.values():
        assert (model - simulation.models[0]).abs().max() < 1e-12
    assert_the_simulators(run.federation, hub, [tmp_path / name for name in names], simulation)
    server, clients = simulation.state
    assert (server.c - clients.c.mean(0)).abs().max() < 1e-12
    assert MessageFile(tmp_path / "c" / "state").header.round == run.federation.rounds
    assert sum(member.accounts.payload_bytes for member in run.members.values()) == simulation.payload_bytes


def left_out(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_audit(folder) if line["event"] == "left out"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"algorithm": {"name": "fedavg", "lr": 0.1}}, "fedavg forgets whoever is late.*scaffold"),
        ({"algorithm": {"name": "vrl-sgd", "lr": 0.1}}, "vrl-sgd needs a message of every node"),
        ({"round": {"quorum": 4}}, "quorum: should be at most the cohort's 3"),
        ({"round": {"deadline": "2min"}}, "deadline: should be less than limits.wait"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], complaint: str) -> None:
    raw = three_of_whom_two_suffice()
    for key, value in changes.items():
        raw[key] = {**raw[key], **value} if key == "round" else value
    with pytest.raises(HoldfastError, match=complaint):
        make_federation(raw, "test")


@pytest.mark.slow
def test_a_straggler_among_processes_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """c is frozen, then b, so that the server cannot end before c is back; then b and the server die."""
    memory = {"name": "top-k", "share": 0.5}  # what the channel remembers has to be put back, too
    raw = three_of_whom_two_suffice(rounds=40, channel=memory)
    with Members(raw, tmp_path / "members") as members:
        for name in members.names:
            members.start(name)
        wait_for(lambda: members.rounds("hub") >= 3)
        os.kill(members.processes["c"].pid, signal.SIGSTOP)
        wait_for(lambda: members.rounds("hub") >= members.rounds("c") + 5)
        os.kill(members.processes["b"].pid, signal.SIGSTOP)
        back = members.rounds("c")
        os.kill(members.processes["c"].pid, signal.SIGCONT)
        wait_for(lambda: members.rounds("c") > back + 1)
        for name in ("b", "hub"):
            members.kill(name)
            members.start(name)
        members.finish()
        federation = make_federation(raw, "test")
        simulation = replayed(federation, members.folder / "server-hub")
        cohorts = read_cohorts(members.folder / "server-hub" / "cohorts.csv", federation.names)
        assert any(2 not in chosen for chosen in cohorts)
        assert any(2 in chosen for chosen in cohorts[back + 3 :])
        nodes = [members.folder / f"node-{name}" for name in federation.names]
        assert_the_simulators(federation, members.folder / "server-hub", nodes, simulation)


@pytest.mark.slow
def test_a_client_that_never_comes_costs_nobody_the_run(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(three_of_whom_two_suffice(limits={"wait": 4.0}), "test"), tmp_path)
    started = Started(run, ["hub", "a", "b"])
    started.end()
    assert not run.errors, run.errors
    assert read_cohorts(tmp_path / "hub" / "cohorts.csv", run.federation.names) == [[0, 1]] * 8
    assert "finished without a final message" in [entry["event"] for entry in run.log]
    assert len(run.models) == 2


def wait_for(what: Any) -> None:
    until = time.monotonic() + 300
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)
