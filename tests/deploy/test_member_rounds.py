"""Rounds are functions: with an ``Exchange`` that is a shared folder, they make the simulator's models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from federation_runs import PATIENCE, describe, make_data, simulate
from torch import Tensor

from holdfast.contract import Algorithm
from holdfast.engines.common.channel_run import with_channel_state
from holdfast.engines.common.counters import Traffic, Work
from holdfast.engines.common.oracle import INITIAL_STEP, BatchOracle
from holdfast_deploy.federation_file import FederationFile, make_federation
from holdfast_deploy.member.node_rounds import graph_round, graph_start
from holdfast_deploy.member.state import Handover, MemberState, RoundContext
from holdfast_deploy.member.template import channel_memories, new_channel_run
from holdfast_deploy.site import Site, open_site
from holdfast_deploy.storage.messages import (
    ExchangeKey,
    Header,
    MessageFile,
    TensorSpec,
    specs,
    write_message,
)

T = TypeVar("T")


class SharedFolder:
    """An ``Exchange`` without network: all nodes write into one folder and read from it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.phase = folder, name, ""
        self.noted: list[tuple[str, int]] = []

    def publish(self, key: ExchangeKey, tree: Any, to: str = "") -> MessageFile:
        header = Header(federation="f", sender=self.name, round=key[0], exchange=key[1], tensors=specs(tree))
        return write_message(self.folder / f"{self.name}-{key[0]}-{key[1]}{to}", header, tree)

    def fetch(
        self, key: ExchangeKey, peers: Sequence[str], tensors: list[TensorSpec]
    ) -> dict[str, MessageFile]:
        paths = {peer: self.folder / f"{peer}-{key[0]}-{key[1]}" for peer in peers}
        until = time.monotonic() + PATIENCE
        while not all(path.exists() for path in paths.values()):
            assert time.monotonic() < until
            time.sleep(0.001)
        return {peer: MessageFile(path) for peer, path in paths.items()}

    def exchanged(self, peer: str, round: int, sent: Sequence[str], received: Sequence[str]) -> None:
        self.noted.append((peer, round))

    def intact(self, own: MessageFile) -> MessageFile:
        own.verify()
        return own

    def retry_while_full(self, action: Callable[[], T]) -> T:
        return action()

    def __getattr__(self, verb: str) -> Any:
        raise AssertionError(f"a round among neighbours has no use for {verb}")


def train(
    federation: FederationFile, name: str, site: Site, files: SharedFolder, found: dict[str, Tensor]
) -> None:
    """All rounds of one node; of what is known to a session, nothing is needed."""
    method, node = federation.member_method, federation.names.index(name)
    assert isinstance(method, Algorithm)
    here, work, traffic = torch.tensor([node]), Work(), Traffic()

    def context(r: int, message_round: int, memories: Any = ()) -> RoundContext:
        return RoundContext(
            round=r,
            message_round=message_round,
            node=node,
            names=federation.names,
            server="",
            network=federation.member_network,
            seed=federation.seed,
            like=site.problem.x0,
            channel_run=new_channel_run(federation, r, memories, here),
            oracle=BatchOracle(site.problem, here, federation.seed, r, work),
            traffic=traffic,
        )

    beginning = context(0, 0)
    beginning.oracle.step = beginning.oracle.read = INITIAL_STEP
    tree = graph_start(method, site.problem.x0, beginning, files)
    memories = channel_memories(federation, site.problem.x0)
    state = MemberState(round=0, method=Handover(with_channel_state(tree, memories)))
    for r in range(federation.rounds):
        before, state = state, graph_round(method, state, context(r, r + 1), files)
        assert before.method.taken  # the round was the only one that held it
    assert state.round == federation.rounds
    found[name] = method.model(state.method.tree)[0]


def test_a_round_needs_an_exchange_and_no_member(tmp_path: Path) -> None:
    raw = describe({"name": "local-gecl", "lr": 0.1, "local_steps": 2}, rounds=3, dtype="float64")
    federation, found = make_federation(raw, "test"), dict[str, Tensor]()
    files = {name: SharedFolder(tmp_path, name) for name in federation.names}
    # One after the other: initial models are drawn with torch's own generator, of which a process has one.
    sites = {name: open_site(federation, name, make_data(node)) for node, name in enumerate(federation.names)}
    threads = [
        threading.Thread(target=train, args=[federation, name, sites[name], files[name], found])
        for name in federation.names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    simulated = simulate(federation).models
    for node, name in enumerate(federation.names):
        assert (found[name] - simulated[node]).abs().max() < 1e-14
        others = [other for other in federation.names if other != name]
        assert sorted(files[name].noted) == sorted((other, r) for r in (1, 2, 3) for other in others)
