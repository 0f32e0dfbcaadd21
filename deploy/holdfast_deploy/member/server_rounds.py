"""The server's part of a method that it leads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.contract import ServerAlgorithm
from holdfast.core.tree import tree_map
from holdfast.engines.common.channel_run import split_channel_state, with_channel_state
from holdfast.problem.statistics import from_moments
from holdfast_deploy.member.aggregating import aggregate
from holdfast_deploy.member.template import channel_memories
from holdfast_deploy.membership.start import forget_roster_before
from holdfast_deploy.storage.results import write_model

if TYPE_CHECKING:
    from holdfast_deploy.member.server import Server


def lead(server: Server, method: ServerAlgorithm[Any]) -> None:
    """All rounds that are left, and the finished model, which is written down and handed out."""
    federation, nodes = server.federation, len(server.federation.node)
    channel, memories = federation.wire_channel, channel_memories(federation, server.x0)
    memory = tree_map(lambda t: t[0], memories[0].receiver) if memories else ()
    first = federation.first_round
    state = method.at(first).init_server(server.x0.clone())
    if server.saved is not None:
        state, memory = split_channel_state(
            server.saved.read(with_channel_state(state, memory), server.x0.device)
        )
    else:
        server.message_round = first
        if federation.roster_number:
            state = method.at(first).init_server(server.starting_model())
        server.save_round(first, with_channel_state(state, memory))
        forget_roster_before(server.membership, server.federation)
    server.forget(server.done)
    for r in range(server.done, federation.rounds):
        now = method.at(r)
        server.due = server.schedule.after(r, [key[:2] for key in server.outbox.messages])
        server.message_round = r + 1
        server.phase = f"serving round {r + 1}"
        channel_run = server.channel_run(r)
        sent = channel_run.broadcast(now.broadcast(state), nodes)
        channel_run.check()
        published = server.publish(server.header(0, sent.wire), sent.wire)
        if federation.secure_aggregation is None:
            size = federation.cohort if federation.secret_cohorts else None
            mean, takers = server.mean(channel, size), server.takers()
        else:
            mean, takers = aggregate(server, published.header)
        arrived = tree_map(lambda t: t.squeeze(0), mean)
        share = (federation.cohort if federation.secret_cohorts else len(takers)) / nodes
        mean, memory = channel.gather(arrived, memory, share)
        if server.privacy is not None:
            server.privacy.releases.begin(str(r))
        state = now.server(state, mean, share)
        if server.privacy is not None:
            server.retry_while_full(partial(server.privacy.charge, r, takers))
        server.costs.traffic.count(len(takers), sent.message, sent.wire)
        for name in takers:
            came = [server.arrivals[r + 1, server.schedule.message][name].content]
            sent_back = [published.header.content]
            server.link_digests.add(name, r + 1, sent=sent_back, received=came)
        if server.keeps_cohorts:
            server.retry_while_full(partial(server.cohorts.add, r + 1, " ".join(takers)))
        if server.quorum is not None:
            left_out = len(server.due.names) - len(takers)
            server.metrics = {"answers": float(len(takers)), "left_out": float(left_out)}
        server.save_round(r + 1, with_channel_state(state, memory))
        server.forget(r + 1)
    _hand_out(server, method.at(max(federation.rounds - 1, 0)).model(state))


def _hand_out(server: Server, model: Tensor) -> None:
    federation = server.federation
    server.message_round = federation.rounds + 1
    server.due = server.schedule.due((server.message_round, 0))
    published = server.publish(server.header(0, model), model)
    for name in federation.names:
        server.link_digests.add(name, server.message_round, sent=[published.header.content])
    server.costs.delivery_bytes = len(federation.node) * published.header.size
    notes = {"federation": federation.name, "rounds": federation.rounds}
    server.phase = "handing out the model"
    statistics = server.average_statistics(server.costs.delivery_bytes)
    complete = model if statistics is None else torch.cat([model, from_moments(statistics[0]).flatten()])
    server.retry_while_full(lambda: write_model(server.folder, server.model, complete, notes))
    server.run_on_loop(server.everybody)
