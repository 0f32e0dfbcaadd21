"""Local objectives made of three independent parts: a source of samples, a loss of a model, and a backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.precision import untried
from holdfast.core.randomness import Word
from holdfast.core.tree import T, Tree, tree_map
from holdfast.data.lazy import AnyData
from holdfast.problem.checks import Augment, augmented, check_augment, check_batches, check_loss
from holdfast.problem.curvature import SquaredOutputs, convexity_of
from holdfast.problem.evaluation import SampleTester
from holdfast.problem.features import Kept, keep_features
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.backend import Activations, Backend, BackendName
from holdfast.problem.gradients.choice import choose_backend
from holdfast.problem.lazy_source import source_of
from holdfast.problem.losses import Loss
from holdfast.problem.losses.base import Regulariser
from holdfast.problem.private import (
    OF_ALL_DATA,
    WHOLE_BATCHES,
    OwnRandomness,
    PrivateGradients,
    Release,
)
from holdfast.problem.problem import Convexity
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.sampling import SamplingName
from holdfast.problem.source import Batch, Source, Weighting
from holdfast.problem.statistics import Buffers

# Samples handled by one call when a whole data set is read: bounds the memory of the activations.
CHUNK_SAMPLES = 8192
GPU_CHUNK_SAMPLES = 65536  # a GPU wants few large calls


class SourceOptions(TypedDict, total=False):
    """How samples are read, see ``ArraySource``."""

    batch_size: int | None
    sampling: SamplingName
    weights: Weighting
    mean: float
    std: float


class ModelProblem:
    """f_i(x) = scale_i * mean loss over node i's samples + regulariser.

    ``data``: samples, which are read as ``options`` say, or any source.
    ``augment``: what is done to the samples of a minibatch on the device, never where all data are read.
    ``backend``: how many rows are computed, "stacked", "loop" or "adapters"; "auto" lets a rule choose, and
    keeps the outputs of a frozen part of the model where it can (``problem/features.py``).
    ``buffers``: with which running statistics of BatchNorm a node's model is evaluated, see ``Buffers``.
    ``samples_at_once``: how many samples of all nodes are computed together; by default what memory allows.

    Where the source holds only some nodes, so does the objective: the others cannot be computed, and what is
    common (``global_value`` ...) is the share of those nodes, (1/n) sum over them.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        data: AnyData | Source,
        *,
        seed: int,
        regulariser: Regulariser | None = None,
        backend: BackendName = "auto",
        buffers: Buffers = "local",
        samples_at_once: int | None = None,
        augment: Augment | None = None,
        **options: Unpack[SourceOptions],
    ) -> None:
        self.source: Source
        self.model, self.loss, self.seed = model, loss.to(model.x0), seed
        # On a GPU as a tensor, so that programs compiled for one seed serve for all.
        self._seed: Word = torch.tensor(seed, device=model.x0.device) if model.x0.is_cuda else seed
        self.regulariser = regulariser or Regulariser()
        self.l1, self.smooth = self.regulariser.l1, loss.curvature != math.inf
        if isinstance(data, AnyData):
            self.source = source_of(data, model.x0, seed, self._seed, options)
        elif options:
            raise HoldfastError(
                f"{', '.join(options)}: only for samples in memory or in Datasets; a source has its own"
            )
        else:
            self.source = data
        self.augment = augment
        self.x0, self.dim, self.nodes, self.here = model.x0, model.dim, data.nodes, self.source.here
        self.row_loss = RowLoss(model, self.loss)
        self.given = self.source  # samples as they are
        whole = backend != "auto"  # then the backend computes all of the model in every step
        self._kept = Kept.nothing(self.given) if whole else keep_features(self.row_loss, self.given, augment)
        self.source = self._kept.source
        example = self.source.some(2 if model.statistics else 1)  # a variance needs two samples
        self.activations = Activations(self.row_loss, example, samples_at_once)
        self._wanted, self.buffers = (backend, samples_at_once), buffers
        self._protected: PrivateGradients | None = None

    @cached_property
    @untried()
    def backend(self) -> Backend:
        """It computes everything that is computed for many rows."""
        return choose_backend(self.row_loss, self.activations, self._wanted[0])

    def forget_start(self) -> None:
        """Frees the initial model; ``x0`` keeps its shape, type and device."""
        self.model.forget_start()
        self.x0 = self.model.x0

    # --- a node's own gradients -------------------------------------------------------------------------

    def minibatch_values_and_grads(
        self, points: Sequence[Tensor], nodes: Tensor, round: Word, step: Word
    ) -> list[tuple[Tensor, Tensor]]:
        if not self.stochastic:
            return self._full(points, nodes, round, step, WHOLE_BATCHES)
        batch, keys = self.source.batch(nodes, round, step), self._keys(nodes, round, step)
        if self.augment is not None:
            batch = batch._replace(samples=augmented(self.augment, batch.samples, keys, self.stacked))
        computed = [self._gradients(x, batch, keys) for x in points]
        if self._protected is not None:
            added = (nodes, round, step)
            computed = [
                (value, self._protected.noised(sums, *added, draw, len(points)))
                for draw, (value, sums) in enumerate(computed)
            ]
        return [
            (value, self.regulariser.add_grad(gradient, x))
            for x, (value, gradient) in zip(points, computed, strict=True)
        ]

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        return self._full([x], nodes, round, step, OF_ALL_DATA)[0][1]

    def _full(
        self, points: Sequence[Tensor], nodes: Tensor, round: Word, step: Word, draws: int
    ) -> list[tuple[Tensor, Tensor]]:
        """At each of ``points``, losses, [m], and gradients, [m, d], over all of each node's data.

        ``draws``: the first of the numbers that distinguish the noise of points.
        """
        answers = []
        for draw, x in enumerate(points, draws):
            start = (x.new_zeros(len(x)), torch.zeros_like(x))
            values, total = self._sum(start, nodes, self._gradients, x)
            if self._protected is not None:
                total = self._protected.noised(total, nodes, round, step, draw, len(points))
            answers.append((values, self.regulariser.add_grad(total, x)))
        return answers

    @property
    def _gradients(self) -> Callable[[Tensor, Batch, Tensor], tuple[Tensor, Tensor]]:
        return (self._protected or self.backend).values_and_gradients

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        with torch.no_grad():
            return self._sum(self.regulariser.value(x), nodes, self.backend.values, x)

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        start = torch.diag_embed(self.regulariser.curvature(x))
        return self._sum(start, nodes, self.backend.hessians, x)

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        start = self.regulariser.curvature(x) * v
        return self._sum(start, nodes, self.backend.hessian_products, x, v)

    def _sum(self, start: T, nodes: Tensor, part: Callable[..., T], *rows: Tensor) -> T:
        """``start`` plus the sums of ``part`` for ``rows`` over all samples of ``nodes``, some at a time.

        Shorter nodes are padded. A loss that gives one number for a batch would count the padding, and so
        would BatchNorm; then nodes are computed one by one.
        """
        if (not self.loss.per_sample or self.model.statistics) and len(nodes) > 1:
            alone: list[T] = []
            for i in range(len(nodes)):
                one: Tree = tree_map(lambda part, i=i: part[i : i + 1], (start, nodes, *rows))
                begin, node, *own = one
                alone.append(self._sum(begin, node, part, *own))
            return tree_map(lambda *of_nodes: torch.cat(of_nodes), *alone)
        keys = self._keys(nodes, 0, 0)
        for batch in self.source.all_of(nodes, self._at_once):
            start = tree_map(torch.add, start, part(*rows, batch, keys))
        return start

    def _every_batch(self) -> Iterator[Batch]:
        """All samples here, [B, ...], weighted by their share in f."""
        if self.loss.per_sample:
            yield from self.source.everything(self._at_once)
            return
        for node in self.here:  # one number for a batch: nodes, which may weigh differently, are kept apart
            for batch in self.source.all_of(node[None], self._at_once):
                yield tree_map(lambda part: part[0], batch._replace(weight=batch.weight / self.nodes))

    def _keys(self, nodes: Tensor, round: Word, step: Word) -> Tensor:
        """(seed, node, round, step) of every node, [m, 4]: what dropout and ``augment`` draw from."""
        if not self.model.draws and self.augment is None:
            return nodes.unsqueeze(-1).expand(-1, 4)
        parts = [
            part.expand(len(nodes)) if isinstance(part, Tensor) else nodes.new_full((len(nodes),), part)
            for part in (self._seed, nodes, round, step)
        ]
        return torch.stack(parts, dim=-1)

    @property
    def _at_once(self) -> int:
        """Samples handled by one call when a whole data set is read, as far as there is memory for them."""
        most = GPU_CHUNK_SAMPLES if self.x0.is_cuda else CHUNK_SAMPLES
        return max(1, min(most, self.activations.at_once))

    # --- how they are computed ----------------------------------------------------------------------------

    @property
    def stochastic(self) -> bool:
        return self.source.batch_size is not None

    @property
    def stacked(self) -> bool:
        return self.backend.stacked

    @property
    def traceable(self) -> bool:
        return self.backend.traceable

    @property
    def fuses(self) -> bool:
        return self.backend.fuses

    @property
    def description(self) -> str:
        parts = (self.backend, self._kept, self.source)
        return "; ".join(part.description for part in parts if part.description)

    @untried()
    def get_ready(self) -> None:
        _ = self.activations.at_once, self.backend

    @property
    def step_bytes(self) -> int:
        """Bytes of the activations while all nodes here compute a gradient."""
        if self.source.batch_size is None:
            return self.backend.step_bytes(1, min(self.samples(self.here), self._at_once))
        draws = self.source.draws
        return self.backend.step_bytes(len(self.here), draws.width if draws else self.source.batch_size)

    def samples_per_minibatch(self, nodes: Tensor) -> int:
        size = self.source.batch_size
        return self.samples(nodes) if size is None else size * len(nodes)

    def samples(self, nodes: Tensor) -> int:
        return self.source.samples(nodes)

    # --- the common objective at one point --------------------------------------------------------------

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        row, x = self._completed(x), x[: self.dim]
        value, total = torch.zeros((), dtype=x.dtype, device=x.device), torch.zeros_like(x)
        for batch in self._every_batch():
            part, gradient = self.row_loss.evaluated_gradient(row, batch)
            value, total = value + part, total + gradient
        share = len(self.here) / self.nodes
        added = self.regulariser.add_grad(torch.zeros_like(x), x)
        return value + share * self.regulariser.value(x), total + share * added

    def global_value(self, x: Tensor) -> Tensor:
        row = self._completed(x)
        with torch.no_grad():
            parts = [self.backend.evaluated(row, batch) for batch in self._every_batch()]
        share = len(self.here) / self.nodes
        return torch.stack(parts).sum() + share * self.regulariser.value(x[: self.dim])

    def _completed(self, x: Tensor) -> Tensor:
        """``x`` [d], a common model, with the statistics of the nodes here; or as it is if it has its own."""
        return self.tester.complete(x[None])[0] if len(x) == self.dim else x

    # --- privacy ------------------------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        return self._protected is not None

    def protected(self, release: Release) -> ModelProblem:
        """The same objective, whose gradients are clipped and noised as ``release`` says."""
        if self.augment is not None:
            raise HoldfastError(
                "private: augment is given all samples of a minibatch and may mix them; transform single "
                "samples in a Dataset instead (hf.from_datasets)"
            )
        twin = copy(self)
        twin._protected = PrivateGradients(self.row_loss, self.source, release)
        shuffle = None
        if isinstance(release.noise, OwnRandomness):
            if self.model.draws:
                raise HoldfastError(
                    "private: dropout draws from the seed, which all members know; use a model without it"
                )
            shuffle = release.noise.shuffle
        twin.source = self.source.drawn_by(shuffle)
        return twin

    # --- the same with something changed ------------------------------------------------------------------

    @cached_property
    def in_float64(self) -> ModelProblem:
        """The same objective in float64, for reference values; itself if it is already."""
        return self if self.x0.dtype == torch.float64 else self.variant(dtype=torch.float64)

    def variant(
        self,
        *,
        dtype: torch.dtype | None = None,
        loss: Loss | None = None,
        regulariser: Regulariser | None = None,
    ) -> ModelProblem:
        """The same model on the same data with another number type, loss or regulariser; data are shared."""
        return ModelProblem(
            FlatModel(self.model.template, self.x0.device, dtype or self.x0.dtype),  # computed in full
            loss or self.loss,
            self.given.in_dtype(dtype) if dtype else self.given,
            seed=self.seed,
            regulariser=regulariser or self.regulariser,
            backend=self._wanted[0],
            buffers=self.buffers,
            samples_at_once=self._wanted[1],
            augment=self.augment,
        )

    # --- what is known about it ---------------------------------------------------------------------------

    @cached_property
    def convexity(self) -> Convexity:
        exact = self.in_float64

        def gram() -> ModelProblem:
            return exact.variant(loss=SquaredOutputs(), regulariser=Regulariser())

        return convexity_of(exact.row_loss, self.regulariser, exact.source.some(64).samples, gram)

    def identity(self) -> tuple[list[object], list[Tensor]] | None:
        if (of_source := self.given.identity()) is None:
            return None
        module, trained = self.model.template, self.model.shapes
        frozen = {name: tensor for name, tensor in module.state_dict().items() if name not in trained}
        words, tensors = of_source
        words = [module, trained, list(frozen), self.loss, self.regulariser, *words]
        return words, [*tensors, *frozen.values()]

    # --- before training -----------------------------------------------------------------------------------

    @untried()
    def check_model(self, test: Any = None) -> None:
        """Refuses a model that does not suit the data, and targets that do not suit the loss."""
        some = self.given.some(2).samples
        if self.augment is not None:
            some = check_augment(self.augment, some, self._keys(self.here[:1], 0, 0)[0], self.stacked)
        check_loss(self.row_loss, self.source, some, test)
        check_batches(self.model, self.loss, self.source)
        self.model.probe_evaluation(self.loss.first_part, some, self.loss.calls)
        if self.backend.vmapped:
            self.row_loss.probe(some, stacked=True)

    # --- measuring models ---------------------------------------------------------------------------------

    @cached_property
    def tester(self) -> SampleTester:
        """Accuracy, loss and outputs of models on samples."""
        return SampleTester(self.row_loss, self.source, self.backend, self.buffers, self._at_once)

    def test_set(self, samples: Tree) -> Tree:
        """``samples``, a pair (x, y) or a dictionary, where the objective computes."""
        return self._kept.placed(samples)
