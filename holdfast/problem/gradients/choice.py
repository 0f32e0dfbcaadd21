"""Which backend computes the rows of a problem, and why."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import tree_map
from holdfast.problem.gradients.backend import Activations, Backend, BackendName, no_key
from holdfast.problem.gradients.loop import CONVOLUTIONS, Loop
from holdfast.problem.gradients.stacked import Stacked, stacked_gradient
from holdfast.problem.row_loss import RowLoss


def choose_backend(loss: RowLoss, activations: Activations, wanted: BackendName = "auto") -> Backend:
    """Stacked, unless rows are faster one by one or cannot be stacked; ``wanted`` overrules that.

    It calls the model, so it has to be asked before anything is compiled.
    """
    if wanted == "loop":
        return Loop(loss, activations, 'as backend = "loop" asks for')
    if wanted == "stacked":
        if not can_be_stacked(loss, activations):
            raise _refusal(loss, activations.example.samples)
        return Stacked(loss, activations, 'as backend = "stacked" asks for')
    model = loss.model
    convolutional = any(isinstance(part, CONVOLUTIONS) for part in model.template.modules())
    if convolutional and model.x0.device.type == "cpu":
        return Loop(loss, activations, "as convolutions want it")
    if not can_be_stacked(loss, activations):
        return Loop(loss, activations, "as the model cannot be stacked")
    return Stacked(loss, activations)


def can_be_stacked(loss: RowLoss, activations: Activations) -> bool:
    """Whether stacked calls of the model, in evaluation and for its gradient, work for two rows."""
    rows = loss.model.x0.expand(2, -1).contiguous()
    batch = tree_map(lambda part: torch.stack([part] * 2), activations.example)
    keys = torch.stack([no_key(rows)] * 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an operation is slow if it is stacked
            with torch.no_grad():
                torch.func.vmap(loss.outputs)(rows, batch.samples)
            stacked_gradient(loss)(rows, batch, keys)
    except RuntimeError:  # what torch's function transforms raise for what they cannot batch
        return False
    return True


def _refusal(loss: RowLoss, samples: Any) -> HoldfastError:
    """Why a model cannot be stacked, naming the layer."""
    loss.probe(samples, stacked=False)  # a plain mistake in the model is told as such
    try:
        loss.probe(samples, stacked=True)
    except HoldfastError as error:
        return HoldfastError(f'backend = "stacked": {error}; use backend = "loop"')
    return HoldfastError('backend = "stacked": the loss of the model cannot be stacked; use backend = "loop"')
