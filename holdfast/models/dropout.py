"""Dropout whose masks are a pure function of seed, node, round and step: a layer of ours, and torch's own."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import _VF, Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import RandomStream, philox
from holdfast.core.validation import Whole, check

# --- a layer of ours ------------------------------------------------------------------------------------


class Dropout(nn.Module):
    """Zeroes each element with probability ``p`` while training and scales the others by 1 / (1 - p).

    Torch's own ``nn.Dropout`` trains as well here; this layer is for code that calls models itself.
    Give each layer of a model its own number ``layer``, or their masks coincide. The training step supplies
    the buffer ``key`` = (seed, node, round, step); without it every mask is the same.
    """

    traceable = True  # the same in every call, given its key
    key: Tensor

    def __init__(self, p: float, layer: int = 0) -> None:
        super().__init__()
        self.p = check("Dropout.p", Annotated[float, Field(ge=0, lt=1)], p)
        self.layer = check("Dropout.layer", Whole, layer)
        self.register_buffer("key", torch.zeros(4, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        seed, node, round, step = self.key.unbind()
        blocks = torch.arange(-(-x.numel() // 4), device=x.device)
        words = philox((blocks, step, round, node), (seed, RandomStream.DROPOUT + self.layer))
        kept = words.flatten()[: x.numel()].view(x.shape) >= self.p * 2**32
        return torch.where(kept, x / (1 - self.p), 0)

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}"


def dropout_keys(module: nn.Module) -> list[str]:
    """Qualified names of the ``key`` buffers that a training step has to supply."""
    return [
        f"{name}.key" if name else "key"
        for name, layer in module.named_modules()
        if isinstance(layer, Dropout)
    ]


# --- torch's own functions ------------------------------------------------------------------------------


_now = threading.local()  # ``drawing``: the mode that is on in this thread
_SELU = 1.7580993408473766  # minus the value that alpha dropout sets units to: that of SELU far below zero


class CountedDropout(TorchFunctionMode):
    """While it is on, every dropout of torch draws its mask from ``key`` [4] = (seed, node, round, step).

    Calls are numbered as they come, so two of them differ, also of a layer that is called twice. It covers
    the layers of torch.nn, ``functional.dropout`` and its kin in a user's own code, and attention: torch's
    functions run with their own code, but for the random numbers. Other functions run as they are.

    With ``key`` [n, 4], the samples of n nodes lie end to end, and each node has the masks that it has alone.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.draws = key, 0
        self.shapes: list[tuple[int, ...]] = []  # of the masks of all nodes, [n B, ...]

    def __enter__(self) -> CountedDropout:
        self._outer, _now.drawing = getattr(_now, "drawing", None), self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _now.drawing = self._outer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _counted().get(func, func)(*args, **(kwargs or {}))

    def kept(self, shape: Sequence[int], p: float) -> Tensor:
        """The next mask, true with probability 1 - ``p``."""
        if _is_checkpointed():
            raise HoldfastError(
                "gradient checkpointing of a part with dropout: computed again, it would drop other units; "
                "leave the dropout out of that part, or the checkpointing"
            )
        call, self.draws = self.draws, self.draws + 1
        if self.key.ndim == 1:
            return mask(self.key, call, shape, p)
        self.shapes.append(tuple(shape))
        own = (shape[0] // len(self.key), *shape[1:])
        return vmap(lambda key: mask(key, call, own, p))(self.key).view(shape)

    @contextmanager
    def of_node(self, key: Tensor) -> Iterator[None]:
        """Continues with the ``key`` [4] of one node, inside a function that is mapped over nodes."""
        keys, self.key = self.key, key
        try:
            yield
        finally:
            self.key = keys


def mask(key: Tensor, call: int, shape: Sequence[int], p: float) -> Tensor:
    """The mask of dropout ``call`` of a forward pass, true with probability 1 - ``p`` to within 2^-17.

    Sixteen bits decide on an element: on a CPU, drawing would else take as long as a small transformer.
    """
    seed, node, round, step = key.unbind()
    numbers = math.prod(shape)
    blocks = torch.arange(-(-numbers // 8), device=key.device)
    words = philox((blocks, step, round, node), (seed, RandomStream.DRAW + call), rounds=7).flatten()
    halves = torch.stack([words & 0xFFFF, words >> 16], -1).flatten()
    return halves[:numbers].view(shape) >= p * 2**16


def may_draw(module: nn.Module) -> bool:
    """Whether a training step may draw masks: a layer does, or is of a class that torch does not have."""
    return any(layer.training and _may_draw(layer) for layer in module.modules())


def _may_draw(layer: nn.Module) -> bool:
    known = type(layer).__module__.startswith("torch.nn.") or vars(type(layer)).get("traceable", False)
    probability = layer.dropout if isinstance(layer, nn.MultiheadAttention | nn.RNNBase) else 0.0
    if isinstance(layer, Dropout | nn.modules.dropout._DropoutNd):
        probability = layer.p
    return not known or probability > 0


def _is_checkpointed() -> bool:
    """Whether this runs in a part whose activations are computed again in the backward pass."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:  # torch 2.6 has no answer; its functions are among those that called this one
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
            frame = frame.f_back
        return frame is not None
    hooks = top(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _dropped(input: Tensor, shape: Sequence[int], p: float) -> Tensor:
    if p == 1:
        return torch.zeros_like(input)
    return torch.where(_now.drawing.kept(shape, p), input / (1 - p), 0)


def _alpha_dropped(input: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Klambauer et al., "Self-normalizing neural networks" (2017): mean and variance stay as they are."""
    if p == 1:
        return torch.zeros_like(input)
    scale = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p))
    dropped = torch.where(_now.drawing.kept(shape, p), input, -_SELU)
    return scale * dropped + scale * _SELU * p


def _function(drop: Callable[..., Tensor], features: bool, inplace: bool) -> Callable[..., Tensor]:
    """A function of torch's C library: (input, p, train); ``features`` are dropped as a whole."""

    def counted(input: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0:
            return input
        shape = (*input.shape[:2], *[1] * (input.ndim - 2)) if features else input.shape
        result = drop(input, shape, p)
        return input.copy_(result) if inplace else result

    return counted


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention``, step by step where weights are dropped."""
    if dropout_p == 0:
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    weights = scores.softmax(-1)
    return _dropped(weights, weights.shape, dropout_p) @ value


@cache
def _counted() -> dict[Any, Callable[..., Any]]:
    """The function that runs in place of each function of torch that drops something."""
    library = {
        name + suffix: _function(drop, name.startswith("feature"), suffix == "_")
        for name, drop in (
            ("dropout", _dropped),
            ("feature_dropout", _dropped),
            ("alpha_dropout", _alpha_dropped),
            ("feature_alpha_dropout", _alpha_dropped),
        )
        for suffix in ("", "_")
    }
    # Functions in Python run with their own code, in which other names stand for these. That code may not ask
    # for the mode again, which is off while its functions run.
    names: dict[str, Any] = dict(vars(functional))
    names |= {f"has_torch_function{kind}": lambda *_: False for kind in ("", "_unary", "_variadic")}
    names |= {"_VF": SimpleNamespace(**library), "scaled_dot_product_attention": _attention}
    counted: dict[Any, Callable[..., Any]] = {getattr(_VF, name): ours for name, ours in library.items()}
    counted[functional.scaled_dot_product_attention] = _attention
    python = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    for name in (*python, "multi_head_attention_forward"):
        theirs = getattr(functional, name)
        ours = FunctionType(theirs.__code__, names, name, theirs.__defaults__, theirs.__closure__)
        ours.__kwdefaults__ = theirs.__kwdefaults__
        counted[theirs] = names[name] = ours
    return counted
