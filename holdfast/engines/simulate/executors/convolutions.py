"""Stacked convolutions in traced programs, computed by kernels of our own.

Stacked over nodes, a convolution with weights of every node becomes one with a group for every node. In a
program that is about to be compiled, such operations and their gradients are replaced, where a GPU may round
factors to TF32 or half precision. Elsewhere cuDNN computes them, as in rounds that are not compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

FEWEST_CHANNELS = 2  # of a group, in and out; with one, it is a depthwise convolution
MOST_CHANNELS = 128  # with more, cuDNN's kernels have enough to do in every group

_ATEN = torch.ops.aten
_NONE = [0, 0]  # output padding


def with_own_convolutions(traced: fx.GraphModule) -> fx.GraphModule:
    """``traced`` with other operations for stacked convolutions, in place."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.target is _ATEN.convolution.default:
            x, weight, bias, *how, transposed, _, groups = node.args
            if bias is None and suits(x.meta["val"], weight.meta["val"], transposed, groups):
                _replace(node, torch.ops.holdfast.convolution.default, x, weight, *how, groups)
        elif node.target is _ATEN.convolution_backward.default:
            slopes, x, weight, _, *how, transposed, _, groups, wanted = node.args
            if wanted[2] or not suits(x.meta["val"], weight.meta["val"], transposed, groups):
                continue
            sizes = [list(part.meta["val"].shape) for part in (x, weight)]
            for part in [user for user in node.users if user.target is operator.getitem]:
                if part.args[1] == 0 and wanted[0]:
                    target = torch.ops.holdfast.convolution_of_inputs.default
                    _replace(part, target, slopes, weight, sizes[0], *how, groups)
                elif part.args[1] == 1 and wanted[1]:
                    target = torch.ops.holdfast.convolution_of_weights.default
                    _replace(part, target, slopes, x, sizes[1], *how, groups)
    graph.eliminate_dead_code()
    traced.recompile()
    return traced


def suits(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    """Whether own kernels compute the convolution of ``x`` and ``weight``, in training or as they are."""
    channels = weight.shape[1], weight.shape[0] // groups
    rounded = x.dtype in (torch.float16, torch.bfloat16) or (
        x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32
    )
    small = min(channels) >= FEWEST_CHANNELS and max(channels) <= MOST_CHANNELS
    return x.is_cuda and x.ndim == 4 and groups > 1 and not transposed and rounded and small


def _replace(node: fx.Node, target: Any, *args: Any) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


# The three operations. On a CPU they are torch's own, so that programs can be tried there.


@torch.library.custom_op("holdfast::convolution", mutates_args=())
def _convolution(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """From inputs [B, g C, H, W] and weights [g M, C, i, j] to outputs [B, g M, P, Q]."""
    result: Tensor = _ATEN.convolution(x, weight, None, stride, padding, dilation, False, _NONE, groups)
    return result


@torch.library.custom_op("holdfast::convolution_of_inputs", mutates_args=())
def _of_inputs(
    slopes: Tensor,
    weight: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of the inputs, of ``size``, from ``slopes`` [B, g M, P, Q] of the outputs."""
    how = stride, padding, dilation, False, _NONE, groups
    wanted = [True, False, False]
    x = slopes.new_empty(size)
    result: Tensor = _ATEN.convolution_backward(slopes, x, weight, None, *how, wanted)[0]
    return result


@torch.library.custom_op("holdfast::convolution_of_weights", mutates_args=())
def _of_weights(
    slopes: Tensor,
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of the weights, of ``size``, from ``slopes`` [B, g M, P, Q] of the outputs."""
    how = stride, padding, dilation, False, _NONE, groups
    wanted = [False, True, False]
    weight = x.new_empty(size)
    result: Tensor = _ATEN.convolution_backward(slopes, x, weight, None, *how, wanted)[1]
    return result


@_convolution.register_fake
def _(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return _outputs(x, weight, stride, padding, dilation)


@_of_inputs.register_fake
@_of_weights.register_fake
def _(
    slopes: Tensor, other: Tensor, size: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    return slopes.new_empty(size)


@_convolution.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    from holdfast.engines.simulate.executors.convolution_kernels import Window, product

    result = _outputs(x, weight, stride, padding, dilation)
    window = Window(weight.shape[2:], stride, padding, dilation)
    images = _images(x, groups), _weights(weight, groups), _images(result, groups)
    product(*images, window, backward=False)
    return result


@_of_inputs.register_kernel("cuda")
def _(
    slopes: Tensor, weight: Tensor, size: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    from holdfast.engines.simulate.executors.convolution_kernels import Window, product

    result = slopes.new_empty(size)
    window = Window(weight.shape[2:], stride, padding, dilation)
    turned = _weights(weight, groups).transpose(1, 2)
    product(_images(slopes, groups), turned, _images(result, groups), window, backward=True)
    return result


@_of_weights.register_kernel("cuda")
def _(slopes: Tensor, x: Tensor, size: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    from holdfast.engines.simulate.executors.convolution_kernels import Window, correlation

    window = Window(size[2:], stride, padding, dilation)
    result: Tensor = correlation(_images(x, groups), _images(slopes, groups), window)
    return result.flatten(0, 1)


def _outputs(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """An empty tensor for the outputs."""
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    sizes = zip(x.shape[2:], padding, spans, stride, strict=True)
    return x.new_empty(len(x), len(weight), *((size + 2 * p - span) // s + 1 for size, p, span, s in sizes))


def _images(x: Tensor, groups: int) -> Tensor:
    """[B, g C, H, W] as [g, B, C, H, W]."""
    return x.view(len(x), groups, -1, *x.shape[2:]).transpose(0, 1)


def _weights(weight: Tensor, groups: int) -> Tensor:
    """[g M, C, i, j] as [g, M, C, i, j]."""
    return weight.view(groups, -1, *weight.shape[1:])
