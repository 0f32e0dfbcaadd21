"""Data sets by name: ours, or what a ``module:function`` of the user's own returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.user_code import import_named
from holdfast.core.validation import quoted
from holdfast.data.dataset import DATASETS, Dataset
from holdfast.data.federated import FederatedData


def load_data(
    name: str, given: Mapping[str, Any], *, nodes: int, seed: int, data_dir: Path | None
) -> Dataset | FederatedData:
    """The registered data set ``name``, or what the user's ``module:function`` returns, given ``given``.

    A user's function also gets ``nodes``, ``seed`` and ``data_dir`` if it has parameters of these names. It
    returns a ``Dataset``, which is divided among the nodes, or ``FederatedData``, which already are. For the
    user's own experiment files only: a name with a colon imports a module.
    """
    context = {"nodes": nodes, "seed": seed, "data_dir": data_dir}
    if ":" not in name:
        return DATASETS.build(name, given, **context)
    function = import_named("dataset", name, "my_module:load")
    if not callable(function):
        raise HoldfastError(f"dataset {name!r}: expected a function, got {quoted(function)}")
    for key in given:
        if key in context:
            raise HoldfastError(f"dataset {name!r}: {key!r} comes from the experiment, leave it out")
    signature = inspect.signature(function)
    arguments = {**given, **{key: value for key, value in context.items() if key in signature.parameters}}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise HoldfastError(f"dataset {name!r}: {error}; its signature is {signature}") from None
    found = function(**arguments)
    if not isinstance(found, Dataset | FederatedData):
        raise HoldfastError(
            f"dataset {name!r}: expected it to return hf.Dataset or hf.FederatedData, got {quoted(found)}"
        )
    if isinstance(found, FederatedData) and found.nodes != nodes:
        raise HoldfastError(
            f"dataset {name!r}: it split the data over {found.nodes} nodes, but problem.nodes is {nodes}"
        )
    return found
