"""What a server computes in a round: functions from a state to the state after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from holdfast.contract import IDENTITY, ServerAlgorithm
from holdfast.core.tree import tree_map
from holdfast.engines.common.channel_run import split_channel_state, wire_like, with_channel_state
from holdfast.engines.common.counters import Traffic
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.clients import Clients
from holdfast_deploy.member.masked_sums import masked_mean
from holdfast_deploy.member.privacy import ServerPrivacy
from holdfast_deploy.member.state import Exchange, Handover, MemberState
from holdfast_deploy.member.sums import mean_of
from holdfast_deploy.member.template import new_channel_run
from holdfast_deploy.storage.links import LinkDigests
from holdfast_deploy.storage.messages import ExchangeKey, MessageFile


@dataclass(frozen=True)
class ServerContext:
    """What a server's rounds get beside the state."""

    federation: Federation
    clients: Clients
    device: torch.device
    traffic: Traffic  # which counts what the round sends
    privacy: ServerPrivacy | None = None

    def mean(self, files: dict[str, MessageFile], size: int | None = None) -> Any:
        """Of the messages of the exchange that is due; ``size``: see ``mean_of``."""
        due, federation = self.clients.due, self.federation
        rule = federation.member_network.aggregation
        wide, channel = self.privacy is not None, federation.wire_channel
        return mean_of(files, channel, due.wire, due.like, self.device, rule=rule, size=size, wide=wide)

    def plain_mean(self, files: dict[str, MessageFile]) -> Any:
        """Of messages that no channel has changed."""
        due, wide = self.clients.due, self.privacy is not None
        rule = self.federation.member_network.aggregation
        return mean_of(files, IDENTITY, due.wire, due.like, self.device, rule=rule, wide=wide)


def leading_round(
    method: ServerAlgorithm[Any], state: MemberState, now: ServerContext, exchange: Exchange
) -> tuple[MemberState, list[str]]:
    """A round of a method that the server leads: the state after it, and whose messages counted."""
    federation, clients, r = now.federation, now.clients, state.round
    nodes, channel, method = len(federation.node), federation.wire_channel, method.at(r)
    before, memory = split_channel_state(state.method.take())
    run = new_channel_run(federation, r, (), torch.tensor([], dtype=torch.int64, device=now.device))
    sent = run.broadcast(method.broadcast(before), nodes)
    run.check()
    published = exchange.publish((r + 1, 0), sent.wire)
    if federation.secure_aggregation is None:
        files, size = exchange.collect((r + 1, 0)), None
        takers = clients.takers()
        if federation.secret_cohorts:
            size = federation.cohort
        mean = exchange.retry_while_full(lambda: now.mean(exchange.checked(files), size))
    else:
        wide = now.privacy is not None
        mean, takers = masked_mean(federation, clients, published.header, exchange, now.device, wide=wide)
    arrived = tree_map(lambda t: t.squeeze(0), mean)
    share = (federation.cohort if federation.secret_cohorts else len(takers)) / nodes
    mean, memory = channel.gather(arrived, memory, share)
    if now.privacy is not None:
        now.privacy.releases.begin(str(r))
    after = method.server(before, mean, share)
    if now.privacy is not None:
        exchange.retry_while_full(partial(now.privacy.charge, r, takers))
    now.traffic.count(len(takers), sent.message, sent.wire)
    for name in takers:
        came = clients.arrivals[r + 1, clients.schedule.message][name].content
        exchange.exchanged(name, r + 1, [published.header.content], [came])
    return replace(state, round=r + 1, method=Handover(with_channel_state(after, memory))), takers


def averaging_round(
    state: MemberState, now: ServerContext, exchange: Exchange, digests: LinkDigests
) -> MemberState:
    """All that clients exchange in a round of a method without a leader: each message round is averaged.

    The round is over when the first messages of another one are here: then all clients have saved theirs.
    """
    clients, r, rounds = now.clients, state.round, now.federation.rounds
    while clients.due.key[0] <= r + 1:
        message_round, number = key = clients.due.key
        mean = _mean(now, exchange, exchange.collect(key))
        run = new_channel_run(
            now.federation,
            max(message_round - 1, 0),
            (),
            torch.tensor([], dtype=torch.int64, device=now.device),
        )
        answer = run.answer(mean, number, len(now.federation.names)).wire
        run.check()
        clients.expect((message_round, number + 1))  # a client that has the mean may send what follows
        published = exchange.publish(key, answer)
        count_mean(now, key)
        note_means(now, message_round, [published], digests)
        for past in [past for past in list(clients.arrivals) if past[0] <= (r or -1)]:
            clients.drop(past)
    exchange.collect(clients.due.key)
    return replace(state, round=min(clients.due.key[0] - 1, rounds))


def _mean(now: ServerContext, exchange: Exchange, files: dict[str, MessageFile]) -> Any:
    return exchange.retry_while_full(lambda: now.mean(exchange.checked(files)))


def take_up_means(
    now: ServerContext, done: int, published: Iterable[MessageFile], digests: LinkDigests
) -> None:
    """Counts and notes what was ``published`` after the state of ``done`` rounds was saved."""
    means = [mean for mean in published if mean.header.round <= now.federation.rounds]
    for mean in means:
        if done < mean.header.round:
            count_mean(now, (mean.header.round, mean.header.exchange))
    for round, of_round in groupby(means, lambda mean: mean.header.round):
        if (done or -1) < round:  # the first state is saved before anything passes
            note_means(now, round, list(of_round), digests)


def note_means(now: ServerContext, round: int, means: list[MessageFile], digests: LinkDigests) -> None:
    """Notes what the clients have sent in ``round``, and have got for it.

    ``means`` are noted at once: a client that asks meanwhile must not hear of half a round.
    """
    for name in now.federation.names:
        arrivals = [now.clients.arrivals.get((round, mean.header.exchange), {}) for mean in means]
        received = [senders[name].content for senders in arrivals if name in senders]
        if len(received) < len(means):  # damaged since: what this client sent cannot be told any more
            digests.forget(name)
        else:
            sent = [mean.header.content for mean in means]
            digests.add(name, round, sent=sent, received=received)


def count_mean(now: ServerContext, key: ExchangeKey) -> None:
    """Every client is sent the mean of that exchange."""
    like = now.clients.schedule.due(key).like
    wire = wire_like(now.federation.wire_channel.down, like)
    now.traffic.count(len(now.federation.names), like, wire)
