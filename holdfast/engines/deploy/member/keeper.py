"""Keeps track of who takes part: hears of the others, carries out orders, goes on without who is lost.

A ``Keeper`` lives as long as the process, through all epochs. It asks every other member, every few
seconds, whether there is anything new; at a server, only nodes ask. How members agree is in ``agreement.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from holdfast.core.errors import HoldfastError
from holdfast.engines.deploy import signing
from holdfast.engines.deploy.agreement import Decision, Proposal, Vote, is_majority
from holdfast.engines.deploy.epochs import Epoch, Order, Standing, check_change, first_epoch, led_epoch
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.member.network import NetworkThread
from holdfast.engines.deploy.member.statistics import diameter
from holdfast.engines.deploy.ops.events import Events
from holdfast.engines.deploy.storage.kept_models import KeptModels
from holdfast.engines.deploy.storage.ledger import Ledger
from holdfast.engines.deploy.storage.messages import parse
from holdfast.engines.deploy.storage.store import remove
from holdfast.engines.deploy.wire.credentials import Credentials
from holdfast.engines.deploy.wire.dialling import WaitLimitError, open_channel
from holdfast.engines.deploy.wire.listening import caller_name, first_frame, serve
from holdfast.engines.deploy.wire.membership import MOST_DECISIONS, Reply, Word, ask, check_vote, sign_vote

if TYPE_CHECKING:
    from holdfast.engines.deploy.member.base import Member

LONGEST_PAUSE = 5.0  # seconds between two questions to the same member
TURN = 4  # pauses after which the next member takes up what the one before has not brought to an end


class EpochChanged(Exception):  # noqa: N818 - not an error
    """The members have agreed on another epoch: the member goes on in that one."""


class Keeper:
    """Membership as one member sees it. All but ``admit`` and what it calls runs on the event loop."""

    def __init__(
        self,
        file: Federation,
        name: str,
        folder: Path,
        credentials: Credentials | None,
        events: Events,
        network: NetworkThread,
    ) -> None:
        assert file.membership is not None
        self.file, self.name, self.folder, self.rules = file, name, folder, file.membership
        self.credentials, self.events, self.network = credentials, events, network
        self.ledger = Ledger(folder / "membership", first_epoch(file))
        self._take_up()
        self.serves = file.server is not None and file.server.name == name
        if self.serves:
            self.ledger.remember(registered=True)
        self.member: Member | None = None
        self.problem = ""  # why it does not take part
        after = self.rules.remove_after
        self.pause = LONGEST_PAUSE if after is None else min(after / 5, LONGEST_PAUSE)
        self.heard: dict[str, float] = {}  # when each member was last heard of
        self.wanted_since: float | None = None  # when a change became due that is not decided yet
        self.channels: dict[str, Any] = {}
        self._count = 0  # the highest of any ballot heard of
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        network.loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = self.network.loop.create_task(self._keep())

    def close(self) -> None:
        """Ends it; what has to be remembered is on disk."""
        asyncio.run_coroutine_threadsafe(self._close(), self.network.loop).result()

    async def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for channel in self.channels.values():
            await channel.close()

    # --- where this member stands -----------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        return self.ledger.epoch

    def _take_up(self) -> None:
        """Looks after the latest epoch from here on; everybody has time anew to be heard of."""
        self.began = self.network.loop.time()
        self.federation: Federation = self.file.in_epoch(self.epoch)
        window = 0 if self.federation.led else diameter(self.federation.member_network)
        self.kept = KeptModels(self.place(), window, lambda: self.pending)

    @property
    def voters(self) -> list[str]:
        """Who decides about the next epoch: the server, or all nodes."""
        return [self.file.server.name] if self.file.server is not None else self.epoch.names

    @property
    def admitted(self) -> bool:
        """Whether this member takes part."""
        belongs = self.serves or self.name in self.epoch.names
        return belongs and self.ledger.memory.registered

    @property
    def pending(self) -> bool:
        """Whether all models have to be kept, as the next epoch may begin with any of them."""
        return self.ledger.vote != Vote(number=self.epoch.number + 1)

    def place(self, number: int | None = None) -> Path:
        """The folder of an epoch, by default of the one under way."""
        number = self.epoch.number if number is None else number
        return self.folder / f"epoch-{number}" if number else self.folder

    def standing(self) -> Standing:
        """What this member can go on from."""
        kept = self.kept.rounds
        ends = {"oldest": kept[0], "newest": kept[-1]} if kept else {}
        return Standing(incarnation=self.ledger.memory.incarnation, **ends)

    def lost(self, name: str) -> bool:
        """Whether ``name`` was not heard of for so long that members go on without it.

        At the very beginning, members come as they like: who was never there is waited for.
        """
        after = self.rules.remove_after
        if self.epoch.number == 0 and name not in self.ledger.memory.known:
            return False
        last = max(self.heard.get(name, 0.0), self.began)
        return after is not None and name != self.name and self.network.loop.time() - last > after

    # --- what others ask --------------------------------------------------------------------------------

    async def serve(self, frames: Any, context: Any) -> bytes:
        """The call ``Membership``: anybody may ask who is, was, or is to become a member."""
        who = caller_name(context, self.credentials is not None)
        try:
            if who not in self._names():
                raise HoldfastError("not a member of the federation")
            word: Word = parse(Word, await first_frame(frames))
            if word.federation != self.file.id:
                raise HoldfastError("another federation file; compare yours with theirs")
            return self.answer(who, word).model_dump_json().encode()
        except (HoldfastError, TimeoutError) as error:
            self.events.complain("refused", peer=who[:80] or "somebody", reason=str(error))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise

    def _names(self) -> set[str]:
        epochs = [self.ledger.first, *(decision.epoch for decision in self.ledger.decisions)]
        names = {name for epoch in epochs for name in epoch.names}
        order = self.ledger.memory.order
        return names | {m.name for m in self.file.members} | ({order.node.name} if order else set())

    def answer(self, who: str, word: Word) -> Reply:
        """What ``who`` is answered; a promise or a vote is written down before."""
        now, memory = self.epoch.number, self.ledger.memory
        self._consider(word.order)
        same = word.epoch == now and (who in self.epoch.names or who in self.voters)
        known = memory.known.get(who, "")
        if same and word.incarnation:
            if not known and who != self.name:
                known = word.incarnation
                self.ledger.remember(known={**memory.known, who: known})
            if known == word.incarnation:
                self.heard[who] = self.network.loop.time()
        granted, signed = False, None
        trusted = who == self.name or (known and known == word.incarnation)
        if word.kind != "hello" and same and trusted and memory.registered and who in self.voters:
            granted, signed = self._vote(word)
        return Reply(
            epoch=now,
            decisions=self.ledger.decisions[word.epoch : word.epoch + MOST_DECISIONS],
            known=known,
            order=self.ledger.memory.order,
            granted=granted,
            vote=self.ledger.vote,
            standing=self.standing(),
            **({} if signed is None else {"signed": signed}),
        )

    def _vote(self, word: Word) -> tuple[bool, Any]:
        """Whether the promise or the vote is given, and its signature."""
        self._count = max(self._count, word.ballot[0])
        if word.kind == "promise":
            vote = self.ledger.vote.promise(word.ballot)
        else:
            if word.value is None:
                raise HoldfastError("a vote for nothing")
            self._check(word.value)
            vote = self.ledger.vote.cast(word.ballot, word.value)
        if vote is None:
            return False, None
        with self.kept.lock:  # from here on, no model is removed
            self.ledger.remember(vote=vote)
        self.wanted_since = self.wanted_since or self.network.loop.time()
        if word.kind == "promise":
            return True, None
        assert word.value is not None
        return True, sign_vote(self.credentials, self.file.id, word.ballot, word.value)

    def _consider(self, order: Order | None) -> None:
        """Takes over an order of the coordinator that is for this epoch, and newer than what was known."""
        if order is None or order == self.ledger.memory.order or order.epoch != self.epoch.number:
            return
        known = self.ledger.memory.order
        if known is not None and known.epoch == order.epoch and known.document <= order.document:
            return  # of two for the same epoch, all take the same
        self._check_order(order)
        self.ledger.remember(order=order)
        self.events.log("an order of the coordinator", change=order.change, member=order.node.name)
        self._news.set()

    def _check_order(self, order: Order) -> None:
        if order.federation != self.file.id:
            raise HoldfastError("an order for another federation")
        if self.file.coordinator is None:
            raise HoldfastError("an order, and the federation file names no coordinator's key")
        if order.signature is None:
            raise HoldfastError("an order that nobody has signed")
        signing.verify("membership", order.document, order.signature, self.file.coordinator)

    def _check(self, after: Epoch) -> None:
        """Refuses an epoch that cannot follow the present one."""
        check_change(self.epoch, after, self.rules)
        if after.order is not None:
            self._check_order(after.order)
        self.file.in_epoch(after)  # complains if there is no such network

    # --- what it asks -----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            try:
                await self._hear()
                await self._act()
            except (HoldfastError, OSError) as error:
                self.events.complain("membership", reason=str(error))
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), self.pause)
            except TimeoutError:
                continue

    def _others(self) -> list[str]:
        if self.serves:
            return []
        if self.file.server is not None:
            return [self.file.server.name]
        names = dict.fromkeys(self.epoch.names if self.admitted else [*self.epoch.names, *self.file.names])
        return [name for name in names if name != self.name]

    async def _ask(self, name: str, word: Word) -> Reply | None:
        if name == self.name:
            return self.answer(name, word)
        if name not in self.channels:
            known = [self.federation, self.file]
            federation = next(f for f in known if name in [member.name for member in f.members])
            self.channels[name] = open_channel(federation, name, self.credentials)
        secure, timeout = self.credentials is not None, max(2 * self.pause, 1.0)
        try:
            return await ask(self.channels[name], self.name, word, secure, timeout)
        except HoldfastError as error:
            self.events.complain("a message was refused", peer=name, reason=str(error))
            return None

    def _word(self, **fields: Any) -> Word:
        memory = self.ledger.memory
        about: dict[str, Any] = {
            "epoch": self.epoch.number,
            "incarnation": memory.incarnation,
            "order": memory.order,
        }
        return Word(federation=self.file.id, **about, **fields)

    async def _hear(self) -> None:
        """Asks all others whether there is anything new."""
        self._look_for_order()
        others = self._others()
        replies = await asyncio.gather(*(self._ask(name, self._word()) for name in others))
        number, own = self.epoch.number, self.ledger.memory.incarnation
        know_us = {self.name}
        for name, reply in zip(others, replies, strict=True):
            if reply is None:
                continue
            if reply.epoch == number:
                self.heard[name] = self.network.loop.time()
                if reply.known == own:
                    know_us.add(name)
                elif reply.known and not self.ledger.memory.registered:
                    self._explain(
                        f"{self.name} has lost its folder: the coordinator has to run 'holdfast "
                        f"federation replace' for it ({name} knows another)"
                    )
            self._consider(reply.order)
            for decision in reply.decisions:
                if decision.epoch.number == self.epoch.number + 1:
                    self._learn(decision)
        if self.epoch.number == number and is_majority(know_us, self.voters):
            self.ledger.remember(registered=True)
        if self.name not in self.epoch.names and not self.serves:
            self._explain(
                f"{self.name} is not a member in epoch {self.epoch.number}: the coordinator has to "
                "run 'holdfast federation add' for it"
            )

    def _look_for_order(self) -> None:
        """The file ``membership/order.json``, which the member's people have put there."""
        path = self.ledger.folder / "order.json"
        if path.exists():
            order: Order = parse(Order, path.read_bytes())
            remove(path)
            self._consider(order)

    def _explain(self, problem: str) -> None:
        if self.problem != problem:
            self.problem = problem
            self.events.log("not taking part", "warning", reason=problem)

    def _learn(self, decision: Decision) -> None:
        """The next epoch is decided: writes it down, and has the member go on in it."""
        self._check(decision.epoch)
        if not is_majority(decision.votes, self.voters):
            raise HoldfastError(f"epoch {decision.epoch.number}: no majority has voted for it")
        for name in set(decision.votes) & set(self.voters):
            check_vote(self.credentials, self.file.id, name, decision.votes[name], decision)
        before = self.epoch
        self.ledger.decide(decision)
        self.wanted_since, self.problem = None, ""
        after = decision.epoch
        self._take_up()
        gone: Any = {"without": sorted(set(before.names) - set(after.names))}
        self.events.log(
            "a new epoch",
            epoch=after.number,
            round=after.first,
            members=after.names,
            joined=after.joined,
            **(gone if gone["without"] else {}),
        )
        if self.member is not None:
            self.member.give_up(EpochChanged())

    # --- changes ----------------------------------------------------------------------------------------

    def _order(self) -> Order | None:
        """What is ordered for the epoch under way."""
        order = self.ledger.memory.order
        return order if order is not None and order.epoch == self.epoch.number else None

    def _wanted(self) -> bool:
        """Whether the members should change: as ordered, because one is lost, or as somebody has begun to."""
        assert self.member is not None
        due = self.pending or self._order() is not None
        return due or any(self.lost(name) and self.member.awaits(name) for name in self.epoch.names)

    async def _act(self) -> None:
        """Proposes the next epoch if one is due, and it is this member's turn."""
        if not (self.admitted and self.name in self.voters and self.member is not None and self._wanted()):
            self.wanted_since = None
            return
        now = self.network.loop.time()
        self.wanted_since = self.wanted_since or now
        present = [name for name in self.voters if not self.lost(name)]
        turn = present.index(self.name) if self.name in present else len(present)
        if now - self.wanted_since >= turn * TURN * self.pause:
            await self._propose()

    async def _propose(self) -> None:
        epoch, voters = self.epoch, self.voters
        ballot = (max(self._count, self.ledger.vote.promised[0]) + 1, self.name)
        proposal = Proposal(epoch, ballot, voters)
        word = self._word(kind="promise", ballot=ballot)
        for name, reply in await self._ask_voters(word):
            if reply.granted and reply.vote is not None and reply.standing is not None:
                proposal.promised(name, reply.vote, reply.standing)
        lost = {name for name in epoch.names if self.lost(name)}
        value = self._server_value(lost) if self.serves else proposal.fix(lost, self._order())
        if value is None or self.epoch is not epoch:
            return
        self._check(value)
        decision = Decision(epoch=value, ballot=ballot, votes={})
        for name, reply in await self._ask_voters(self._word(kind="vote", ballot=ballot, value=value)):
            if reply.granted:
                decision.votes[name] = reply.signed
        if is_majority(decision.votes, voters) and self.epoch is epoch:
            self._learn(decision)

    async def _ask_voters(self, word: Word) -> list[tuple[str, Reply]]:
        """Those of the voters who answer, and are where this member is."""
        voters = self.voters
        replies = await asyncio.gather(*(self._ask(name, word) for name in voters))
        found = [(name, reply) for name, reply in zip(voters, replies, strict=True) if reply is not None]
        return [(name, reply) for name, reply in found if reply.epoch == word.epoch]

    def _server_value(self, lost: set[str]) -> Epoch | None:
        """What a server decides by itself: it holds the model, and nobody can go on without it."""
        before, newest = self.ledger.vote.value, self.standing().newest
        if before is not None or newest is None:
            return before
        return led_epoch(self.epoch, newest, lost, self._order())

    # --- before it takes part ---------------------------------------------------------------------------

    def admit(self, listen: str | None, wait: Callable[[Any], Any]) -> None:
        """Waits until this member is to take part; meanwhile it answers others, on ``listen`` if given.

        ``wait`` runs a coroutine on the event loop to its end.
        """
        last = self.epoch.order
        if last is not None and last.change == "remove" and last.node.name == self.name:
            raise HoldfastError(f"the coordinator has removed {self.name} after round {self.epoch.first}")
        if not self.admitted:
            wait(self._lobby(listen))

    async def _lobby(self, listen: str | None) -> None:
        async def nothing(frames: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it has not begun yet")
            yield b""

        server = None
        if listen is not None:
            answers = {"Membership": self.serve}
            server, port, door = await serve(listen, self.credentials, nothing, answers, 4096, self.events)
            keeping = asyncio.create_task(door.keep(port))
        since = self.network.loop.time()
        try:
            while not self.admitted:
                if self.network.loop.time() - since > self.file.limits.wait:
                    raise WaitLimitError(
                        (self.problem or "fewer than half of the members could be reached")
                        + "; that is the limit (limits.wait). Start the same command again to go on"
                    )
                await asyncio.sleep(min(self.pause, 0.2))
        finally:
            if server is not None:
                keeping.cancel()
                await server.stop(0)
