"""Which backend computes the rows of a problem, and why."""

from __future__ import annotations

import math
import warnings

import torch
from torch import nn
from torch.func import vmap

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import tree_map
from holdfast.problem.gradients.adapters import ROUNDING, SMALL_PART, Adapters
from holdfast.problem.gradients.backend import Activations, Backend, BackendName, no_key
from holdfast.problem.gradients.loop import CONVOLUTIONS, Loop
from holdfast.problem.gradients.stacked import Stacked, stacked_value_and_gradient
from holdfast.problem.gradients.support import random_state, reason
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Batch


def choose_backend(loss: RowLoss, activations: Activations, wanted: BackendName = "auto") -> Backend:
    """Adapters where little is trained; otherwise stacked, unless rows are faster one by one or cannot be.

    ``wanted`` overrules that. It calls the model, so it has to be asked before anything is compiled.
    """
    if wanted == "loop":
        return Loop(loss, activations, 'as backend = "loop" asks for')
    why = ""
    little = loss.model.frozen is None and loss.model.trained_share <= SMALL_PART
    if wanted == "adapters" or (wanted == "auto" and little):
        asked = 'as backend = "adapters" asks for' if wanted == "adapters" else ""
        backend = Adapters(loss, activations, lambda: _stacked_or_loop(loss, activations), asked)
        obstacle = _obstacle_to_one_batch(backend)
        if obstacle is None:
            return backend
        if wanted == "adapters":
            loss.probe(activations.example.samples, stacked=False)  # a plain mistake raises by itself
            raise HoldfastError(f'backend = "adapters": {obstacle}; use backend = "stacked" or "loop"')
        why = f"as {obstacle}"
    return _stacked_or_loop(loss, activations, why, asked=wanted == "stacked")


def _stacked_or_loop(
    loss: RowLoss, activations: Activations, why: str = "", asked: bool = False
) -> Stacked | Loop:
    model = loss.model
    convolutional = any(isinstance(layer, CONVOLUTIONS) for layer in model.layers)
    recurrent = any(isinstance(layer, nn.RNNBase) for layer in model.layers)
    if not asked and model.x0.device.type == "cpu" and (convolutional or recurrent):
        layers = "convolutions" if convolutional else "recurrent layers"
        return Loop(loss, activations, f"as {layers} want it")
    obstacle = _obstacle(loss, activations.example)
    if asked and obstacle is not None:
        loss.probe(activations.example.samples, stacked=False)  # a plain mistake raises by itself
        raise HoldfastError(f'backend = "stacked": {obstacle}; use backend = "loop"')
    if obstacle is not None:
        return Loop(loss, activations, "as the model cannot be stacked")
    return Stacked(loss, activations, 'as backend = "stacked" asks for' if asked else why)


def _obstacle_to_one_batch(backend: Adapters) -> str | None:
    """Why the model cannot be called once for all rows: its results must equal those row by row."""
    device = backend.loss.model.x0.device
    random = random_state(device)
    try:
        difference = backend.difference()
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
        return f"the model cannot take the samples of all nodes as one batch ({reason(error)})"
    if not all(map(torch.equal, random_state(device), random)):
        return "random numbers of torch would be drawn for all nodes at once"
    if not math.isfinite(difference):
        return "the gradient of the first sample is not finite"
    model = backend.loss.model
    types = {model.compute, *(p.dtype for p in model.template.parameters())}
    if difference > max(ROUNDING.get(dtype, 0.0) for dtype in types):
        return "samples of different nodes would affect one another in one batch"
    return None


def _obstacle(loss: RowLoss, example: Batch) -> str | None:
    """What keeps two rows from being stacked, in evaluation or for a gradient, naming the layer."""
    loss = loss.copy()  # a call may leave tensors of its own in a module that occurs twice
    rows = loss.model.x0.expand(2, -1).contiguous()
    batch = tree_map(lambda part: torch.stack([part] * 2), example)
    keys = torch.stack([no_key(rows)] * 2)
    with loss.model.watched() as running, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings that an operation is slow if it is stacked
        try:
            with torch.no_grad():
                vmap(loss.tested)(loss.model.trial_row.expand(2, -1), batch.samples)
            stacked_value_and_gradient(loss)(rows, batch, keys)
        except RuntimeError as error:  # what torch's function transforms raise for what they cannot batch
            return f"{running[-1] if running else 'the loss'} cannot be stacked: {reason(error)}"
    return None
