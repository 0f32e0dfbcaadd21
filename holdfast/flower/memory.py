"""What a client keeps between messages, in the state that Flower keeps for it.

A client computes a new state before it knows whether its message reaches the server. So it keeps the state
before as well, and the server says with every message which one it has taken in. A message that got lost
thus never leaves a client and the server with different ideas of the client's state.
"""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, Context

from holdfast.core.errors import HoldfastError
from holdfast.flower.records import as_tree, from_record, to_record

KEPT = "holdfast.kept"


def _record(stage: int) -> str:
    return f"holdfast.state.{stage}"


class Memory:
    """The states of one client in one run, by stage."""

    def __init__(self, context: Context) -> None:
        self.records, self.run = context.state, str(context.run_id)
        kept = self.records.config_records.get(KEPT)
        # Flower may hand over what an earlier run left.
        same_run = kept is not None and kept["run"] == self.run
        self.stages: list[int] = list(kept["stages"]) if same_run else []

    def read(self, stage: int, like: Any) -> Any:
        """The state after ``stage``, a tree like ``like``; what comes later did not reach the server."""
        if stage not in self.stages:
            raise HoldfastError(
                f"this client has no state of stage {stage}, only of {self.stages or 'none'}: its SuperNode "
                "was started anew, or another client has its partition-id; start the run again"
            )
        self._keep([stage])
        return as_tree(from_record(self.records.array_records[_record(stage)]), like, "the client's state")

    def clear(self) -> None:
        """The client begins anew: the server has taken in nothing of it."""
        self._keep([])

    def write(self, stage: int, state: Any) -> None:
        """Keeps the ``state`` after ``stage`` beside the one it was made from."""
        self.records[_record(stage)] = to_record(state)
        self._keep([*(kept for kept in self.stages if kept < stage), stage])

    def _keep(self, stages: list[int]) -> None:
        names = {_record(stage) for stage in stages}
        for name in [name for name in self.records.array_records if name.startswith(_record(0)[:-1])]:
            if name not in names:
                del self.records[name]
        self.stages = stages
        self.records[KEPT] = ConfigRecord({"run": self.run, "stages": stages})
