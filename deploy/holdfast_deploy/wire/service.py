"""What a member answers to others. Who they are is what their certificates say."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import grpc

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.audit import Head
from holdfast_deploy.ops.events import Events
from holdfast_deploy.own_model import describe_identity
from holdfast_deploy.reading import Reading, Readings
from holdfast_deploy.storage.incarnations import Dependencies
from holdfast_deploy.storage.messages import CHUNK, DamagedError, Header, MessageFile, parse
from holdfast_deploy.storage.outbox import Outbox
from holdfast_deploy.storage.store import Store
from holdfast_deploy.storage.tally import PutBackError, Tally
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.gate import Gate, RefusedError
from holdfast_deploy.wire.incoming import check_header
from holdfast_deploy.wire.listening import (
    Frames,
    caller,
    first_frame,
    metadata,
    serve,
)
from holdfast_deploy.wire.protocol import (
    AUDIT_KEY,
    FOR_GOOD,
    MODEL_KEY,
    PATIENCE,
    READING_KEY,
    Answer,
    Ask,
    audit_message,
)
from holdfast_deploy.wire.revocations import Heard
from holdfast_deploy.wire.submissions import Intake, Submissions

Code = grpc.StatusCode

REPEATS, LATER = 30, 1.0  # how often a member is sent a message at once; seconds that it waits from then on
MOST_STRANGERS = 4096  # connections without a member, at most half of what the process may open


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
    membership: Callable[[Any, Any], Awaitable[bytes]] | None = None  # the call, if members may change
    submissions: Submissions | None = None
    tally: Tally = field(default_factory=lambda: Tally(""))  # nothing has passed
    readings: Readings = field(default_factory=lambda: Readings("", Reading()))  # nothing is known
    bytes_served: int = 0
    seen: dict[str, tuple[float, int]] = field(
        default_factory=dict
    )  # when each member asked, for which round
    released: dict[str, int] = field(default_factory=dict)  # before which each member will ask for nothing
    fetched: dict[str, int] = field(default_factory=dict)  # the last round that each member has fetched
    served: dict[str, Path] = field(default_factory=dict)  # the last message that each member was sent

    def __post_init__(self) -> None:
        self.gate = Gate({member.name for member in self.federation.members}, self.events, self.give_up)
        self.pool = ThreadPoolExecutor(2, "checking")
        self.intake = Intake(self.federation, self.store.inbox, self.dependencies, self.pool)
        self._keeping: asyncio.Task[None] | None = None
        self._sent: WeakKeyDictionary[MessageFile, Counter[str]] = WeakKeyDictionary()  # how often, to whom

    @property
    def answers(self) -> dict[str, Callable[[Any, Any], Awaitable[bytes]]]:
        """The questions with short answers, by name; ``fetch`` is the one with a long one."""
        answers: dict[str, Callable[[Any, Any], Awaitable[bytes]]] = {
            "Agree": self.agree,
            "Release": self.release,
            "Submit": self.submit,
            "Status": self.tell_status,
            "Revocations": self.revocations,
        }
        return answers if self.membership is None else answers | {"Membership": self.membership}

    async def listen(self, address: str, credentials: Credentials | None) -> tuple[Any, int]:
        """Serves on ``address``; the gRPC server and its port."""
        self.gate.secure, self.gate.credentials = credentials is not None, credentials
        places = MOST_STRANGERS + 4 * len(self.gate.members)
        server, port, door = await serve(address, credentials, self.fetch, self.answers, places, self.events)
        self.gate.door, self._keeping = door, asyncio.create_task(door.keep(port))
        return server, port

    def close(self) -> None:
        """Looks after nothing any more."""
        if self._keeping is not None:
            self._keeping.cancel()
        self.pool.shutdown(wait=False)

    # --- the questions -----------------------------------------------------------------------------------

    async def fetch(self, frames: Frames, context: Any) -> AsyncGenerator[bytes, None]:
        """The message of an exchange, in pieces, as soon as there is one."""
        async with self.gate.call(context) as who:
            ask = await self._question(who, frames, context)
            if self.submissions is not None and self.submissions.left_out(who, ask.round):
                yield self._answer(who, active=False)
                return
            now = self.current_round()  # looked at first: what is published meanwhile is not gone
            message = await self.outbox.find(ask.round, ask.exchange, who, 0.0)
            if message is None:
                if self.submissions is not None and self.submissions.counted(who, ask.round, ask.exchange):
                    yield self._answer(who, active=True)
                    return
                self._refuse_if_gone(who, ask, now)
                message = await self.outbox.find(ask.round, ask.exchange, who, PATIENCE)
            if message is None:
                yield self._answer(who)
                return
            if self.submissions is not None and self.submissions.left_out(who, ask.round):  # meanwhile
                yield self._answer(who, active=False)
                return
            if self.served.get(who) == message.path:  # it did not arrive well: is the file as it was written?
                await self._verify(message)
            self.served[who] = message.path
            if ask.round == self.federation.last_stage and self.submissions is None:
                # Written down before it has our farewell: then it may be gone, and must not be waited for.
                self.store.decide(ask.round, 0, who, True)
            header = message.header
            resumes = ask.content == header.content and ask.offset < header.size and ask.offset % CHUNK == 0
            offset = ask.offset if resumes else 0
            await self._slow_down(who, message)
            self.events.require_room()
            self._passed("sent", header, context)
            await self.events.lasting()  # nothing leaves without a line that survives a power cut
            yield self._answer(who, header=header, offset=offset)
            for frame in message.frames(self.federation.compression == "lossless", offset):
                self.bytes_served += len(frame)
                yield frame
            self.fetched[who] = max(ask.round, self.fetched.get(who, 0))
            self.outbox.wake()

    async def agree(self, frames: Frames, context: Any) -> bytes:
        """Whether the sporadic link to the asker took part, as soon as that is decided."""
        async with self.gate.call(context) as who:
            ask = await self._question(who, frames, context)
            now = self.current_round()  # looked at first, as in ``fetch``
            if self.store.decision(ask.round, ask.exchange, who) is None:
                self._refuse_if_gone(who, ask, now)
            until = self.outbox.loop.time() + PATIENCE
            while (decision := self.store.decision(ask.round, ask.exchange, who)) is None:
                if not await self.outbox.changed(until - self.outbox.loop.time()):
                    break
            return self._answer(who, active=decision)

    async def release(self, frames: Frames, context: Any) -> bytes:
        """The asker will never ask for a round before this one."""
        async with self.gate.call(context) as who:
            ask = await self._question(who, frames, context)
            self.released[who] = ask.round
            self.outbox.wake()
            return self._answer(who)

    async def submit(self, frames: Frames, context: Any) -> bytes:
        """A client's message to a server, in pieces; answered when it is safe on disk."""
        async with self.gate.call(context) as who:
            if self.submissions is None:
                raise RefusedError(Code.PERMISSION_DENIED, "this is no server")
            self._trains_the_same(context, who)
            header = parse(Header, await first_frame(frames))
            check_header(
                header,
                federation=self.federation.id,
                sender=who,
                round=header.round,
                exchange=header.exchange,
                tensors=None,
                limit=self.federation.limits.message_mib * 2**20,
            )
            self._saw(who, header.round)
            if not self.submissions.left_out(who, header.round) and self.submissions.admit(header):
                norm = await self.intake.take(header, frames)
                self._passed("received", header, context)
                self.submissions.arrived(header, norm)
                self.outbox.wake()
            await self.events.lasting()
            left_out = self.submissions.left_out(who, header.round)
            return self._answer(who, received=True, active=False if left_out else None)

    async def revocations(self, frames: Frames, context: Any) -> bytes:
        """Each tells the other which certificates are revoked, as far as it does not know."""
        async with self.gate.call(context):
            heard: Heard = parse(Heard, await first_frame(frames))
            own = self.gate.credentials
            if own is None:
                return Heard().model_dump_json().encode()
            if heard.lacking is not None:
                own.learn(heard.lacking, self.federation.coordinator)
            return own.revocations.tell(heard.have).model_dump_json().encode()

    async def tell_status(self, frames: Frames, context: Any) -> bytes:
        """Where this member stands; for members only."""
        async with self.gate.call(context):
            return json.dumps(self.status()).encode()

    def _passed(self, event: str, header: Header, context: Any) -> None:
        """A line in the audit log: a message that the caller was sent, or that came from it."""
        head = metadata(context, AUDIT_KEY)
        seen = {"head": head} if Head.parse(head) is not None else {}
        audit_message(self.events, event, header, **caller(context, self.gate.secure), **seen)

    # --- whether it may be asked ---------------------------------------------------------------------------

    async def _question(self, who: str, frames: Frames, context: Any) -> Ask:
        """What is asked, checked."""
        self._trains_the_same(context, who)
        ask: Ask = parse(Ask, await first_frame(frames))
        if ask.federation != self.federation.id:
            if self.membership is not None:  # soon both are in the same
                raise RefusedError(Code.OUT_OF_RANGE, "in another roster, or with another federation file")
            raise RefusedError(Code.FAILED_PRECONDITION, "another federation file; compare yours with theirs")
        if ask.start != self.start:
            reason = "another initial model; compare the versions of torch and of your model"
            raise RefusedError(Code.FAILED_PRECONDITION, reason)
        if ask.round > self.federation.last_stage:
            raise HoldfastError(f"round: there is no {ask.round}")
        if not self.may_fetch(who, ask.round):
            raise RefusedError(Code.PERMISSION_DENIED, "not a neighbour")
        self.dependencies.check(ask.depends_on)
        self.tally.compare(who, ask.passed)
        self.tally.require_newest(who, ask.passed)
        self._saw(who, ask.round)
        self.outbox.raise_floor(who, min(ask.round, self.current_round() + 1))
        return ask

    def _trains_the_same(self, context: Any, who: str) -> None:
        """Whether the asker trains our model, as far as that is a site's own code, on columns like ours."""
        theirs = metadata(context, MODEL_KEY)
        if theirs != (ours := self.federation.model_identity):
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"another model: {who} has {describe_identity(theirs)}, {self.name} has "
                f"{describe_identity(ours)}; give every member the same source with --model",
            )
        try:
            self.readings.compare(who, metadata(context, READING_KEY))
        except HoldfastError as error:
            raise RefusedError(Code.FAILED_PRECONDITION, str(error)) from None

    def _refuse_if_gone(self, who: str, ask: Ask, now: int) -> None:
        """What is not here of a round before ``now`` will never be: the asker was put back too far."""
        if ask.round < now and ask.round not in self.outbox.lost:  # what is lost is computed again
            why = f"round {ask.round} is over, {self.name} is at round {now} and has no message of it left"
            raise RefusedError(FOR_GOOD, str(PutBackError(who, why)))

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
            raise RefusedError(Code.FAILED_PRECONDITION, reason) from None

    def _saw(self, who: str, round: int) -> None:
        self.seen[who] = (self.outbox.loop.time(), max(round, self.seen.get(who, (0.0, 0))[1]))

    def _answer(self, who: str, **fields: Any) -> bytes:
        passed = self.tally.told(who)
        return Answer(round=self.current_round(), passed=passed, **fields).model_dump_json().encode()
