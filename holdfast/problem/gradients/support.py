"""Whether copies of a module can be trained side by side, and if not, because of which layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import Tree, is_tree, leaves, tree_map
from holdfast.data.samples import TARGET_NAMES, Pair, describe, inputs_of
from holdfast.models import CountedDropout, Dropout, dropout_keys
from holdfast.problem.gradients.convolution import PixelConv2d, is_regular
from holdfast.problem.statistics import tracks

# --- whether copies of a module can be trained side by side, and if not, which layer is to blame --------


_RUNNING_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)

# What torch's messages mean when a forward pass cannot be stacked.
_REASONS = (
    (
        "random operation",
        "it draws random numbers other than dropout's; use dropout of torch, or leave the randomness out",
    ),
    ("mutate a captured Tensor", "it changes a buffer in place; keep no running state in the model"),
    (
        "backward through the graph a second time",
        "it calls backward(); return the loss, which we differentiate",
    ),
    (
        "does not require grad",
        "nothing it returns depends on the parameters; leave out detach(), no_grad(), numpy and the like",
    ),
    (".item()", "it reads the value of a tensor (.item(), or 'if' on a tensor); use torch.where"),
    ("_local_scalar_dense", "it reads the value of a tensor"),
)
RANDOM, _IN_PLACE = (meaning for _, meaning in _REASONS[:2])

Call = Callable[[Any, Any], Any]
"""What is computed of a model and a batch of samples, such as the forward pass, or that and the loss."""


class Called(nn.Module):
    """Runs a function of ``model`` as a module, so that it can be called with other parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Call, samples: Tree) -> Any:
        return call(self.model, samples)


def check_supported(module: nn.Module) -> None:
    """Raises, naming the layer, unless copies of ``module`` can be trained side by side and exchanged.

    A layer in eval mode is taken to be frozen: it may keep running statistics, since it does not change them.
    """
    dropouts: dict[int, str] = {}
    for name, layer in module.named_modules():
        objection = _objection(layer)
        if isinstance(layer, Dropout):
            twin = dropouts.setdefault(layer.layer, name)
            if twin != name:
                objection = f"it would drop what {twin!r} drops, both have layer={layer.layer}; number them"
        if objection:
            raise HoldfastError(f"{_describe(name, layer)} cannot be trained here: {objection}")
    _check_parameters({name: p for name, p in module.named_parameters() if p.requires_grad})


def probe(module: nn.Module, call: Call, samples: Tree, stacked: bool = True, calls: str = "") -> Any:
    """Tries ``call`` and its gradients with two copies on a batch; errors name the layer that failed.

    ``calls``: what the error names if no layer failed, such as the user's step; by default the model.

    ``stacked``: both in one call, which finds out whether the model draws random numbers or keeps a state; or
    one after the other. Returns the result of ``call``, a tree of tensors. The module itself stays untouched.
    """
    trial = deepcopy(module, {id(p): p for p in module.parameters()})  # parameters are only read
    buffers, device = dict(trial.named_buffers()), next(leaves(samples)).device
    trainable = {name: p.detach() for name, p in trial.named_parameters() if p.requires_grad}
    weights = {name: p.expand(2, *p.shape) for name, p in trainable.items()}
    keys = torch.zeros(2, 4, dtype=torch.int64, device=device)
    called = Called(trial)

    def total(outputs: Any) -> Tensor:
        if not is_tree(outputs):
            raise TypeError(f"it must give tensors, got {type(outputs).__name__}")
        return torch.stack([part.sum() for part in leaves(outputs) if part.is_floating_point()]).sum()

    def run(weights: dict[str, Tensor], key: Tensor, samples: Tree, call: Call = call) -> Any:
        given = weights | dict.fromkeys(dropout_keys(trial), key)
        with CountedDropout(key):
            named = {f"model.{name}": value for name, value in given.items()}
            return functional_call(called, named, (call, samples))

    def stacked_total(weights: dict[str, Tensor], key: Tensor, samples: Tree) -> tuple[Tensor, Any]:
        outputs = run(weights, key, samples)
        return total(outputs), outputs

    def with_gradient(model: nn.Module, samples: Tree) -> Any:
        outputs = call(model, samples)
        torch.autograd.grad(total(outputs), list(row.values()), allow_unused=True)
        return outputs

    with watched(trial) as running:
        try:
            with CountedDropout(keys[0]):
                call(trial, samples)  # first by itself, so that a plain mistake has a plain message
            if stacked:
                twice = tree_map(lambda part: torch.stack([part] * 2), samples)
                outputs = vmap(grad(stacked_total, has_aux=True))(weights, keys, twice)[1]
                outputs = tree_map(lambda part: part[0], outputs)
            else:
                row = {name: p.clone().requires_grad_() for name, p in trainable.items()}
                with _without_trace(trial, device):
                    outputs = run(row, keys[0], samples, with_gradient)
        except Exception as error:  # the user's own code
            failed = running[-1] if running else calls or _describe("", module)
            why = reason(error) + _hint(samples, str(error))
            given = describe(samples) if failed == calls else _shapes(samples)
            raise HoldfastError(f"{failed} fails on a batch of {given}: {why}") from error
    for name, buffer in trial.named_buffers():
        if buffer is not buffers.get(name):
            raise HoldfastError(
                f"the model replaces its buffer {name!r} in forward: keep no running state in it"
            )
    return outputs


def _hint(samples: Tree, error: str) -> str:
    """What may be wrong with ``samples`` if a model fails on them with this ``error``."""
    inputs = list(leaves(inputs_of(samples)))
    if "dtype" in error and any(part.dtype == torch.int64 for part in inputs):
        return (
            "; whole numbers (int64) enter a model as they are, like tokens: of measurements give x.float()"
        )
    if "channels" in error and any(part.ndim == 4 and part.shape[-1] in (1, 3, 4) for part in inputs):
        return "; images are [channels, height, width]: give x.movedim(-1, 1)"
    if "unexpected keyword argument" in error and isinstance(samples, Mapping):
        return f"; columns are the model's arguments, but for the targets: {', '.join(TARGET_NAMES)}"
    return ""


def _shapes(samples: Tree) -> str:
    if isinstance(samples, Pair) and isinstance(samples.x, Tensor):
        return f"shape {tuple(samples.x.shape)}"
    return describe(samples)


def probe_evaluation(
    module: nn.Module, run: Callable[[], object], device: torch.device, calls: str = ""
) -> None:
    """Runs what calls ``module`` in eval mode; refuses one that draws random numbers or keeps a state."""
    with watched(module) as running, torch.no_grad():
        try:
            with _without_trace(module, device):
                run()
        except RuntimeError as error:
            layer, why = running[-1] if running else calls or _describe("", module), reason(error)
            if why == RANDOM:
                why = "it draws random numbers in eval mode; call dropout with training=self.training"
            raise HoldfastError(f"{layer} cannot be evaluated: {why}") from error


@contextmanager
def _without_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Refuses what draws torch's random numbers or changes a buffer of ``module``.

    In stacked calls, torch itself refuses that.
    """
    buffers, random = [buffer.clone() for buffer in module.buffers()], random_state(device)
    yield
    if not all(map(torch.equal, random_state(device), random)):
        raise RuntimeError(RANDOM)
    if not all(map(torch.equal, module.buffers(), buffers)):
        raise RuntimeError(_IN_PLACE)


def random_state(device: torch.device) -> list[Tensor]:
    """Of the generators that a model on ``device`` may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def watched(*modules: nn.Module) -> Iterator[list[str]]:
    """The layers whose forward is under way, innermost last; those of a call that failed stay in the list."""
    running: list[str] = []
    hooks = []
    for name, layer in (named for module in modules for named in module.named_modules()):
        description = _describe(name, layer)
        hooks.append(layer.register_forward_pre_hook(lambda *_, it=description: running.append(it)))
        hooks.append(layer.register_forward_hook(lambda *_: running.pop() and None))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


def _objection(layer: nn.Module) -> str | None:
    """Why copies of ``layer`` cannot be trained side by side, and what to use instead."""
    for name, parameter in layer.named_parameters(recurse=False):
        if isinstance(parameter, nn.UninitializedParameter):
            return f"its parameter {name!r} has no shape yet; run one batch through the model first"
    if isinstance(layer, torch.jit.ScriptModule):
        return "TorchScript cannot be stacked; use the module it was made from"
    if isinstance(layer, nn.SyncBatchNorm):
        return "it mixes the samples of different processes; use torch.nn.GroupNorm"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
        return "max_norm changes the weights in forward; leave max_norm out"
    if not layer.training:
        return None
    if isinstance(layer, _RUNNING_STATISTICS) and layer.track_running_stats and not tracks(layer):
        return (
            "it keeps running statistics, which nodes do not exchange; use torch.nn.GroupNorm, or "
            "track_running_stats=False (batch statistics, in evaluation too), or freeze this layer by .eval()"
        )
    return None


def _check_parameters(trainable: dict[str, nn.Parameter]) -> None:
    if not trainable:
        raise HoldfastError("the model has no parameter to train: at least one needs requires_grad=True")
    first_name, first = next(iter(trainable.items()))
    for name, parameter in trainable.items():
        if not parameter.is_floating_point():
            raise HoldfastError(f"parameter {name!r} is {parameter.dtype}: use a real floating-point type")
        if parameter.dtype != first.dtype:
            raise HoldfastError(
                f"parameters must share a type: {first_name!r} is {first.dtype}, {name!r} {parameter.dtype}; "
                "convert the model, for example with .float()"
            )


def _describe(name: str, layer: nn.Module) -> str:
    kind = layer._get_name()
    return f"layer {name!r} ({kind})" if name else f"the model ({kind})"


def reason(error: Exception) -> str:
    """What is wrong, in words."""
    text = str(error)
    for sign, meaning in _REASONS:
        if sign in text:
            return meaning
    return text.strip().split("\n", 1)[0] or type(error).__name__


# --- layers in a form that stacks well ------------------------------------------------------------------


class PlaneConv2d(nn.Conv2d):
    """A convolution of a single plane, such as a grey image, as a product of its patches.

    Stacked, a convolution becomes one with a group for every node; if a group has one plane only, it is
    taken for a depthwise convolution, whose GPU kernels are several times slower than this product.
    """

    traceable = True

    def _get_name(self) -> str:
        return "Conv2d"  # what the user calls it, for messages

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 4 or input.shape[1] != 1:
            return super().forward(input)  # which refuses what is no batch of planes
        assert not isinstance(self.padding, str)  # see _is_plane
        down, across = self.padding
        height, width = self.kernel_size
        padded = functional.pad(input[:, 0], (across, across, down, down))  # [B, H, W]
        rows, columns = padded.shape[1] - height + 1, padded.shape[2] - width + 1
        patches = torch.stack(
            [padded[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
        )
        planes = self.weight.flatten(1) @ patches.flatten(1)  # [out, k] @ [k, B rows columns]
        if self.bias is not None:
            planes = planes + self.bias[:, None]
        return planes.view(self.out_channels, len(input), rows, columns).transpose(0, 1)


class NarrowLinear(nn.Linear):
    """A layer with few outputs as weight times inputs, not inputs times weight.

    Stacked, a product whose result has few columns takes up to twice the time of one with few rows; and on
    a GPU, the sums that follow are then compiled to slow kernels.
    """

    traceable = True

    def _get_name(self) -> str:
        return "Linear"

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim < 2 or input.shape[-1] != self.in_features:
            return super().forward(input)  # whose complaint has the shapes as the user knows them
        outputs = (self.weight @ input.mT).mT
        return outputs if self.bias is None else outputs + self.bias


NARROW = 16  # outputs


def ready_to_stack(module: nn.Module, device: torch.device) -> nn.Module:
    """``module`` with layers that stack badly on ``device`` replaced, in place; parameters are the same."""
    # Where a part is frozen, its outputs are kept by watching torch's own functions.
    all_trained = all(parameter.requires_grad for parameter in module.parameters())
    for layer in module.modules():
        if type(layer) is nn.Conv2d and device.type == "cuda" and _is_plane(layer):
            layer.__class__ = PlaneConv2d
        if type(layer) is nn.Conv2d and device.type == "cuda" and all_trained and is_regular(layer):
            layer.__class__ = PixelConv2d
        if type(layer) is nn.Linear and layer.out_features <= NARROW:
            layer.__class__ = NarrowLinear
    return module


def _is_plane(layer: nn.Conv2d) -> bool:
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    return plain and layer.in_channels == 1 and not isinstance(layer.padding, str)
