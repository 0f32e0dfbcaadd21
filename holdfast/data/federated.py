"""The data of nodes in the form that engines use: one tensor, in which each node owns a range of rows."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.core.validation import Count, check
from holdfast.data.samples import (
    IGNORED,
    Pair,
    as_tree,
    described,
    is_dataset,
    items_in,
    labels_below,
    read_items,
    stack_items,
    targets_of,
)

Counted = Callable[[Tensor], Tensor | None]
"""A function from targets [N, ...] to the samples that count, [N] bool; None: all."""

ITEMS_READ_AGAIN = 8  # of a Dataset: a transform that changes every second item is noticed too


@dataclass(frozen=True)
class TableForm:
    """How a table became samples, so that another one can be read in the same way."""

    target: str
    inputs: tuple[Any, ...]  # the names of the columns, in their order
    node: str | None
    words: dict[Any, tuple[Any, ...]]  # of columns of words, each word at the place of its number


@dataclass(frozen=True, eq=False)
class Whose:
    """The organisation of every row, in the rows' order: the column ``node`` of a table."""

    of_row: np.ndarray  # [N] words or whole numbers, as in the table
    node: str
    names: tuple[str, ...]  # the names of the nodes to which the rows are to belong


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Nodes' samples in one tensor: node i owns rows ``starts[i] : starts[i] + counts[i]``.

    Where the nodes are spread over processes, each holds the samples of its own nodes only.
    """

    x: Any
    """Inputs: a tensor [N, ...], or several in a dictionary or tuple; with ``y = None`` a dictionary of all
    columns, targets included if one is called as in ``TARGET_NAMES``."""
    y: Tensor | None
    """[N, ...] int64 class labels, or float targets."""
    counts: np.ndarray
    """[n] int64: samples of each node, at least one; of a node held elsewhere 0 if that is not known."""
    unused: int = 0
    """Samples of the original data that no node got."""
    held: np.ndarray | None = None
    """[m] int64, ascending: the nodes whose samples are here; None: all."""
    description: str = ""
    """How they were read, in words."""
    names: tuple[str, ...] | None = None
    """The names of the nodes, such as hospitals; None: their numbers."""
    table: TableForm | None = None
    """How they were read from a frame, if they were."""
    class_names: tuple[str, ...] | None = None
    """The names of the classes, each at the place of its label; None: their numbers."""
    whose: Whose | None = None
    """Where all rows are in the order of their table: the owner of each, if the table has it."""
    finite = True

    def __post_init__(self) -> None:
        samples = as_tree("data", self.x if self.y is None else (self.x, self.y))
        if isinstance(samples, Pair):
            object.__setattr__(self, "x", samples.x)
            object.__setattr__(self, "y", samples.y)
        else:
            object.__setattr__(self, "x", samples)
        object.__setattr__(self, "counts", np.asarray(self.counts, dtype=np.int64))
        if self.counts.ndim != 1 or len(self.counts) == 0:
            raise HoldfastError(f"counts: expected one number per node, got shape {list(self.counts.shape)}")
        if self.held is not None:
            object.__setattr__(self, "held", np.asarray(self.held, dtype=np.int64))
        here = self.counts[self.here]
        no_empty_node(here)
        if here.sum() != len(self):
            raise HoldfastError(f"counts: they sum to {here.sum()}, but there are {len(self)} samples")

    def __repr__(self) -> str:
        """Such as ``FederatedData(1400 samples on 10 nodes, 22 to 378 each; inputs [64], 10 classes)``."""
        inputs = str(list(self.input_shape)) if isinstance(self.x, Tensor) else "a tree of tensors"
        counts = self.counts[self.here]
        each = f"{counts.min()} to {counts.max()}" if counts.min() < counts.max() else f"{counts[0]}"
        target = "" if self.targets is None else f", {_targets_in_words(self.targets, self.classes)}"
        where = f"{self.nodes} nodes" if self.held is None else f"{len(self.here)} of {self.nodes} nodes"
        named = f" ({', '.join(self.names)})" if self.names and len(self.names) <= 6 else ""
        return f"FederatedData({len(self)} samples on {where}{named}, {each} each; inputs {inputs}{target})"

    def __len__(self) -> int:
        """Samples here."""
        return len(next(leaves(self.x)))

    @property
    def samples(self) -> Tree:
        """All samples here: a ``Pair``, or a dictionary of columns."""
        return self.x if self.y is None else Pair(self.x, self.y)

    @property
    def numbers(self) -> int:
        """How many numbers all inputs here have."""
        return sum(part.numel() for part in leaves(self.x))

    @property
    def bytes_everywhere(self) -> int:
        """Bytes of the inputs of all nodes, those held elsewhere included."""
        sizes = sum(part[0].numel() * part.element_size() for part in leaves(self.x))
        return int(self.counts.sum()) * sizes

    @property
    def numbers_everywhere(self) -> int:
        """How many numbers that are."""
        return int(self.counts.sum()) * sum(part[0].numel() for part in leaves(self.x))

    @property
    def targets(self) -> Tensor | None:
        """[N, ...]: what a loss compares outputs with, if the columns name it."""
        return targets_of(self.samples)

    @property
    def nodes(self) -> int:
        """Number of nodes, n."""
        return len(self.counts)

    @property
    def classes(self) -> int | None:
        """One more than the largest label of the samples here; None if there are no class labels."""
        labels = self.targets
        return None if labels is None or labels.is_floating_point() else int(labels.max()) + 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample; () if samples have several inputs."""
        return tuple(self.x.shape[1:]) if isinstance(self.x, Tensor) else ()

    @property
    def here(self) -> np.ndarray:
        """[m] int64: the nodes whose samples are here."""
        return np.arange(self.nodes) if self.held is None else self.held

    @property
    def starts(self) -> np.ndarray:
        """[n] int64: first row of each node; -1 for nodes held elsewhere."""
        starts = np.full(self.nodes, -1)
        starts[self.here] = np.concatenate([[0], np.cumsum(self.counts[self.here])[:-1]])
        return starts

    def hold(self, nodes: Sequence[int]) -> FederatedData:
        """The same federation with only the samples of ``nodes`` here (a copy)."""
        held = np.unique(np.asarray(nodes, dtype=np.int64))
        rows = torch.as_tensor(np.flatnonzero(np.isin(self.owners, held)))
        x = tree_map(lambda part: part[rows], self.x)
        return replace(self, x=x, y=None if self.y is None else self.y[rows], held=held)

    def at_site(self, node: int, counts: np.ndarray) -> FederatedData:
        """The samples of a single node as those of ``node`` among nodes with ``counts`` [n] samples."""
        everywhere = counts.copy()
        everywhere[node] = len(self)
        return replace(self, counts=everywhere, held=np.array([node]))

    @property
    def owners(self) -> np.ndarray:
        """[N] int64: the node of each sample."""
        return np.repeat(self.here, self.counts[self.here])

    def node(self, i: int) -> Tree:
        """The samples of node ``i``, which must be here: a pair (x, y) or a dictionary (views, no copies)."""
        if not 0 <= i < self.nodes:
            raise HoldfastError(f"node {i} does not exist: expected 0..{self.nodes - 1}")
        if i not in self.here:
            raise HoldfastError(f"node {i} is held elsewhere; here are {self.here.tolist()}")
        rows = slice(int(self.starts[i]), int(self.starts[i] + self.counts[i]))
        return tree_map(lambda part: part[rows], self.samples)

    def that_count(self, where: str, counted: Counted) -> FederatedData:
        """Without the samples whose targets do not count; a warning tells how many."""
        mask = None if self.targets is None else counted(self.targets)
        if mask is None:
            return self
        rows = torch.nonzero(mask.cpu())[:, 0]
        counts = np.bincount(self.owners[rows.numpy()], minlength=self.nodes)
        if len(empty := np.flatnonzero(counts == 0)):
            raise HoldfastError(
                f"{where}: node {empty[0]} has no sample with a label that counts; all are {IGNORED}"
            )
        warnings.warn(
            f"{where}: {len(self) - len(rows)} of {len(self)} samples have no label that counts, all are "
            f"{IGNORED}; they are left out",
            UserWarning,
            stacklevel=2,
        )
        x = tree_map(lambda part: part[rows.to(part.device)], self.x)
        return replace(self, x=x, y=None if self.y is None else self.y[rows.to(self.y.device)], counts=counts)

    def local_steps(self, epochs: int, batch_size: int) -> int:
        """Steps in which every node passes over its samples ``epochs`` times, for ``sampling="epochs"``.

        That must be the same number for all nodes, since all take as many steps in a round.
        """
        check("epochs", Count, epochs)
        steps = -(-self.counts // check("batch_size", Count, batch_size))
        if len(differs := np.flatnonzero(steps != steps[0])):
            raise HoldfastError(
                f"local_steps: an epoch is {steps[0]} steps for node 0 and {steps[differs[0]]} for node "
                f"{differs[0]}; nodes take as many steps in a round, so say how many"
            )
        return int(epochs * steps[0])

    def label_table(self, classes: int) -> np.ndarray:
        """[n, classes] int64: how many samples of each class each node owns."""
        labels = self.targets
        if labels is None or labels.is_floating_point() or labels.ndim != 1:
            raise HoldfastError("the targets are real numbers: a table of labels needs integer class labels")
        labels_below("y", labels, classes)
        known, owners = labels.cpu().numpy(), self.owners
        counted = known != IGNORED
        cells = np.bincount((owners * classes + known)[counted], minlength=self.nodes * classes)
        return cells.reshape(self.nodes, classes)

    @classmethod
    def of_nodes(cls, parts: Sequence[Any]) -> FederatedData:
        """From each node's samples: a pair (x, y), a dictionary of columns, or a map-style torch Dataset.

        A torch Dataset is read once, so random transforms in it are drawn once; then there is a warning.
        """
        expected = "expected a list with one (x, y) pair, dictionary or torch Dataset per node"
        if not isinstance(parts, Sequence) or _is_pair(parts):
            got = "one pair" if isinstance(parts, Sequence) else type(parts).__name__
            raise HoldfastError(f"data: {expected}, got {got}{_dividing(parts)}")
        if len(parts) == 0:
            raise HoldfastError(f"data: there is no node; {expected}")
        trees = [read_samples(f"node {i}", part) for i, part in enumerate(parts)]
        for i, (part, tree) in enumerate(zip(parts, trees, strict=True)):
            if warn_if_random(f"node {i}", part, tree):
                break  # the other nodes' transforms are most likely the same
        counts = np.array([len(next(leaves(tree))) for tree in trees])
        no_empty_node(counts)
        first = described(trees[0])
        for i, tree in enumerate(trees):
            if list(own := described(tree)) != list(first):
                raise HoldfastError(f"node {i}: columns are {list(own)}, those of node 0 {list(first)}")
            for name in own:
                if own[name] != first[name]:
                    raise HoldfastError(
                        f"node {i}: {name} is {own[name]} per sample, that of node 0 is {first[name]}"
                    )
        samples = tree_map(lambda *columns: torch.cat(columns), *trees)
        x, y = samples if isinstance(samples, Pair) else (samples, None)
        return cls(x, y, counts)


def _is_pair(parts: Sequence[Any]) -> bool:
    """Whether ``parts`` look like the samples and targets of one data set."""
    return len(parts) == 2 and all(isinstance(part, Tensor | np.ndarray) for part in parts)


def _dividing(whole: Tree) -> str:
    """How to divide a data set among nodes, for messages."""
    if isinstance(whole, Sequence):
        return "; divide it by hf.partition(x, y, hf.IID(), nodes=10)"
    if hasattr(whole, "iloc"):
        return "; read a frame by hf.from_frame(frame, target=..., node=...)"
    if inspect.isfunction(whole):
        return "; a function of (node, round, step) is given as hf.Stream(nodes=10, batch=function)"
    if isinstance(whole, DataLoader):
        return "; divide loader.dataset by hf.partition_dataset(dataset, hf.IID(), nodes=10)"
    return "; divide it by hf.partition_dataset(dataset, hf.IID(), nodes=10)" if is_dataset(whole) else ""


def no_empty_node(counts: np.ndarray) -> None:
    """Raises, naming the first one, if a node has no sample."""
    empty = np.flatnonzero(counts < 1)
    if len(empty):
        raise HoldfastError(
            f"node {empty[0]} has no samples ({len(empty)} of {len(counts)} nodes are empty): use fewer "
            "nodes, more data or another partition"
        )


def read_samples(where: str, part: Any) -> Tree:
    """The samples of a pair (x, y), a dictionary or a map-style torch Dataset, checked."""
    if is_dataset(part):
        part = stack_items(where, read_items(where, part, range(items_in(where, part))))
    return as_tree(where, part)


def warn_if_random(where: str, part: Any, samples: Tree) -> bool:
    """Warns if ``part`` is a torch Dataset whose items differ from those read into ``samples``."""
    if not is_dataset(part):
        return False
    for i in range(min(ITEMS_READ_AGAIN, len(part))):
        if not alike(as_tree(where, stack_items(where, read_items(where, part, [i]))), samples, i):
            warnings.warn(
                f"{where}: item {i} of the Dataset differs on a second read. Items are read once, before "
                "training, so random transforms are drawn once and frozen. Leave them out, or, for training "
                "data, use hf.from_datasets, which reads items whenever they are drawn",
                UserWarning,
                stacklevel=2,
            )
            return True
    return False


def alike(one: Any, samples: Tree, row: int) -> bool:
    """Whether a tree of a single sample equals ``samples`` at ``row``."""
    pairs = zip(leaves(one), leaves(samples), strict=True)
    return all(a.shape[1:] == b.shape[1:] and torch.equal(a[0], b[row]) for a, b in pairs)


def _targets_in_words(targets: Tensor, classes: int | None) -> str:
    return f"{classes} classes" if classes is not None else f"targets {list(targets.shape[1:]) or 'numbers'}"
