"""Deployed federations: the simulator's models and byte counts, over real sockets with TLS."""

from __future__ import annotations

import contextlib
import csv
import json
import socket
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from federation_runs import PATIENCE, DeployedRun, calm_run, deploy, describe, make_data, simulate
from test_conformance import CASES as ALL_METHODS
from test_conformance import Case

from holdfast.algorithms import ALGORITHMS
from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.network import NetworkThread
from holdfast_deploy.member.node import Node
from holdfast_deploy.member.template import state_template
from holdfast_deploy.member.waiting import Stopped
from holdfast_deploy.storage.messages import Header, MessageFile, specs
from holdfast_deploy.wire.retry import WaitLimitError

SERVER = {"topology": "server"}

ADAMW = {
    "name": "warmup-cosine",
    "warmup": 3,
    "inner": {"name": "clip", "inner": {"name": "adamw", "keep": True}},
}

CASES = {
    "local-gecl": ({"name": "local-gecl", "lr": 0.1, "local_steps": 3}, {}),
    "warm start, neighbour sums": (
        {"name": "local-gecl", "lr": 0.1, "alpha": 0.1, "warm_start_rounds": 2},
        {"network": {"topology": "complete"}, "nodes": 4},
    ),
    "net-fleet": ({"name": "net-fleet", "lr": 0.05, "local_steps": 3}, {"nodes": 4}),
    "two exchanges a round": ({"name": "gt-sgd", "lr": 0.05, "order": "atc"}, {}),
    "ecl, every neighbour something else": (
        {"name": "ecl", "lr": 0.1, "local_steps": 2},
        {"network": {"topology": "star"}, "nodes": 4},
    ),
    "dspodfl": (
        {"name": "dspodfl", "lr": 0.1},
        {"network": {"links": 0.5, "compute": 0.6}, "nodes": 4, "rounds": 10},
    ),
    "a graph that changes": (
        {"name": "gossip", "lr": 0.1},
        {"network": {"topology": {"name": "erdos-renyi", "p": 0.7}, "graph_every": 2}, "nodes": 4},
    ),
    "pairs in which a node may be left alone": (
        {"name": "k-gt", "lr": 0.1},
        {"network": {"topology": "base-graph"}, "nodes": 3},
    ),
    "led": ({"name": "led", "lr": 0.1, "local_steps": 3}, {"nodes": 4}),
    "unequal steps, averaged by a server": (
        {"name": "vrl-sgd", "lr": 0.1, "local_steps": 3},
        {
            "network": SERVER,
            "node": [{"name": "a", "local_steps": 1}, {"name": "b"}, {"name": "c", "local_steps": 5}],
        },
    ),
    "fedavg": ({"name": "fedavg", "lr": 0.1, "local_steps": 3}, {"network": SERVER}),
    "scaffold with cohorts": (
        {"name": "scaffold", "lr": 0.1, "local_steps": 3},
        {"network": SERVER | {"cohort": 2}, "nodes": 4, "problem": {"weights": "samples"}},
    ),
    "fedpd that skips rounds": (
        {"name": "fedpd", "eta": 1.0, "lr": 0.1, "local_steps": 3, "skip": 0.4},
        {"network": SERVER, "rounds": 8},
    ),
    "dualfl": (
        {"name": "dualfl", "nu": 0.1, "rho": 0.05, "solver": {"name": "sgd", "lr": 0.1, "steps": 3}},
        {"network": SERVER},
    ),
    "neighbour sums through a server": (
        {"name": "local-gecl", "lr": 0.1, "alpha": 0.1},
        {"network": SERVER},
    ),
    "adamw, clipped and warmed up": (
        {"name": "local-gecl", "lr": 0.01, "local_steps": 3, "optimizer": ADAMW},
        {},
    ),
    "fedopt, ditto and cohorts": (
        {
            "name": "ditto",
            "lr": 0.01,
            "local_steps": 2,
            "optimizer": ADAMW,
            "server_lr": 0.1,
            "server_optimizer": {"name": "fedyogi"},
        },
        {"network": SERVER | {"cohort": 2}, "nodes": 4},
    ),
    "fedrep": ({"name": "fedrep", "lr": 0.1, "head": 10, "head_steps": 2}, {}),
    "compressed": ({"name": "local-gecl", "lr": 0.1, "local_steps": 3}, {"compression": "lossless"}),
}


@pytest.mark.parametrize("case", CASES)
def test_deployed_models_and_bytes_are_the_simulators(case: str, tmp_path: Path) -> None:
    algorithm, changes = CASES[case]
    raw = describe(algorithm, **changes)
    if raw["problem"].get("weights") == "samples":
        for i, node in enumerate(raw["node"]):
            node["samples"] = len(make_data(i).x_train)
    run = deploy(raw, tmp_path)
    simulation = simulate(run.federation)
    deployed = torch.stack([run.models[name] for name in run.federation.names])
    assert (deployed - simulation.models).norm() <= 1e-5 * simulation.models.norm()
    assert sum(member.accounts.payload_bytes for member in run.members.values()) == simulation.payload_bytes


def test_half_precision_on_the_wire_halves_the_bytes_and_stays_close(tmp_path: Path) -> None:
    raw = describe({"name": "local-gecl", "lr": 0.1, "local_steps": 3})
    run = deploy(raw | {"channel": "half"}, tmp_path)
    simulation = simulate(make_federation(raw, "test"))
    deployed = torch.stack([run.models[name] for name in run.federation.names])
    assert 0 < (deployed - simulation.models).norm() <= 1e-2 * simulation.models.norm()
    sent = sum(member.accounts.wire_bytes[0] for member in run.members.values())
    assert 2 * sent == simulation.payload_bytes


# Servers do not answer at the end of a round: methods that need it are refused.
DEPLOYED = [case for case in ALL_METHODS if not ALGORITHMS[case.name].declared.answers]


def test_methods_whose_server_answers_are_refused() -> None:
    raw = describe({"name": "tamuna", "lr": 0.1, "p": 0.5}, network=SERVER)
    with pytest.raises(HoldfastError, match="TAMUNA: its server answers"):
        make_federation(raw, "test")


@pytest.mark.slow
@pytest.mark.parametrize("case", DEPLOYED, ids=[f"{case.name}-{i}" for i, case in enumerate(DEPLOYED)])
def test_every_method_gives_the_simulators_models_and_bytes(case: Case, tmp_path: Path) -> None:
    options = {"name": case.name, **case.options} | ({case.rate: 0.05} if case.rate else {})
    raw = describe(options, rounds=2, network={"topology": "server" if case.server else "ring"})
    run = deploy(raw, tmp_path)
    simulation = simulate(run.federation)
    deployed = torch.stack([run.models[name] for name in run.federation.names])
    assert (deployed - simulation.models).norm() <= 1e-5 * simulation.models.norm()
    assert sum(member.accounts.payload_bytes for member in run.members.values()) == simulation.payload_bytes
    for node in run.members.values():
        if isinstance(node.program, Node):  # what a restart fills looks like what was saved
            template = state_template(run.federation, node.program.node, node.x0)
            assert specs(template) == MessageFile(node.folder / "state").header.tensors


def run_with_interruptions(run: DeployedRun, victim: str, at_rounds: list[int]) -> None:
    """Runs all members; the victim is stopped at the given rounds, each time to begin anew from its files."""
    network = NetworkThread()
    run.members = {member.name: run.member(member.name, network) for member in run.federation.members}
    others = [name for name in run.members if name != victim]
    threads = [threading.Thread(target=run._run, args=[name], daemon=True) for name in others]
    for thread in threads:
        thread.start()
    for at in [*at_rounds, None]:
        thread = threading.Thread(target=run._run, args=[victim], daemon=True)
        thread.start()
        if at is not None:
            while run.members[victim].exchange.message_round < at and thread.is_alive():
                time.sleep(0.002)
            run.members[victim].stop()
            thread.join(PATIENCE)
            assert isinstance(run.errors.pop(victim), Stopped)
            run.members[victim].close()
            run.members[victim] = run.member(victim, network)
    for running in [*threads, thread]:
        running.join(PATIENCE)
        assert not running.is_alive()
    for member in run.members.values():
        member.close()
    network.close()
    assert not run.errors


@pytest.mark.parametrize(
    ("algorithm", "network", "victim"),
    [
        pytest.param(
            {"name": "gt-sgd", "lr": 0.05, "order": "atc"}, {"topology": "ring"}, "b", marks=pytest.mark.slow
        ),
        ({"name": "local-gecl", "lr": 0.1, "warm_start_rounds": 2}, {"topology": "ring"}, "a"),
        ({"name": "scaffold", "lr": 0.1, "local_steps": 2}, {"topology": "server", "cohort": 2}, "hub"),
        pytest.param(
            {"name": "scaffold", "lr": 0.1, "local_steps": 2},
            {"topology": "server", "cohort": 2},
            "b",
            marks=pytest.mark.slow,
        ),
        ({"name": "dspodfl", "lr": 0.1}, {"topology": "ring", "links": 0.5, "compute": 0.5}, "b"),
        pytest.param(
            {"name": "fedlin", "lr": 0.1, "local_steps": 2},
            {"topology": "server"},
            "hub",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"name": "fedlin", "lr": 0.1, "local_steps": 2},
            {"topology": "server"},
            "b",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_interrupted_member_comes_back_as_if_nothing_had_happened(
    algorithm: dict, network: dict, victim: str, tmp_path: Path
) -> None:
    raw = describe(algorithm, network=network, rounds=16)
    calm = calm_run(raw)
    disturbed = DeployedRun(make_federation(raw, "test"), tmp_path / "disturbed")
    run_with_interruptions(disturbed, victim, at_rounds=[0, 4, 9, 10])
    assert disturbed.models.keys() == calm.models.keys()
    for name in calm.models:
        assert torch.equal(disturbed.models[name], calm.models[name])
    assert "resuming" in [entry["event"] for entry in disturbed.log if entry["node"] == victim]
    assert not [entry for entry in disturbed.log if entry["level"] == "error" or "differs" in entry["event"]]


def test_a_sporadic_exchange_that_fails_is_inactive_on_both_ends(tmp_path: Path) -> None:
    raw = describe(
        {"name": "dspodfl", "lr": 0.1},
        nodes=2,
        rounds=12,
        network={"topology": "line", "links": 1.0},
        limits={"exchange": 0.3},
    )
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    network = NetworkThread()
    run.members = {name: run.member(name, network) for name in ("a", "b")}
    threads = [threading.Thread(target=run._run, args=[name], daemon=True) for name in run.members]
    threads[0].start()
    while run.members["a"].done < 3:  # nobody answers, so that a goes on alone
        time.sleep(0.01)
    threads[1].start()
    for thread in threads:
        thread.join(PATIENCE)
    for member in run.members.values():
        member.close()
    network.close()
    assert not run.errors
    failed = {entry["round"] - 1 for entry in run.log if entry["event"] == "inactive link"}
    assert {0, 1, 2} <= failed < set(range(12))
    assert (
        run.members["a"].accounts.payload_bytes
        == run.members["b"].accounts.payload_bytes
        == (12 - len(failed)) * 21 * 4
    )

    federation = make_federation(raw, "test")
    chances = federation.member_network.sporadic(1.0, lambda r: 1e-12 if r in failed else 1.0, seed=0)
    federation.__dict__["member_network"] = chances
    expected = simulate(federation).models
    deployed = torch.stack([run.models["a"], run.models["b"]])
    assert (deployed - expected).norm() <= 1e-5 * expected.norm()


def test_a_node_leaves_its_model_metrics_and_report(tmp_path: Path) -> None:
    run = deploy(describe({"name": "local-gecl", "lr": 0.1}, rounds=4, evaluate_every=2), tmp_path)
    with (tmp_path / "a" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["0", "2", "4"]
    assert float(rows[-1]["local_loss"]) < float(rows[0]["local_loss"])
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    assert report["round"] == 4
    assert report["payload_bytes"] == report["wire_bytes_sent"] == run.members["a"].accounts.payload_bytes
    assert report["metrics"]["test_accuracy"] == float(rows[-1]["test_accuracy"])
    assert report["seconds"] >= report["waiting_seconds"] > 0
    assert (tmp_path / "a" / "model.safetensors").exists()
    assert run.members["a"].status()["metrics"] == {}  # nothing is shared unless the file says so


def test_a_node_leaves_its_personal_model_behind(tmp_path: Path) -> None:
    run = deploy(describe({"name": "ditto", "lr": 0.1, "personal_steps": 2}, network=SERVER), tmp_path)
    expected = simulate(run.federation).personal_models
    for row, name in enumerate(run.federation.names):
        left = safetensors.torch.load_file(tmp_path / name / "personal.safetensors")
        personal = torch.cat([tensor.flatten() for tensor in left.values()])
        assert sorted(personal.tolist()) == pytest.approx(sorted(expected[row].tolist()), rel=1e-4, abs=1e-6)
        assert (expected[row] - run.models[name]).norm() > 1e-2


def test_running_a_finished_node_again_gives_its_model_and_waits_for_nobody(tmp_path: Path) -> None:
    run = deploy(describe({"name": "local-gecl", "lr": 0.1}), tmp_path)
    with run.member("a") as again:
        assert torch.equal(again.run(), run.models["a"])
    assert run.log[-1]["event"] == "finished already"


def test_a_node_killed_while_it_finished_ends_though_the_others_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_deploy.member.finish.GRACE", 0.5)
    run = deploy(describe({"name": "local-gecl", "lr": 0.1}, limits={"wait": 3600.0}), tmp_path)
    (tmp_path / "a" / "parted").unlink()
    with run.member("a") as again:
        assert torch.equal(again.run(), run.models["a"])
    assert (tmp_path / "a" / "parted").exists()


def test_a_client_killed_while_it_finished_has_its_model_though_the_server_is_gone(tmp_path: Path) -> None:
    algorithm = {"name": "scaffold", "lr": 0.1, "local_steps": 2}
    raw = describe(algorithm, network=SERVER, limits={"wait": 0.5, "exchange": 0.5})
    run = deploy(raw | {"limits": {}}, tmp_path)
    (tmp_path / "a" / "parted").unlink()
    run.federation = make_federation(raw, "test")
    with run.member("a") as again:
        assert torch.equal(again.run(), run.models["a"])
        assert again.status()["round"] == raw["rounds"]
        assert again.accounts.metrics == json.loads((tmp_path / "a" / "report.json").read_text())["metrics"]
    assert run.log[-1]["event"] == "finished"


def test_a_client_of_a_server_opens_no_port(tmp_path: Path) -> None:
    raw = describe({"name": "fedlin", "lr": 0.1}, network=SERVER)
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    with run.member("hub") as hub, run.member("a", listen="127.0.0.1:0") as client:
        assert hub.port is not None
        assert client.port is None


def test_a_client_cannot_fill_the_servers_disk(tmp_path: Path) -> None:
    raw = describe({"name": "fedlin", "lr": 0.1}, network=SERVER, rounds=100)
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    with run.member("hub") as hub:
        clients = hub.exchange.clients
        assert clients is not None
        ahead = Header(
            federation=run.federation.id,
            sender="a",
            round=1,
            exchange=0,
            tensors=specs(hub.x0[None]),
        )
        assert clients.admit(ahead)
        clients.arrived(ahead)
        assert not clients.admit(ahead)  # it is there
        with pytest.raises(HoldfastError, match="still waits for others"):
            clients.admit(ahead.model_copy(update={"round": 2}))
        with pytest.raises(HoldfastError, match="round: 2, exchange 0, has not begun"):
            clients.admit(ahead.model_copy(update={"sender": "b", "round": 2}))
        assert clients.admit(ahead.model_copy(update={"sender": "b"}))


def test_an_absent_neighbour_is_waited_for_up_to_the_limit(tmp_path: Path) -> None:
    raw = describe({"name": "local-gecl", "lr": 0.1}, nodes=2, limits={"wait": 0.5, "exchange": 0.5})
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    with (
        run.member("a") as lonely,
        pytest.raises(WaitLimitError, match=r"waiting for b \(\d s\): it cannot be"),
    ):
        lonely.run()


def test_others_in_the_same_directory_and_other_data_are_refused(tmp_path: Path) -> None:
    raw = describe({"name": "local-gecl", "lr": 0.1}, nodes=2)
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    with run.member("a"), pytest.raises(ValueError, match="in use by another process"):
        run.member("a")
    changed = DeployedRun(make_federation(raw | {"rounds": 9}, "test"), tmp_path)
    with pytest.raises(ValueError, match="begun with another federation file"):
        changed.member("a")


class CountingProxy:
    """Passes connections on to a port of this machine and counts the bytes, both ways."""

    def __init__(self, target: int) -> None:
        self.target, self.bytes = target, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inside, outside = (
                    socket.create_connection(("127.0.0.1", self.target)),
                    self.listener.accept()[0],
                )
                for ends in ((inside, outside), (outside, inside)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                self.bytes += len(piece)
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


def test_a_10_mb_model_takes_less_than_2_percent_more_on_the_wire(tmp_path: Path) -> None:
    raw = describe(
        {"name": "gossip", "lr": 0.1},
        nodes=2,
        rounds=2,
        network={"topology": "line"},
        problem={"model": {"name": "mlp", "hidden": [1600, 1600]}},
    )
    real = [int(node["address"].rpartition(":")[2]) for node in raw["node"]]
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    network = NetworkThread()
    run.members = {name: run.member(name, network) for name in ("a", "b")}
    proxies = [CountingProxy(port) for port in real]
    for node, proxy in zip(run.federation.node, proxies, strict=True):  # from now on all go through them
        node.address = f"127.0.0.1:{proxy.port}"
    threads = [threading.Thread(target=run._run, args=[name], daemon=True) for name in run.members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for member in run.members.values():
        member.close()
    network.close()
    assert not run.errors
    payload = sum(member.accounts.payload_bytes for member in run.members.values())
    assert payload == 2 * 2 * 4 * run.models["a"].numel() > 4 * 10**7
    assert payload < sum(proxy.bytes for proxy in proxies) < 1.02 * payload
