"""Convolutions of all nodes at once, with images laid out pixel by pixel.

Stacked, a convolution becomes one with a group of planes for every node. Where images lie plane by plane, as
torch has them, cuDNN computes one group after the other. Where they lie pixel by pixel, it has fast kernels
for all groups, but only for outputs, and only with a stride of 1. So the gradient in the inputs is computed
as the outputs of another convolution. Where cuDNN is slow, kernels of our own are used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

FEW_PLANES = 8  # for which cuDNN takes one group after the other
MANY = 1 << 18  # numbers, for which kernels of our own are worth compiling


class Form(NamedTuple):
    """The parameters of a convolution of images [B, C, H, W] with weights [M, C, k, k]."""

    kernel: int
    stride: int
    padding: int
    size: tuple[int, int]  # H, W

    @property
    def outputs(self) -> tuple[int, int]:
        """P, Q."""
        height, width = ((s + 2 * self.padding - self.kernel) // self.stride + 1 for s in self.size)
        return height, width


class PixelConv2d(nn.Conv2d):
    """A convolution that is stacked in this way."""

    traceable = True

    def _get_name(self) -> str:
        return "Conv2d"  # what the user calls it, for messages

    def forward(self, input: Tensor) -> Tensor:
        fits = input.ndim == 4 and input.shape[1] == self.in_channels
        if not fits or min(input.shape[2:]) + 2 * int(self.padding[0]) < self.kernel_size[0]:
            return super().forward(input)  # which takes an image without a batch, and complains of others
        if _has_no_rule():
            return super().forward(input)
        height, width = input.shape[2:]
        form = Form(self.kernel_size[0], self.stride[0], int(self.padding[0]), (height, width))
        y = _y(input, self.weight, form)
        return y if self.bias is None else y + self.bias[:, None, None]


def is_regular(layer: nn.Conv2d) -> bool:
    """Whether ``layer`` is one that ``PixelConv2d`` computes."""
    sizes = (layer.kernel_size, layer.stride, layer.padding)
    square = all(not isinstance(size, str) and size[0] == size[1] for size in sizes)
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    return square and plain and int(layer.padding[0]) < layer.kernel_size[0]


def _has_no_rule() -> bool:
    """Whether a derivative is taken in forward mode, or samples are stacked within nodes."""
    kinds = [level.key() for level in torch._C._functorch.get_interpreter_stack() or []]
    transform = torch._C._functorch.TransformType
    return transform.Jvp in kinds or kinds.count(transform.Vmap) > 1


class _Outputs(torch.autograd.Function):
    """y [B, M, P, Q], linear in x and in w. The other two functions are linear in their arguments as well."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, form: Form) -> Tensor:
        return functional.conv2d(x, w, None, form.stride, form.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, w, ctx.form = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        for_x, for_w, _ = ctx.needs_input_grad
        dx = _of_x(g, w, ctx.form) if for_x else None
        return dx, _of_w(x, g, ctx.form) if for_w else None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, form: Form) -> tuple[Tensor, int]:
        n = info.batch_size
        images, weights = _images(x, in_dims[0], n), _weights(w, in_dims[1], n)
        return _apart(_convolved(images, weights, form.stride, form.padding, form.outputs), n), 0


class _Inputs(torch.autograd.Function):
    """The gradient [B, C, H, W] of the sum of g * y in x."""

    @staticmethod
    def forward(g: Tensor, w: Tensor, form: Form) -> Tensor:
        shape = (len(g), w.shape[1], *form.size)
        dx: Tensor = conv2d_input(shape, w, g, form.stride, form.padding)
        return dx

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        g, w, ctx.form = inputs
        ctx.save_for_backward(g, w)

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor | None, ...]:
        g, w = ctx.saved_tensors
        return _y(x, w, ctx.form), _of_w(x, g, ctx.form), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, w: Tensor, form: Form) -> tuple[Tensor, int]:
        """Of every s x s pixels of x, the ones at the same place (u, v) are a convolution of g.

        x[s a + u] is the sum over i = u + p - s d of g[a + d] w[i]. So with s² as many planes, one
        convolution of stride 1 gives all of them.
        """
        n, (k, s, p, size) = info.batch_size, form
        images, weights = _images(g, in_dims[0], n), _weights(w, in_dims[1], n)
        least, most = -((k - 1 - p) // s), (s - 1 + p) // s  # d
        taps, before = most - least + 1, s * most - p
        after = s * taps - k - before
        whole = functional.pad(weights, (before, after, before, after))
        whole = whole.view(*whole.shape[:3], taps, s, taps, s)
        # [n, M, C, d, u, d, v] with d from the last to the first, to [n, C u v, M, d, d]
        of_places = whole.flip(3, 5).permute(0, 2, 4, 6, 1, 3, 5).flatten(1, 3)
        places = _convolved(images, of_places, 1, -least, tuple(-(-length // s) for length in size))
        x = functional.pixel_shuffle(places, s)[..., : size[0], : size[1]]
        return _apart(x, n), 0


class _Weights(torch.autograd.Function):
    """The gradient [M, C, k, k] of the sum of g * y in w."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, form: Form) -> Tensor:
        shape = (g.shape[1], x.shape[1], form.kernel, form.kernel)
        dw: Tensor = conv2d_weight(x, shape, g, form.stride, form.padding)
        return dw

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, g, ctx.form = inputs
        ctx.save_for_backward(x, g)

    @staticmethod
    def backward(ctx: Any, w: Tensor) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        return _of_x(g, w, ctx.form), _y(x, w, ctx.form), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, g: Tensor, form: Form) -> tuple[Tensor, int]:
        n, (k, s, p, _) = info.batch_size, form
        images, slopes = _images(x, in_dims[0], n), _images(g, in_dims[1], n)
        planes = images.shape[1] // n
        if _by_own_kernels(images, planes, k, s):
            return _correlations(images, slopes, n, k, s, p, torch.backends.cudnn.allow_tf32), 0
        shape = (slopes.shape[1], planes, k, k)
        w: Tensor = conv2d_weight(images, shape, slopes, s, p, groups=n)
        return w.reshape(n, -1, *shape[1:]), 0


_y: Callable[..., Tensor] = _Outputs.apply
_of_x: Callable[..., Tensor] = _Inputs.apply
_of_w: Callable[..., Tensor] = _Weights.apply


def _images(x: Tensor, dim: int | None, n: int) -> Tensor:
    """``x`` with nodes at ``dim``, or the same for all, as [B, n C, H, W], pixel by pixel."""
    apart = x.unsqueeze(1).expand(-1, n, -1, -1, -1) if dim is None else x.movedim(dim, 1)
    return apart.flatten(1, 2).contiguous(memory_format=torch.channels_last)


def _weights(w: Tensor, dim: int | None, n: int) -> Tensor:
    """``w`` as [n, M, C, k, k]."""
    return w.expand(n, *w.shape) if dim is None else w.movedim(dim, 0)


def _apart(y: Tensor, n: int) -> Tensor:
    """[B, n M, P, Q] as [n, B, M, P, Q], plane by plane: the next operation may not stack in another layout.

    Compiled, that is no copy of its own.
    """
    return y.reshape(len(y), n, -1, *y.shape[2:]).transpose(0, 1).contiguous()


def _convolved(x: Tensor, w: Tensor, stride: int, padding: int, size: tuple[int, ...]) -> Tensor:
    """[B, n M, *size] of ``x`` [B, n C, H, W] and ``w`` [n, M, C, k, k]; beyond the images there is zero."""
    n, _, planes, k, _ = w.shape
    if _by_own_kernels(x, planes, k, stride):
        y: Tensor = _products(x, w, stride, padding, list(size), torch.backends.cudnn.allow_tf32)
        return y
    beyond = [(s - 1) * stride + k - padding - length for s, length in zip(size, x.shape[2:], strict=True)]
    weights = w.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    if beyond == [padding, padding]:
        return functional.conv2d(x, weights, None, stride, padding, groups=n)
    padded = functional.pad(x, (padding, beyond[1], padding, beyond[0]))
    return functional.conv2d(padded, weights, None, stride, groups=n)


def _by_own_kernels(x: Tensor, planes: int, kernel: int, stride: int) -> bool:
    """Whether cuDNN is slow here and Triton is installed, as with torch for a GPU.

    The two samples with which a model is tried are not worth the second that a kernel takes to compile.
    """
    fits = x.is_cuda and x.dtype is torch.float32 and x.numel() >= MANY
    slow = stride > 1 or kernel == 1 or planes < FEW_PLANES
    return fits and slow and importlib.util.find_spec("triton") is not None


@torch.library.custom_op(
    "holdfast::convolution_products",
    mutates_args=(),
    # written out because torch 2.6 does not read the types of lists
    schema="(Tensor x, Tensor w, SymInt stride, SymInt padding, SymInt[] size, bool tf32) -> Tensor",
)
def _products(x: Tensor, w: Tensor, stride: int, padding: int, size: list[int], tf32: bool) -> Tensor:
    from holdfast.problem.gradients.convolution_kernels import products

    return products(x, w, stride, padding, (size[0], size[1]), tf32)


@_products.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: int, size: list[int], tf32: bool) -> Tensor:
    from holdfast.problem.gradients.convolution_kernels import compile_products

    compile_products(x, w, stride, padding, (size[0], size[1]), tf32)
    return x.new_empty(len(x), *size, w.shape[0] * w.shape[1]).permute(0, 3, 1, 2)


@torch.library.custom_op("holdfast::convolution_correlations", mutates_args=())
def _correlations(x: Tensor, g: Tensor, n: int, kernel: int, stride: int, padding: int, tf32: bool) -> Tensor:
    from holdfast.problem.gradients.convolution_kernels import correlations

    return correlations(x, g, n, kernel, stride, padding, tf32)


@_correlations.register_fake
def _(x: Tensor, g: Tensor, n: int, kernel: int, stride: int, padding: int, tf32: bool) -> Tensor:
    from holdfast.problem.gradients.convolution_kernels import compile_correlations

    compile_correlations(x, g, n, kernel, stride, padding, tf32)
    return x.new_empty(n, g.shape[1] // n, x.shape[1] // n, kernel, kernel)
