"""A federation that starts from a model that was trained before."""

from __future__ import annotations

import hashlib
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError


def read_start(path: Path) -> dict[str, Tensor]:
    """The tensors of the safetensors file ``path``, by name."""
    try:
        return safetensors.torch.load_file(path)
    except OSError as error:
        raise HoldfastError(f"start: {path} cannot be read ({error.strerror or error})") from None
    except SafetensorError:
        raise HoldfastError(f"start: {path} is not a safetensors file, or it is damaged") from None


def digest_of(path: Path) -> str:
    """SHA-256 of the file, as ``sha256sum`` prints it: members agree on it."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise HoldfastError(f"start: {path} cannot be read ({error.strerror})") from None


def load_start(module: nn.Module, path: Path) -> None:
    """Has ``module`` start from the model in ``path``; running statistics may be missing."""
    tensors, own = read_start(path), module.state_dict()
    for name, tensor in tensors.items():
        if name in own and tensor.is_floating_point() != own[name].is_floating_point():
            raise HoldfastError(f"start: {path} does not fit the model: {name!r} is of type {tensor.dtype}")
        if not tensor.isfinite().all():
            raise HoldfastError(f"start: {path}: {name!r} has numbers that are not finite; choose another")
    try:
        missing, unexpected = module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # other shapes
        raise HoldfastError(
            f"start: {path} does not fit the model: {str(error).splitlines()[-1].strip()}"
        ) from None
    parameters = {name for name, _ in module.named_parameters()}
    if wrong := [*unexpected, *(name for name in missing if name in parameters)]:
        raise HoldfastError(f"start: {path} is of another model: {wrong[0]!r} is in one of the two only")
