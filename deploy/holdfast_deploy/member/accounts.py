"""What taking part has cost a member, and its figures by round."""

from __future__ import annotations

import time
from dataclasses import replace

from holdfast.engines.common.counters import Work
from holdfast_deploy.member.connections import Connections
from holdfast_deploy.member.state import Costs
from holdfast_deploy.member.waiting import Waiting
from holdfast_deploy.storage.results import Record
from holdfast_deploy.wire.service import Service


class Accounts:
    """The costs so far and the latest metrics, in memory and in the member's ``record``."""

    def __init__(self, record: Record, waiting: Waiting, connections: Connections, service: Service) -> None:
        self.record, self.waiting, self.connections, self.service = record, waiting, connections, service
        self.costs, self.metrics = Costs(), dict[str, float]()  # the latest
        self.began = self._clock_start = time.monotonic()

    def restore(self, costs: Costs) -> None:
        """Continues from ``costs``."""
        self.costs = costs.copy()
        self.waiting.seconds = costs.waiting
        self._clock_start = time.monotonic() - costs.seconds

    def state(self) -> Costs:
        """The costs as they are saved."""
        self.costs.seconds, self.costs.waiting = self.seconds, self.waiting.seconds
        sent, received = self.wire_bytes
        return replace(self.costs.copy(), wire_sent=sent, wire_received=received)

    def forget_process(self) -> None:
        """What went over the wire since this process began is not counted: it goes back to what is saved."""
        self.service.bytes_served = 0
        for link in self.connections.links.values():
            link.bytes_sent = link.bytes_received = 0

    @property
    def seconds(self) -> float:
        """Since the very start, without the time that the member was down."""
        return time.monotonic() - self._clock_start

    @property
    def payload_bytes(self) -> int:
        """Bytes of all messages sent so far, each counted once, as the simulator counts them."""
        return self.costs.traffic.bits // 8

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Bytes of messages (sent, received) so far, repetitions and compression included."""
        links = list(self.connections.links.values())
        sent = self.costs.wire_sent + self.service.bytes_served + sum(link.bytes_sent for link in links)
        return sent, self.costs.wire_received + sum(link.bytes_received for link in links)

    def record_round(self, done: int, work: Work, links: int) -> None:
        """Records the latest figures, and what ``done`` rounds have cost; ``links``: to others."""
        sent, received = self.wire_bytes
        wire = {
            "wire_bytes_sent": sent,
            "wire_bytes_received": received,
            "waiting_seconds": round(self.waiting.seconds, 3),
        }
        costs = {
            "payload_bytes": self.payload_bytes,
            "payload_bytes_per_link": self.payload_bytes / max(links, 1),
            "gradient_evaluations": work.gradient_evaluations,
            "sample_gradients": work.sample_gradients,
            "seconds": round(self.seconds, 3),
        }
        self.waiting.retry_while_full(lambda: self.record.add(done, self.metrics | wire, costs))
        self.waiting.retry_while_full(lambda: self.record.conclude("running", done, self.seconds))

    def report(self) -> dict[str, float]:
        """What ``report.json`` says of the costs."""
        costs = self.costs
        return {
            "seconds": round(costs.seconds, 3),
            "saving_seconds": round(costs.saving, 3),
            "compute_seconds": round(costs.seconds - self.waiting.seconds - costs.saving, 3),
            "delivery_bytes": costs.delivery_bytes,
        }
