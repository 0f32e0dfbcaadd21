"""Data sets of Hugging Face and partitions of flwr-datasets: which columns are inputs, which the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from holdfast.core.errors import HoldfastError, unknown
from holdfast.data.federated import FederatedData
from holdfast.data.lazy import LazyData
from holdfast.data.per_node import from_datasets


@dataclass(frozen=True)
class _Selected(Dataset[tuple[Any, Any]]):
    rows: Any
    x: str | tuple[str, ...]
    y: str
    transform: Callable[[Any], Any] | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> tuple[Any, Any]:
        row = self.rows[item]
        given = row[self.x] if isinstance(self.x, str) else {name: row[name] for name in self.x}
        return given if self.transform is None else self.transform(given), row[self.y]


def select_columns(
    dataset: Any,
    *,
    x: str | Sequence[str],
    y: str,
    transform: Callable[[Any], Any] | None = None,
) -> Dataset[tuple[Any, Any]]:
    """``dataset`` of Hugging Face as pairs (x, y) of its columns, as ``hf.train`` takes a node's or ``test``.

    ``x``: the column of the model's input, or the columns of its keyword arguments. ``transform``: a function
    of one sample's input, such as ``lambda image: torch.tensor(np.asarray(image)) / 255``.
    """
    names = dataset.column_names
    for name in [*([x] if isinstance(x, str) else x), y]:
        if name not in names:
            raise unknown("column", name, names)
    return _Selected(dataset, x if isinstance(x, str) else tuple(x), y, transform)


def from_partitioner(
    source: Any,
    *,
    x: str | Sequence[str],
    y: str,
    transform: Callable[[Any], Any] | None = None,
    split: str = "train",
    **options: Any,
) -> FederatedData | LazyData:
    """The partitions of flwr-datasets, a node each, ready for ``hf.train``.

    ``source``: a ``FederatedDataset``, of which the ``split`` is taken, or a ``Partitioner`` that has its
    data set. ``x``, ``y``, ``transform``: see ``select_columns``. ``options``: those of ``from_datasets``.
    """
    parts = [select_columns(part, x=x, y=y, transform=transform) for part in _partitions(source, split)]
    return from_datasets(parts, **options)


def _partitions(source: Any, split: str) -> list[Any]:
    from flwr_datasets import FederatedDataset
    from flwr_datasets.partitioner import Partitioner

    if isinstance(source, FederatedDataset):
        first = source.load_partition(0, split)  # this call lets the partitioner load its data set
        count = source.partitioners[split].num_partitions
        return [first, *(source.load_partition(i, split) for i in range(1, count))]
    if isinstance(source, Partitioner):
        return [source.load_partition(i) for i in range(source.num_partitions)]
    raise HoldfastError(
        f"source: expected a FederatedDataset or a Partitioner of flwr_datasets, got {type(source).__name__}"
        "; for a list of data sets, hf.from_datasets([hf.select_columns(...), ...])"
    )
