"""What a user chooses: the thing itself, or its name, registered or ``module:attribute``, with parameters.

For the user's own calls and files. A federation file may come from others: it names registered things only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from holdfast.algorithms.load import build_algorithm
from holdfast.contract import CHANNELS, Channel, Method
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.validation import check, quoted
from holdfast.data import FederatedData
from holdfast.experiments.config import Choice
from holdfast.models import load_model
from holdfast.problem.losses import LOSSES, Loss

T = TypeVar("T")

Named = str | Mapping[str, Any]
"""A name, or a dictionary with a name and parameters, as in an experiment file."""


def as_choice(where: str, value: Named) -> Choice:
    """``value`` as an experiment file would have it."""
    table = {"name": value} if isinstance(value, str) else dict(value)
    if not isinstance(table.get("name"), str):
        raise HoldfastError(
            f"{where}: expected a name among the keys, such as {{'name': 'torus', 'rows': 2}}, got "
            f"{quoted(value)}"
        )
    return Choice(**table)


def as_method(algorithm: Method | Named) -> Method:
    """The algorithm itself, or the one that is named."""
    if isinstance(algorithm, str | Mapping):
        choice = as_choice("algorithm", algorithm)
        return build_algorithm(choice.name, choice.parameters)
    if not isinstance(algorithm, Method):
        raise HoldfastError(
            f"algorithm: expected one such as holdfast.LocalGECL(lr=0.05), got {quoted(algorithm)}"
        )
    return algorithm


def as_loss(loss: Loss | Named) -> Loss:
    """The loss itself, or the one that is named."""
    return _named_or_given("loss", loss, LOSSES)


def as_channel(channel: Channel | Named) -> Channel:
    """The channel itself, or the one that is named."""
    return _named_or_given("channel", channel, CHANNELS)


def as_module(model: nn.Module | Named, data: FederatedData, loss: Loss, seed: int) -> nn.Module:
    """The model itself, or the one that is named, made for samples like ``data`` and drawn from ``seed``."""
    if isinstance(model, str | Mapping):
        shape, outputs = tuple(data.x.shape[1:]), loss.outputs(data.classes)
        return initial_module(as_choice("model", model), shape, outputs, seed)
    given: nn.Module = check("model", nn.Module, model)
    return given


def _named_or_given(where: str, value: Any, registry: Registry[T]) -> T:
    if isinstance(value, str | Mapping):
        choice = as_choice(where, value)
        return registry.load(choice.name, choice.parameters)
    given: T = check(where, registry.base, value)
    return given


def initial_module(choice: Choice, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """The chosen model as everybody starts from it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return load_model(choice.name, choice.parameters, input_shape, outputs)
