"""What travels between a strategy and its clients, and what clients keep: named arrays and a few numbers.

A message has two records. ``holdfast`` says what it is about: a ``Control`` from the server, an ``Answer``
from a client. ``holdfast.arrays`` holds tensors by their dotted names. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import Tree, named_leaves, tree_map
from holdfast.core.validation import explain

ABOUT, ARRAYS = "holdfast", "holdfast.arrays"

Named = dict[str, Tensor]
M = TypeVar("M", bound=BaseModel)


class Control(BaseModel):
    """What the server asks of a client.

    Stage 0 is the start of a method, and stage r + 1 its round r. ``JOIN`` only asks for the client's name.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    stage: int
    method: str  # a digest of the server's; clients compare it with their own
    seed: int
    dtype: str
    counts: list[int]  # [n]: every node's samples, 0 where that is not known yet
    taken: int = -1  # the last stage whose message of this client the server has used; -1: none
    means: int = 0  # the number of exchanges of this stage that are averaged already
    ahead: bool = False  # whether a method that is averaged continues to the next stage, as far as it can


JOIN = -1


class Answer(BaseModel):
    """What a client says of itself."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    node: int  # its number, 0..n-1
    samples: int
    stage: int
    done: bool  # whether the stage is finished, or waits for a mean


def content(about: BaseModel, tree: Tree = ()) -> RecordDict:
    """A message."""
    return RecordDict({ABOUT: ConfigRecord(about.model_dump()), ARRAYS: to_record(tree)})


def read_about(kind: type[M], records: RecordDict) -> M:
    """What a message is about; refuses any that is not the bridge's."""
    if ABOUT not in records.config_records:
        raise HoldfastError(
            "the message is not from holdfast.flower: use flower.Strategy in the ServerApp and flower.Client "
            "in the ClientApp, both of this version"
        )
    try:
        return kind.model_validate(dict(records.config_records[ABOUT]))
    except ValidationError as error:
        raise HoldfastError(f"the message is not one of this version of holdfast: {explain(error)}") from None


def to_record(tree: Tree) -> ArrayRecord:
    """The tensors of ``tree`` by name."""
    return ArrayRecord({name: Array(t.detach().cpu().numpy()) for name, t in named_leaves(tree)})


def from_record(record: ArrayRecord) -> Named:
    """The tensors by name."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def below(named: Named, prefix: str) -> Named:
    """Those whose names begin with ``prefix`` and a dot, without it; that of the name itself is ``value``."""
    inner = {name[len(prefix) + 1 :]: t for name, t in named.items() if name.startswith(f"{prefix}.")}
    return inner | ({"value": named[prefix]} if prefix in named else {})


def as_tree(named: Named, like: Any, where: str) -> Tree:
    """A tree like ``like``, which may be on the device "meta"; other names, shapes or types are refused."""
    expected = {name: (list(t.shape), t.dtype) for name, t in named_leaves(like)}
    given = {name: (list(t.shape), t.dtype) for name, t in named.items()}
    if given != expected:
        raise HoldfastError(f"{where}: expected the arrays {expected}, got {given}")
    tensors = iter([named[name] for name in expected])
    return tree_map(lambda _: next(tensors), like)
