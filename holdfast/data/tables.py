"""Tables: pandas frames and CSV files, with the organisations named by a column."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.tree import leaves
from holdfast.data.dataset import DATASETS, Dataset, TrainTest
from holdfast.data.federated import FederatedData, TableForm, Whose
from holdfast.data.files import Folder, given_path, in_short
from holdfast.data.partition import Grouping
from holdfast.data.samples import as_tree

if TYPE_CHECKING:
    import pandas


# --- tables: pandas frames and CSV files, with the organisations named by a column ----------------------


def from_frame(
    frame: pandas.DataFrame | str | Path,
    *,
    target: str | None = None,
    node: str | None = None,
    one_hot: str | Sequence[str] = (),
    like: FederatedData | None = None,
) -> FederatedData:
    """A pandas frame, or a CSV file, as samples [N, columns] in float32 with targets in column ``target``.

    ``node``: the column that says to which node, such as a hospital, a row belongs; nodes are sorted by name,
    and ``names`` of the result keeps them. None: all rows belong to one node (then see ``hf.partition``).
    ``one_hot``: columns of words; each of their words becomes a column of zeros and ones.
    Targets that are whole numbers, words or truth values are class labels; words are numbered in their order.
    ``like``: data that came from a frame. This one, such as a test set or new rows to predict, is read in the
    same way, with the same numbers for words. Its rows keep their order, so that outputs of a model belong to
    the rows of the frame. If it has the column of the nodes, ``hf.train`` divides it among them.
    """
    if like is None:
        words = [one_hot] if isinstance(one_hot, str) else list(one_hot)
        table = _checked(_read(frame, words))
        return _samples(table, _form(table, target, node, words))
    if target or node or one_hot:
        raise HoldfastError("like: it says how columns are read; leave target, node and one_hot out")
    if like.table is None:
        raise HoldfastError("like: expected data that came from hf.from_frame, or parts of them")
    words = [name for name, known in like.table.words.items() if isinstance(known[0], str)]
    table, form = _checked(_read(frame, words)), like.table
    data = replace(_samples(table, replace(form, node=None)), table=form)
    names = like.names if like.whose is None else like.whose.names
    if form.node is None or names is None or form.node not in table.columns:
        return data
    return replace(data, whose=Whose(table[form.node].to_numpy(), form.node, names))


def divided(data: FederatedData) -> FederatedData:
    """``data`` among the nodes of their rows, if they are in the order of a table that names these."""
    if data.whose is None:
        return data
    assert data.y is not None
    owner, node, names = data.whose.of_row, data.whose.node, data.whose.names
    grouped = _by_organisation(data.x, data.y, node, owner, names)
    return replace(grouped, table=data.table, class_names=data.class_names)


def is_table(value: Any) -> TypeGuard[pandas.DataFrame | str | Path]:
    """Whether ``value`` is a pandas frame or the path of a file."""
    library = sys.modules.get("pandas")  # to have a frame, it must have been imported
    return isinstance(value, str | Path) or (library is not None and isinstance(value, library.DataFrame))


def _form(table: Any, target: str | None, node: str | None, one_hot: Sequence[str]) -> TableForm:
    """How ``table`` is to be read."""
    if target is None:
        raise HoldfastError("target: name the column of targets, or give like=, data of another frame")
    _checked(table, target, node, *one_hot)
    inputs = tuple(name for name in table.columns if name not in (target, node))
    if not inputs:
        raise HoldfastError(f"there is no column of inputs beside {target!r}")
    words = {name: tuple(sorted(set(table[name].tolist()), key=str)) for name in one_hot}
    if table[target].to_numpy().dtype.kind not in "fbiu":
        words[target] = Grouping.of(target, table[target].to_numpy()).names
    return TableForm(target, inputs, node, words)


def _samples(table: Any, form: TableForm) -> FederatedData:
    """The rows of ``table``, by node if ``form`` names a column of nodes, else in their order."""
    _checked(table, form.target, *form.inputs)
    columns = [part for name in form.inputs for part in _numbers(name, table[name], form.words.get(name))]
    x = torch.from_numpy(np.stack(columns, axis=1))
    y = torch.from_numpy(_targets(form.target, table[form.target], form.words.get(form.target)))
    if form.node is None:
        data = FederatedData(x, y, np.array([len(x)]))
    else:
        data = _by_organisation(x, y, form.node, table[form.node].to_numpy())
    truth = ("False", "True") if table[form.target].to_numpy().dtype.kind == "b" else None
    return replace(data, table=form, class_names=form.words.get(form.target, truth))


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
    where, words = "dataset 'csv'", one_hot or []
    train = _read(given_path(where, file, data_dir), words)
    test = None if test_file is None else _read(given_path(where, test_file, data_dir), words)
    table = _checked(train if test is None else _both(train, test), node)
    options: dict[str, Any] = {"target": target, "one_hot": words}
    # Words are numbered, and spread over columns, in both files together.
    together = from_frame(table if node is None else table.drop(columns=node), **options)
    x, y, names, cut = together.x, together.y, together.class_names, len(train)
    assert y is not None
    if node is None:
        return Dataset(x[:cut], y[:cut], x[cut:], y[cut:], classes=together.classes, class_names=names)
    tests = None if test is None else (x[cut:], y[cut:])
    data = _by_organisation(x[:cut], y[:cut], node, train[node].to_numpy())
    return TrainTest(replace(data, class_names=names), tests)


def _checked(table: Any, *names: Any) -> Any:
    """``table``, if it has the columns ``names``, and a value in every place."""
    for name in filter(None, names):
        if name not in table.columns:
            raise unknown("column", name, list(map(str, table.columns)))
    missing = {name: int(count) for name, count in table.isna().sum().items() if count}
    if missing:
        missed = ", ".join(f"{name!r} in {count} rows" for name, count in missing.items())
        raise HoldfastError(f"values are missing: {missed}; fill them, or drop these rows or columns")
    return table


def _both(train: Any, test: Any) -> Any:
    """The rows of both tables."""
    import pandas

    if set(test.columns) != set(train.columns):
        differing = sorted(map(str, set(test.columns) ^ set(train.columns)))
        raise HoldfastError(f"test_file: only one of both files has the column {differing[0]!r}")
    return pandas.concat([train, test], ignore_index=True)


def _by_organisation(
    x: Any, y: Any, node: str, owner: np.ndarray, nodes: Sequence[str] | None = None
) -> FederatedData:
    """Rows by their ``owner``; ``nodes``: what these must be called, in their order, if it is known."""
    owners = Grouping.of(node, owner)
    names = owners.names if nodes is None else tuple(nodes)
    all_on_all = f"drop the column {node!r} to test every node on all rows"
    of_row = owners.among(f"column {node!r}", names, all_on_all)
    if absent := [name for name in names if name not in owners.names]:
        raise HoldfastError(f"column {node!r}: {absent[0]!r} has no row; {all_on_all}")
    order = np.argsort(of_row, kind="stable")
    return FederatedData(x[order], y[order], np.bincount(of_row), names=names)


def _read(frame: Any, words: Sequence[str] = ()) -> Any:
    """A table; in a file, columns of ``words`` are text even where all are numbers."""
    try:
        import pandas
    except ImportError:
        raise HoldfastError("pandas is not installed: pip install 'holdfast[pandas]'") from None
    if isinstance(frame, pandas.DataFrame):
        table = frame
    elif isinstance(frame, str | Path):
        try:
            table = pandas.read_csv(frame, dtype=dict.fromkeys(words, "str"))
        except OSError as error:
            raise HoldfastError(f"cannot read {str(frame)!r}: {error.strerror}") from None
        except (ValueError, pandas.errors.ParserError) as error:
            raise HoldfastError(f"{str(frame)!r} is not a CSV file: {str(error).splitlines()[0]}") from None
    else:
        raise HoldfastError(f"expected a pandas frame or the path of a CSV file, got {type(frame).__name__}")
    if len(table) == 0:
        raise HoldfastError("the table has no rows")
    return table


def _numbers(name: Any, column: Any, words: Sequence[Any] | None) -> list[np.ndarray]:
    """The float32 columns that one column of the table becomes; one for each of its ``words``, if any."""
    values = column.to_numpy()
    if words is not None:
        if strange := [word for word in values.tolist() if word not in words]:
            known = ", ".join(map(repr, words))
            raise HoldfastError(f"column {name!r}: {strange[0]!r} is not among {known}; {_READ_TOGETHER}")
        return [(values == word).astype(np.float32) for word in words]
    if values.dtype.kind not in "biuf":
        found = sorted(set(map(str, values.tolist())))[:3]
        raise HoldfastError(
            f"column {str(name)!r} holds {', '.join(map(repr, found))}, ..., which are not numbers: name it "
            "in one_hot, or leave it out"
        )
    return [values.astype(np.float32)]


def _targets(name: str, column: Any, words: Sequence[str] | None) -> np.ndarray:
    values = column.to_numpy()
    if words is not None:
        return Grouping.of(name, values).among(f"column {name!r}", words, _READ_TOGETHER)
    if values.dtype.kind not in "fbiu":
        raise HoldfastError(f"column {name!r} holds words, and that of the training data numbers")
    numbers: np.ndarray = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
    return numbers


_READ_TOGETHER = "leave these rows out, or read the words from a frame that has all of them"


# --- samples as named columns in a file of a node's own -------------------------------------------------


PARTS = ("train", "test")


@dataclass(frozen=True, eq=False)
class Columns:
    """Dictionaries of tensors [N, ...], to train on and, if there are any, to test on."""

    train: dict[str, Tensor]
    test: dict[str, Tensor] | None = None

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of one sample in every column."""
        return {name: list(column.shape[1:]) for name, column in self.train.items()}


def has_columns(path: Path) -> bool:
    """Whether an npz file holds columns such as ``train/input_ids``, not ``x_train`` and ``y_train``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.startswith("train/") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False  # reading the file will show


def read_columns(path: Path) -> Columns:
    """The columns of an npz file whose arrays are called ``train/NAME`` and ``test/NAME``."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise HoldfastError(f"{path}: cannot be read ({in_short(error)})") from None
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, array in arrays.items():
        part, _, column = name.partition("/")
        if part not in PARTS or not column:
            raise HoldfastError(f"{path}: expected arrays train/NAME and test/NAME, got {name!r}")
        parts[part][column] = array
    trees = {part: as_tree(f"{path}, {part}", columns) for part, columns in parts.items() if columns}
    if "test" in trees and list(trees["test"]) != list(trees["train"]):
        raise HoldfastError(
            f"{path}: columns to test on are {list(trees['test'])}, to train on {list(trees['train'])}"
        )
    return Columns(trees["train"], trees.get("test"))


def write_columns(path: Path, columns: Columns) -> None:
    """A file that ``read_columns`` reads."""
    trees = {"train": columns.train, "test": columns.test or {}}
    named: dict[str, Any] = {
        f"{part}/{name}": column.cpu().numpy()
        for part, tree in trees.items()
        for name, column in tree.items()
    }
    np.savez(path, **named)


def count(columns: dict[str, Tensor]) -> int:
    """Samples in ``columns``."""
    return len(next(leaves(columns)))
