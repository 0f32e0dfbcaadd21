"""Secure aggregation with a server that does not keep to the protocol, over real sockets and TLS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from federation_runs import PATIENCE, DeployedRun, Started, describe, simulate
from torch import Tensor

from holdfast.engines.common.channel_run import split_channel_state
from holdfast.privacy.aggregation.protocol import ANNOUNCED, CONFIRMED, DEALT, MASKED, REVEALED
from holdfast_deploy.cli import orders
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member import masked_client
from holdfast_deploy.member.masked_messages import round_digest
from holdfast_deploy.member.server import Server
from holdfast_deploy.storage.messages import Header, MessageFile

FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
SCAFFOLD = {**FEDAVG, "name": "scaffold"}
QUORUM = {"algorithm": SCAFFOLD, "round": {"quorum": 3, "deadline": 89.0}}  # one may be late
NAMES = "abcd"  # of whom three are the threshold

Publish = Callable[..., Any]


def masked(rounds: int = 3, algorithm: dict[str, Any] = FEDAVG, **changes: Any) -> dict[str, Any]:
    given = {"network": {"topology": "server"}, "dtype": "float64", "secure_aggregation": {}}
    return describe(algorithm, nodes=len(NAMES), rounds=rounds, **(given | changes))


def errors_with(lie: Callable[[Publish, Any, Any], None], folder: Path, **changes: Any) -> dict[str, str]:
    """What the clients say to a server that publishes what ``lie(publish, header, tree)`` does."""
    run = DeployedRun(make_federation(masked(**changes), "test"), folder)
    run.members = {"hub": run.member("hub")}
    outbox = run.members["hub"].outbox
    publish = outbox.publish

    def lying(header: Any, tree: Any, recipient: str = "") -> Any:
        lie(publish, header, tree)
        return publish(header, tree, recipient)

    outbox.publish = lying  # type: ignore[method-assign]
    hub = run.members["hub"]
    started = Started(run, list(NAMES))
    run.members["hub"] = hub
    started.begin("hub")
    started.until(lambda: len(run.errors) > 0)
    for name in NAMES:  # the others may wait for it forever
        run.members[name].waiting.loop.call_later(1.0, run.members[name].stop)
    for name in NAMES:
        started.threads[name].join(PATIENCE)
    hub.stop()
    started.end()
    return {name: str(error) for name, error in run.errors.items()}


def test_clients_that_are_told_of_different_arrivals_reveal_nothing(tmp_path: Path) -> None:
    """Two hear that all have arrived, two that a has not: but for signatures, it had both a's secrets."""

    def lie(publish: Publish, header: Any, tree: Tensor) -> None:
        if header.exchange == CONFIRMED:
            for name in "cd":
                publish(header, torch.tensor([0, 1, 1, 1], dtype=torch.uint8), name)

    errors = errors_with(lie, tmp_path, **QUORUM)
    told = {why for name, why in errors.items() if name in NAMES and why}
    assert any("2 clients confirm whose messages arrived, and 3 are needed" in why for why in told)
    assert not list(tmp_path.glob(f"[{NAMES}]/outbox/*-{REVEALED}"))


@pytest.mark.parametrize(
    "exchange",
    [pytest.param(DEALT, marks=pytest.mark.slow), pytest.param(MASKED, marks=pytest.mark.slow), CONFIRMED],
)
def test_nobody_is_left_out_where_there_is_no_quorum(exchange: int, tmp_path: Path) -> None:
    """All are told that d is missing. With all in the sum after a rollback, d's message would show."""

    def lie(publish: Publish, header: Any, tree: Any) -> None:
        if header.exchange == exchange:
            flags = tree["dealt"] if exchange == MASKED else tree
            flags[NAMES.index("d")] = 0

    errors = errors_with(lie, tmp_path)
    assert any("the server says that only 3 clients" in why for why in errors.values())
    assert not list(tmp_path.glob(f"[{NAMES}]/outbox/*-{exchange}"))


def test_clients_that_are_sent_different_models_are_not_added_up(tmp_path: Path) -> None:
    """A model from which the others' messages are known would lay a's open in the sum."""

    def lie(publish: Publish, header: Any, tree: Tensor) -> None:
        if (header.round, header.exchange) == (2, 0):
            publish(header, tree + 1.0, "a")

    errors = errors_with(lie, tmp_path)
    assert any("passes on keys that are not signed by" in why for why in errors.values())
    assert not list(tmp_path.glob(f"[{NAMES}]/outbox/2-{MASKED}"))


def test_keys_of_an_earlier_round_are_refused(tmp_path: Path) -> None:
    """The server may know them: a client that dropped out had its key revealed."""
    cards: list[Tensor] = []

    def lie(publish: Publish, header: Any, tree: Any) -> None:
        if header.exchange == DEALT:  # the answer to the announcements
            cards.append(tree.clone())
            tree[0] = cards[0][0]

    errors = errors_with(lie, tmp_path)
    assert any("passes on keys that are not signed by a" in why for why in errors.values())
    assert not list(tmp_path.glob(f"[{NAMES}]/outbox/2-{MASKED}"))


def test_confirmations_that_others_signed_do_not_count(tmp_path: Path) -> None:
    def lie(publish: Publish, header: Any, tree: Tensor) -> None:
        if header.exchange == REVEALED:  # the answer to the confirmations
            tree[1:] = tree[0].clone()

    errors = errors_with(lie, tmp_path)
    assert any("1 clients confirm whose messages arrived" in why for why in errors.values())


def test_a_round_is_over_for_nobody_whose_message_is_not_there(tmp_path: Path) -> None:
    """A server that says so from the beginning is not believed, and does not make clients break down."""
    run = DeployedRun(make_federation(masked(), "test"), tmp_path)
    run.members = {"hub": run.member("hub")}
    hub = run.members["hub"]
    assert isinstance(hub.program, Server)
    counted, claims = hub.program.clients.counted, []

    def claimed(sender: str, round: int, exchange: int) -> bool:
        if exchange <= MASKED:
            claims.append(exchange)
            return len(claims) < 20
        return counted(sender, round, exchange)

    hub.program.clients.counted = claimed  # type: ignore[method-assign]
    started = Started(run, list(NAMES))
    run.members["hub"] = hub
    started.begin("hub")
    started.end()
    assert not run.errors, run.errors
    refused = [entry["reason"] for entry in run.log if entry["event"] == "a message was refused"]
    assert any("says that the round is over, and has no message of this client" in why for why in refused)


def test_a_round_is_named_by_all_that_must_not_be_mixed_up() -> None:
    federation = make_federation(masked(), "test")
    model = Header(federation=federation.id, sender="hub", round=2, exchange=0, tensors=[])
    model = model.model_copy(update={"depends_on": {"hub": "0" * 16}, "content": "1" * 64})
    others = [
        model.model_copy(update={"round": 3}),
        model.model_copy(update={"content": "2" * 64}),
        model.model_copy(update={"depends_on": {"hub": "3" * 16}}),
    ]
    another = make_federation(masked(rounds=4), "test")
    named = [round_digest(federation, header) for header in [model, *others]]
    named.append(round_digest(another, model))
    assert len(set(named)) == len(named)
    of_clients = model.model_copy(update={"depends_on": {"hub": "0" * 16, "a": "4" * 16}})
    assert round_digest(federation, of_clients) == named[0]  # which the server may hear of meanwhile


def stopping_when(run: DeployedRun, name: str, key: tuple[int, int]) -> Started:
    """``name`` stops as soon as it has published its message of that round and exchange."""
    started = Started(run)
    outbox = run.members[name].outbox
    publish = outbox.publish

    def then_stop(header: Any, tree: Any, recipient: str = "") -> Any:
        message = publish(header, tree, recipient)
        if (header.round, header.exchange) == key:
            run.members[name].stop()
        return message

    outbox.publish = then_stop  # type: ignore[method-assign]
    started.threads[name].join(PATIENCE)
    return started


def test_a_round_that_is_gone_through_again_after_a_rollback_has_other_keys(tmp_path: Path) -> None:
    """Of the same message. If a client dropped out in one attempt only, both its secrets would be known."""
    raw = masked(rounds=4, limits={"wait": 90.0, "snapshot_every": 1, "snapshots": 6})
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(raw))
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    attempts = []
    for _ in range(2):
        stopping_when(run, "a", (3, ANNOUNCED)).stop()
        card = b"".join(MessageFile(run.folder / "a" / "outbox" / f"3-{ANNOUNCED}").chunks())
        content = MessageFile(run.folder / "a" / "unmasked").header.content
        attempts.append((content, {card[i : i + 32] for i in (0, 32, 64)}))
        for name in ["hub", *NAMES]:
            orders.rollback(path, 2, name, run.folder / name)
    (first, keys), (again, others) = attempts
    assert first == again
    assert not keys & others


@pytest.mark.parametrize("exchange", [pytest.param(ANNOUNCED, marks=pytest.mark.slow), DEALT])
def test_a_message_that_comes_out_otherwise_after_a_crash_changes_nothing(
    exchange: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices that add up in another order: what was announced holds, and the sum is right."""
    run = DeployedRun(make_federation(masked(), "test"), tmp_path)
    started = stopping_when(run, "b", (2, exchange))
    run.members["b"].close()
    run.errors.clear()
    encode = masked_client.encode
    monkeypatch.setattr(masked_client, "encode", lambda values, clients: encode(values, clients) + 1)
    started.start("b")
    started.end()
    assert not run.errors, run.errors
    expected = split_channel_state(simulate(run.federation).state)[0].server.x
    for model in run.models.values():
        assert (model - expected).abs().max() < 1e-8
