"""A data set before it is divided among nodes, and the registry of those that have a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.validation import Count, Positive, check
from holdfast.data.samples import as_owners, as_samples, as_targets, labels_below, same_length

Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, eq=False)
class Dataset:
    """One data set, samples as stored; images uint8 or float, channels first."""

    x_train: Tensor
    """[N, ...] uint8, float32 or float64."""
    y_train: Tensor
    """[N] int64 class labels, or float targets."""
    x_test: Tensor
    """[M, ...] like ``x_train``; M may be 0."""
    y_test: Tensor
    """[M] like ``y_train``."""
    classes: int | None
    """Number of classes; None for float targets (regression, or binary labels -1/+1)."""
    groups: Tensor | None = None
    """[N] int64: natural owner (writer, node) of every training sample."""
    mean: float = 0.0
    std: float = 1.0
    """``mean`` and ``std`` are for :func:`prepare`, which takes uint8 to [0, 1] first."""
    class_names: tuple[str, ...] | None = None
    """The names of the classes, for the report; None: their numbers."""

    def __post_init__(self) -> None:
        check("classes", Count | None, self.classes)
        if len(self.x_train) == 0:
            raise HoldfastError("x_train: there is no training sample")
        for part in ("train", "test"):
            x, y = getattr(self, f"x_{part}"), getattr(self, f"y_{part}")
            as_samples(f"x_{part}", x)
            as_targets(f"y_{part}", y)
            same_length(**{f"x_{part}": x, f"y_{part}": y})
            if (self.classes is None) != y.is_floating_point():
                expected = (
                    "float targets, as classes is None" if self.classes is None else "integer class labels"
                )
                raise HoldfastError(f"y_{part}: expected {expected}, got {y.dtype}")
            if self.classes is not None:
                labels_below(f"y_{part}", y, self.classes)
        if self.x_test.shape[1:] != self.x_train.shape[1:] or self.x_test.dtype != self.x_train.dtype:
            raise HoldfastError(
                f"x_test: samples are {self.x_test.dtype} {list(self.x_test.shape[1:])}, "
                f"those of x_train {self.x_train.dtype} {list(self.x_train.shape[1:])}"
            )
        if self.groups is not None:
            same_length(x_train=self.x_train, groups=as_owners("groups", self.groups))
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise HoldfastError(f"class_names: there are {len(self.class_names)} of {self.classes} classes")
        check("mean", Finite, self.mean)
        check("std", Positive, self.std)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample, channels first."""
        return tuple(self.x_train.shape[1:])


def prepare(x: Tensor, mean: float, std: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Stored samples as a model sees them: (x/255 - mean)/std for uint8, (x - mean)/std for floats."""
    if x.dtype in (torch.int64, torch.bool):  # tokens, which an embedding looks up, and masks
        return x
    # This runs in every training step: operations without effect are left out, and others work in place,
    # which on a CPU is many times faster than writing to new memory.
    divisor = 255 * std if x.dtype == torch.uint8 else std
    own = x.to(dtype, copy=divisor != 1 or mean != 0)
    if divisor != 1:
        own.mul_(1 / divisor)  # twice as fast as dividing
    return own.sub_(mean / std) if mean != 0 else own


class TrainTest(NamedTuple):
    """Data and a test set that belong together, where they are no ``Dataset`` of arrays.

    ``train``: what ``hf.train`` takes as ``data``, or a map-style Dataset that is still to be divided.
    ``test``: what it takes as ``test``.
    """

    train: Any
    test: Any = None


DATASETS: Registry[Any] = Registry("dataset", context=("data_dir", "nodes", "seed"))
"""What is registered returns a ``Dataset``, a ``TrainTest``, or the ``train`` of one."""
