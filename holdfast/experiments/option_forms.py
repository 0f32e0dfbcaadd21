"""The forms that options come in: names with parameters, things themselves, and what the user wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
)

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
)
from pydantic_core import core_schema
from torch import nn

from holdfast.channels import CHANNELS, Channel
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.validation import Count, Seed, quoted
from holdfast.data import DATASETS, PARTITIONERS, Partitioner, TrainTest
from holdfast.data.lazy import AnyData
from holdfast.models import MODELS
from holdfast.problem.checks import Augment
from holdfast.problem.losses import LOSSES, Loss, LossFunction, Step
from holdfast.robust import AGGREGATIONS, ATTACKS, Aggregation, Attack
from holdfast.topology import MIXINGS, TOPOLOGIES, Network
from holdfast.topology.graphs import Graph

if TYPE_CHECKING:
    from holdfast.data.per_node import Tests
else:
    Tests = Any  # its definition names pandas, which may not be installed


class Choice(BaseModel):
    """Something chosen by name with its own parameters; a plain string is a name without any."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str  # which one

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def plain(self) -> str | dict[str, Any]:
        """As a file has it: the name alone, or a table."""
        return {"name": self.name, **self.parameters} if self.parameters else self.name


Named = str | Mapping[str, Any] | Choice
"""A name, or a dictionary with a name and parameters, as in an experiment file."""


class AsGiven:
    """Marks an option whose value is read where it is used; a file may name code, as ``module:attribute``."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.any_schema()


class OneOf:
    """Marks an option that is a thing itself, or the name of a registered one, which becomes a ``Choice``."""

    def __init__(self, registry: Registry[Any]) -> None:
        self.registry = registry

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(_named)


class Checked:
    """Marks an option that is given in one of several forms, and kept as ``annotation`` says."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return handler.generate_schema(self.annotation)


def _named(value: Any) -> Any:
    """A name, alone or with parameters, as a choice; anything else as it is."""
    table = {"name": value} if isinstance(value, str) else value
    if isinstance(table, Choice) or not isinstance(table, Mapping):
        return table
    if not isinstance(table.get("name"), str):
        raise ValueError(
            f"expected a name among the keys, such as {{'name': 'torus', 'rows': 2}}, got {quoted(table)}"
        )
    return Choice(**table)


def as_choice(where: str, value: object) -> Choice:
    """``value``, which has to be a name or a table with one, as an experiment file would have it."""
    try:
        found = _named(value)
    except ValueError as error:
        raise HoldfastError(f"{where}: {error}") from None
    if not isinstance(found, Choice):
        raise HoldfastError(f"{where}: expected a name, or a table with a name, got {quoted(value)}")
    return found


@dataclass(frozen=True)
class OfSeed:
    """A model or data that every seed has its own of: ``make`` is given the seed."""

    make: Callable[[int], Any]


def of_seed(value: Any, seed: int) -> Any:
    """``value`` as the job with this ``seed`` has it."""
    return value.make(seed) if isinstance(value, OfSeed) else value


def as_table(value: Any) -> Any:
    """A name as the table that it stands for."""
    return {"name": value} if isinstance(value, str) else value


def _as_list(metrics: Any) -> Any:
    if isinstance(metrics, dict):
        return ["default", metrics]
    if isinstance(metrics, list | tuple) and (own := [item for item in metrics if callable(item)]):
        raise ValueError(f'a figure of your own needs a name, such as {{"mae": mae}}, got {quoted(own[0])}')
    return list(metrics) if isinstance(metrics, tuple) else metrics


def _name_of_type(dtype: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"should be torch.float32 or torch.float64, got {dtype}")
    return str(dtype).removeprefix("torch.")


def _distinct(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"every seed should stand there once, got {quoted(seeds)}")
    return seeds


BatchSize = Count | Literal["full"]
Cadence = Count | Literal["auto"]
Weighting = Literal["uniform", "samples"]
Seeds = Annotated[list[Seed], AfterValidator(_distinct), Field(min_length=1)]
Metrics = Annotated[list[str | dict[str, Any]] | Literal["default"], BeforeValidator(_as_list)]
"""Names, and the user's own by name; a table alone adds them to the default."""
GivenMetrics = Annotated[Sequence[str | dict[str, Any]] | dict[str, Any], Checked(Metrics)]
NumberName = Literal["float32", "float64"]
NumberType = Annotated[
    torch.dtype | NumberName, Checked(Annotated[NumberName, BeforeValidator(_name_of_type)])
]

GivenModel = Annotated[nn.Module | Named, OneOf(MODELS)]
GivenLoss = Annotated[Loss | LossFunction | Named, OneOf(LOSSES)]
GivenData = Annotated[AnyData | Sequence[Any] | TrainTest | Named, OneOf(DATASETS)]
GivenPartition = Annotated[Partitioner | Named | None, OneOf(PARTITIONERS)]
GivenTests = Annotated[Tests | None, AsGiven()]
GivenStep = Annotated[Step | str | None, AsGiven()]
GivenAugment = Annotated[Augment | str | None, AsGiven()]
Topology = Annotated[Network | Graph | Named | None, OneOf(TOPOLOGIES)]
"""Which nodes talk to one another: a name, a graph, or a network."""
GivenMixing = Annotated[Named | None, OneOf(MIXINGS)]
GivenAggregation = Annotated[Aggregation | Named | None, OneOf(AGGREGATIONS)]
GivenAttack = Annotated[Attack | Named | None, OneOf(ATTACKS)]
GivenChannel = Annotated[Channel | Named, OneOf(CHANNELS)]
