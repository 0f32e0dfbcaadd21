"""A ``torch.nn.Module`` as a function of one flat parameter vector."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holdfast.core.errors import HoldfastError
from holdfast.data.samples import map_inputs
from holdfast.models import dropout_keys
from holdfast.problem.gradients.layers import ready_to_stack
from holdfast.problem.gradients.support import Called, check_supported, probe, watched
from holdfast.problem.problem import PADDED_TO

Call = Callable[[Any, Any], Any]
"""What is done with a model and a batch of samples, such as the forward pass, or that and the loss."""


Run = Callable[[dict[str, Tensor], tuple[Any, ...], dict[str, Any]], Any]
"""Stands for a call of the module: the tensors that it is given by name, and its arguments."""


class FlatModel:
    """The trainable parameters of ``module`` laid end to end; frozen ones and buffers stay inside.

    Modules are run as they are handed over: a part that the user has put into eval mode stays there. Frozen
    parameters and buffers of another type than the trainable ones keep it, such as a bfloat16 backbone.
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
            self._training = _placed(deepcopy(module), device, dtype)
        except RuntimeError as error:  # such as torch.nn.utils.weight_norm's
            raise HoldfastError(f"the model cannot be copied for every node: {error}") from None
        trainable = {name: p for name, p in self._training.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in trainable.items()}
        self.sizes = [p.numel() for p in trainable.values()]
        self.dim = sum(self.sizes)
        self.x0 = torch.cat([p.detach().reshape(-1) for p in trainable.values()])
        for name, piece in self.parameters(self.x0).items():
            trainable[name].data = piece  # calls bring their own, so the modules need no copies
        self._evaluation = deepcopy(self._training, {id(p): p for p in self._training.parameters()}).eval()
        for used in (self._training, self._evaluation):
            ready_to_stack(used, device)
        self._dropout_keys = [f"model.{name}" for name in dropout_keys(self._training)]
        self._called = {True: Called(self._training), False: Called(self._evaluation)}
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
    def recurrent(self) -> bool:
        """Whether the model has a recurrent layer of torch's."""
        return any(isinstance(layer, nn.RNNBase) for layer in self.template.modules())

    @property
    def trained_share(self) -> float:
        """Of all parameters, those that are trained."""
        return self.dim / sum(p.numel() for p in self.template.parameters())

    @property
    def draws(self) -> bool:
        """Whether a training step draws random numbers, as dropout does."""
        return bool(self._dropout_keys)

    def forget_start(self) -> None:
        """Lets go of the initial parameters: what is left of ``x0`` is its form, type and device."""
        self.x0 = self.x0.new_zeros(()).expand(self.dim)
        for module in (self.template, self._training):  # the evaluation's are those of training
            for name, shape in self.shapes.items():
                parameter = module.get_parameter(name)
                parameter.data = parameter.data.new_zeros(()).expand(shape)

    def probe(self, call: Call, samples: Any, stacked: bool = True) -> Any:
        """What ``call`` gives for a batch; raises, naming the layer, if copies cannot be trained.

        ``stacked``: side by side in one call; or one after the other.
        """
        return probe(self._training, call, samples, stacked)

    def watched(self) -> AbstractContextManager[list[str]]:
        """The layers whose forward is under way, innermost last; those of a call that failed stay."""
        return watched(self._training, self._evaluation)

    def parameters(self, row: Tensor) -> dict[str, Tensor]:
        """The flat vector ``row`` [d], which may be padded, cut into the module's named parameters."""
        behind = len(row) - self.dim
        assert 0 <= behind < PADDED_TO
        pieces = torch.split(row, [*self.sizes, behind] if behind else self.sizes)
        return {
            name: piece.view(shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=False)
        }

    def train(
        self, parameters: dict[str, Tensor], call: Call, samples: Any, key: Tensor, run: Run | None = None
    ) -> Tensor:
        """``call`` of the model while training; ``key`` [4] = (seed, node, round, step) feeds dropout."""
        cast = {name: value.to(self.compute) for name, value in parameters.items()}
        given = {place: cast[name] for place, name in self._places} | dict.fromkeys(self._dropout_keys, key)
        if self.compute != self.x0.dtype:
            samples = map_inputs(
                lambda part: part.to(self.compute) if part.is_floating_point() else part, samples
            )
        return self._run(True, given, call, samples, run)

    def copy(self) -> FlatModel:
        """The same model with modules of its own, for another thread."""
        return FlatModel(self.template, self.x0.device, self.x0.dtype, self.compute)

    def evaluate(self, row: Tensor, call: Call, samples: Any, run: Run | None = None) -> Tensor:
        """``call`` of the model in eval mode."""
        parameters = self.parameters(row)
        given = {place: parameters[name] for place, name in self._places}
        return self._run(False, given, call, samples, run)

    @property
    def parts(self) -> tuple[tuple[nn.Module, list[str]], tuple[nn.Module, list[str]]]:
        """The modules for training and for evaluation, with the names of the tensors that calls bring."""
        places = [place.removeprefix("model.") for place, _ in self._places]
        keys = [key.removeprefix("model.") for key in self._dropout_keys]
        return (self._training, [*places, *keys]), (self._evaluation, places)

    def _run(
        self, training: bool, given: dict[str, Tensor], call: Call, samples: Any, run: Run | None
    ) -> Tensor:
        if run is not None:
            named = {place.removeprefix("model."): tensor for place, tensor in given.items()}
            answer: Tensor = call(lambda *args, **kwargs: run(named, args, kwargs), samples)
            return answer
        result: Tensor = functional_call(self._called[training], given, (call, samples), tie_weights=False)
        return result

    def module(self, row: Tensor) -> nn.Module:
        """A copy of the user's module, in its own dtype and on the CPU, that holds the parameters ``row``."""
        module = deepcopy(self.template).cpu()
        values = self.parameters(row.detach().cpu())
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
        return module


def _placed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """``module`` on ``device``, in ``dtype`` where it has the type of its trainable parameters."""
    own = next(p.dtype for p in module.parameters() if p.requires_grad)

    module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype == own:
            tensor.data = tensor.data.to(dtype)
    return module
