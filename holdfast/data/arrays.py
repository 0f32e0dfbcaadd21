"""What users hand in as samples and targets (numpy or torch), turned into checked tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError

SAMPLE_DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float32, torch.float64)
IGNORED = -100  # a target that does not count, as in torch's cross entropy


def as_samples(where: str, values: Any) -> Tensor:
    """``values`` as a tensor [N, ...] of uint8 pixels, int64 tokens, finite floats or a bool mask."""
    samples = _tensor(where, values)
    if samples.dtype not in SAMPLE_DTYPES:
        raise HoldfastError(
            f"{where}: samples are {_name(samples.dtype)}; "
            "convert them to float32, float64, uint8 pixels or int64 tokens"
        )
    _all_finite(where, samples)
    return samples


def as_targets(where: str, values: Any) -> Tensor:
    """``values`` as class labels [N, ...] int64 or finite float targets [N, ...].

    Labels are not negative; ``IGNORED`` marks those that do not count.
    """
    targets = _tensor(where, values)
    if targets.dtype in (torch.float32, torch.float64):
        _all_finite(where, targets)
        return targets
    if targets.is_floating_point() or targets.is_complex():
        raise HoldfastError(
            f"{where}: targets are {_name(targets.dtype)}; convert them to float32 or float64"
        )
    labels = targets.to(torch.int64)
    negative = labels[(labels < 0) & (labels != IGNORED)]
    if negative.numel():
        raise HoldfastError(
            f"{where}: class label {int(negative.min())} is negative; count from 0, or store -1/+1 as floats"
        )
    return labels


def as_owners(where: str, values: Any) -> Tensor:
    """``values`` as integer group ids [N] int64."""
    owners = _tensor(where, values)
    if owners.ndim != 1 or owners.is_floating_point() or owners.is_complex():
        raise HoldfastError(
            f"{where}: expected one integer per sample, got {_name(owners.dtype)} {list(owners.shape)}"
        )
    return owners.to(torch.int64)


def same_length(**columns: Tensor) -> None:
    """Complains unless all named tensors have the same number of rows."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise HoldfastError("lengths differ: " + ", ".join(f"{name} has {n}" for name, n in lengths.items()))


def labels_below(where: str, labels: Tensor, classes: int) -> None:
    """Complains, naming the label, unless all ``labels`` are in 0..classes-1."""
    beyond = torch.nonzero(labels >= classes)
    if len(beyond):
        row = int(beyond[0])
        raise HoldfastError(
            f"{where}: label {int(labels[row])} of sample {row} is out of range; expected 0..{classes - 1}"
        )


def _tensor(where: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        tensor = values.detach()
    else:
        try:
            array = np.asarray(values)
        except ValueError:
            raise HoldfastError(f"{where}: the rows do not all have the same shape") from None
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            alike = "; give words numbers, the same for all nodes and the test set"
            words = alike if array.dtype.kind in "USO" else ""
            raise HoldfastError(f"{where}: expected numbers, got values of type {array.dtype}{words}")
        # torch takes neither foreign byte order, nor negative strides, nor read-only memory
        native = array.dtype.newbyteorder("=")
        tensor = torch.from_numpy(np.require(array, dtype=native, requirements=["C", "W"]))
    if tensor.ndim == 0:
        raise HoldfastError(f"{where}: expected one row per sample, got a single number")
    return tensor


def _all_finite(where: str, values: Tensor) -> None:
    if not values.is_floating_point() or bool(values.isfinite().all()):
        return
    row = int(torch.nonzero(~values.isfinite())[0, 0])
    raise HoldfastError(f"{where}: sample {row} has a value that is not finite (NaN or infinite)")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
