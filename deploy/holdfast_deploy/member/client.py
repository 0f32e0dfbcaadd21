"""A client of a server that leads: it computes when it is asked, and may be left out when it is late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.contract import ServerAlgorithm
from holdfast.core.randomness import cohort
from holdfast.core.tree import tree_map
from holdfast.engines.common.channel_run import split_channel_state, wire_like, with_channel_state
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.aggregating import send_masked
from holdfast_deploy.member.state import MemberState
from holdfast_deploy.member.template import channel_memories, state_template
from holdfast_deploy.member.transport import read
from holdfast_deploy.membership.start import forget_roster_before
from holdfast_deploy.storage.messages import MessageFile
from holdfast_deploy.wire.protocol import LeftOut

if TYPE_CHECKING:
    from holdfast_deploy.member.node import Node


def train_with_server(node: Node, method: ServerAlgorithm[Any]) -> Tensor:
    """All rounds of ``node`` that are left; the model, [d], that the server hands out in the end."""
    federation = node.federation
    if node.state is None:
        node.phase = "preparing"
        start = node.starting_model()
        node.state = with_channel_state(method.init(start[None]), channel_memories(federation, node.x0))
        node.save_round(federation.first_round)
        forget_roster_before(node.membership, node.federation)
    node.forget_start()
    row = torch.empty_like(node.x0, device="meta")
    like, down = method.broadcast(method.init_server(row)), federation.wire_channel.down
    if not down.transparent:  # it comes as rows
        like = tree_map(lambda t: t[None], like)
    wire = wire_like(down, like)

    def take_part(r: int) -> None:
        node.message_round = r + 1
        node.phase = f"waiting for round {r + 1}"
        file = node.transport.from_server(0, wire)
        received = node.retry_while_full(partial(read, file, down, wire, like, node.x0.device))
        if not down.transparent:
            received = tree_map(lambda t: t[0], received)
        node.phase = f"computing round {r + 1}"
        state, memories = split_channel_state(node.state)
        oracle = node.oracle(r)
        state, message = method.at(r).client(state, received, oracle)
        channel_run = node.channel_run(r, memories)
        sent = channel_run.send(message)
        channel_run.check()
        node.costs.traffic.count(1, message, sent.wire)
        last: MessageFile | None
        if federation.secure_aggregation is None:
            published = last = node.publish(node.header(0, sent.wire), sent.wire)
        else:
            published, last = send_masked(node, sent.wire, file.header)
        state = method.at(r).finish(state, sent.arrived, (), oracle)
        node.state = with_channel_state(state, channel_run.memories)
        node.transport.passed_server(sent=[published], received=[file])
        node.save_round(r + 1)
        if last is not None:
            node.transport.to_server(last)

    r = _unless_left_out(node, node.transport.to_server_again, node.done)
    while r < federation.rounds:
        # Whether it is in a secret cohort, the server tells it when it asks for the model.
        if federation.secret_cohorts or node.node in _cohort(federation, r):
            r = _unless_left_out(node, partial(take_part, r), r + 1)
        else:
            r += 1
    node.message_round = federation.rounds + 1
    file = node.transport.from_server(0, row)  # the finished model, as it is
    node.transport.passed_server(received=[file])
    model: Tensor = node.retry_while_full(lambda: file.read(row, node.x0.device))
    node.done = federation.rounds
    node.measure(model[None])
    return model


def _cohort(federation: Federation, r: int) -> Tensor:
    return cohort(federation.seed, r, len(federation.node), federation.cohort)


def _unless_left_out(node: Node, take_part: Callable[[], None], then: int) -> int:
    """The round after ``take_part``: ``then``, or the server's where it went on without this client.

    The state before is put back in that case, so that all is as if the client had not been in the cohort. It
    is the one that the last save has left behind. The new save is of the same round and leaves it there, so
    that after a crash in between, all of this is done once more. What is saved then tells which rounds are
    over for this client, should it ever have to go back to it.
    """
    traffic = replace(node.costs.traffic)
    try:
        take_part()
    except LeftOut as late:
        node.costs.traffic = traffic
        if node.done == late.message_round:
            before, x0 = node.store.state_before(), node.x0
            state = MemberState.read(before, state_template(node.federation, node.node, x0), x0)
            node.state = state.method.take()
            node.link_digests.restore(state.links)
            node.costs.traffic = state.costs.traffic
            node.save(node.done, node.state, replace(node.work), **node.metrics)
        if node.federation.secret_cohorts:
            node.events.log("not asked in a round", round=late.message_round)
        else:
            reason = "the answer was late"
            node.events.log("left out of a round", "warning", round=late.message_round, reason=reason)
            node.events.audit("left out", round=late.message_round)
        then = min(max(late.now - 1, late.message_round, then), node.federation.rounds)
        if then > node.done:
            node.save(then, node.state, replace(node.work), **node.metrics)
        # Last of all: without it, after a crash, the round would be gone through with other messages.
        node.outbox.withdraw(late.message_round)
    return then
