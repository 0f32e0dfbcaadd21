"""Checkpoints of jobs: one file where one process holds all nodes, else a shard from each rank.

``<job>.safetensors`` is written last and at once, so it always stands for a whole checkpoint: what all ranks
have in common, and the names of the shards. A shard says which nodes its rows belong to: any number of ranks
can go on from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.files import read_notes, read_tensors, write_tensors
from holdfast.core.tree import named_leaves
from holdfast.core.world import World
from holdfast.engines.common.channel_run import split_channel_state
from holdfast.engines.common.rounds import ServerState
from holdfast.engines.common.simulation import Simulation
from holdfast.topology import Network


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run."""

    folder: Path
    digest: str  # of the experiment
    world: World
    earlier: tuple[str, ...] = ()  # the same with fewer rounds, which was extended

    def write(self, job: str, simulation: Simulation, seconds: float) -> None:
        """Saves the state of ``job``; what was saved before stays valid until all is written."""
        tensors, counters = simulation.snapshot()
        notes = {"digest": self.digest, "job": job, "seconds": seconds, **counters}
        if self.world.leads:
            self.folder.mkdir(exist_ok=True)
        if self.world.size == 1:
            write_tensors(self.path(job), tensors, notes)
            self._remove_shards(job, keep=[])
            return
        self.world.wait()  # for the folder
        rows = _row_kinds(simulation)
        own = {name: tensors[name] for name in rows}
        here = {"digest": self.digest, "job": job, "nodes": simulation.nodes.tolist()}
        shards = [
            f"{job}.round{simulation.round}.{rank}of{self.world.size}" for rank in range(self.world.size)
        ]
        write_tensors(self.path(shards[self.world.rank]), own, here)
        self.world.wait()  # for all shards
        if self.world.leads:
            common = {name: tensor for name, tensor in tensors.items() if name not in rows}
            write_tensors(self.path(job), common, {**notes, "shards": shards})
            self._remove_shards(job, keep=shards)

    def notes(self, job: str) -> dict[str, Any] | None:
        """What is noted beside the state, such as the round; None without a checkpoint."""
        return self._checked(job, job) if self.path(job).exists() else None

    def restore(self, job: str, simulation: Simulation) -> float:
        """Lets ``simulation`` go on from the checkpoint, if there is one; the seconds spent before."""
        rows = _row_kinds(simulation)
        read = self.world.raise_on_all(lambda: self._read(job, simulation, rows))
        if read is None:
            return 0.0
        simulation.restore(*read)
        return float(read[1]["seconds"])

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _read(
        self, job: str, simulation: Simulation, rows: dict[str, str]
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors of the nodes that ``simulation`` holds, and the notes."""
        notes = self.notes(job)
        if notes is None:
            return None
        everybody = list(range(simulation.problem.nodes))
        parts = {shard: self._checked(job, shard)["nodes"] for shard in notes.get("shards", [])}
        files = parts or {job: everybody}
        mine = simulation.nodes.cpu().numpy()
        gathered = {name: _Gathering(_keys(kind, mine, simulation.network)) for name, kind in rows.items()}
        for file, nodes in files.items():
            if not np.isin(nodes, mine).any():
                continue
            tensors, _ = read_tensors(self.path(file))
            for name, gathering in gathered.items():
                gathering.take(_keys(rows[name], np.asarray(nodes), simulation.network), tensors.get(name))
        if not all(gathering.complete for gathering in gathered.values()):
            raise HoldfastError(
                f"{self.path(job)} lacks rows of some nodes: it is of another run; delete it to start anew"
            )
        common = read_tensors(self.path(job))[0]
        return {**common, **{name: gathering.result for name, gathering in gathered.items()}}, notes

    def _checked(self, job: str, file: str) -> dict[str, Any]:
        path = self.path(file)
        notes = read_notes(path)
        if notes.get("digest") not in (self.digest, *self.earlier) or notes.get("job") != job:
            raise HoldfastError(
                f"{path} is a checkpoint of another experiment; delete it to start this job anew"
            )
        return notes

    def _remove_shards(self, job: str, keep: list[str]) -> None:
        for path in self.folder.glob(f"{job}.round*of*.safetensors"):
            if path.name.removesuffix(".safetensors") not in keep:
                path.unlink(missing_ok=True)


def _row_kinds(simulation: Simulation) -> dict[str, str]:
    """The tensors of a state with rows of its own for every "node" or every "link"; the others are common."""
    led = isinstance(split_channel_state(simulation.state)[0], ServerState)
    common = ("server.", "state.server.", "channel.receiver.") if led else ()
    found = [(name, t) for name, t in named_leaves(simulation.state) if not f"{name}.".startswith(common)]
    if not found:
        return {}
    # All ranks together tell: nodes may be as many as links on one of them, but not in a connected network.
    totals = simulation.world.sum(torch.tensor([len(tensor) for _, tensor in found])).tolist()
    nodes = simulation.problem.nodes
    return {
        name: "node" if total == nodes else "link" for (name, _), total in zip(found, totals, strict=True)
    }


def _keys(kind: str, nodes: np.ndarray, network: Network) -> np.ndarray:
    """Numbers, ascending, of the rows of ``nodes``, which are ascending too."""
    if kind == "node":
        return nodes
    own, other, _ = network.directed
    return (own * network.nodes + other)[np.isin(own, nodes)]


class _Gathering:
    """Rows put together from several files."""

    def __init__(self, wanted: np.ndarray) -> None:
        self.wanted = wanted
        self.missing = np.ones(len(wanted), dtype=bool)
        self.result = torch.empty(0)

    def take(self, keys: np.ndarray, rows: Tensor | None) -> None:
        """Takes what is wanted of ``rows``, whose numbers are ``keys``."""
        if rows is None or len(rows) != len(keys):
            return
        if not len(self.result):
            self.result = rows.new_empty(len(self.wanted), *rows.shape[1:])
        here = np.flatnonzero(np.isin(self.wanted, keys))
        self.result[here] = rows[np.searchsorted(keys, self.wanted[here])]
        self.missing[here] = False

    @property
    def complete(self) -> bool:
        return not self.missing.any()
