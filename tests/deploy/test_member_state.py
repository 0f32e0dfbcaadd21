"""The record that a member saves after a round: how it lies on disk, and what is read of it."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.engines.common.counters import Traffic, Work
from holdfast_deploy.member.state import Costs, Handover, MemberState
from holdfast_deploy.ops.audit import Head
from holdfast_deploy.ops.events import Events, silence
from holdfast_deploy.storage.links import LinkDigest
from holdfast_deploy.storage.messages import MessageFile
from holdfast_deploy.storage.store import Store

DIGEST = "ab" * 32
ON_DISK = (
    '{"work":{"gradient_evaluations":6,"sample_gradients":24,"delay":0.0,"raw_delay":0.0,'
    '"value_evaluations":0,"unfinished_solves":0},"metrics":{"train_loss":1.5},'
    '"costs":{"traffic":{"numbers":10,"bits":320,"delay":0.0,"raw_delay":0.0},"seconds":2.0,"waiting":0.5,'
    '"saving":0.25,"wire_sent":40,"wire_received":80,"delivery_bytes":0},'
    f'"tally":{{"b":[{{"round":2,"sent":"{DIGEST}","received":"{DIGEST}"}}],"c":null}},'
    f'"norms":{{"largest":3.5}},"audit":[7,"{DIGEST}"],"releases":4}}'
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    identity = {"federation file": "f" * 16, "name": "a", "model": "m", "data": "d"}
    return Store(tmp_path / "a", identity, Events("a", silence))


def full_state(store: Store) -> MemberState:
    return MemberState(
        round=2,
        method=Handover({"x": torch.tensor([[1.0, 2.0]])}),
        work=Work(gradient_evaluations=6, sample_gradients=24),
        metrics={"train_loss": 1.5},
        costs=Costs(Traffic(10, 320), 2.0, 0.5, 0.25, 40, 80),
        links={"b": (LinkDigest(round=2, sent=DIGEST, received=DIGEST),), "c": None},
        largest_norm=3.5,
        depends_on={"a": store.incarnation, "b": "0" * 16},
        audit=Head(7, DIGEST),
        releases=4,
    )


def test_what_is_on_disk_is_what_older_releases_read(store: Store) -> None:
    full_state(store).write(store)
    file = MessageFile(store.state)
    file.verify()
    assert json.dumps(file.header.notes, separators=(",", ":")) == ON_DISK
    assert file.header.model_dump_json().encode() in store.state.read_bytes()
    assert (file.header.round, file.header.exchange, file.header.sender) == (2, 0, "a")


def test_a_state_is_read_as_it_was_written(store: Store) -> None:
    written = full_state(store)
    written.write(store)
    x0 = torch.zeros(2)
    read = MemberState.read(MessageFile(store.state), {"x": torch.empty(1, 2, device="meta")}, x0)
    assert torch.equal(read.method.tree["x"], written.method.tree["x"])
    assert replace(read, method=written.method) == written
    figures = MemberState.of_notes(MessageFile(store.state), x0)
    assert replace(figures, method=written.method) == written
    assert figures.method.tree is None


def test_the_state_of_a_server_and_of_a_member_without_a_budget_says_less(store: Store) -> None:
    state = MemberState(round=0, method=Handover(()), depends_on={"a": store.incarnation})
    assert list(state.to_notes()) == ["costs", "tally", "norms", "audit"]
    state.write(store)
    read = MemberState.read(MessageFile(store.state), (), torch.zeros(2))
    assert (read.work, read.releases, dict(read.metrics)) == (None, None, {})


def test_older_states_count_numbers_only_and_one_that_was_put_back_is_of_that_round(store: Store) -> None:
    full_state(store).write(store)
    file = MessageFile(store.state)
    del file.header.notes["costs"]["traffic"]["bits"]
    file.header.notes["rolled_back"] = 5
    state = MemberState.of_notes(file, torch.zeros(2, dtype=torch.float64))
    assert (state.costs.traffic.numbers, state.costs.traffic.bits, state.round) == (10, 640, 5)


def test_a_tree_that_was_taken_is_held_by_the_taker_alone(store: Store) -> None:
    state = full_state(store)
    seen = weakref.ref(state.method.tree["x"])
    tree = state.method.take()
    assert seen() is not None
    del tree
    gc.collect()
    assert seen() is None
    with pytest.raises(IndexError):
        state.method.take()
