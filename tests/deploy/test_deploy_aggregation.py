"""Secure aggregation over real sockets: the simulator's models, from sums alone, whoever stops and when."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_runs import PATIENCE, DeployedRun, Started, deploy, describe, simulate
from member_processes import Members

from holdfast.core.errors import HoldfastError
from holdfast.engines.common.channel_run import split_channel_state
from holdfast.privacy.aggregation.keys import KEY_BYTES, Announcement
from holdfast.privacy.aggregation.protocol import ANNOUNCED, CONFIRMED, DEALT, MASKED, REVEALED
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.clients import Clients
from holdfast_deploy.member.masked_client import secrets_for
from holdfast_deploy.member.masked_messages import make_card, round_digest
from holdfast_deploy.site import initial_model
from holdfast_deploy.storage.messages import MessageFile, digest
from holdfast_deploy.storage.results import read_cohorts, read_model

SCAFFOLD = {"name": "scaffold", "lr": 0.1, "local_steps": 2}


def masked(algorithm: dict[str, Any] = SCAFFOLD, nodes: int = 4, rounds: int = 3, **changes: Any) -> Any:
    given = {"network": {"topology": "server"}, "dtype": "float64", "secure_aggregation": {}}
    return describe(algorithm, nodes=nodes, rounds=rounds, **(given | changes))


def assert_like_the_simulator(run: DeployedRun, cohorts: list[list[int]] | None = None) -> None:
    expected = split_channel_state(simulate(run.federation, cohorts).state)[0].server.x
    for model in run.models.values():
        # Sums are rounded to 2^-33 of a message, three times.
        assert 0 < (model - expected).abs().max() < 1e-8


@pytest.mark.parametrize("algorithm", [SCAFFOLD, {"name": "fedavg", "lr": 0.1, "local_steps": 2}])
def test_models_are_those_of_the_simulator(algorithm: dict[str, Any], tmp_path: Path) -> None:
    assert_like_the_simulator(deploy(masked(algorithm), tmp_path))


def test_cohorts_are_masked_among_themselves(tmp_path: Path) -> None:
    network = {"topology": "server", "cohort": 3}
    assert_like_the_simulator(deploy(masked(nodes=5, network=network), tmp_path))


class Recording(Clients):
    """A curious server: keeps all that it was ever sent."""

    read: list[tuple[int, str, Any]]

    def drop(self, key: Any) -> None:
        for name in self.arrivals.get(key, {}):
            wire = self.schedule.due(key).wire
            self.read.append((key[1], name, self.file(key, name).read(wire, torch.device("cpu"))))
        super().drop(key)


def test_what_a_curious_server_has_of_a_client_are_uniform_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that one client says in 8 rounds, but for signatures, which are of what is said and of no data."""
    Recording.read = []
    monkeypatch.setattr("holdfast_deploy.member.server.Clients", Recording)
    deploy(masked(rounds=8), tmp_path)
    by_phase: dict[int, list[Any]] = {phase: [] for phase in range(5)}
    for exchange, name, said in Recording.read:
        if name == "a":
            by_phase[exchange].append(said.numpy())
    assert min(map(len, by_phase.values())) >= 6
    said = np.stack(by_phase[MASKED])
    assert np.abs(np.corrcoef(said.astype(float))[~np.eye(len(said), dtype=bool)]).max() < 0.7
    # Bit 255 of a key of X25519 is zero, and a share is below 2^521: the highest bytes are left out.
    keys = np.stack(by_phase[ANNOUNCED])[:, : 3 * KEY_BYTES].reshape(-1, KEY_BYTES)[:, :-1]
    shares = np.stack(by_phase[REVEALED])[..., 2:]
    # 15 degrees of freedom: 1 in 13,000, and 1 in 560,000
    for bytes_, most in ((said.view("uint8"), 45), (keys, 55), (np.stack(by_phase[DEALT]), 55), (shares, 55)):
        counts = np.bincount(bytes_.ravel() >> 4, minlength=16)
        expected = counts.sum() / 16
        assert expected > 30
        assert ((counts - expected) ** 2 / expected).sum() < most


def stopping(run: DeployedRun, member: str, exchange: int) -> Started:
    """``member`` stops after it has published its message of ``exchange`` in the second round."""
    started = Started(run)
    started.until(lambda: member in run.members)
    outbox = run.members[member].outbox
    publish = outbox.publish

    def then_stop(header: Any, tree: Any, recipient: str = "") -> Any:
        message = publish(header, tree, recipient)
        if (header.round, header.exchange) == (2, exchange):
            run.members[member].stop()
        return message

    outbox.publish = then_stop  # type: ignore[method-assign]
    return started


@pytest.mark.parametrize("member", ["b", pytest.param("hub", marks=pytest.mark.slow)])
@pytest.mark.parametrize("exchange", [ANNOUNCED, DEALT, MASKED, CONFIRMED, REVEALED])
def test_a_member_that_stops_in_any_phase_goes_on_when_it_is_back(
    member: str, exchange: int, tmp_path: Path
) -> None:
    run = DeployedRun(make_federation(masked(), "test"), tmp_path)
    started = stopping(run, member, exchange)
    started.threads[member].join(PATIENCE)
    assert not started.threads[member].is_alive()
    run.members[member].close()
    assert set(run.errors) == {member}
    run.errors.clear()
    started.start(member)
    started.end()
    assert not run.errors
    assert_like_the_simulator(run)
    complaints = [entry for entry in run.log if "differs" in entry["event"]]
    assert not complaints


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(ANNOUNCED, marks=pytest.mark.slow),
        pytest.param(DEALT, marks=pytest.mark.slow),
        MASKED,
        pytest.param(CONFIRMED, marks=pytest.mark.slow),
        REVEALED,
    ],
)
def test_who_is_late_in_any_phase_stops_nobody(exchange: int, tmp_path: Path) -> None:
    """The others go on without it; where its message had come, it counts."""
    raw = masked(round={"quorum": 3, "deadline": "1s"})
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    started = stopping(run, "b", exchange)
    started.threads["b"].join(PATIENCE)
    run.members["b"].close()
    run.errors.clear()
    started.until(lambda: run.members["hub"].done >= 3)
    started.start("b")
    started.end()
    assert not run.errors, run.errors
    cohorts = read_cohorts(tmp_path / "hub" / "cohorts.csv", run.federation.names)
    assert (1 in cohorts[1]) == (exchange >= CONFIRMED)
    assert_like_the_simulator(run, cohorts)


def test_a_server_that_swaps_keys_is_found_out(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(masked(), "test"), tmp_path)
    started = Started(run)
    hub = run.members["hub"]
    publish = hub.outbox.publish

    def swapped(header: Any, tree: Any, recipient: str = "") -> Any:
        if header.exchange == DEALT:  # its answer to the announcements
            tree = tree.clone()
            tree[0, 0] ^= 1
        return publish(header, tree, recipient)

    hub.outbox.publish = swapped  # type: ignore[method-assign]
    started.threads["b"].join(PATIENCE)
    for member in run.members.values():
        member.stop()
    started.end()
    assert "the server passes on keys that are not signed by a" in str(run.errors["b"])


def test_a_client_that_announces_a_key_without_a_secret_is_named(tmp_path: Path) -> None:
    """A point of small order: what others would share with it anybody could compute."""
    run = DeployedRun(make_federation(masked(), "test"), tmp_path)
    started = Started(run)
    outbox = run.members["b"].outbox
    publish = outbox.publish

    def of_small_order(header: Any, tree: Any, recipient: str = "") -> Any:
        if header.exchange == ANNOUNCED:
            announced = Announcement(bytes(32), *Announcement.unpack(bytes(tree[:96].tolist()))[1:])
            tree = make_card(run.credentials("b"), "b", announced, _round_of(run, header.round))
        return publish(header, tree, recipient)

    outbox.publish = of_small_order  # type: ignore[method-assign]
    started.until(lambda: "hub" in run.errors)
    for member in run.members.values():
        member.stop()
    started.end()
    assert "b announced a public key that X25519 does not accept" in str(run.errors["hub"])


def _round_of(run: DeployedRun, round: int) -> bytes:
    model = MessageFile(run.folder / "b" / "inbox" / f"{round}-0-hub").header
    return round_digest(run.federation, model)


def test_files_that_cannot_be_are_refused() -> None:
    for changes, why in (
        ({"nodes": 2}, "among 2 clients a sum hides nothing"),
        ({"secure_aggregation": {"threshold": 2}}, "threshold = 2 of 4 clients; expected more than half"),
        ({"channel": {"name": "top-k", "share": 0.5}}, "cannot be added up under masks"),
        ({"algorithm": {"name": "gossip", "lr": 0.1}}, "methods that a server leads, and gossip is none"),
        ({"round": {"quorum": 2, "deadline": 1.0}}, "round.quorum = 2 is less than its threshold of 3"),
    ):
        algorithm = changes.pop("algorithm", SCAFFOLD)
        with pytest.raises(HoldfastError, match=why):
            make_federation(masked(algorithm, **changes), "test")


def test_another_message_of_the_same_round_has_other_masks() -> None:
    """As after everybody was rolled back: the difference of two messages under the same masks would show."""
    key, message = bytes(range(32)), digest({"x": torch.ones(3)})
    first, again = (secrets_for(key, "run", message, b"round 1").announcement() for _ in range(2))
    other = secrets_for(key, "run", digest({"x": torch.ones(3) * 2}), b"round 1").announcement()
    after = secrets_for(key, "rolled back", message, b"round 1").announcement()
    assert first == again
    assert not set(first) & set(other)
    assert not set(first) & set(after)
    assert not set(first) & set(secrets_for(bytes(32), "run", message, b"round 1").announcement())


@pytest.mark.slow
def test_processes_killed_at_any_time_end_with_the_simulators_model(tmp_path: Path) -> None:
    """Ten SIGKILLs, of clients and of the server, whatever they are doing."""
    draw, federation = random.Random(1), make_federation(masked(rounds=14), "test")
    with Members(masked(rounds=14), tmp_path / "run") as members:
        for name in members.names:
            members.start(name)
        for number in range(1, 11):
            members.wait_for_round(number)
            time.sleep(draw.random() * 0.1)
            victim = draw.choice(members.names)
            members.kill(victim)
            members.start(victim)
        members.finish()
        expected = split_channel_state(simulate(federation).state)[0].server.x
        for name in members.nodes:
            found = read_model(members.folder / f"node-{name}", initial_model(federation))
            assert 0 < (found - expected).abs().max() < 1e-7
