"""What a server does for a method that it does not lead: it averages."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from holdfast.engines.common.channel_run import wire_like
from holdfast_deploy.storage.messages import MessageFile

if TYPE_CHECKING:
    from holdfast_deploy.member.server import Server


def average(server: Server) -> None:
    """Exchange by exchange, what everybody has sent is averaged, until all take leave."""
    federation = server.federation
    if server.saved is None:
        server.save_round(0, ())
    server.phase = "averaging"
    before = [message for _, message in sorted(server.outbox.messages.items())]
    for message in before:  # published after the state was last saved
        if server.done < message.header.round <= federation.rounds:
            _count(server, message)
    for round, of_round in groupby(before, lambda message: message.header.round):
        if _noted(server) < round <= federation.rounds:
            _passed(server, round, list(of_round))
    while server.due.key[0] <= federation.rounds:
        message_round, exchange = server.due.key
        server.message_round = message_round
        mean = server.mean(federation.wire_channel)
        if message_round - 1 > server.done:  # everybody is past the rounds before
            server.save_round(message_round - 1, ())
            server.forget(message_round - 1)
        channel_run = server.channel_run(max(message_round - 1, 0))
        answer = channel_run.answer(mean, exchange, len(federation.names)).wire
        channel_run.check()
        header = server.header(exchange, answer)
        # A client that has the mean may send what follows.
        server.due = server.schedule.due((message_round, exchange + 1))
        published = server.publish(header, answer)
        _count(server, published)
        _passed(server, message_round, [published])
        for key in [key for key in list(server.arrivals) if key[0] <= _noted(server)]:
            server.drop(key)
    server.average_statistics()
    server.run_on_loop(server.everybody)
    server.save_round(federation.rounds, ())


def _noted(server: Server) -> int:
    """The last round of which the saved state says what has passed."""
    return server.done if server.done else -1  # the first state is saved before anything passes


def _passed(server: Server, round: int, means: list[MessageFile]) -> None:
    """Notes what everybody has sent in ``round``, and has got for it.

    ``means`` are noted at once: a client that asks meanwhile must not be told of half a round.
    """
    for name in server.federation.names:
        arrivals = [server.arrivals.get((round, mean.header.exchange), {}) for mean in means]
        received = [senders[name].content for senders in arrivals if name in senders]
        if len(received) < len(means):  # damaged since: what this client sent cannot be told any more
            server.link_digests.forget(name)
        else:
            sent = [mean.header.content for mean in means]
            server.link_digests.add(name, round, sent=sent, received=received)


def _count(server: Server, mean: MessageFile) -> None:
    """Every client is sent it."""
    like = server.schedule.due((mean.header.round, mean.header.exchange)).like
    wire = wire_like(server.federation.wire_channel.down, like)
    server.costs.traffic.count(len(server.federation.names), like, wire)
