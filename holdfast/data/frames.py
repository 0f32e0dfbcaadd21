"""Tables: pandas frames and CSV files, with the organisations named by a column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holdfast.core.errors import HoldfastError, unknown
from holdfast.data.dataset import DATASETS, Dataset, TrainTest
from holdfast.data.federated import FederatedData
from holdfast.data.files import Folder, given_path
from holdfast.data.grouping import Grouping

if TYPE_CHECKING:
    import pandas


def from_frame(
    frame: pandas.DataFrame | str | Path,
    *,
    target: str,
    node: str | None = None,
    one_hot: Sequence[str] = (),
) -> FederatedData:
    """A pandas frame, or a CSV file, as samples [N, columns] in float32 with targets in column ``target``.

    ``node``: the column that says to which node, such as a hospital, a row belongs; nodes are sorted by name,
    and ``names`` of the result keeps them. None: all rows belong to one node (then see ``hf.partition``).
    ``one_hot``: columns of words; each of their words becomes a column of zeros and ones.
    Targets that are whole numbers, words or truth values are class labels; words are numbered in their order.
    """
    table = _checked(_read(frame), target, node, *one_hot)
    inputs = [name for name in table.columns if name not in (target, node)]
    if not inputs:
        raise HoldfastError(f"there is no column of inputs beside {target!r}")
    columns = [part for name in inputs for part in _numbers(str(name), table[name], name in one_hot)]
    x, y = torch.from_numpy(np.stack(columns, axis=1)), torch.from_numpy(_targets(target, table[target]))
    if node is None:
        return FederatedData(x, y, np.array([len(x)]))
    return _by_organisation(x, y, node, table[node].to_numpy())


@DATASETS.register("csv")
def csv(
    file: str,
    target: str,
    node: str | None = None,
    one_hot: list[str] | None = None,
    test_file: str | None = None,
    data_dir: Folder = None,
) -> Dataset | TrainTest:
    """A CSV file with the targets in column ``target`` and, if rows belong to organisations, their ``node``.

    Without ``node``, rows are divided by the partition. ``one_hot``: columns of words. ``test_file``: a file
    with the same columns.
    """
    where = "dataset 'csv'"
    train = _read(given_path(where, file, data_dir))
    test = None if test_file is None else _read(given_path(where, test_file, data_dir))
    table = _checked(train if test is None else _both(train, test), node)
    told: dict[str, Any] = {"target": target, "one_hot": one_hot or ()}
    # Words are numbered, and spread over columns, in both files together.
    together = from_frame(table if node is None else table.drop(columns=node), **told)
    x, y, cut = together.x, together.y, len(train)
    assert y is not None
    if node is None:
        return Dataset(x[:cut], y[:cut], x[cut:], y[cut:], classes=together.classes)
    tests = None if test is None else (x[cut:], y[cut:])
    return TrainTest(_by_organisation(x[:cut], y[:cut], node, train[node].to_numpy()), tests)


def _checked(table: Any, *names: str | None) -> Any:
    """``table``, if it has the columns ``names``, and a value in every place."""
    for name in filter(None, names):
        if name not in table.columns:
            raise unknown("column", name, list(map(str, table.columns)))
    missing = {name: int(count) for name, count in table.isna().sum().items() if count}
    if missing:
        told = ", ".join(f"{name!r} in {count} rows" for name, count in missing.items())
        raise HoldfastError(f"values are missing: {told}; fill them, or drop these rows or columns")
    return table


def _both(train: Any, test: Any) -> Any:
    """The rows of both tables."""
    import pandas

    if set(test.columns) != set(train.columns):
        differing = sorted(map(str, set(test.columns) ^ set(train.columns)))
        raise HoldfastError(f"test_file: only one of both files has the column {differing[0]!r}")
    return pandas.concat([train, test], ignore_index=True)


def _by_organisation(x: Any, y: Any, node: str, owner: np.ndarray) -> FederatedData:
    owners = Grouping.of(node, owner)
    order = np.argsort(owners.of_row, kind="stable")
    return FederatedData(x[order], y[order], np.bincount(owners.of_row), names=owners.names)


def _read(frame: Any) -> Any:
    try:
        import pandas
    except ImportError:
        raise HoldfastError("pandas is not installed: pip install 'holdfast[pandas]'") from None
    if isinstance(frame, pandas.DataFrame):
        table = frame
    elif isinstance(frame, str | Path):
        try:
            table = pandas.read_csv(frame)
        except OSError as error:
            raise HoldfastError(f"cannot read {str(frame)!r}: {error.strerror}") from None
        except (ValueError, pandas.errors.ParserError) as error:
            raise HoldfastError(f"{str(frame)!r} is not a CSV file: {str(error).splitlines()[0]}") from None
    else:
        raise HoldfastError(f"expected a pandas frame or the path of a CSV file, got {type(frame).__name__}")
    if len(table) == 0:
        raise HoldfastError("the table has no rows")
    return table


def _numbers(name: str, column: Any, one_hot: bool) -> list[np.ndarray]:
    """The float32 columns that one column of the table becomes."""
    values = column.to_numpy()
    if one_hot:
        return [(values == word).astype(np.float32) for word in sorted(set(values.tolist()), key=str)]
    if values.dtype.kind not in "biuf":
        words = sorted(set(map(str, values.tolist())))[:3]
        raise HoldfastError(
            f"column {name!r} holds {', '.join(map(repr, words))}, ..., which are no numbers: name it in "
            "one_hot, or leave it out"
        )
    return [values.astype(np.float32)]


def _targets(name: str, column: Any) -> np.ndarray:
    values = column.to_numpy()
    if values.dtype.kind == "f":
        return values.astype(np.float32)  # type: ignore[no-any-return]
    if values.dtype.kind in "biu":
        return values.astype(np.int64)  # type: ignore[no-any-return]
    return Grouping.of(name, values).of_row
