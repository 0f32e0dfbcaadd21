"""Numbers that spoil a model are put down to whoever sent them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federation_runs import PATIENCE, DeployedRun, Started, describe, make_data

from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.storage.links import ImplausibleMessageError, MessageNorms
from holdfast_deploy.storage.messages import DivergedError, Header, MessageFile, specs, write_message

GOSSIP = {"name": "gossip", "lr": 0.1}
SERVER = {"network": {"topology": "server"}}


def poisoned(node: int) -> Dataset:
    """Node b has samples a million million times too large, as if a unit were wrong."""
    data = make_data(node)
    return data if node != 1 else replace(data, x_train=1e12 * data.x_train)


@pytest.mark.parametrize(
    ("algorithm", "changes", "victim"),
    [(GOSSIP, {}, "a"), ({"name": "fedavg", "lr": 0.1, "local_steps": 2}, SERVER, "hub")],
)
def test_an_absurd_message_is_not_used_and_its_sender_named(
    algorithm: dict, changes: dict, victim: str, tmp_path: Path
) -> None:
    run = DeployedRun(make_federation(describe(algorithm, rounds=6, **changes), "test"), tmp_path)
    run.data_of = poisoned
    started = Started(run)
    try:
        started.threads[victim].join(PATIENCE)
        error = run.errors[victim]
        assert isinstance(error, ImplausibleMessageError)
        assert str(error).startswith("b sent a message of norm ")
        assert run.members[victim].status()["messages"][victim]["norm"] < 100
    finally:
        for member in run.members.values():
            member.stop()
        started.end()


def message(folder: Path, value: float, round: int = 1) -> MessageFile:
    tree = torch.full((1, 4), value)
    header = Header(federation="f", sender="b", round=round, exchange=0, tensors=specs(tree))
    return write_message(folder / "m", header, tree)


def test_what_became_infinite_is_put_down_to_the_largest_sender(tmp_path: Path) -> None:
    norms = MessageNorms("a", limit=1e6)
    norms.sent(message(tmp_path, 1.0))
    norms.received("c", message(tmp_path, 2.0))
    assert norms.suspicion() == (
        "no member's messages stand out (norms of the last: a 2, c 4): try a smaller lr"
    )
    norms.received("b", message(tmp_path, 1e5))
    assert norms.suspicion().startswith(
        "b sent by far the largest numbers: ask b (norms of the last messages:"
    )
    largest = r"b sent a message of norm 2e\+12 in round 7; the largest before"
    with pytest.raises(ImplausibleMessageError, match=largest):
        norms.received("b", message(tmp_path, 1e12, round=7))
    assert norms.status()["b"] == {"round": 1, "norm": pytest.approx(2e5)}
    again = MessageNorms("a", limit=1e6)
    again.restore(norms.largest)
    assert again.largest == norms.largest


def test_numbers_near_the_largest_float_have_a_norm(tmp_path: Path) -> None:
    assert message(tmp_path, 3e38).norm == pytest.approx(6e38, rel=1e-6)
    with pytest.raises(DivergedError):
        message(tmp_path, float("inf"))


def test_a_node_that_diverges_says_whose_messages_were_large(tmp_path: Path) -> None:
    raw = describe({"name": "gossip", "lr": 3e38}, rounds=30, limits={"wait": 2.0})
    run = DeployedRun(make_federation(raw, "test"), tmp_path).carry_out()
    assert run.errors
    assert any("try a smaller lr" in str(error) or "sent" in str(error) for error in run.errors.values())
    assert all(isinstance(error, HoldfastError) for error in run.errors.values())
