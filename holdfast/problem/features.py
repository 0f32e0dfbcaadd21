"""Whether the outputs of a model's frozen beginning are kept in place of the samples; see ``frozen.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.memory import total_memory
from holdfast.core.precision import untried
from holdfast.core.tree import Tree, tree_map
from holdfast.data.samples import Pair, targets_of
from holdfast.problem.checks import Augment
from holdfast.problem.frozen import Features, Frozen
from holdfast.problem.gradients.support import reason
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import ArraySource, Batch, Source

# The share of all parameters that the frozen beginning must have if features are to be kept.
MOST_OF_THE_MODEL = 0.5
# The share of the rest that must be trained: frozen layers are better run once for all nodes.
TRAINED_OF_THE_REST = 0.25
SHARE_FOR_FEATURES = 0.1  # of all memory
SAMPLES_AT_ONCE = 256  # whose features are computed together
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.2}

# What a forward pass may raise on tensors without numbers, or where it does not do the same in every call.
OBSTACLES = (
    HoldfastError,
    *(RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError),
)


class Kept(NamedTuple):
    """Where samples come from, and whether their features are kept."""

    source: Source
    description: str
    placed: Callable[[Any], Any]  # a test set, as the source stores it

    @classmethod
    def nothing(cls, source: Source, description: str = "") -> Kept:
        return cls(source, description, source.test_set)


@untried()
def keep_features(row_loss: RowLoss, source: Source, augment: Augment | None) -> Kept:
    """``source`` with features in place of inputs, where most of the model is frozen and that is possible.

    Then ``row_loss.model`` takes both: samples, and features of samples.
    """
    parameters = list(row_loss.model.template.parameters())
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    if frozen < MOST_OF_THE_MODEL * sum(p.numel() for p in parameters):
        return Kept.nothing(source)
    try:
        if not isinstance(source, ArraySource):
            raise RuntimeError("samples are read when they are drawn")
        if augment is not None:
            raise RuntimeError("samples are augmented")
        return _kept(row_loss, source)
    except OBSTACLES as error:
        row_loss.model.frozen = None
        return Kept.nothing(source, f"its frozen part computed in every step, as {reason(error)}")


def _kept(row_loss: RowLoss, source: ArraySource) -> Kept:
    model, example = row_loss.model, source.some(2)
    if targets_of(example.samples) is None:
        raise RuntimeError("samples have no targets")
    if row_loss.loss.calls:
        raise RuntimeError(f"{row_loss.loss.calls} calls the model")
    if model.statistics:
        raise RuntimeError("BatchNorm takes the statistics of every batch")
    if model.compute != model.x0.dtype:
        raise RuntimeError(f"steps are computed in {model.compute}")
    parts = dict(zip((True, False), (module for module, _ in model.parts), strict=True))
    frozen = Frozen(parts, example.samples)
    frozen.noted(True, 1)  # what it reads
    sizes = {id(p): p.numel() for p in parts[True].parameters()}
    beginning, total = sum(sizes.get(key, 0) for key in frozen.parameters), sum(sizes.values())
    if beginning < MOST_OF_THE_MODEL * total:
        raise RuntimeError("little of the model comes before what is trained")
    if model.dim < TRAINED_OF_THE_REST * (total - beginning):
        raise RuntimeError("most of what follows is frozen, too")
    _check_independence(frozen, example.samples)
    one = frozen.features(True, tree_map(lambda part: part[:1], example.samples))
    needed = source.size * sum(part.numel() * part.element_size() for part in one)
    if needed > SHARE_FOR_FEATURES * total_memory(model.x0.device):
        raise RuntimeError(f"its outputs would take {needed / 2**20:.0f} MiB")
    if any(part.dtype not in (model.x0.dtype, torch.int64, torch.bool) for part in one):
        raise RuntimeError("its outputs have another type of numbers than the trained part")
    model.frozen = frozen
    _check_results(row_loss, example, frozen)

    def of(batches: Iterator[Tree]) -> Pair:
        found = [_featured(frozen, samples) for samples in batches]
        return tree_map(lambda *parts: torch.cat(parts), *found)

    x, y = of(batch.samples for batch in source.everything(SAMPLES_AT_ONCE))
    numbers = sum(part[0].numel() for part in x.kept)
    return Kept(
        source.holding(x, y),
        f"outputs of its frozen part kept, {numbers} numbers a sample",
        lambda samples: of(source.input_transform.in_parts(source.test_set(samples), SAMPLES_AT_ONCE)),
    )


def _featured(frozen: Frozen, samples: Tree) -> Pair:
    targets = targets_of(samples)
    assert targets is not None
    return Pair(Features(frozen.features(True, samples)), targets)


def _check_independence(frozen: Frozen, samples: Tree) -> None:
    """Refuses features that depend on other samples of the batch, or on whether the model is training."""
    mixed = tree_map(lambda part: torch.cat([part[:1], part[-1:].roll(1)]), samples)
    alone = tree_map(lambda part: torch.cat([part[:1]] * 3), samples)
    expected = frozen.features(True, mixed)
    for training, batch, size in ((True, alone, 3), (False, mixed, 2)):
        found = frozen.features(training, batch)
        if [part.shape[:1] for part in found] != [(size,)] * len(expected):
            raise RuntimeError("its outputs have no row for every sample, or other ones in evaluation")
        if not all(_close(a[0], b[0]) for a, b in zip(found, expected, strict=True)):
            raise RuntimeError("it mixes the samples of a batch, or gives something else in evaluation")


def _check_results(row_loss: RowLoss, example: Batch, frozen: Frozen) -> None:
    """Refuses a model whose losses or gradients differ with features and without."""
    model = row_loss.model
    key = torch.zeros(4, dtype=torch.int64, device=model.x0.device)
    results = []
    for samples in (example.samples, _featured(frozen, example.samples)):
        with torch.enable_grad():
            row = model.x0.detach().requires_grad_()
            value = row_loss.differentiable(model.parameters(row), example._replace(samples=samples), key)
            [gradient] = torch.autograd.grad(value, row)
        with torch.no_grad():
            results.append((value.detach(), gradient, row_loss.tested(model.trial_row, samples)))
    if not all(map(_close, *results)):
        raise RuntimeError("gradients would be others")


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return float((a - b).norm()) <= ROUNDING.get(a.dtype, 0.0) * float(b.norm()) + 1e-30
