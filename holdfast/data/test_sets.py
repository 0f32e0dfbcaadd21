"""What models are tested on: one set for all nodes, or one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves
from holdfast.data.federated import FederatedData, read_samples, warn_if_random
from holdfast.data.frames import divided, from_frame, is_table
from holdfast.data.lazy import AnyData

if TYPE_CHECKING:
    import pandas
    from torch.utils.data import Dataset

TestSamples: TypeAlias = "tuple[Any, Any] | Mapping[str, Any] | Dataset[Any]"
"""A pair (x, y), a dictionary of tensors or a map-style Dataset."""

Tests: TypeAlias = "TestSamples | Sequence[TestSamples] | FederatedData | pandas.DataFrame | str | Path"
"""What ``test=`` takes: one set, a set for each node, or a table that is read like the training data."""


def read_tests(test: Tests | None, data: AnyData) -> tuple[Any, list[int] | None]:
    """All test samples, or None, and how many are each node's own if there is a set for every node.

    ``data`` are those for training: a frame is read as they were.
    """
    if test is None:
        return None, None
    if is_table(test):
        if not isinstance(data, FederatedData) or data.table is None:
            raise HoldfastError(
                "test: a table is read like the training data, and these are none of hf.from_frame; give "
                "(x, y)"
            )
        test = from_frame(test, like=data)
    if isinstance(test, FederatedData):
        sets = divided(test)
    elif isinstance(test, list) and not any(isinstance(part, Tensor | np.ndarray) for part in test):
        sets = FederatedData.of_nodes(test)
    else:
        samples = read_test("test", test)
        if not len(next(leaves(samples))):
            raise HoldfastError("test: there is no sample; leave test= out, or give some")
        return samples, None
    _check_words(sets, data)
    if isinstance(test, FederatedData) and sets.nodes == 1:
        return sets.samples, None
    if sets.nodes != data.nodes:
        raise HoldfastError(
            f"test: expected one set, or a list of {data.nodes}, one for each node, got {sets.nodes}"
        )
    return sets.samples, sets.counts.tolist()


def read_test(where: str, part: Any) -> Any:
    """``read_samples``, with a warning if ``part`` is a Dataset with random transforms."""
    samples = read_samples(where, part)
    warn_if_random(where, part, samples)
    return samples


def _check_words(test: FederatedData, data: AnyData) -> None:
    """Refuses a frame that was read apart from the training data, in another way."""
    table, read = test.table, data.table if isinstance(data, FederatedData) else None
    if table is None or (read is None and not table.words):
        return
    do = "give the frame itself, test=frame, or read it by hf.from_frame(frame, like=data)"
    for column, words in table.words.items():
        if read is None or read.words.get(column) != words:
            raise HoldfastError(
                f"test: the words of column {column!r} were numbered apart from those for training; {do}"
            )
    if read is not None and read.inputs != table.inputs:
        raise HoldfastError(f"test: columns are {list(table.inputs)}, for training {list(read.inputs)}; {do}")
