"""The clients of a server: whose messages are due, which of them are here, and who is left out of a round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.schedule import Due, Schedule
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.disk_full import retry_while_full
from holdfast_deploy.storage.links import Dependencies, ForgedError
from holdfast_deploy.storage.messages import DamagedError, ExchangeKey, Header, MessageFile
from holdfast_deploy.storage.outbox import Outbox
from holdfast_deploy.storage.results import RoundRecord
from holdfast_deploy.storage.store import Store, message_key, message_name, remove
from holdfast_deploy.wire.retry import Wait, WaitLimitError


class Arrival(NamedTuple):
    """A client's message in the inbox."""

    content: str  # its digest
    norm: float | None = None  # None: not known since the last start


class Quorum:
    """Who is left out of a round: whoever has not answered by the deadline, once enough others have.

    Each decision is written down before the server averages, and counts for good: whatever the client
    sends or asks for that round is answered with "left out". The client then continues as if it had not been
    in the cohort.
    """

    def __init__(self, least: int, deadline: float, decided: Iterable[tuple[int, str]]) -> None:
        self.least, self.deadline = least, deadline
        self.left_out = set(decided)  # message round and name
        last = max((message_round for message_round, _ in self.left_out), default=0)
        # Left out, and not heard of since: they still work on an earlier round, or are gone.
        self._behind = {name for message_round, name in self.left_out if message_round == last}

    def met(self, due: Due, missing: set[str], seen: Mapping[str, tuple[float, int]], waited: float) -> bool:
        """Whether the round may continue without the ``missing`` ones, who were ``waited`` for so long.

        Nobody waits until the deadline for those who still work on an earlier round; ``seen``: when each
        client asked last, for which round.
        """
        message_round = due.key[0]
        self._behind = {name for name in self._behind if seen.get(name, (0.0, 0))[1] < message_round}
        gone = sum((message_round, name) in self.left_out for name in due.names)
        if len(due.names) - gone - len(missing) < self.least:
            return False
        return missing <= self._behind or waited >= self.deadline

    def leave_out(self, name: str, message_round: int) -> None:
        """``name`` was too late."""
        self.left_out.add((message_round, name))
        self._behind.add(name)


class Clients:
    """What clients bring to a server, exchange by exchange: ``Submissions`` for those who ask.

    The computing thread says what is due, the event loop takes it in. ``seen``: when each client asked last,
    for which message round. ``lost``: whether the members continue without that one.
    """

    def __init__(
        self,
        federation: Federation,
        schedule: Schedule,
        store: Store,
        outbox: Outbox,
        events: Events,
        dependencies: Dependencies,
        waits: dict[str, Wait],
        seen: Mapping[str, tuple[float, int]],
        lost: Callable[[str], bool],
        cohorts: RoundRecord,
    ) -> None:
        self.federation, self.schedule, self.store, self.outbox = federation, schedule, store, outbox
        self.events, self.dependencies, self.waits, self.seen = events, dependencies, waits, seen
        self.lost, self.cohorts = lost, cohorts
        self.arrivals: dict[ExchangeKey, dict[str, Arrival]] = {}
        self.quorum: Quorum | None = None
        self.due = schedule.due((0, 0))

    def restore(self, done: int) -> None:
        """What clients have sent since the state after ``done`` rounds was saved; more may come now."""
        self.expect_next(done)
        rule, store = self.federation.round, self.store
        if rule is not None and rule.quorum is not None and rule.deadline is not None:
            decided = [(r, name) for r, e, name in store.decided() if store.decision(r, e, name) is False]
            self.quorum = Quorum(rule.quorum, rule.deadline, decided)
        for path in store.received():
            message_round, exchange, name = message_key(path.name)
            if self.left_out(name, message_round):  # it came while that was decided
                remove(path)
                continue
            senders = self.arrivals.setdefault((message_round, exchange), {})
            try:
                header = store.own(path, name, (message_round, exchange)).header
                self.dependencies.add(header.depends_on)
                senders[name] = Arrival(header.content)
            except DamagedError as error:  # the client has to send it again
                remove(path)
                senders.pop(name, None)
                again = f"; start {name} again: it sends the message once more"
                reason = f"{error}{again if message_round > done else ''}"
                self.events.complain("a file is damaged", reason=reason, peer=name)

    def expect(self, key: ExchangeKey) -> None:
        """From here on, the messages of that exchange are taken in, or those of the first after it."""
        self.due = self.schedule.due(key)

    def expect_next(self, done: int) -> None:
        """From here on, what follows ``done`` saved rounds, and all that is published, is taken in."""
        self.due = self.schedule.after(done, [key[:2] for key in self.outbox.messages])

    def takers(self) -> list[str]:
        """Whose messages count in the exchange that is due."""
        return [name for name in self.due.names if not self.left_out(name, self.due.key[0])]

    def file(self, key: ExchangeKey, name: str) -> MessageFile:
        """What ``name`` sent."""
        return MessageFile(self.store.inbox / message_name(*key, name))

    def files(self, key: ExchangeKey) -> dict[str, MessageFile]:
        """What is here of an exchange, of those that count."""
        here = self.arrivals.get(key, {})
        return {name: self.file(key, name) for name in self.takers() if name in here}

    def norm(self, name: str, file: MessageFile) -> float:
        """Of the message ``file`` of ``name``."""
        known = self.arrivals[file.header.round, file.header.exchange][name].norm
        return math.sqrt(file.squares()) if known is None else known

    def forget(self, done: int) -> None:
        """The messages of the rounds before the last finished one, which may have to be computed again."""
        for key in [key for key in list(self.arrivals) if key[0] < done]:  # a copy: the loop adds to it
            self.drop(key)

    def drop(self, key: ExchangeKey) -> None:
        """What was sent for that exchange is needed no longer."""
        for name in self.arrivals.pop(key, ()):
            remove(self.store.inbox / message_name(*key, name))

    # --- as ``Submissions`` -----------------------------------------------------------------------------

    def admit(self, header: Header) -> bool:
        due, key = self.due, (header.round, header.exchange)
        if header.sender not in self.federation.names:
            raise HoldfastError("only nodes send messages")
        there = self.arrivals.get(key, {}).get(header.sender)
        if there is not None and there.content != header.content:
            raise ForgedError(
                f"two messages of {header.sender} for round {key[0]} differ: somebody else has its key. "
                f"Give {header.sender} a new key (csr, sign --replace), and roll everybody back to before "
                "(holdfast federation rollback)"
            )
        waiting = header.sender in self.arrivals.get(due.key, ())
        if key < due.key or (key == due.key and waiting):
            return False  # it is in the model or in a mean already, or will be
        if key > due.key:
            if waiting:
                raise HoldfastError(f"round: your message of round {due.key[0]} still waits for others")
            raise HoldfastError(f"round: {key[0]}, exchange {key[1]}, has not begun")
        if header.sender not in due.names:
            raise HoldfastError(f"cohort: you are not in that of round {key[0]}")
        if header.tensors != due.tensors:
            raise HoldfastError("tensors: not those that are expected from everybody")
        return True

    def arrived(self, header: Header, norm: float | None = None) -> None:
        if self.left_out(header.sender, header.round):  # while it came in
            remove(self.store.inbox / message_name(header.round, header.exchange, header.sender))
            return
        senders = self.arrivals.setdefault((header.round, header.exchange), {})
        senders[header.sender] = Arrival(header.content, norm)

    def left_out(self, sender: str, round: int) -> bool:
        if self.federation.secret_cohorts:  # said of a round that has begun: nobody need know ahead
            return round <= self.due.key[0] and not self.schedule.asked(sender, round)
        return self.quorum is not None and (round, sender) in self.quorum.left_out

    def counted(self, sender: str, round: int, exchange: int) -> bool:
        if self.federation.secure_aggregation is None or exchange <= self.schedule.message:
            return False
        return sender in self.cohorts.lines().get(round, [""])[0].split()

    # --- on the event loop --------------------------------------------------------------------------------

    async def all_due(self) -> None:
        """Waits for all messages that are due; the limit counts from the last one that came."""
        due, since, before = self.due, time.monotonic(), None
        begun, in_round = since, due.key[0] <= self.federation.rounds
        size = sum(tensor.size for tensor in due.tensors)
        try:
            while missing := self._missing(due):
                if missing != before:
                    since, before = time.monotonic(), missing
                    self.waits.clear()
                    for name in sorted(missing):
                        self.waits[name] = Wait(name, since)
                waited = time.monotonic() - begun
                if self.quorum is not None and in_round and self.quorum.met(due, missing, self.seen, waited):
                    if due.key[1] > self.schedule.message:
                        return  # enough has been revealed, and every client's message is here
                    await self._continue_without(self.quorum, due, missing)
                    continue
                if time.monotonic() - since > self.federation.limits.patience(size):
                    if self.quorum is not None and due.key[0] == self.schedule.last:
                        names = ", ".join(sorted(missing))
                        self.events.log("finished without a final message", "warning", reason=f"of {names}")
                        return
                    raise WaitLimitError(
                        f"waited for {', '.join(sorted(missing))} as long as limits.wait allows. Everything "
                        "is saved: start the same command again to go on"
                    )
                left = begun + self.quorum.deadline - time.monotonic() if self.quorum else 1.0
                await self.outbox.changed(left if 0 < left < 1.0 else 1.0)
        finally:
            self.waits.clear()

    def _missing(self, due: Due) -> set[str]:
        """Who is still waited for; not for the final message of one that is lost."""
        missing = set(self.takers()) - set(self.arrivals.get(due.key, {}))
        if due.key[0] < self.schedule.last:
            return missing
        return {name for name in missing if not self.lost(name)}

    async def _continue_without(self, quorum: Quorum, due: Due, missing: set[str]) -> None:
        """Writes down that the ``missing`` ones are left out."""
        message_round, exchange = due.key
        for name in sorted(missing):
            if name in self.arrivals.get(due.key, ()):  # while the others were written down
                continue
            quorum.leave_out(name, message_round)  # first: what comes while there is no room does not count
            decide = partial(self.store.decide, message_round, exchange, name, False)
            await retry_while_full(decide, self.events, self.federation.limits.wait)
            self.events.log("left out of a round", "warning", peer=name, round=message_round)
            self.events.audit("left out", peer=name, round=message_round)
