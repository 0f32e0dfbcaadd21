"""The forward pass: how samples enter a model, and which part of its answer a loss reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.tree import Tree, is_tree, tree_map
from holdfast.data.samples import inputs_of

HALF = (torch.float16, torch.bfloat16)


def forward(model: nn.Module, samples: Tree) -> Any:
    """The outputs of ``model`` for a batch, in float32 at least.

    Inputs are one tensor, or keyword arguments in a dictionary, or arguments in a tuple. Of an answer that
    has ``logits``, as a Hugging Face model's has, these are the outputs.
    """
    inputs = inputs_of(samples)
    if isinstance(inputs, Mapping):
        answer = model(**inputs)
    elif isinstance(inputs, tuple):
        answer = model(*inputs)
    else:
        answer = model(inputs)
    outputs = logits_of(answer)
    return tree_map(_in_full, outputs) if is_tree(outputs) else outputs


def logits_of(answer: Any) -> Any:
    """The logits of a model's answer, if it has any, or else the answer."""
    if isinstance(answer, Tensor):
        return answer
    if isinstance(answer, Mapping):
        return answer.get("logits", answer)
    return getattr(answer, "logits", answer)


def _in_full(outputs: Tensor) -> Tensor:
    return outputs.float() if outputs.dtype in HALF else outputs
