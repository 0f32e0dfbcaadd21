"""The frozen beginning of a model, computed once for every sample instead of in every step.

Up to the first trained layer, a forward pass depends on frozen parameters and the sample alone. What the rest
reads of it, the features, is kept in place of the inputs. The user's own forward pass runs as it is, and a
``TorchFunctionMode`` answers every call of torch whose arguments are frozen. A first run on tensors without
numbers records the answers. In later runs nothing frozen is computed, and a call that mixes frozen values
with trained ones gets the features of the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode

from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.data.samples import Pair, targets_of
from holdfast.models import CountedDropout, dropout_keys
from holdfast.problem.forward import forward


class Features(NamedTuple):
    """In place of the inputs of samples: what the trained part of a model reads of them, [B, ...] each."""

    kept: tuple[Tensor, ...]


@dataclass
class Noted:
    """A record of what a forward pass on so many samples does with frozen values."""

    samples: Tree  # without numbers
    answers: list[tuple[Any, Any]] = field(default_factory=list)  # functions and their results, in order
    shadows: dict[int, Tensor] = field(default_factory=dict)  # all tensors without numbers, by their ids
    features: dict[int, int] = field(default_factory=dict)  # of those the trained part reads: their numbers
    views: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)  # calls that return views of others
    last_use: dict[int, int] = field(default_factory=dict)  # numbers of the answers that read others last

    def __post_init__(self) -> None:
        target = targets_of(self.samples)
        self.shadows |= {id(part): part for part in leaves(self.samples) if part is not target}

    def origins(self, tree: Any) -> Iterator[int]:
        """What is kept of the tensors in ``tree``: of a view, such as a transposed matrix, its base.

        Views cost nothing, and samples may not be their first dimension.
        """
        for part in _tensors(tree):
            if id(part) in self.views:
                yield from self.origins(self.views[id(part)])
            elif id(part) in self.shadows:
                yield id(part)

    def real(self, values: dict[int, Tensor], tree: Any) -> Any:
        """``tree`` with real tensors in place of those without numbers."""

        def found(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) not in self.shadows:
                return leaf
            if id(leaf) in values:
                return values[id(leaf)]
            func, args, kwargs = self.views[id(leaf)]
            return func(*self.real(values, args), **self.real(values, kwargs))

        return pytree.tree_map(found, tree)

    def samples_with(self, targets: Tensor) -> Tree:
        own = targets_of(self.samples)
        return tree_map(lambda part: targets if part is own else part, self.samples)


_TRAINED = object()  # in place of an answer: the function draws random numbers, so it belongs to the rest

Handle = Callable[[Any, Any, Any], Any]


class _Walk(TorchFunctionMode):
    """Sorts the calls of torch in a forward pass by what they read.

    ``frozen(func, args, kwargs)`` answers those that read ``shadows`` and what does not depend on samples
    alone, ``trained`` those that read shadows and something else. Others are computed as they are.
    """

    def __init__(
        self, constant: set[int], shadows: dict[int, Tensor], frozen: Handle, trained: Handle
    ) -> None:
        super().__init__()
        self.given, self.constant, self.shadows = constant, set(constant), shadows
        self.frozen, self.trained = frozen, trained
        self.parameters: set[int] = set()  # that were read without anything trained
        self._alive: list[Any] = []  # no two constants may have one id

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = set(map(id, _tensors((args, kwargs))))
        fixed = read <= self.constant | self.shadows.keys()
        if fixed:
            self.parameters |= read & self.given
        if read & self.shadows.keys():
            return (self.frozen if fixed else self.trained)(func, args, kwargs)
        result = func(*args, **kwargs)
        if fixed:
            self.constant.update(map(id, _tensors(result)))
            self._alive.append(result)
        return result


class Frozen:
    """``modules``: the model while training (True) and in eval mode (False). ``example``: two samples."""

    def __init__(self, modules: dict[bool, nn.Module], example: Tree) -> None:
        self.modules, self.example = modules, example
        self.constant: set[int] = set()
        for module in modules.values():
            drawn = set(dropout_keys(module))
            self.constant |= {id(p) for p in module.parameters() if not p.requires_grad}
            self.constant |= {id(b) for name, b in module.named_buffers() if name not in drawn}
        self.parameters: set[int] = set()  # frozen ones that only the beginning reads
        self._noted: dict[tuple[bool, int], Noted] = {}
        self._lock = threading.Lock()

    def noted(self, training: bool, size: int) -> Noted:
        """The record of a forward pass on ``size`` samples; made on first use."""
        with self._lock:
            if (training, size) not in self._noted:
                self._noted[training, size] = self._note(training, size)
            return self._noted[training, size]

    def _note(self, training: bool, size: int) -> Noted:
        with ExitStack() as outside:
            # Whatever is under way, such as vmap or tracing, is not meant for this.
            for leave in (
                temporarily_clear_interpreter_stack,
                disable_proxy_modes_tracing,
                unset_fake_temporarily,
                torch.no_grad,
            ):
                outside.enter_context(leave())
            without_numbers = FakeTensorMode(allow_non_fake_inputs=True)
            some = tree_map(lambda part: part[:1].expand(size, *part.shape[1:]), self.example)
            noted = Noted(tree_map(lambda part: without_numbers.from_tensor(part.contiguous()), some))
            key = torch.zeros(4, dtype=torch.int64, device=next(leaves(some)).device)
            drawing = CountedDropout(key)

            def frozen(func: Any, args: Any, kwargs: Any) -> Any:
                before = drawing.draws
                result = func(*args, **kwargs)
                if drawing.draws > before:
                    noted.answers.append((func, _TRAINED))
                    note_features((args, kwargs))
                    return result
                noted.last_use |= dict.fromkeys(map(id, _tensors((args, kwargs))), len(noted.answers))
                noted.answers.append((func, result))
                if _is_view(result, (args, kwargs)):
                    noted.views[id(result)] = func, args, kwargs
                noted.shadows |= {id(part): part for part in _tensors(result)}
                return result

            def trained(func: Any, args: Any, kwargs: Any) -> Any:
                note_features((args, kwargs))
                return func(*args, **kwargs)

            def note_features(read: Any) -> None:
                for origin in noted.origins(read):
                    noted.features.setdefault(origin, len(noted.features))

            walk = _Walk(self.constant, noted.shadows, frozen, trained)
            for mode in (without_numbers, drawing, walk):
                outside.enter_context(mode)
            outputs = forward(self.modules[training], noted.samples)
            if any(id(part) in noted.shadows for part in _tensors(outputs)):
                raise RuntimeError("an output does not depend on trained parameters")
            self.parameters |= walk.parameters
        return noted

    @contextmanager
    def standing_in(self, training: bool, samples: Pair) -> Iterator[Tree]:
        """A model's inputs in place of samples whose features are known, [B, ...]."""
        noted = self.noted(training, len(samples.y))
        values = {key: samples.x.kept[number] for key, number in noted.features.items()}
        with self._walk(noted, values, lambda *_: None):
            yield noted.samples_with(samples.y)

    @torch.no_grad()
    def features(self, training: bool, samples: Tree) -> tuple[Tensor, ...]:
        """The features of a batch."""
        targets = targets_of(samples)
        assert targets is not None
        noted = self.noted(training, len(targets))
        values = {id(a): b for a, b in zip(leaves(noted.samples), leaves(samples), strict=True)}
        found: dict[int, tuple[Tensor, int]] = {}

        def compute(func: Any, args: Any, kwargs: Any, number: int, answer: Any) -> None:
            real = func(*noted.real(values, args), **noted.real(values, kwargs))
            values.update({id(a): b for a, b in zip(_tensors(answer), _tensors(real), strict=True)})
            for part in _tensors((args, kwargs)):
                if noted.last_use.get(id(part)) == number and id(part) not in noted.features:
                    values.pop(id(part), None)

        with self._walk(noted, values, compute, found):
            forward(self.modules[training], noted.samples_with(targets))
        if any(value._version != version for value, version in found.values()):
            raise RuntimeError("what the trained part reads is changed in place")
        return tuple(found[key][0] for key in noted.features)

    def _walk(
        self,
        noted: Noted,
        values: dict[int, Tensor],
        compute: Callable[..., None],
        found: dict[int, tuple[Tensor, int]] | None = None,
    ) -> _Walk:
        number = 0

        def frozen(func: Any, args: Any, kwargs: Any) -> Any:
            nonlocal number
            known, answer = noted.answers[number] if number < len(noted.answers) else (None, None)
            if known != func:
                raise RuntimeError("the frozen part of the model does not do the same in every call")
            number += 1
            if answer is _TRAINED:
                return trained(func, args, kwargs)
            compute(func, args, kwargs, number - 1, answer)
            return answer

        def trained(func: Any, args: Any, kwargs: Any) -> Any:
            if found is not None:
                for key in noted.origins((args, kwargs)):
                    found.setdefault(key, (values[key], values[key]._version))
            return func(*noted.real(values, args), **noted.real(values, kwargs))

        return _Walk(self.constant, noted.shadows, frozen, trained)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_view(result: Any, read: Any) -> bool:
    """Whether ``result`` is a view of a tensor that was ``read``."""
    if not isinstance(result, Tensor) or any(result is part for part in _tensors(read)):
        return False
    return any(_memory(result) == _memory(part) for part in _tensors(read))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
