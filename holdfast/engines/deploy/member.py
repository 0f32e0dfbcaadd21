"""What node and server processes have in common: a directory, an outbox, a service, links to others."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.engines.common.carrier import Carrier, Slot, wire_like
from holdfast.engines.common.counters import Traffic
from holdfast.engines.deploy.credentials import Credentials
from holdfast.engines.deploy.events import Events
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.links import Link, Wait
from holdfast.engines.deploy.messages import Header, MessageFile, TensorSpec, specs
from holdfast.engines.deploy.outbox import Outbox
from holdfast.engines.deploy.scarcity import Shortage
from holdfast.engines.deploy.service import Service
from holdfast.engines.deploy.store import Store

T = TypeVar("T")

GRACE = 15.0  # seconds that a finished member stays for answers that got lost


class Stopped(Exception):  # noqa: N818 - not an error
    """Somebody asked the member to stop; everything is saved."""


class NetworkThread:
    """An event loop in a thread of its own: it answers others while the member computes."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="network", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@dataclass
class Costs:
    """What taking part has cost so far; saved with the state."""

    traffic: Traffic = field(default_factory=Traffic)  # in messages sent, each counted once
    seconds: float = 0.0  # in all
    waiting: float = 0.0  # of these, spent on exchanges
    saving: float = 0.0  # and on writing down states
    wire_sent: int = 0  # bytes of messages that went out before this process began
    wire_received: int = 0  # and came in
    delivery_bytes: int = 0  # the finished model, handed out by a server

    @classmethod
    def from_notes(cls, notes: dict[str, Any], itemsize: int) -> Costs:
        return cls(**{**notes, "traffic": Traffic.of(notes["traffic"], itemsize)})


class Member:
    """One process of a federation. Used as a context; what it does is up to ``Node`` and ``Hub``."""

    def __init__(
        self,
        federation: Federation,
        name: str,
        folder: Path,
        x0: Tensor,
        *,
        credentials: Credentials | None,
        events: Events,
        data_digest: str = "",
        network: NetworkThread | None = None,
    ) -> None:
        self.federation, self.name, self.folder, self.x0 = federation, name, folder, x0
        self.credentials, self.events = credentials, events
        self.start = digest(x0)
        model = " ".join(filter(None, (federation.model_identity, self.start)))
        identity = {"federation file": federation.id, "name": name, "model": model, "data": data_digest}
        self.store = Store(folder, identity)
        self._own_network = network is None
        self.network = network or NetworkThread()
        self.outbox = Outbox(self.store, events, self.network.loop)
        self.service = Service(
            federation,
            name,
            self.start,
            self.store,
            self.outbox,
            events,
            self.may_fetch,
            self.status,
            lambda: self.stage,
        )
        self.waits: dict[str, Wait] = {}
        self.links: dict[str, Link] = {}
        self.costs = Costs()
        self.done = 0  # rounds
        self.stage = 0  # as in ``Header.round``: the round under way
        self.phase = "starting"
        self.metrics: dict[str, float] = {}  # the latest
        self.began = time.monotonic()
        self.port: int | None = None
        self._server: Any = None
        self._waiting_on: Future[Any] | None = None
        self._stopping = False

    # --- beginning and end ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self, address: str) -> None:
        """Lets others ask, on ``address`` (host:port)."""
        self._server, self.port = self._run(self.service.listen(address, self.credentials))

    def close(self) -> None:
        """Closes all connections. What is published stays on disk."""
        self._run(self._close())
        self.store.close()
        if self._own_network:
            self.network.close()

    async def _close(self) -> None:
        if self._server is not None:
            await self._server.stop(1.0 if self.phase == "finished" else 0)
        for link in self.links.values():
            await link.close()
        self.service.close()

    def stop(self) -> None:
        """From another thread: makes the member raise ``Stopped`` at its next exchange, or at once."""
        self._stopping = True
        waiting_on = self._waiting_on
        if waiting_on is not None:
            waiting_on.cancel()

    # --- files ----------------------------------------------------------------------------------------

    def insist(self, action: Callable[[], T]) -> T:
        """What ``action`` gives; while there is no room for its files, it is tried again from the start."""
        shortage = Shortage(self.events, self.federation.limits.wait)
        while True:
            try:
                return action()
            except OSError as error:
                self.ask(partial(shortage.pause, error))

    async def insist_on_loop(self, action: Callable[[], T]) -> T:
        """``insist`` for the event loop, which must not be held up."""
        shortage = Shortage(self.events, self.federation.limits.wait)
        while True:
            try:
                return action()
            except OSError as error:
                await shortage.pause(error)

    def publish(self, header: Header, tree: Any, recipient: str = "") -> MessageFile:
        """Puts a message into the outbox, as soon as there is room."""
        return self.insist(lambda: self.outbox.publish(header, tree, recipient))

    # --- talking to others ----------------------------------------------------------------------------

    def ask(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine on the event loop and waits for it; that time counts as waiting."""
        before = time.monotonic()
        future: Future[T] = asyncio.run_coroutine_threadsafe(begin(), self.network.loop)
        self._waiting_on = future
        try:
            if self._stopping:  # looked at last, so that no call of ``stop`` is missed
                raise Stopped
            return future.result()
        except CancelledError:
            raise Stopped from None
        finally:
            self._waiting_on = None
            future.cancel()
            self.costs.waiting += time.monotonic() - before

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.network.loop).result()

    async def link(self, peer: str) -> Link:
        """The way to ``peer``."""
        if peer not in self.links:
            self.links[peer] = Link(
                self.federation,
                self.name,
                peer,
                self.start,
                self.store.inbox,
                self.credentials,
                self.events,
                self.waits,
            )
        return self.links[peer]

    def header(self, exchange: int, wire: Any) -> Header:
        """Of a message in the round under way, as it is sent."""
        return Header(
            federation=self.federation.id,
            sender=self.name,
            round=self.stage,
            exchange=exchange,
            tensors=specs(wire),
            checksum=0,
        )

    def wire_specs(self, message: Any) -> list[TensorSpec]:
        """The tensors of ``message`` as they are sent."""
        return specs(wire_like(self.federation.wire_channel, message))

    def may_fetch(self, who: str, stage: int) -> bool:
        """Whether ``who`` may have this member's messages of a round."""
        raise NotImplementedError

    # --- where it stands ------------------------------------------------------------------------------

    @property
    def payload_bytes(self) -> int:
        """Bytes of all messages sent so far, each counted once, as the simulator counts them."""
        return self.costs.traffic.bits // 8

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Bytes of messages (sent, received) so far, repetitions and compression included."""
        links = list(self.links.values())
        sent = self.costs.wire_sent + self.service.bytes_served + sum(link.bytes_sent for link in links)
        return sent, self.costs.wire_received + sum(link.bytes_received for link in links)

    def cost_notes(self) -> dict[str, Any]:
        """What is saved with the state."""
        sent, received = self.wire_bytes
        return asdict(self.costs) | {"wire_sent": sent, "wire_received": received}

    def status(self) -> dict[str, Any]:
        """For people and for other members: only metrics that the federation file lists are in it."""
        waits = [str(wait) for wait in list(self.waits.values())]
        sent, received = self.wire_bytes
        shared = {k: v for k, v in self.metrics.items() if k in self.federation.evaluation.shared}
        return {
            "name": self.name,
            "federation": self.federation.id,
            "round": self.done,
            "rounds": self.federation.rounds,
            "phase": self.phase if self.phase in ("finished", "starting") else "; ".join(waits) or self.phase,
            "payload_bytes": self.payload_bytes,
            "wire_bytes_sent": sent,
            "wire_bytes_received": received,
            "retries": sum(link.retries for link in list(self.links.values())),
            "waiting_seconds": round(self.costs.waiting, 3),
            "uptime_seconds": round(time.monotonic() - self.began, 1),
            "refused": dict(self.events.complaints),
            "last_error": self.events.last_error,
            "metrics": shared,
        }

    def report(self) -> dict[str, Any]:
        """What taking part has cost, for the member's own people."""
        costs = self.costs
        return self.status() | {
            "seconds": round(costs.seconds, 3),
            "saving_seconds": round(costs.saving, 3),
            "compute_seconds": round(costs.seconds - costs.waiting - costs.saving, 3),
            "delivery_bytes": costs.delivery_bytes,
        }


def new_carrier(federation: Federation, round: int, slots: tuple[Slot, ...], nodes: Tensor) -> Carrier:
    """The federation's channel in a round, for the messages of ``nodes`` [m]."""
    lost = torch.zeros((), dtype=torch.bool, device=nodes.device)
    return Carrier(federation.wire_channel, slots, federation.seed, round, nodes, lost)


def digest(tensor: Tensor) -> str:
    """A short digest of the numbers in ``tensor``."""
    return data_digest([tensor.detach()])


def data_digest(tensors: Iterable[Tensor]) -> str:
    """A short digest of a node's data, so that a run is not resumed with others."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():
            total.update(np.ascontiguousarray(tensor.cpu().numpy()).reshape(-1).view(np.uint8).data)
    return total.hexdigest()[:16]


def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def require_loopback(federation: Federation, listen: str | None) -> None:
    """No unencrypted traffic leaves the machine."""
    for address in [*(member.address for member in federation.members if member.address), listen]:
        if address is not None and not is_loopback(address):
            raise HoldfastError(
                f"--insecure: only for loopback addresses such as 127.0.0.1:7001, not {address}"
            )
