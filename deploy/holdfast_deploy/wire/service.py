"""What a member answers to others. Who they are is what their certificates say."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.audit import Head
from holdfast_deploy.ops.events import Events
from holdfast_deploy.own_model import describe_identity
from holdfast_deploy.reading import Reading, Readings
from holdfast_deploy.storage.links import Dependencies, LinkDigests, PutBackError
from holdfast_deploy.storage.messages import CHUNK, DamagedError, Header, MessageFile, parse
from holdfast_deploy.storage.outbox import Outbox
from holdfast_deploy.storage.store import Store
from holdfast_deploy.wire.callers import Callers
from holdfast_deploy.wire.credentials import serial_of
from holdfast_deploy.wire.protocol import (
    AUDIT_KEY,
    LINKS,
    MODEL_KEY,
    PATIENCE,
    READING_KEY,
    RELEASED,
    REVOCATIONS,
    STATUS,
    SYNC,
    Answer,
    Ask,
    Kind,
    Peer,
    Pieces,
    RefusedError,
    Sending,
    Wanted,
    audit_message,
)
from holdfast_deploy.wire.receiving import check_header, header_first
from holdfast_deploy.wire.revocations import Heard
from holdfast_deploy.wire.submissions import Intake, Submissions

REPEATS, LATER = 30, 1.0  # how often a member is sent a message at once; seconds that it waits from then on


@dataclass
class Service:
    """The questions that other members may ask, and the answers."""

    federation: Federation
    name: str
    start: str
    store: Store
    outbox: Outbox
    events: Events
    may_fetch: Callable[[str, int], bool]
    status: Callable[[], dict[str, Any]]
    current_round: Callable[[], int]
    dependencies: Dependencies
    give_up: Callable[[Exception], None]
    submissions: Submissions | None = None
    link_digests: LinkDigests = field(default_factory=lambda: LinkDigests(""))  # nothing has passed
    readings: Readings = field(default_factory=lambda: Readings("", Reading()))  # nothing is known
    bytes_served: int = 0
    seen: dict[str, tuple[float, int]] = field(
        default_factory=dict
    )  # when each member asked, for which round
    released: dict[str, int] = field(default_factory=dict)  # before which each member will ask for nothing
    fetched: dict[str, int] = field(default_factory=dict)  # the last round that each member has fetched
    served: dict[str, Path] = field(default_factory=dict)  # the last message that each member was sent

    def __post_init__(self) -> None:
        self.callers = Callers({member.name for member in self.federation.members}, self.events, self.give_up)
        self.pool = ThreadPoolExecutor(2, "checking")
        self.intake = Intake(self.federation, self.store.inbox, self.dependencies, self.pool)
        self._sent: WeakKeyDictionary[MessageFile, Counter[str]] = WeakKeyDictionary()  # how often, to whom

    @property
    def answers(self) -> dict[str, Callable[[Peer, bytes], Awaitable[bytes]]]:
        """The questions with short answers, by method and path. A new one is a line here, and its method."""
        return {
            SYNC: self.sync,
            LINKS: self.agree,
            RELEASED: self.release,
            STATUS: self.tell_status,
            REVOCATIONS: self.revocations,
        }

    def close(self) -> None:
        """Checks nothing any more."""
        self.pool.shutdown(wait=False)

    # --- the questions -----------------------------------------------------------------------------------

    async def sync(self, peer: Peer, body: bytes) -> bytes:
        """Whether there is the message of an exchange, as soon as there is."""
        async with self.callers.authorised(peer) as who:
            ask = self._question(peer, body)
            if self._left_out(who, ask.round):
                return self._answer(who, active=False)
            now = self.current_round()  # looked at first: what is published meanwhile is not gone
            message = await self.outbox.find(ask.round, ask.exchange, who, 0.0)
            if message is None:
                if self.submissions is not None and self.submissions.counted(who, ask.round, ask.exchange):
                    return self._answer(who, active=True)
                self._refuse_if_gone(who, ask, now)
                message = await self.outbox.find(ask.round, ask.exchange, who, PATIENCE)
            if message is None:
                return self._answer(who)
            if self._left_out(who, ask.round):  # meanwhile
                return self._answer(who, active=False)
            if self.served.get(who) == message.path:  # it did not arrive well: is the file as it was written?
                await self._verify(message)
            return self._answer(who, header=message.header)

    @asynccontextmanager
    async def message(self, peer: Peer, wanted: Wanted) -> AsyncIterator[Sending]:
        """The message that ``sync`` has announced, for as long as it is being sent."""
        async with self.callers.authorised(peer) as who:
            self._trains_the_same(peer)
            if wanted.round > self.federation.last_message_round or not self.may_fetch(who, wanted.round):
                raise RefusedError(Kind.NOT_ALLOWED, "not a neighbour")
            message = await self.outbox.find(wanted.round, wanted.exchange, who, 0.0)
            if (
                message is None
                or message.header.content != wanted.content
                or self._left_out(who, wanted.round)
            ):
                raise RefusedError(Kind.CHANGED, "there is no such message: ask whether there is another")
            header, lossless = message.header, self.federation.compression == "lossless"
            if wanted.offset > max(header.size - 1, 0) or (lossless and wanted.offset % CHUNK):
                raise HoldfastError(f"Range: no piece begins at byte {wanted.offset}")
            self.served[who] = message.path
            if wanted.round == self.federation.last_message_round and self.submissions is None:
                # Written down before it has our final message: then it may be gone, and is not waited for.
                self.store.decide(wanted.round, 0, who, True)
            await self._slow_down(who, message)
            self.events.require_room()
            self._passed("sent", header, peer)
            await self.events.lasting()  # nothing leaves without a line that survives a power cut
            frames = self._counted(message.frames(lossless, wanted.offset))
            yield Sending(None if lossless else header.size - wanted.offset, header.size, frames)
            self.fetched[who] = max(wanted.round, self.fetched.get(who, 0))
            self.outbox.wake()

    def _counted(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        for frame in frames:
            self.bytes_served += len(frame)
            yield frame

    def _left_out(self, who: str, round: int) -> bool:
        return self.submissions is not None and self.submissions.left_out(who, round)

    async def agree(self, peer: Peer, body: bytes) -> bytes:
        """Whether the sporadic link to the asker took part, as soon as that is decided."""
        async with self.callers.authorised(peer) as who:
            ask = self._question(peer, body)
            now = self.current_round()  # looked at first, as in ``sync``
            if self.store.decision(ask.round, ask.exchange, who) is None:
                self._refuse_if_gone(who, ask, now)
            until = self.outbox.loop.time() + PATIENCE
            while (decision := self.store.decision(ask.round, ask.exchange, who)) is None:
                if not await self.outbox.changed(until - self.outbox.loop.time()):
                    break
            return self._answer(who, active=decision)

    async def release(self, peer: Peer, body: bytes) -> bytes:
        """The asker will never ask for a round before this one."""
        async with self.callers.authorised(peer) as who:
            ask = self._question(peer, body)
            self.released[who] = ask.round
            self.outbox.wake()
            return self._answer(who)

    async def submit(self, peer: Peer, round: int, exchange: int, pieces: Pieces) -> bytes:
        """A client's message to a server, after its header; answered when it is safe on disk."""
        async with self.callers.authorised(peer) as who:
            if self.submissions is None:
                raise RefusedError(Kind.NOT_ALLOWED, "this is no server")
            self._trains_the_same(peer)
            text, pieces = await header_first(pieces)
            header: Header = parse(Header, text)
            check_header(
                header,
                federation=self.federation.id,
                sender=who,
                round=round,
                exchange=exchange,
                tensors=None,
                limit=self.federation.limits.message_mib * 2**20,
            )
            self._saw(who, header.round)
            if not self.submissions.left_out(who, header.round) and self.submissions.admit(header):
                norm = await self.intake.take(header, pieces)
                self._passed("received", header, peer)
                self.submissions.arrived(header, norm)
                self.outbox.wake()
            await self.events.lasting()
            left_out = self.submissions.left_out(who, header.round)
            return self._answer(who, received=True, active=False if left_out else None)

    async def revocations(self, peer: Peer, body: bytes) -> bytes:
        """Each tells the other which certificates are revoked, as far as it does not know."""
        async with self.callers.authorised(peer):
            heard: Heard = parse(Heard, body)
            own = self.callers.credentials
            if own is None:
                return Heard().model_dump_json().encode()
            if heard.lacking is not None:
                own.learn(heard.lacking, self.federation.coordinator)
            return own.revocations.tell(heard.have).model_dump_json().encode()

    async def tell_status(self, peer: Peer, body: bytes) -> bytes:
        """Where this member stands; for members only."""
        async with self.callers.authorised(peer):
            return json.dumps(self.status()).encode()

    def _passed(self, event: str, header: Header, peer: Peer) -> None:
        """A line in the audit log: a message that the caller was sent, or that came from it."""
        head = peer.says(AUDIT_KEY)
        seen = {"head": head} if Head.parse(head) is not None else {}
        shown = {"serial": serial_of(peer.certificate)} if peer.certificate else {}
        audit_message(self.events, event, header, peer=peer.name, address=peer.address, **shown, **seen)

    # --- whether it may be asked ---------------------------------------------------------------------------

    def _question(self, peer: Peer, body: bytes) -> Ask:
        """What is asked, checked. Who asks for a round acknowledges that it has saved all rounds before."""
        who = peer.name
        self._trains_the_same(peer)
        ask: Ask = parse(Ask, body)
        if ask.federation != self.federation.id:
            if self.federation.membership is not None:  # soon both are in the same
                raise RefusedError(Kind.NOT_YET, "in another roster, or with another federation file")
            raise RefusedError(Kind.DISAGREE, "another federation file; compare yours with theirs")
        if ask.start != self.start:
            reason = "another initial model; compare the versions of torch and of your model"
            raise RefusedError(Kind.DISAGREE, reason)
        if ask.round > self.federation.last_message_round:
            raise HoldfastError(f"round: there is no {ask.round}")
        if not self.may_fetch(who, ask.round):
            raise RefusedError(Kind.NOT_ALLOWED, "not a neighbour")
        self.dependencies.check(ask.depends_on)
        self.link_digests.compare(who, ask.passed)
        self.link_digests.require_newest(who, ask.passed)
        self._saw(who, ask.round)
        self.outbox.raise_floor(who, min(ask.round, self.current_round() + 1))
        return ask

    def _trains_the_same(self, peer: Peer) -> None:
        """Whether the asker trains our model, as far as that is a site's own code, on columns like ours."""
        theirs = peer.says(MODEL_KEY)
        if theirs != (ours := self.federation.model_identity):
            raise RefusedError(
                Kind.DISAGREE,
                f"another model: {peer.name} has {describe_identity(theirs)}, {self.name} has "
                f"{describe_identity(ours)}; give every member the same source with --model",
            )
        try:
            self.readings.compare(peer.name, peer.says(READING_KEY))
        except HoldfastError as error:
            raise RefusedError(Kind.DISAGREE, str(error)) from None

    def _refuse_if_gone(self, who: str, ask: Ask, now: int) -> None:
        """What is not here of a round before ``now`` will never be: the asker was put back too far."""
        if ask.round < now and ask.round not in self.outbox.lost:  # what is lost is computed again
            why = f"round {ask.round} is over, {self.name} is at round {now} and has no message of it left"
            raise RefusedError(Kind.FOR_GOOD, str(PutBackError(who, why)))

    async def _slow_down(self, who: str, message: MessageFile) -> None:
        """Whoever asks for the same message again and again must not fill our disk with lines about it."""
        sent = self._sent.setdefault(message, Counter())
        sent[who] += 1
        if sent[who] > REPEATS:
            await asyncio.sleep(LATER)

    async def _verify(self, message: MessageFile) -> None:
        """Refuses a message that is damaged on our disk, and has it computed again."""
        try:
            await self.outbox.loop.run_in_executor(self.pool, message.verify)
        except DamagedError as error:
            if self.outbox.lose(message, error):
                self.give_up(error)
            reason = "the message is damaged, and is being computed again"
            raise RefusedError(Kind.DISAGREE, reason) from None

    def _saw(self, who: str, round: int) -> None:
        self.seen[who] = (self.outbox.loop.time(), max(round, self.seen.get(who, (0.0, 0))[1]))

    def _answer(self, who: str, **fields: Any) -> bytes:
        passed = self.link_digests.report(who)
        return Answer(round=self.current_round(), passed=passed, **fields).model_dump_json().encode()
