"""Dropout whose masks are a pure function of seed, node, round and step."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from holdfast.core.randomness import RandomStream, philox
from holdfast.core.validation import Whole, check


class Dropout(nn.Module):
    """Zeroes each element with probability ``p`` while training and scales the others by 1 / (1 - p).

    Torch's own ``nn.Dropout`` trains as well here; this layer is for those who call models by themselves.
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
