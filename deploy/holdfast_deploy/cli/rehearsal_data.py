"""The data that members of a rehearsal train on: parts of somebody's own, or random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map
from holdfast.data import DATASETS, IID, Dataset, partition
from holdfast.data.samples import Pair
from holdfast.data.tables import Columns, write_columns
from holdfast_deploy.federation_file import FederationFile
from holdfast_deploy.sites import read_data

RANDOM_SAMPLES = 64  # per node, where there are no data to rehearse with


def write_data(federation: FederationFile, data: str | None, folder: Path) -> None:
    """One npz file for each node, as the sites would have it."""
    for i, (name, part) in enumerate(zip(federation.names, _split(federation, data), strict=True)):
        count, own = federation.node[i].samples, len(next(leaves(part.train)))
        if count is not None and own < count:
            raise HoldfastError(f"{name}: the file says {count} samples, the rehearsal has {own}")
        train = tree_map(lambda column, count=count: column[:count], part.train)
        if isinstance(train, Pair):
            test = {} if part.test is None else {"x_test": part.test.x, "y_test": part.test.y}
            np.savez(folder / f"{name}.npz", x_train=train.x, y_train=train.y, **test)
        else:
            write_columns(folder / f"{name}.npz", Columns(train, part.test))


class Part(NamedTuple):
    """What a node has in a rehearsal: trees of samples."""

    train: Any
    test: Any


def _split(federation: FederationFile, data: str | None) -> list[Part]:
    nodes, seed, problem = len(federation.node), federation.seed, federation.problem
    if data is None:
        if problem.input_shape is None:
            raise HoldfastError("columns cannot be made up: give --data, an npz file like a node's own")
        rng = np.random.default_rng(seed)
        parts = []
        for node in federation.node:
            count = (node.samples or RANDOM_SAMPLES) + RANDOM_SAMPLES // 4
            x = torch.from_numpy(rng.standard_normal((count, *problem.input_shape)).astype(np.float32))
            y = rng.standard_normal(count).astype(np.float32)
            labels = torch.from_numpy(
                y if problem.classes is None else rng.integers(0, problem.classes, count)
            )
            cut = count - RANDOM_SAMPLES // 4
            parts.append(Part(Pair(x[:cut], labels[:cut]), Pair(x[cut:], labels[cut:])))
        return parts
    dataset = read_data(Path(data)) if Path(data).suffix == ".npz" else _registered(data, nodes, seed)
    if isinstance(dataset, Columns):
        train, test = dataset.train, dataset.test
        order = np.random.default_rng(seed).permutation(len(next(leaves(train))))
        rows = [torch.from_numpy(np.sort(own)) for own in np.array_split(order, nodes)]
        return [Part(tree_map(lambda column, own=own: column[own], train), test) for own in rows]
    split = partition(dataset.x_train, dataset.y_train, IID(), nodes=nodes, seed=seed)
    return [Part(split.node(i), Pair(dataset.x_test, dataset.y_test)) for i in range(nodes)]


def _registered(data: str, nodes: int, seed: int) -> Dataset:
    found = DATASETS.build(data, {}, nodes=nodes, seed=seed)
    if not isinstance(found, Dataset):
        raise HoldfastError(f"--data {data}: a rehearsal divides arrays only; give an npz file")
    return found
