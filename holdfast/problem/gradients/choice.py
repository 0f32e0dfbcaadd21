"""Which backend computes the rows of a problem, and why."""

from __future__ import annotations

import warnings

import torch
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
    """Stacked, unless rows are faster one by one or cannot be stacked; ``wanted`` overrules that.

    It calls the model, so it has to be asked before anything is compiled.
    """
    if wanted == "loop":
        return Loop(loss, activations, 'as backend = "loop" asks for')
    model = loss.model
    why = ""
    if wanted == "adapters" or (wanted == "auto" and model.trained_share <= SMALL_PART):
        adapters = _adapters(loss, activations, wanted)
        if isinstance(adapters, Adapters):
            return adapters
        why = f"as {adapters}"
    convolutional = any(isinstance(part, CONVOLUTIONS) for part in model.template.modules())
    if wanted == "auto" and model.x0.device.type == "cpu" and (convolutional or model.recurrent):
        return Loop(
            loss, activations, f"as {'convolutions' if convolutional else 'recurrent layers'} want it"
        )
    obstacle = _obstacle(loss, activations.example)
    if wanted == "stacked":
        if obstacle is not None:
            loss.probe(activations.example.samples, stacked=False)  # a plain mistake is told as such
            raise HoldfastError(f'backend = "stacked": {obstacle}; use backend = "loop"')
        return Stacked(loss, activations, 'as backend = "stacked" asks for')
    return (
        Loop(loss, activations, "as the model cannot be stacked")
        if obstacle
        else Stacked(loss, activations, why)
    )


def _adapters(loss: RowLoss, activations: Activations, wanted: BackendName) -> Adapters | str:
    """One call of the model for all rows, if that gives the same as row by row; else what is against it."""
    backend = Adapters(loss, activations, 'as backend = "adapters" asks for' if wanted == "adapters" else "")
    random = random_state(loss.model.x0.device)
    try:
        difference = backend.difference()
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
        obstacle = f"the model cannot take the samples of all nodes as one batch ({reason(error)})"
    else:
        types = {loss.model.compute, *(p.dtype for p in loss.model.template.parameters())}
        if not all(map(torch.equal, random_state(loss.model.x0.device), random)):
            obstacle = "dropout of torch would be drawn for all nodes at once; holdfast.models.Dropout is not"
        elif difference <= max(ROUNDING.get(dtype, 0.0) for dtype in types):
            return backend
        else:
            obstacle = "samples of different nodes would affect one another in one batch"
    if wanted == "adapters":
        loss.probe(activations.example.samples, stacked=False)  # a plain mistake is told as such
        raise HoldfastError(f'backend = "adapters": {obstacle}; use backend = "stacked" or "loop"')
    return obstacle


def _obstacle(loss: RowLoss, example: Batch) -> str | None:
    """What keeps two rows from being stacked, in evaluation or for a gradient, naming the layer."""
    loss = loss.copy()  # a call may leave tensors of its own in a module that occurs twice
    rows = loss.model.x0.expand(2, -1).contiguous()
    batch = tree_map(lambda part: torch.stack([part] * 2), example)
    keys = torch.stack([no_key(rows)] * 2)
    with loss.model.watched() as running, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an operation is slow if it is stacked
        try:
            with torch.no_grad():
                vmap(loss.tested)(loss.model.trial_row.expand(2, -1), batch.samples)
            stacked_value_and_gradient(loss)(rows, batch, keys)
        except RuntimeError as error:  # what torch's function transforms raise for what they cannot batch
            return f"{running[-1] if running else 'the loss'} cannot be stacked: {reason(error)}"
    return None
