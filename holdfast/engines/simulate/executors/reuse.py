"""Values of a traced round that take over memory which nothing needs any more.

A round is a list of operations, cut into runs that are compiled one by one. Left alone, every value that
later runs read would get memory of its own, and the new state would be written twice: for later runs, and
over the old state at the end of the round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile

import torch
from torch import Tensor, fx

Run = list[fx.Node]

_COPY = torch.ops.aten.copy_.default


def reuse_memory(graph: fx.Graph, runs: list[Run], own_memory: object) -> None:
    """Ends runs with copies of their values into memory that is free, from where later runs then read them.

    Compiled, a value is written there in the first place. What the operation ``own_memory`` returns is left
    alone: it comes out of a product, so that it would be copied indeed.
    """
    memory = _Memory(graph, runs)
    for index, run in enumerate(runs[:-1]):
        for value in memory.read_later(run, index):
            if value.target is own_memory or not memory.is_new(value, index):
                continue
            for place in memory.proposals(value, index):
                if memory.is_free(place, value, index):
                    memory.put(value, place, index)
                    break


def inputs_of(run: Run) -> list[fx.Node]:
    """What ``run`` reads of others, in the order in which it does."""
    inside = set(run)
    return list(dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in inside))


class _Memory:
    """Which nodes share memory, and in which runs it is read."""

    def __init__(self, graph: fx.Graph, runs: list[Run]) -> None:
        self.graph, self.runs = graph, runs
        self.run_of = {node: index for index, run in enumerate(runs) for node in run}
        self.becomes = _becomes(runs)
        self.sharing: dict[int, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            for storage in _storages(node):
                self.sharing[storage].append(node)
        # The new state is copied over the old one at the end: by value, that copy and what it overwrites.
        self.endings: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        for copy in takewhile(_overwrites_state, reversed(runs[-1] if runs else [])):
            old, new = copy.all_input_nodes
            self.endings[new] = copy, old

    def read_later(self, run: Run, index: int) -> list[fx.Node]:
        """The values of ``run`` that later ones read."""
        return [node for node in run if any(self._when(user) > index for user in node.users)]

    def is_new(self, value: fx.Node, index: int) -> bool:
        """Whether the memory of ``value`` is of this run, and later ones know it by no other name."""
        owners = {self._when(owner) for owner in self._owners(value)}
        return owners == {index} and self._needed(value, index) == [value]

    def proposals(self, value: fx.Node, index: int) -> Iterator[fx.Node]:
        """Where ``value`` could go, the best first."""
        last = self.becomes.get(value, value)
        if last in self.endings:
            yield self.endings[last][1]
        # What this run reads where the next one reads ``value``: so all steps stay alike.
        here, there = inputs_of(self.runs[index]), inputs_of(self.runs[index + 1])
        if value in there and there.index(value) < len(here):
            yield here[there.index(value)]

    def is_free(self, place: fx.Node, value: fx.Node, index: int) -> bool:
        """Whether the memory of ``place`` fits ``value`` and is needed by no run after this one."""
        if not _alike(place, value):
            return False
        (owner,) = self._owners(place)
        if owner.op == "get_attr" or (owner.op == "placeholder" and owner is not place):
            return False
        # A part of the new state in the place of another part of the old one might be overwritten too soon.
        if value in self.endings and place.op == "placeholder" and place is not self.endings[value][1]:
            return False
        return not self._needed(place, index)

    def put(self, value: fx.Node, place: fx.Node, index: int) -> None:
        run = self.runs[index]
        with self.graph.inserting_after(run[-1]):
            copy = self.graph.call_function(_COPY, (place, value))
        run.append(copy)
        self.run_of[copy] = index
        value.replace_all_uses_with(place, lambda user: self._when(user) > index)
        if value in self.endings and self.endings[value][1] is place:
            ending, _ = self.endings.pop(value)
            ending.replace_all_uses_with(place)
            self.runs[-1].remove(ending)
            self.graph.erase_node(ending)

    def _owners(self, node: fx.Node) -> list[fx.Node]:
        """Who had the memory of ``node`` first."""
        return [self.sharing[storage][0] for storage in _storages(node)]

    def _when(self, node: fx.Node) -> int:
        """The run of ``node``: what is given comes before the first, what is returned after the last."""
        return self.run_of.get(node, len(self.runs) if node.op == "output" else -1)

    def _needed(self, node: fx.Node, index: int) -> list[fx.Node]:
        """The nodes with memory in common with ``node`` that are read after the run ``index``."""
        overwriting = dict(self.endings.values())  # copy: what it overwrites, without reading it
        names = dict.fromkeys(name for storage in _storages(node) for name in self.sharing[storage])
        return [
            name
            for name in names
            if name not in overwriting
            and any(self._when(user) > index and overwriting.get(user) is not name for user in name.users)
        ]


def _overwrites_state(node: fx.Node) -> bool:
    return (
        node.target is _COPY
        and len(node.all_input_nodes) == 2
        and node.all_input_nodes[0].op == "placeholder"
    )


def _becomes(runs: list[Run]) -> dict[fx.Node, fx.Node]:
    """What values have become after the last step, where each run reads what the one before has read anew."""
    inputs = [inputs_of(run) for run in runs]
    last: dict[fx.Node, fx.Node] = {}
    for run, reads, following in reversed(list(zip(runs, inputs, inputs[1:], strict=False))):
        inside = set(run)
        heirs = {old: new for old, new in zip(reads, following, strict=False) if new in inside}
        last |= {old: last.get(new, new) for old, new in heirs.items()}
    return last


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [part for part in values if isinstance(part, Tensor)]


def _storages(node: fx.Node) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(node)}


def _alike(place: fx.Node, value: fx.Node) -> bool:
    """Whether both are single tensors of one form, without gaps."""
    a, b = _tensors(place), _tensors(value)
    if len(a) != 1 or len(b) != 1:
        return False
    same = (a[0].shape, a[0].dtype, a[0].device) == (b[0].shape, b[0].dtype, b[0].device)
    return same and a[0].is_contiguous() and b[0].is_contiguous()
