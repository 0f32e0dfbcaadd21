"""Secure aggregation when a client loses all that was not synced, and the server tells it otherwise then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_runs import PATIENCE, DeployedRun, Started, describe, simulate
from power_cut import watched

from holdfast.core.errors import HoldfastError
from holdfast.engines.common.channel_run import split_channel_state
from holdfast.privacy.aggregation.protocol import ANNOUNCED, CONFIRMED, DEALT, MASKED
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.noise import read_key
from holdfast_deploy.storage.results import read_cohorts

FEDAVG = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
SCAFFOLD = {**FEDAVG, "name": "scaffold"}
QUORUM = {"quorum": 4, "deadline": 89.0}  # one may be late
NAMES = "abcde"  # of whom four are the threshold


def masked(algorithm: dict[str, Any] = FEDAVG, **changes: Any) -> dict[str, Any]:
    given = {"network": {"topology": "server"}, "dtype": "float64", "secure_aggregation": {}}
    return describe(algorithm, nodes=len(NAMES), rounds=3, **(given | changes))


def stopping(run: DeployedRun, exchange: int) -> Started:
    """``b`` stops when it has published its message of ``exchange`` in the second round."""
    started = Started(run)
    outbox = run.members["b"].outbox
    publish = outbox.publish

    def then_stop(header: Any, tree: Any, recipient: str = "") -> Any:
        message = publish(header, tree, recipient)
        if (header.round, header.exchange) == (2, exchange):
            run.members["b"].stop()
        return message

    outbox.publish = then_stop  # type: ignore[method-assign]
    started.threads["b"].join(PATIENCE)
    run.members["b"].close()
    run.errors.clear()
    return started


def tell(started: Started, exchange: int, change: Callable[[Any], Any]) -> None:
    """The server has another answer for ``b`` than for the others."""
    hub = started.run.members["hub"]
    key = (2, exchange, "")
    started.until(lambda: key in hub.outbox.messages)
    said = hub.outbox.messages[key]
    tree = [torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in said.header.tensors]
    tree = said.read(tree, torch.device("cpu"))
    hub.outbox.publish(said.header, change(tree), "b")


def without_e(tree: Any) -> Any:
    """Cards, or flags of who dealt or arrived, in which e is missing."""
    tree[0][list(NAMES).index("e")] = 0
    return tree


def end(started: Started) -> dict[str, str]:
    """What the members say: ``b``, and those who were waiting for it."""
    started.threads["b"].join(PATIENCE)
    for member in started.run.members.values():
        member.stop()
    started.end()
    return {name: str(error) for name, error in started.run.errors.items()}


def assert_like_the_simulator(run: DeployedRun, cohorts: list[list[int]] | None = None) -> None:
    expected = split_channel_state(simulate(run.federation, cohorts).state)[0].server.x
    for model in run.models.values():
        assert (model - expected).abs().max() < 1e-8


@pytest.mark.parametrize(
    "exchange",
    [pytest.param(DEALT, marks=pytest.mark.slow), MASKED, pytest.param(CONFIRMED, marks=pytest.mark.slow)],
)
def test_a_power_cut_takes_back_nothing_that_a_client_has_spoken_on(exchange: int, tmp_path: Path) -> None:
    """The server's answers are on disk before the client says anything that follows from them."""
    with watched() as synced:
        run = DeployedRun(make_federation(masked(SCAFFOLD, round=QUORUM), "test"), tmp_path)
        started = stopping(run, exchange)
        synced.cut(tmp_path / "b" / "inbox")
        tell(started, exchange, without_e)
        synced.cut(tmp_path / "b")
        synced.cut(tmp_path / "b" / "outbox")
        started.start("b")
        started.end()
    assert not run.errors, run.errors
    assert_like_the_simulator(run)


@pytest.mark.parametrize("exchange", [pytest.param(DEALT, marks=pytest.mark.slow), MASKED, CONFIRMED])
def test_a_client_says_nothing_more_if_the_server_now_says_otherwise(exchange: int, tmp_path: Path) -> None:
    """Its inbox is gone for whatever reason. Two lists of who dealt, and few masks are left on its message.

    For the first it masks with c, d and e, and for the second it signs that e dropped out: with e's key, and
    with the own mask of b, two colluders among a, c and d would read the message of b.
    """
    run = DeployedRun(make_federation(masked(SCAFFOLD, round=QUORUM), "test"), tmp_path)
    started = stopping(run, exchange)
    tell(started, exchange, without_e)
    for path in (tmp_path / "b" / "inbox").iterdir():
        path.unlink()
    started.start("b")
    errors = end(started)
    assert "the server answers otherwise than before this client was stopped" in errors["b"]
    assert not (tmp_path / "b" / "outbox" / f"2-{exchange + 1}").exists()


def test_a_card_that_was_damaged_is_signed_alike(tmp_path: Path) -> None:
    """The server has it. Another signature of the same would look as if somebody had stolen the key."""
    run = DeployedRun(make_federation(masked(), "test"), tmp_path)
    started = stopping(run, MASKED)
    card = tmp_path / "b" / "outbox" / f"2-{ANNOUNCED}"
    content = bytearray(card.read_bytes())
    content[-1] ^= 1
    card.write_bytes(content)
    started.start("b")
    started.threads["b"].join(PATIENCE)
    started.end()
    assert not run.errors, run.errors
    assert any(entry["event"] == "a published message is damaged" for entry in run.log)
    assert_like_the_simulator(run)


def test_a_client_that_was_left_out_forgets_what_it_said_last_of_all(tmp_path: Path) -> None:
    """Killed in between, it would else go through the round again, and sign a second time."""
    raw = masked(SCAFFOLD, round={"quorum": 4, "deadline": "1s"})
    run = DeployedRun(make_federation(raw, "test"), tmp_path)
    started = stopping(run, DEALT)
    started.until(lambda: run.members["hub"].done >= 3)
    run.members["b"] = run.member("b", started.network)
    store, said = run.members["b"].store, tmp_path / "b" / "outbox" / f"2-{DEALT}"

    def killed(*_: Any) -> None:
        raise HoldfastError("killed")

    store.save_state = killed  # type: ignore[method-assign]
    started.begin("b")
    started.threads["b"].join(PATIENCE)
    assert str(run.errors.pop("b")) == "killed"
    run.members["b"].close()
    assert said.exists()
    started.start("b")
    started.end()
    assert not run.errors, run.errors
    assert not said.exists()
    cohorts = read_cohorts(tmp_path / "hub" / "cohorts.csv", run.federation.names)
    assert_like_the_simulator(run, cohorts)


def test_a_key_that_is_used_survives_a_power_cut(tmp_path: Path) -> None:
    with watched() as synced:
        key = read_key(tmp_path / "masks.key")
        assert synced.cut(tmp_path) == []
    assert read_key(tmp_path / "masks.key") == key
