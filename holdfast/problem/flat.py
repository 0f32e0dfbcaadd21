"""A ``torch.nn.Module`` as a function of one flat parameter vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import Tree
from holdfast.data.samples import Pair, map_inputs
from holdfast.models import CountedDropout, dropout_keys, may_draw
from holdfast.problem.frozen import Features, Frozen
from holdfast.problem.gradients.recurrent import stackable_recurrence
from holdfast.problem.gradients.support import (
    Call,
    Called,
    check_supported,
    probe,
    probe_evaluation,
    ready_to_stack,
    watched,
)
from holdfast.problem.problem import PADDED_TO
from holdfast.problem.statistics import by_batch, measuring, pooled, to_measure, tracked

Run = Callable[[dict[str, Tensor], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of the module: with the tensors that it has by name, and its arguments."""


class FlatModel:
    """The trainable parameters of ``module`` laid end to end; frozen ones and buffers stay inside.

    Modules run as they are given: a part that the user has put into eval mode stays in it. Frozen
    parameters and buffers of another type than the trainable ones keep it, such as a bfloat16 backbone; all
    copies of the model share them.

    ``statistics``: s, the means that BatchNorm needs in eval mode, and as many variances. Rows that are
    evaluated or become a module have them behind their parameters, [d + 2 s].
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        compute: torch.dtype | None = None,
    ) -> None:
        check_supported(module)
        self.template = module
        self.compute = compute or dtype  # what a training step is computed in; the parameters stay in dtype
        try:
            self._training = _placed(module, device, dtype)
        except RuntimeError as error:  # such as torch.nn.utils.weight_norm's
            raise HoldfastError(f"the model cannot be copied for every node: {error}") from None
        self._tracked = tracked(self._training)
        self.statistics = sum(layer.features for layer in self._tracked)
        trainable = {name: p for name, p in self._training.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in trainable.items()}
        self.sizes = [p.numel() for p in trainable.values()]
        self.dim = sum(self.sizes)
        self.x0 = torch.cat([p.detach().reshape(-1) for p in trainable.values()])
        for name, piece in self.parameters(self.x0).items():
            trainable[name].data = piece  # calls bring their own, so the modules need no copies
        stackable_recurrence(self._training)
        self._evaluation = to_measure(_sharing_tensors(self._training)).eval()
        by_batch(self._training)
        for used in (self._training, self._evaluation):
            ready_to_stack(used, device)
        self.frozen: Frozen | None = None  # the beginning of the model, where its outputs are kept
        self.draws = may_draw(self._training)  # whether a training step may draw random numbers, as dropout
        self._dropout_keys = [f"model.{name}" for name in dropout_keys(self._training)]
        self._call_through()
        # Every place of a parameter once, also of shared ones and in shared layers: torch's own search for
        # them leaves a layer that has two names with the parameters of the last call.
        names = {id(p): name for name, p in trainable.items()}
        self._places = [
            (".".join(filter(None, ("model", path, part))), names[id(p)])
            for path, layer in self._training.named_modules()
            for part, p in layer.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in names
        ]

    @property
    def layers(self) -> Iterator[nn.Module]:
        """What a training step computes: all layers but those of a frozen part whose outputs are kept."""
        done = set() if self.frozen is None else self.frozen.parameters
        for layer in self._training.modules():
            if not done & set(map(id, layer.parameters(recurse=False))):
                yield layer

    @property
    def numbers(self) -> dict[str, int]:
        """How many numbers each trained parameter has, in the order of a row."""
        return dict(zip(self.shapes, self.sizes, strict=True))

    @property
    def recurrent(self) -> bool:
        """Whether the model has a recurrent layer of torch's."""
        return any(isinstance(layer, nn.RNNBase) for layer in self.template.modules())

    @property
    def trial_row(self) -> Tensor:
        """[d + 2 s]: the initial parameters with any statistics."""
        return torch.cat([self.x0, self.x0.new_ones(2 * self.statistics)])

    @property
    def trained_share(self) -> float:
        """Of all parameters, those that are trained."""
        return self.dim / sum(p.numel() for p in self.template.parameters())

    def forget_start(self) -> None:
        """Frees the initial parameters; ``x0`` keeps its shape, type and device."""
        self.x0 = self.x0.new_zeros(()).expand(self.dim)
        for module in (self.template, self._training):  # the evaluation's are those of training
            for name, shape in self.shapes.items():
                parameter = module.get_parameter(name)
                parameter.data = parameter.data.new_zeros(()).expand(shape)

    def probe(self, call: Call, samples: Tree, stacked: bool = True, calls: str = "") -> Any:
        """The result of ``call`` for a batch; raises, naming the layer, if copies cannot be trained.

        ``stacked``: side by side in one call, or else one after the other. ``calls``: what the message names
        if no layer failed.
        """
        return probe(self._training, call, samples, stacked, calls)

    def probe_evaluation(self, call: Call, samples: Tree, calls: str = "") -> None:
        """Raises, naming the layer, if models in eval mode cannot be called, or differ between two calls."""
        run = partial(self.evaluate, self.trial_row, call, samples)
        probe_evaluation(self._evaluation, run, self.x0.device, calls)

    def watched(self) -> AbstractContextManager[list[str]]:
        """The layers whose forward is under way, innermost last; those of a call that failed stay."""
        return watched(self._training, self._evaluation)

    def parameters(self, row: Tensor) -> dict[str, Tensor]:
        """The flat vector ``row`` [d], which may be padded, cut into the module's named parameters."""
        behind = len(row) - self.dim
        assert 0 <= behind < PADDED_TO + 2 * self.statistics
        pieces = torch.split(row, [*self.sizes, behind] if behind else self.sizes)
        return {
            name: piece.view(shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=False)
        }

    def train(
        self, parameters: dict[str, Tensor], call: Call, samples: Tree, key: Tensor, run: Run | None = None
    ) -> Tensor:
        """``call`` of the model while training; ``key`` [4] = (seed, node, round, step) feeds dropout."""
        cast = {name: value.to(self.compute) for name, value in parameters.items()}
        given = {place: cast[name] for place, name in self._places} | dict.fromkeys(self._dropout_keys, key)
        if self.compute != self.x0.dtype:
            samples = map_inputs(
                lambda part: part.to(self.compute) if part.is_floating_point() else part, samples
            )
        # Where ``run`` is given, its owner also draws dropout: for how many nodes is not known here.
        counted = self.draws and run is None
        with CountedDropout(key) if counted else nullcontext():
            return self._run(True, given, call, samples, run)

    def copy(self) -> FlatModel:
        """The same model with modules of its own, for another thread; tensors are shared."""
        twin = copy(self)
        twin._training, twin._evaluation = map(_sharing_tensors, (self._training, self._evaluation))
        twin._call_through()
        return twin

    def _call_through(self) -> None:
        self._called = {True: Called(self._training), False: Called(self._evaluation)}

    def evaluate(self, row: Tensor, call: Call, samples: Tree, run: Run | None = None) -> Tensor:
        """``call`` of the model in eval mode; ``row`` [d + 2 s] has its statistics."""
        parameters = self.parameters(row)
        given = {place: parameters[name] for place, name in self._places}
        return self._run(False, given | self._statistics(row, "model."), call, samples, run)

    def measured(self, row: Tensor, call: Call, samples: Tree) -> Tensor:
        """Means and variances [2, s] of what BatchNorm sees in ``call`` on a batch; ``row`` [d]."""
        with measuring() as found:
            self.evaluate(torch.cat([row[: self.dim], row.new_zeros(2 * self.statistics)]), call, samples)
        layers = [
            pooled(torch.stack(found[layer.place]).view(-1, 2, layer.features))
            if layer.place in found
            else row.new_tensor([0.0, 1.0])[:, None].expand(2, layer.features)  # it does not run
            for layer in self._tracked
        ]
        return torch.cat(layers, -1)

    def _statistics(self, row: Tensor, prefix: str) -> dict[str, Tensor]:
        """The running statistics at the end of ``row`` by the names of their buffers."""
        if not self._tracked:
            return {}
        assert len(row) == self.dim + 2 * self.statistics, "a row without its statistics"
        parts = torch.split(row[self.dim :].view(2, -1), [layer.features for layer in self._tracked], -1)
        given: dict[str, Tensor] = {}
        for layer, (mean, variance) in zip(self._tracked, parts, strict=True):
            path = f"{prefix}{layer.place}." if layer.place else prefix
            given |= {f"{path}running_mean": mean, f"{path}running_var": variance}
        return given

    @property
    def parts(self) -> tuple[tuple[nn.Module, list[str]], tuple[nn.Module, list[str]]]:
        """The modules for training and for evaluation, with the names of the tensors that calls bring."""
        places = [place.removeprefix("model.") for place, _ in self._places]
        keys = [key.removeprefix("model.") for key in self._dropout_keys]
        return (self._training, [*places, *keys]), (self._evaluation, places)

    def _run(
        self, training: bool, given: dict[str, Tensor], call: Call, samples: Tree, run: Run | None
    ) -> Tensor:
        if run is not None:
            named = {place.removeprefix("model."): tensor for place, tensor in given.items()}
            answer: Tensor = call(lambda *args, **kwargs: run(named, args, kwargs), samples)
            return answer
        with self._entering(training, samples) as entering:
            result: Tensor = functional_call(
                self._called[training], given, (call, entering), tie_weights=False
            )
        return result

    def _entering(self, training: bool, samples: Tree) -> AbstractContextManager[Any]:
        """The module's arguments: ``samples``, or what replaces them if these are features."""
        if isinstance(samples, Pair) and isinstance(samples.x, Features):
            assert self.frozen is not None
            return self.frozen.standing_in(training, samples)
        return nullcontext(samples)

    @property
    def statistics_names(self) -> list[str]:
        """The buffers that hold running statistics, as the user's module calls them."""
        return list(self._statistics(self.trial_row, ""))

    def module(self, row: Tensor) -> nn.Module:
        """A copy of the user's module, in its own dtype and on the CPU, that holds ``row`` [d + 2 s].

        Where the statistics are not given, [d], they are NaN: a server has no data to estimate them from.
        """
        module = deepcopy(self.template).cpu()
        row = row.detach().cpu()
        if self.statistics and len(row) == self.dim:
            row = torch.cat([row, row.new_full((2 * self.statistics,), torch.nan)])
        values = self.parameters(row) | self._statistics(row, "")
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if name in values:
                    tensor.copy_(values[name])
        return module


def _placed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A copy on ``device``, in ``dtype`` where the module has the type of its trainable parameters.

    Frozen parameters that are there already, in their type, are not copied.
    """
    own = next(p.dtype for p in module.parameters() if p.requires_grad)
    frozen = {id(p): _moved(p, device, dtype, own) for p in module.parameters() if not p.requires_grad}
    placed = deepcopy(module, dict(frozen))  # deepcopy notes in it what it has copied
    placed.to(device)
    kept = set(map(id, frozen.values()))
    for tensor in (*placed.parameters(), *placed.buffers()):
        if tensor.dtype == own and id(tensor) not in kept:
            tensor.data = tensor.data.to(dtype)
    return placed


def _moved(frozen: nn.Parameter, device: torch.device, dtype: torch.dtype, own: torch.dtype) -> nn.Parameter:
    data = frozen.detach().to(device, dtype if frozen.dtype == own else frozen.dtype)
    return nn.Parameter(data, requires_grad=False)


def _sharing_tensors(module: nn.Module) -> nn.Module:
    """A copy of ``module`` with the same parameters and buffers, which calls only read."""
    return deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
