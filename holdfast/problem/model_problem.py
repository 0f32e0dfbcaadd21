"""Local objectives made of a model, a loss and each node's own samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Word
from holdfast.data.dataset import prepare
from holdfast.data.federated import FederatedData
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.rowwise import RowGradients, laid_out_by_pixel
from holdfast.problem.gradients.ways import OneByOne, Stacked, Way
from holdfast.problem.losses import Loss
from holdfast.problem.regulariser import Regulariser
from holdfast.problem.samples import Batch, Samples

# Samples handled by one call when a whole data set is read: bounds the memory of the activations.
CHUNK_SAMPLES = 8192
GPU_CHUNK_SAMPLES = 65536  # a GPU wants few large calls

Weighting = Literal["uniform", "samples"]


class ModelObjective:
    """f_i(x) = scale_i * mean loss over node i's samples + regulariser.

    ``weights = "uniform"`` counts every node alike (scale 1); ``"samples"`` counts every sample alike: then
    scale_i = n N_i / N, so that (1/n) sum_i f_i is the mean over all samples, whatever the method.

    Where the data hold only some nodes, so does the objective: the others can't be asked for, and what is
    common (``global_value`` ...) is those nodes' share, (1/n) sum over them.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        data: FederatedData,
        *,
        batch_size: int | None,
        seed: int,
        regulariser: Regulariser | None = None,
        weights: Weighting = "uniform",
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        self.model, self.loss = model, loss
        self.batch_size, self.seed = batch_size, seed
        # On a GPU as a tensor, so that programs compiled for one seed serve for all.
        self._seed: Word = torch.tensor(seed, device=model.x0.device) if model.x0.is_cuda else seed
        self.regulariser = regulariser or Regulariser()
        self.l1, self.smooth = self.regulariser.l1, loss.curvature != math.inf
        self.weights: Weighting = weights
        self.mean, self.std = mean, std
        self.x0, self.dim, self.nodes = model.x0, model.dim, data.nodes
        device, dtype = self.x0.device, self.x0.dtype
        self.x, self.y = data.x.to(device), data.y.to(device)
        if self.y.is_floating_point():
            self.y = self.y.to(dtype)
        self.counts = torch.as_tensor(data.counts, device=device)
        self._longest = int(data.counts.max())
        self.starts = torch.as_tensor(data.starts, device=device)
        self.here = torch.as_tensor(data.here, device=device)
        self.scale = torch.ones(self.nodes, device=device, dtype=dtype)
        if weights == "samples":
            self.scale = (self.counts.double() * self.nodes / self.counts.sum()).to(dtype)
        prepared = partial(prepare, mean=mean, std=std, dtype=dtype)
        self._stored = Samples(self.x, self.y, self.counts, self._seed, prepared, whole=batch_size is None)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        example = self._stored.batch(first, self.scale[:1])
        self.row_grads = RowGradients(model, self._loss_of, example, traceable=loss.traceable)

    @cached_property
    def _way(self) -> Way:
        """How everything but minibatch gradients, which have ways of their own, is computed for all rows."""
        return Stacked() if self.row_grads.stackable else OneByOne()

    def forget_start(self) -> None:
        """Lets go of the initial model: from here on, ``x0`` tells only what it was like."""
        self.model.forget_start()
        self.x0 = self.model.x0

    # --- a node's own gradients -------------------------------------------------------------------------

    def minibatch_grads(
        self, points: Sequence[Tensor], nodes: Tensor, round: Word, step: Word
    ) -> list[Tensor]:
        if self.batch_size is None:
            return [self.full_grads(x, nodes) for x in points]
        return [self._minibatch_grad(x, nodes, round, step) for x in points]

    def _minibatch_grad(self, x: Tensor, nodes: Tensor, round: Word, step: Word) -> Tensor:
        assert self.batch_size is not None
        picks = self._stored.picks(nodes, round, step, self.batch_size)
        weight = self.scale.index_select(0, nodes).div_(self.batch_size).unsqueeze(-1).expand(picks.shape)
        batch = self._stored.batch(self.starts.index_select(0, nodes).unsqueeze(-1) + picks, weight)
        gradient = self.row_grads(x, batch, self._keys(nodes, round, step))
        return self.regulariser.add_grad(gradient, x)

    def full_grads(self, x: Tensor, nodes: Tensor) -> Tensor:
        key = self._keys(nodes, 0, 0)
        total = torch.zeros_like(x)
        for batch in self._chunks_of(nodes):
            total = total + self.row_grads(x, batch, key)
        return self.regulariser.add_grad(total, x)

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        key = self._keys(nodes, 0, 0)
        total = self.regulariser.value(x)
        with torch.no_grad():
            for batch in self._chunks_of(nodes):
                total = total + self._way.each(self._row_loss, x, batch, key)
        return total

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        key = self._keys(nodes, 0, 0)
        second = partial(self._way.hessian, self._row_loss)
        total = torch.diag_embed(self.regulariser.curvature(x))
        for batch in self._chunks_of(nodes):
            total = total + self._way.each(second, x, batch, key)
        return total

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        key = self._keys(nodes, 0, 0)
        product = partial(self._way.hessian_product, self._row_loss)
        total = self.regulariser.curvature(x) * v
        for batch in self._chunks_of(nodes):
            total = total + self._way.each(product, x, v, batch, key)
        return total

    @property
    def stochastic(self) -> bool:
        return self.batch_size is not None

    @property
    def stacked(self) -> bool:
        return not self.row_grads.row_by_row

    @property
    def traceable(self) -> bool:
        return self.row_grads.may_be_traced

    @property
    def how(self) -> str:
        return self.row_grads.how

    def get_ready(self) -> None:
        _ = self.row_grads.samples_at_once, self.row_grads.stackable

    @property
    def step_bytes(self) -> int:
        """What the activations take while all nodes here compute a gradient."""
        if self.batch_size is None:
            return self.row_grads.step_bytes(1, min(len(self.x), self._at_once))
        return self.row_grads.step_bytes(len(self.here), self.batch_size)

    def samples_per_minibatch(self, nodes: Tensor) -> int:
        return self.samples(nodes) if self.batch_size is None else self.batch_size * len(nodes)

    def samples(self, nodes: Tensor) -> int:
        if len(nodes) == self.nodes:
            return len(self.x)
        return int(self.counts[nodes].sum())

    def _loss_of(self, model: FlatModel, parameters: dict[str, Tensor], batch: Batch, key: Tensor) -> Tensor:
        """A number whose gradient is that of the loss."""
        outputs = model.train(parameters, batch.x, key)
        return (self.loss.differentiable(outputs, batch.y) * batch.weight).sum()

    def _row_loss(self, row: Tensor, batch: Batch, key: Tensor) -> Tensor:
        outputs = self.model.train(self.model.parameters(row), batch.x, key)
        return (self.loss.values(outputs, batch.y) * batch.weight).sum()

    def _chunks_of(self, nodes: Tensor) -> Iterator[Batch]:
        """All samples of ``nodes``, some of every node at a time; shorter nodes are padded with weight 0."""
        counts, starts, scale = self.counts[nodes], self.starts[nodes], self.scale[nodes]
        size = max(1, self._at_once // len(nodes))
        # Of everybody, that is known: a value read from a GPU would have it wait.
        longest = self._longest if len(nodes) == self.nodes else int(counts.max())
        for first in range(0, longest, size):
            last = min(first + size, longest)
            place = torch.arange(first, last, device=counts.device)
            inside = place < counts.unsqueeze(-1)
            weight = (inside * (scale / counts).unsqueeze(-1)).to(self.x0.dtype)
            rows = starts.unsqueeze(-1) + torch.minimum(place, counts.unsqueeze(-1) - 1)
            yield self._stored.stretch(nodes, first, last, weight) or self._stored.batch(rows, weight)

    def _keys(self, nodes: Tensor, round: Word, step: Word) -> Tensor:
        """(seed, node, round, step) of every node, [m, 4]: what dropout, if any, draws its masks from."""
        if not self.model.draws:
            return nodes.unsqueeze(-1).expand(-1, 4)
        parts = [
            part.expand(len(nodes)) if isinstance(part, Tensor) else nodes.new_full((len(nodes),), part)
            for part in (self._seed, nodes, round, step)
        ]
        return torch.stack(parts, dim=-1)

    @property
    def _at_once(self) -> int:
        """Samples handled by one call when a whole data set is read, as far as there is memory for them."""
        most = GPU_CHUNK_SAMPLES if self.x.is_cuda else CHUNK_SAMPLES
        return max(1, min(most, self.row_grads.samples_at_once))

    # --- the common objective at one point --------------------------------------------------------------

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, total = torch.zeros((), dtype=x.dtype, device=x.device), torch.zeros_like(x)
        for batch in self._chunks_of_all():
            gradient, part = self._way.grad_and_value(self._evaluation_loss, x, batch)
            value, total = value + part.detach(), total + gradient.detach()
        share = len(self.here) / self.nodes
        added = self.regulariser.add_grad(torch.zeros_like(x), x)
        return value + share * self.regulariser.value(x), total + share * added

    def global_value(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            parts = [self._evaluation_loss(x, batch) for batch in self._chunks_of_all()]
        return torch.stack(parts).sum() + len(self.here) / self.nodes * self.regulariser.value(x)

    def _evaluation_loss(self, row: Tensor, batch: Batch) -> Tensor:
        outputs = self.model.evaluate(row, batch.x)
        return (self.loss.values(outputs, batch.y) * batch.weight).sum()

    def _chunks_of_all(self) -> Iterator[Batch]:
        counts, scale = self.counts[self.here], self.scale[self.here]
        per_sample = torch.repeat_interleave(scale / (self.nodes * counts), counts)
        everything = torch.arange(len(self.x), device=self.x.device)
        for rows in torch.split(everything, self._at_once):
            yield self._stored.batch(rows, per_sample[rows].to(self.x0.dtype))

    # --- the same with something changed ------------------------------------------------------------------

    @cached_property
    def in_float64(self) -> ModelObjective:
        """The same objective in float64, for reference values; itself if it is already."""
        return self if self.x0.dtype == torch.float64 else self.variant(dtype=torch.float64)

    def variant(
        self,
        *,
        dtype: torch.dtype | None = None,
        loss: Loss | None = None,
        regulariser: Regulariser | None = None,
    ) -> ModelObjective:
        """The same model on the same data with another number type, loss or regulariser; data are shared."""
        return ModelObjective(
            FlatModel(self.model.template, self.x0.device, dtype or self.x0.dtype),  # computed in full
            loss or self.loss,
            FederatedData(self.x, self.y, self.counts.cpu().numpy(), held=self.here.cpu().numpy()),
            batch_size=self.batch_size,
            seed=self.seed,
            regulariser=regulariser or self.regulariser,
            weights=self.weights,
            mean=self.mean,
            std=self.std,
        )

    # --- before training -----------------------------------------------------------------------------------

    def check_model(self, test: tuple[Tensor, Tensor] | None) -> None:
        """Refuses a model that does not suit the data, and labels that do not suit the loss."""
        shape = self.model.probe(self._stored.prepare(self.x[:2]), stacked=self.row_grads.stackable)
        self.loss.values(torch.zeros(shape), torch.zeros_like(self.y[:2], device="cpu"))
        classes = max(shape[-1] if len(shape) > 1 else 1, 2)
        for y in [self.y] if test is None else [self.y, test[1]]:
            self.loss.check_targets(y, None if y.is_floating_point() else classes)

    def test_set(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) where the objective computes."""
        if x.shape[1:] != self.x.shape[1:]:
            raise HoldfastError(
                f"test x: samples are {list(x.shape[1:])}, for training {list(self.x.shape[1:])}"
            )
        return x.to(self.x.device), y.to(self.y.device, self.y.dtype)

    # --- a test set ---------------------------------------------------------------------------------------

    def test(self, rows: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Accuracy and mean loss, each [m], of every model in ``rows`` [m, d] on the samples (x, y)."""
        correct = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        loss = torch.zeros_like(correct)
        size = max(1, self._at_once // len(rows))
        with torch.no_grad():
            for inputs, targets in zip(torch.split(x, size), torch.split(y, size), strict=True):
                outputs = self._predictions(rows, self._stored.prepare(inputs))
                loss += self._way.each(self.loss.values, outputs, shared=(targets,)).sum(-1)
                if self.loss.has_accuracy:
                    correct += self._way.each(self.loss.correct, outputs, shared=(targets,)).sum(-1)
        return correct / len(x), loss / len(x)

    def _predictions(self, rows: Tensor, x: Tensor) -> Tensor:
        """The outputs of every model in ``rows`` for the same samples, [m, B, ...]."""
        if self.row_grads.row_by_row:
            x = laid_out_by_pixel(x) if self.row_grads.by_pixel else x
            return torch.stack([self.model.evaluate(row, x) for row in rows])
        return self._way.each(self.model.evaluate, rows, shared=(x,))
