"""How the gradients of many nodes' losses are computed: stacked in one call, or row by row on all cores."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property

import torch
from torch import Tensor, fx, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from holdfast.core.memory import total_memory
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.ways import can_be_stacked, unbound
from holdfast.problem.samples import Batch

# Of all memory, what the activations of rows that are computed together may take.
SHARE_FOR_ACTIVATIONS = 0.25
# What a backward pass needs, over what the forward pass keeps for it: that, its own results, and inputs.
BACKWARD_OVER_FORWARD = 3

# Working out a gradient anew takes a millisecond or more; tracing it, a tenth of a second.
TRACE_FROM_CALLS = 20

PLANES_AT_ONCE = 8  # numbers in a register of a CPU: with fewer planes, going pixel by pixel takes longer

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

StackedGradient = Callable[[Tensor, Batch, Tensor], Tensor]

RowLoss = Callable[[FlatModel, dict[str, Tensor], Batch, Tensor], Tensor]
"""(model, its parameters by name, batch, key) -> the loss."""


class RowGradients:
    """Gradients [m, d] of the losses of rows [m, d], each on its own batch.

    ``example``: any one sample, to see how much memory it takes. ``traceable``: the loss does the same in
    every call.

    Stacking turns the layers of all rows into batched ones, which is what a GPU wants. On a CPU that holds
    for dense layers; stacked convolutions lose to one row after the other, the rows spread over the cores.
    What cannot be stacked is computed one row after the other wherever it runs.
    """

    def __init__(self, model: FlatModel, loss: RowLoss, example: Batch, traceable: bool = True) -> None:
        self.model, self.loss, self.example = model, loss, example
        convolutional = any(isinstance(part, _CONVOLUTIONS) for part in model.template.modules())
        self.on_cpu = model.x0.device.type == "cpu"
        self._convolves_on_cpu = convolutional and self.on_cpu
        self._stacked = self._stacked_on(model)
        known = traceable and all(map(_is_known, model.template.modules()))
        self.may_be_traced = self.on_cpu and known  # and compiled: the same is done in every call
        self._calls: Counter[tuple[int, ...]] = Counter()
        self._traced: dict[tuple[int, ...], StackedGradient] = {}
        self._own = threading.local()
        # Images laid out pixel by pixel are computed faster on a CPU, if planes are many.
        self.by_pixel = self._convolves_on_cpu and _planes_fill_registers(model.template)
        self.by_pixel = self.by_pixel and self._runs()

    def _stacked_on(self, model: FlatModel) -> StackedGradient:
        """The gradients of all rows in one call of ``model``."""
        loss = self.loss
        stacked: StackedGradient = vmap(
            grad(lambda row, batch, key: loss(model, model.parameters(row), batch, key))
        )
        return stacked

    def __call__(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        if self.on_cpu and len(x) == 1:  # a node on its own, whose model may be large
            return self._one(self.model, x[0], next(unbound(batch)), keys[0])[None]
        if self.row_by_row:
            rows = (x, unbound(batch), keys)
            if self.on_cpu:
                return torch.stack(list(_pool(torch.get_num_threads()).map(self._one_in_thread, *rows)))
            return torch.stack([self._one(self.model, *row) for row in zip(*rows, strict=True)])
        size = max(1, self.samples_at_once // batch.y.shape[1])
        parts = [torch.split(tensor, size) for tensor in (x, *batch, keys)]
        gradients = [self._together(rows, Batch(*some), key) for rows, *some, key in zip(*parts, strict=True)]
        return gradients[0] if len(gradients) == 1 else torch.cat(gradients)

    def _together(self, x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        """``_stacked``; on a CPU, shapes that come often are traced into the operations it comes down to."""
        if not self.may_be_traced or type(x) is not Tensor or torch.compiler.is_compiling():
            return self._stacked(x, batch, keys)
        shape = (*x.shape, *batch.x.shape)
        self._calls[shape] += 1
        if self._calls[shape] == TRACE_FROM_CALLS:
            with suppress(Exception):  # whatever the tracer objects to: there is another way
                self._traced[shape] = _without_value(make_fx(self._stacked)(x, batch, keys))
        return self._traced.get(shape, self._stacked)(x, batch, keys)

    @cached_property
    def stackable(self) -> bool:
        """Whether two rows can be stacked; to be asked for before anything is compiled."""
        model = self.model.copy()  # a call may leave tensors of its own in a module that occurs twice
        rows = model.x0.expand(2, -1).contiguous()
        batch = Batch(*(torch.stack([part] * 2) for part in self.example))
        keys = torch.stack([_no_key(rows)] * 2)
        gradient = self._stacked_on(model)
        return can_be_stacked(
            lambda: vmap(model.evaluate)(rows, batch.x), lambda: gradient(rows, batch, keys)
        )

    @cached_property
    def row_by_row(self) -> bool:
        """Whether rows are computed one after the other."""
        return self._convolves_on_cpu or not self.stackable

    @cached_property
    def samples_at_once(self) -> int:
        """Of all rows together; to be asked for before anything is compiled."""
        budget = SHARE_FOR_ACTIVATIONS * total_memory(self.model.x0.device)
        return int(budget // (BACKWARD_OVER_FORWARD * self.activation_bytes))

    @cached_property
    def activation_bytes(self) -> int:
        """What the forward pass of one sample keeps for the backward pass."""
        return activation_bytes(self.model, self.loss, self.example)

    def step_bytes(self, nodes: int, batch: int) -> int:
        """What the activations take while so many nodes compute a gradient, each of ``batch`` samples."""
        if self.row_by_row:
            together = min(nodes, torch.get_num_threads() if self.on_cpu else 1) * batch
        else:
            together = min(nodes * batch, max(batch, self.samples_at_once))
        return BACKWARD_OVER_FORWARD * together * self.activation_bytes

    @property
    def how(self) -> str:
        """For people."""
        if self.row_by_row:
            where = f" on {torch.get_num_threads()} cores" if self.on_cpu else ""
            why = "as convolutions want it" if self._convolves_on_cpu else "as the model cannot be stacked"
            return f"nodes one by one{where}, {why}"
        return "all nodes stacked"

    def _runs(self) -> bool:
        """Whether the model has a gradient; pixel by pixel, one that takes a ``view`` of planes has not."""
        try:
            self._one(self.model, self.model.x0, self.example, _no_key(self.model.x0))
        except Exception:  # if it fails for another reason, it will fail again where that is told
            return False
        return True

    def _one_in_thread(self, row: Tensor, batch: Batch, key: Tensor) -> Tensor:
        # A module is altered while it is called with a row's parameters, so every thread has its own.
        if not hasattr(self._own, "model"):
            self._own.model = self.model.copy()
        return self._one(self._own.model, row, batch, key)

    def _one(self, model: FlatModel, row: Tensor, batch: Batch, key: Tensor) -> Tensor:
        """The gradient of one row, layer by layer put where it belongs: no second copy of it all."""
        if self.by_pixel:
            batch = batch._replace(x=laid_out_by_pixel(batch.x))
        gradient = torch.zeros_like(row)
        parameters = model.parameters(row.detach())
        for parameter, place in zip(parameters.values(), model.parameters(gradient).values(), strict=True):
            parameter.requires_grad_().grad = place
        self.loss(model, parameters, batch, key).backward()  # type: ignore[no-untyped-call]
        return gradient


def _without_value(gradient: fx.GraphModule) -> fx.GraphModule:
    """``gradient`` without the loss itself, which nobody reads but the ones "like it" that it starts from."""
    for node in gradient.graph.find_nodes(op="call_function", target=torch.ops.aten.ones_like.default):
        like = node.meta["val"]
        with gradient.graph.inserting_before(node):
            options = {"dtype": like.dtype, "device": like.device}
            ones = gradient.graph.call_function(torch.ops.aten.ones.default, (list(like.shape),), options)
        node.replace_all_uses_with(ones)
    gradient.graph.eliminate_dead_code()
    gradient.recompile()
    return gradient


def activation_bytes(model: FlatModel, loss: RowLoss, example: Batch) -> int:
    """What the forward pass of the one sample in ``example`` keeps for the backward pass."""
    row = model.x0.detach().clone().requires_grad_()
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() != row.data_ptr():  # the model itself is no activation
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = loss(model, model.parameters(row), example, _no_key(row))
    del value  # alive until here, so that no two tensors were given the same place
    return max(1, sum(kept.values()))


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer does the same in every call: one of torch's own, or of a class that declares it."""
    kind, hooks = type(layer), layer._forward_hooks or layer._forward_pre_hooks
    return (kind.__module__.startswith("torch.nn.") or vars(kind).get("traceable", False)) and not hooks


def _planes_fill_registers(model: nn.Module) -> bool:
    layers = [part for part in model.modules() if isinstance(part, _CONVOLUTIONS)]
    return all(layer.out_channels % PLANES_AT_ONCE == 0 for layer in layers)


def laid_out_by_pixel(images: Tensor) -> Tensor:
    """``images`` [B, C, H, W] with the planes of a pixel next to each other in memory."""
    # Not ``contiguous``: grey images already are, in both layouts, and would be taken for the usual one.
    return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)


def _no_key(row: Tensor) -> Tensor:
    return torch.zeros(4, dtype=torch.int64, device=row.device)


@cache
def _pool(cores: int) -> ThreadPoolExecutor:
    """Threads whose kernels use one core each."""
    pool = ThreadPoolExecutor(cores, initializer=lambda: torch.set_num_threads(1))
    all_started = threading.Barrier(cores + 1)
    for _ in range(cores):
        pool.submit(all_started.wait)
    all_started.wait()
    torch.set_num_threads(cores)  # what was set last, anywhere, is what other threads of the user start with
    return pool
