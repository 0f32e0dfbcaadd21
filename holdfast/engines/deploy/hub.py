"""A server: it takes in the clients' messages, keeps them until the round is saved, and answers.

For a method with a state on the server it runs the server's part. For a method without a leader it only
averages. Either way clients dial out, and only the server has to be reachable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from holdfast.algorithms.base import ServerAlgorithm
from holdfast.engines.deploy.credentials import Credentials
from holdfast.engines.deploy.events import Events
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.incarnations import MixedRunsError
from holdfast.engines.deploy.links import Wait, WaitLimitError
from holdfast.engines.deploy.member import GRACE, Member, NetworkThread
from holdfast.engines.deploy.messages import DamagedError, Header, MessageFile, TensorSpec
from holdfast.engines.deploy.results import write_model
from holdfast.engines.deploy.store import message_key, message_name, remove
from holdfast.engines.deploy.template import client_message
from holdfast.errors import HoldfastError
from holdfast.files import write_json
from holdfast.objective.flat import FlatModel
from holdfast.randomness import cohort
from holdfast.tree import row_size, tree_map

Key = tuple[int, int]  # stage, exchange


class Hub(Member):
    """The server of a federation. ``run`` serves from wherever it stopped, to the end."""

    def __init__(
        self,
        federation: Federation,
        folder: Path,
        model: FlatModel,
        *,
        credentials: Credentials | None,
        events: Events,
        network: NetworkThread | None = None,
    ) -> None:
        assert federation.server is not None
        super().__init__(
            federation,
            federation.server.name,
            folder,
            model.x0,
            credentials=credentials,
            events=events,
            network=network,
        )
        self.model = model
        self.service.submissions = self
        self.last = federation.rounds + 1  # the stage in which clients take leave
        self.arrivals: dict[Key, set[str]] = {}
        self.expected: list[TensorSpec] | None = None
        if isinstance(federation.method, ServerAlgorithm):
            self.like = client_message(federation, model.dim)
            self.expected = self.wire_specs(self.like)
        self._restore()
        self._began = time.monotonic() - self.costs.seconds

    def _restore(self) -> None:
        """What is saved, and what clients have sent since."""
        saved = self._saved = self.store.saved_state()
        self.done = saved.header.round if saved is not None else 0
        self.stage = self.done + 1 if self._leads else self.done  # clients may come before ``run`` gets there
        if saved is not None:
            self.costs = self.costs.from_notes(saved.header.notes["costs"])
            self.dependencies.add(saved.header.depends_on)
        self.outbox.lost.clear()  # computed again from the state, or from the clients' messages
        for path in self.store.received():
            self._take_in(path)

    def _take_in(self, path: Path) -> None:
        """A client's message that came before; if it is damaged, the client has to send it again."""
        stage, exchange, name = message_key(path.name)
        senders = self.arrivals.setdefault((stage, exchange), set())
        try:
            self.dependencies.add(self.store.own(path, name, (stage, exchange)).header.depends_on)
            senders.add(name)
        except DamagedError as error:
            remove(path)
            senders.discard(name)
            advice = f"; start {name} again: it sends the message once more" if stage > self.done else ""
            self.events.complain("a file is damaged", reason=f"{error}{advice}", peer=name)

    def run(self) -> None:
        """Serves until every client has finished."""
        self.recovering(self._run_on, self._restore)

    def _run_on(self) -> None:
        """From what is saved to the end."""
        self.events.log("starting" if self.done == 0 else "resuming", round=self.done)
        method = self.federation.method
        if isinstance(method, ServerAlgorithm):
            self._lead(method)
        else:
            self._average()
        self.phase = "finishing"
        write_json(self.folder / "report.json", self.report())
        try:
            self.ask(self._linger)
        except MixedRunsError as error:  # everybody had finished before somebody started anew
            self.events.log("finished, but a client did not say so", "warning", reason=str(error))
        self.phase = "finished"
        self.events.log("finished")

    # --- the server's part of a method ----------------------------------------------------------------

    def _lead(self, method: ServerAlgorithm[Any]) -> None:
        nodes, cohort_size = len(self.federation.node), self.federation.cohort
        state = method.at(0).init_server(self.x0.clone())
        if self._saved is not None:
            state = self._saved.read(state, self.x0.device)
        else:
            self._save(0, state)
        self._forget(self.done)
        for r in range(self.done, self.federation.rounds):
            now = method.at(r)
            self.stage = r + 1
            self.phase = f"serving round {r + 1}"
            sent = now.broadcast(state)
            self.outbox.publish(self.header(0, sent), sent)
            chosen = cohort(self.federation.seed, r, nodes, cohort_size).tolist()
            names = [self.federation.names[i] for i in chosen]
            self._wait_for((self.stage, 0), names)
            mean = tree_map(lambda t: t.squeeze(0), self._mean((self.stage, 0), names, self.like))
            state = now.server(state, mean, cohort_size / nodes)
            self.costs.traffic.numbers += cohort_size * row_size(sent)
            self._save(r + 1, state)
            self._forget(r + 1)
        self.stage = self.last
        model = method.at(max(self.federation.rounds - 1, 0)).model(state)
        published = self.outbox.publish(self.header(0, model), model)
        self.costs.delivery_bytes = nodes * published.header.size
        notes = {"federation": self.federation.name, "rounds": self.federation.rounds}
        write_model(self.folder, self.model, model, notes)
        self.phase = "handing out the model"
        self._wait_for((self.last, 0), self.federation.names)

    def _save(self, done: int, state: Any) -> None:
        before = time.monotonic()
        self.costs.seconds = before - self._began
        self.store.save_state(done, state, {"costs": self.cost_notes()}, self.dependencies.known)
        self.done = done
        self.costs.saving += time.monotonic() - before
        self.events.log("round done", round=done)

    def _forget(self, done: int) -> None:
        """All messages of the rounds before the last finished one, which may have to be computed again."""
        for stage, exchange, _ in list(self.outbox.messages):
            if stage < done:
                self.outbox.discard(stage, exchange)
        for key in list(self.arrivals):  # a copy: the event loop adds to it
            if key[0] < done:
                self._drop(key)

    # --- averaging for methods without a leader -------------------------------------------------------

    def _average(self) -> None:
        """Whatever everybody has sent is averaged, exchange by exchange, until all take leave."""
        names = self.federation.names
        if self._saved is None:
            self._save(0, ())
        self.stage = max([self.done, *(key[0] for key in self.outbox.messages)])
        self.phase = "averaging"
        for message in list(self.outbox.messages.values()):  # published after the costs were last saved
            if message.header.round > self.done:
                self._count(message)
        while True:
            key = self.ask(lambda: self._complete(names))
            if key == (self.last, 0):
                self._save(self.federation.rounds, ())
                return
            self.stage = key[0]
            if self.stage - 1 > self.done:  # everybody is past the rounds before
                self._save(self.stage - 1, ())
                self._forget(self.stage - 1)
            first = self._file(key, names[0])
            like = [torch.empty(t.shape, device="meta", dtype=self.x0.dtype) for t in first.header.tensors]
            mean = self._mean(key, names, tuple(like))
            header = self.header(key[1], mean).model_copy(update={"tensors": first.header.tensors})
            self._count(self.outbox.publish(header, mean))
            for before in [before for before in list(self.arrivals) if before < key]:
                self._drop(before)  # everybody has had that mean: without it, nobody could have sent this

    def _count(self, mean: MessageFile) -> None:
        """Every client is sent it."""
        numbers = sum(math.prod(tensor.shape) for tensor in mean.header.tensors)
        self.costs.traffic.numbers += len(self.federation.names) * numbers

    async def _complete(self, names: list[str]) -> Key:
        """The next exchange of which all messages are here."""
        while True:
            waiting = [key for key in sorted(self.arrivals) if not self._averaged(key)]
            for key in waiting:
                if self.arrivals[key] >= set(names):
                    return key
            await self._everybody(waiting[0] if waiting else (self.stage + 1, 0), names, once=True)

    def _averaged(self, key: Key) -> bool:
        """Whether the messages of an exchange are in a mean already."""
        return (*key, "") in self.outbox.messages or 0 < self.done >= key[0]

    # --- clients' messages ----------------------------------------------------------------------------

    def admit(self, header: Header) -> bool:
        stage, key = header.round, (header.round, header.exchange)
        if header.sender not in self.federation.names:
            raise HoldfastError("only nodes send messages")
        exchanges = 1 if self._leads or stage == self.last else 10_000
        if stage > self.last or header.exchange >= exchanges:
            raise HoldfastError(f"round: there is no {stage} with an exchange {header.exchange}")
        if header.sender in self.arrivals.get(key, ()):
            return False
        if stage == self.last:
            expected: list[TensorSpec] = []
        elif self._leads:
            assert self.expected is not None
            if stage != self.stage:
                if stage < self.stage:
                    return False  # it is in the model already
                raise HoldfastError(f"round: {stage} has not begun")
            i = self.federation.names.index(header.sender)
            if i not in cohort(
                self.federation.seed, stage - 1, len(self.federation.node), self.federation.cohort
            ):
                raise HoldfastError(f"cohort: you are not in that of round {stage}")
            expected = self.expected
        else:
            if self._averaged(key):
                return False
            self._plausible(header)
            self._only_one(header.sender)
            expected = header.tensors
            for other in self.arrivals.get(key, ()):
                expected = self._file(key, other).header.tensors
                break
        if header.tensors != expected:
            raise HoldfastError("tensors: not those that are expected from everybody")
        return True

    @property
    def _leads(self) -> bool:
        return self.expected is not None

    def _plausible(self, header: Header) -> None:
        """Rows of the model's size, or single numbers."""
        dtype = "float16" if self.federation.compression == "fp16" else self.federation.dtype
        for tensor in header.tensors:
            if tensor.dtype != dtype or tensor.shape not in ([1, self.model.dim], [1, 1]):
                raise HoldfastError(f"tensors: expected {dtype} [1, {self.model.dim}], got {tensor.shape}")
        if not header.tensors:
            raise HoldfastError("tensors: expected at least one")

    def _only_one(self, sender: str) -> None:
        """Who waits for a mean has nothing else to send: nobody can fill the disk."""
        for key, senders in list(self.arrivals.items()):
            if sender in senders and not self._averaged(key):
                raise HoldfastError(f"round: your message of round {key[0]} still waits for others")

    def arrived(self, header: Header) -> None:
        self.arrivals.setdefault((header.round, header.exchange), set()).add(header.sender)

    def _wait_for(self, key: Key, names: list[str]) -> None:
        self.ask(lambda: self._everybody(key, names))

    async def _everybody(self, key: Key, names: Iterable[str], once: bool = False) -> None:
        """Waits for the messages of all ``names``; ``once``: for any change."""
        wanted, since, before = set(names), time.monotonic(), None
        try:
            while missing := wanted - self.arrivals.get(key, set()):
                if missing != before:
                    since, before = time.monotonic(), missing
                    self.waits.clear()
                    for name in sorted(missing):
                        self.waits[name] = Wait(name, since)
                if time.monotonic() - since > self.federation.limits.wait:
                    raise WaitLimitError(
                        f"waited for {', '.join(sorted(missing))} as long as limits.wait allows. Everything "
                        "is saved: start the same command again to go on"
                    )
                if await self.outbox.changed(1.0 if not once else 5.0) and once:
                    return
        finally:
            self.waits.clear()

    def _mean(self, key: Key, names: list[str], like: Any) -> Any:
        """The mean of the messages of ``names``, added up in their order."""
        total = tree_map(lambda t: torch.zeros(t.shape, dtype=t.dtype, device=self.x0.device), like)
        for name in names:
            message = self._file(key, name)
            message.verify()  # it may have been on disk for long
            message.add_to(total)
        return tree_map(lambda t: t.div_(len(names)), total)

    def _file(self, key: Key, name: str) -> MessageFile:
        return MessageFile(self.store.inbox / message_name(*key, name))

    def _drop(self, key: Key) -> None:
        for name in self.arrivals.pop(key, ()):
            remove(self.store.inbox / message_name(*key, name))

    # --- others ---------------------------------------------------------------------------------------

    def may_fetch(self, who: str, stage: int) -> bool:
        return who in self.federation.names

    async def _linger(self) -> None:
        """Clients whose answer got lost may ask once more; those who heard it say so."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            if all(self.service.released.get(name, 0) >= self.last for name in self.federation.names):
                return
            await self.outbox.changed(until - time.monotonic())

    def status(self) -> dict[str, Any]:
        """Also where the clients are: they cannot be asked themselves."""
        now = self.network.loop.time()
        clients = {
            name: {"round": min(stage, self.last) - 1, "seconds_ago": round(now - when, 1)}
            for name, (when, stage) in dict(self.service.seen).items()
        }
        return super().status() | {"clients": clients}
