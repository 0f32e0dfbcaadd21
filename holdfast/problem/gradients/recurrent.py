"""Recurrent layers in a form that stacks: torch's kernels for whole layers do not.

The input's products are computed for all times at once; ``recurrence`` computes the rest. Rows that are
computed one by one keep torch's kernels. Dropout between layers is torch's function in both, so that it is
counted (``holdfast.models.dropout``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

# --- A recurrent layer's steps through time as one operation forward and one backward -------------------
#
# Traced step by step, an LSTM on 32 tokens comes down to 2,250 operations, for which a compiler takes about
# 10 ms each. Here only what depends on the step before is left to the two operations, which no compiler looks
# into. The rest is computed for all times at once: the input's products before, and in the backward pass the
# slopes of the cell, which are numbers as it acts on every unit alone, and the sums for weights.


State = tuple[Tensor, ...]  # [B, H] each: (h, c) of an LSTM, (h,) of the others
Cell = Callable[[Tensor, Tensor, State], State]
"""From the input's and the state's products [B, gates * H] and the state to the next state."""


def _lstm(given: Tensor, fed_back: Tensor, state: State) -> State:
    into, forget, new, out = (given + fed_back).chunk(4, -1)
    memory = forget.sigmoid() * state[1] + into.sigmoid() * new.tanh()
    return out.sigmoid() * memory.tanh(), memory


def _gru(given: Tensor, fed_back: Tensor, state: State) -> State:
    (reset, update, new), (of_reset, of_update, of_new) = given.chunk(3, -1), fed_back.chunk(3, -1)
    candidate = (new + (reset + of_reset).sigmoid() * of_new).tanh()
    share = (update + of_update).sigmoid()
    return (candidate + share * (state[0] - candidate),)


def _tanh(given: Tensor, fed_back: Tensor, state: State) -> State:
    return ((given + fed_back).tanh(),)


def _relu(given: Tensor, fed_back: Tensor, state: State) -> State:
    return ((given + fed_back).relu(),)


CELLS: dict[str, Cell] = {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": _tanh, "RNN_RELU": _relu}


def recurrence(given: Tensor, back: Tensor, bias: Tensor, start: State, mode: str) -> State:
    """The states [T, B, H] at all times. The cell is fed back its last one times ``back`` [H, G] + ``bias``.

    ``given`` [T, B, G]: the input's products. There are first derivatives only.
    """
    one = [tensor.unsqueeze(0) for tensor in (given, back, bias, *start)]
    states = _recurrence(mode, *one)
    return tuple(part.squeeze(0) for part in states)


# Schemas are written out because torch 2.6 does not read the types of lists.
@torch.library.custom_op(
    "holdfast::recurrence",
    mutates_args=(),
    schema="(Tensor given, Tensor back, Tensor bias, Tensor[] start, str mode) -> Tensor[]",
)
def _forward(given: Tensor, back: Tensor, bias: Tensor, start: Sequence[Tensor], mode: str) -> list[Tensor]:
    """The same for n nodes: all tensors begin with [n, ...]."""
    state: State = tuple(start)
    states = []
    for now in given.unbind(1):
        state = CELLS[mode](now, torch.baddbmm(bias.unsqueeze(1), state[0], back), state)
        states.append(state)
    return [torch.stack(parts, 1) for parts in zip(*states, strict=True)]


@_forward.register_fake
def _(given: Tensor, back: Tensor, bias: Tensor, start: Sequence[Tensor], mode: str) -> list[Tensor]:
    return [given.new_empty(*given.shape[:3], part.shape[-1]) for part in start]


@torch.library.custom_op(
    "holdfast::recurrence_backward",
    mutates_args=(),
    schema="(Tensor[] slopes, Tensor[] own, Tensor back, Tensor[] upstream) -> Tensor[]",
)
def _backward(
    slopes: Sequence[Tensor], own: Sequence[Tensor], back: Tensor, upstream: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients in every state [n, T, B, H] and in the first one [n, B, H].

    ``upstream``: the same without the steps that follow. Of every part of the state, ``slopes`` [n, T,
    B, G] are those in what is fed back, and ``own`` [n, T, B, H] those in every part of the state before.
    """
    parts, units = len(upstream), upstream[0].shape[-1]
    by_unit = [slope.view(*slope.shape[:-1], -1, units) for slope in slopes]
    totals: list[State] = []
    carried: list[Tensor] = [torch.zeros_like(part[:, 0]) for part in upstream]
    for time in reversed(range(upstream[0].shape[1])):
        total = tuple(part[:, time] + later for part, later in zip(upstream, carried, strict=True))
        totals.append(total)
        fed = total[0].unsqueeze(-2) * by_unit[0][:, time]
        for part, slope in zip(total[1:], by_unit[1:], strict=True):
            fed.addcmul_(part.unsqueeze(-2), slope[:, time])
        carried = [torch.bmm(fed.flatten(2), back.mT)]
        carried += [torch.zeros_like(part) for part in total[1:]]
        for number, slope in enumerate(own):
            carried[number % parts].addcmul_(total[number // parts], slope[:, time])
    of_times = [torch.stack(times[::-1], 1) for times in zip(*totals, strict=True)]
    return of_times + [part.contiguous() for part in carried]


@_backward.register_fake
def _(
    slopes: Sequence[Tensor], own: Sequence[Tensor], back: Tensor, upstream: Sequence[Tensor]
) -> list[Tensor]:
    first = [part[:, 0] for part in upstream]
    return [part.new_empty(part.shape) for part in (*upstream, *first)]


class _Recurrence(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(mode: str, given: Tensor, back: Tensor, bias: Tensor, *start: Tensor) -> State:
        return tuple(_forward(given, back, bias, start, mode))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: State) -> None:
        ctx.mode, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        given, back, bias, *both = ctx.saved_tensors
        parts = len(upstream)
        pairs = zip(both[:parts], both[parts:], strict=True)
        before = tuple(torch.cat([start.unsqueeze(1), states[:, :-1]], 1) for start, states in pairs)
        fed_back = torch.baddbmm(bias.unsqueeze(1), before[0].flatten(1, 2), back).view_as(given)
        after, pull_back, *_ = vjp(CELLS[ctx.mode], given, fed_back, before)
        slopes = []  # of every part of the state: in the input's products, in what is fed back, in the state
        for part in range(parts):
            chosen = [(torch.ones_like if i == part else torch.zeros_like)(a) for i, a in enumerate(after)]
            slopes.append(pull_back(tuple(chosen)))
        own = [slope for _, _, of_state in slopes for slope in of_state]
        found = _backward([fed for _, fed, _ in slopes], own, back, upstream)
        of_given, of_fed = (
            _chained(found[:parts], [slope[argument] for slope in slopes]) for argument in (0, 1)
        )
        of_fed = of_fed.flatten(1, 2)
        of_back = torch.bmm(before[0].flatten(1, 2).mT, of_fed)
        return None, of_given, of_back, of_fed.sum(1), *found[parts:]


_recurrence: Callable[..., State] = _Recurrence.apply


def _chained(totals: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
    """The sum over parts of the state of gradients [..., H] times slopes [..., G] in the gates."""
    terms = [
        t.unsqueeze(-2) * s.view(*s.shape[:-1], -1, t.shape[-1]) for t, s in zip(totals, slopes, strict=True)
    ]
    return sum(terms[1:], terms[0]).flatten(-2)


def _mapped(operation: Callable[..., list[Tensor]]) -> Callable[..., tuple[list[Tensor], list[int]]]:
    """The rule of vmap for ``operation`` on tensors of n nodes: the mapped dimension joins the nodes."""

    def merged(size: int, arg: Any, dim: Any) -> Any:
        if isinstance(arg, Tensor):
            return (arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)).flatten(0, 1)
        if isinstance(arg, list | tuple):
            return [merged(size, *pair) for pair in zip(arg, dim, strict=True)]
        return arg

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[list[Tensor], list[int]]:
        size = info.batch_size
        results = operation(*(merged(size, *pair) for pair in zip(args, in_dims, strict=True)))
        return [part.view(size, -1, *part.shape[1:]) for part in results], [0] * len(results)

    return rule


_forward.register_vmap(_mapped(_forward))
_backward.register_vmap(_mapped(_backward))


# --- recurrent layers in a form that stacks: torch's kernels for whole layers do not --------------------


class Stackable(nn.RNNBase):
    """A recurrent layer that runs step by step under torch's function transforms."""

    traceable = True

    def _get_name(self) -> str:
        return self.mode.split("_")[0]

    def forward(self, input: Any, hx: Any = None) -> Any:
        drops = self.training and self.dropout > 0 and self.num_layers > 1
        if isinstance(input, PackedSequence) and drops:
            raise RuntimeError("dropout between layers of a packed sequence; pad it, or leave dropout out")
        if isinstance(input, PackedSequence) or not (drops or _is_transformed()):
            return super().forward(input, hx)
        return self._by_layers(input, hx)

    def _by_layers(self, input: Tensor, hx: Any) -> Any:
        alone = input.ndim == 2  # one sequence, without a batch
        time = 0 if alone or not self.batch_first else 1
        sequence = (input.unsqueeze(1) if alone else input).movedim(0 if alone else time, 0)  # [T, B, I]
        starts = self._starts(sequence, hx, alone)
        directions = 2 if self.bidirectional else 1
        run = self._step_by_step if _is_transformed() else self._whole
        finals: list[State] = []
        for layer in range(self.num_layers):
            if layer > 0:
                sequence = functional.dropout(sequence, self.dropout, self.training)
            outputs = []
            for direction in range(directions):
                number = layer * directions + direction
                weights, start = self._weights(layer, direction), tuple(part[number] for part in starts)
                ahead = sequence.flip(0) if direction else sequence
                output, final = run(ahead, weights, start)
                outputs.append(output.flip(0) if direction else output)
                finals.append(final)
            sequence = torch.cat(outputs, -1) if directions == 2 else outputs[0]
        states = [torch.stack(parts) for parts in zip(*finals, strict=True)]
        output = sequence.movedim(0, time)
        if alone:
            output, states = output.squeeze(1), [part.squeeze(1) for part in states]
        return output, tuple(states) if self.mode == "LSTM" else states[0]

    def _starts(self, sequence: Tensor, hx: Any, alone: bool) -> tuple[Tensor, ...]:
        """The first states, [layers * directions, B, H] each."""
        if hx is not None:
            given = hx if isinstance(hx, tuple) else (hx,)
            return tuple(part.unsqueeze(1) for part in given) if alone else given
        number = self.num_layers * (2 if self.bidirectional else 1)
        sizes = [self.proj_size or self.hidden_size, self.hidden_size][: 2 if self.mode == "LSTM" else 1]
        return tuple(sequence.new_zeros(number, sequence.shape[1], size) for size in sizes)

    def _weights(self, layer: int, direction: int) -> dict[str, Tensor]:
        suffix = f"_l{layer}" + ("_reverse" if direction else "")
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        return {name: getattr(self, name + suffix) for name in names if hasattr(self, name + suffix)}

    def _step_by_step(
        self, sequence: Tensor, weights: dict[str, Tensor], state: State
    ) -> tuple[Tensor, State]:
        given = functional.linear(sequence, weights["weight_ih"], weights.get("bias_ih"))
        back, projection = weights["weight_hh"].mT, weights.get("weight_hr")
        bias, cell = weights.get("bias_hh", back.new_zeros(back.shape[1])), CELLS[self.mode]
        if projection is None and _has_one_gradient():
            states = recurrence(given, back, bias, state, self.mode)
            return states[0], tuple(part[-1] for part in states)
        outputs = []
        for now in given.unbind():
            state = cell(now, torch.addmm(bias, state[0], back), state)
            if projection is not None:
                state = (state[0] @ projection.mT, *state[1:])
            outputs.append(state[0])
        return torch.stack(outputs), state

    def _whole(
        self, sequence: Tensor, weights: dict[str, Tensor], state: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        """By torch's kernel for the layer."""
        kernel = getattr(torch, self.mode.lower())
        first = [part.unsqueeze(0) for part in state]
        given = first if self.mode == "LSTM" else first[0]
        output, *final = kernel(
            sequence, given, list(weights.values()), self.bias, 1, 0.0, self.training, False, False
        )
        return output, tuple(part.squeeze(0) for part in final)


_STACKABLE: dict[type, type] = {
    kind: type(kind.__name__, (Stackable, kind), {"traceable": True}) for kind in (nn.LSTM, nn.GRU, nn.RNN)
}


def stackable_recurrence(module: nn.Module) -> nn.Module:
    """``module`` with recurrent layers that can be stacked, in place; parameters are the same."""
    for layer in module.modules():
        layer.__class__ = _STACKABLE.get(type(layer), type(layer))
    return module


def _is_transformed() -> bool:
    """Whether one of torch's function transforms, such as vmap, is under way."""
    return torch._C._functorch.maybe_current_level() is not None


def _has_one_gradient() -> bool:
    """Whether torch's function transforms take at most one derivative, and that backwards."""
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or []]
    kinds = torch._C._functorch.TransformType
    return kinds.Jvp not in levels and levels.count(kinds.Grad) <= 1
