"""What Python objects are, as text: equal for equal settings in any process, to tell whether one changed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import networkx as nx
import numpy as np
import torch
from scipy.sparse import issparse
from torch import Tensor, nn

NUMBERS = (int, float, complex, np.generic)
PLAIN = (str, bytes, *NUMBERS, type(None), torch.dtype, torch.device, PurePath)  # known by their repr


def fingerprint(value: Any) -> str:
    """A digest of ``value``; of a module, the values of parameters that are trained do not count."""
    return _digest(_described(value, {}))


def _digest(description: Any) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _described(value: Any, seen: dict[int, tuple[Any, str]]) -> Any:
    """What ``value`` is, as JSON; ``seen`` keeps objects, so that each is looked at once and cycles end."""
    if isinstance(value, PLAIN):
        return repr(value)
    if id(value) not in seen:
        seen[id(value)] = (value, "itself")
        seen[id(value)] = (value, _digest(_parts(value, partial(_described, seen=seen))))
    return seen[id(value)][1]


def _parts(value: Any, inner: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return _array(value)
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, Mapping):
        return ["mapping", sorted([str(key), inner(each)] for key, each in value.items())]
    if isinstance(value, set | frozenset):
        return ["set", sorted(map(inner, value))]
    if isinstance(value, list | tuple | range):
        return [type(value).__name__, [inner(each) for each in value]]
    if isinstance(value, nx.Graph):
        return ["graph", sorted(map(str, value.nodes)), sorted(map(str, value.edges(data=True)))]
    if issparse(value):
        rows = value.tocsr()
        return ["sparse", list(rows.shape), *map(_array, (rows.data, rows.indices, rows.indptr))]
    if isinstance(value, FunctionType):
        closed = [inner(cell.cell_contents) for cell in value.__closure__ or ()]
        named = [inner(value.__kwdefaults__)] if value.__kwdefaults__ else []
        return [value.__qualname__, _code(value.__code__), closed, inner(value.__defaults__), *named]
    if isinstance(value, MethodType):
        return ["method", inner(value.__func__), inner(value.__self__)]
    if isinstance(value, partial):
        return ["partial", inner(value.func), inner(value.args), inner(value.keywords)]
    if not isinstance(value, type) and hasattr(type(value), "known_by"):  # what a class says counts
        return [_name(type(value)), inner(value.known_by())]
    if isinstance(value, type | BuiltinFunctionType):
        return _name(value)
    own = _attributes(value)
    if own is None:
        return [_name(type(value)), _without_addresses(repr(value))]
    return [_name(type(value)), [[name, inner(getattr(value, name))] for name in own]]


def _attributes(value: Any) -> list[str] | None:
    """The names of what an object consists of; None if that is not known."""
    if is_dataclass(value):
        return sorted(field.name for field in fields(value))
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return sorted({*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))})


def _names(slots: Any) -> list[str]:
    """``__slots__`` may be a single name; these two are no attributes of one's own."""
    given = [slots] if isinstance(slots, str) else slots
    return [name for name in given if name not in ("__dict__", "__weakref__")]


def _array(value: Tensor | np.ndarray) -> Any:
    array = value.detach().cpu().contiguous() if isinstance(value, Tensor) else np.ascontiguousarray(value)
    if isinstance(array, Tensor):
        array = array.flatten().view(torch.uint8).numpy()  # bfloat16 too, which numpy does not know
    elif array.dtype == object:
        return [_described(each, {}) for each in array.flatten().tolist()]
    return [str(value.dtype), list(value.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def _module(module: nn.Module) -> Any:
    """Its layers and the forms of its parameters; values only of what is not trained."""
    layers = [
        [name, _name(type(layer)), _without_addresses(layer.extra_repr()), *_settings(layer)]
        for name, layer in module.named_modules()
    ]
    trained = [
        [name, str(p.dtype), list(p.shape)] for name, p in module.named_parameters() if p.requires_grad
    ]
    frozen = [[name, _array(p)] for name, p in module.named_parameters() if not p.requires_grad]
    return ["module", layers, trained, frozen, [[name, _array(b)] for name, b in module.named_buffers()]]


def _settings(layer: nn.Module) -> list[Any]:
    """What ``extra_repr`` does not tell: eval mode, and the numbers and words of a class of one's own."""
    told: list[Any] = [] if layer.training else ["eval"]
    if not type(layer).__module__.startswith("torch."):
        own = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        told += [[name, repr(own[name])] for name in sorted(own) if isinstance(own[name], (*NUMBERS, str))]
    return told


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "", text)


def _code(code: CodeType) -> Any:
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names)]


def _name(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{getattr(value, '__qualname__', kind.__qualname__)}"
