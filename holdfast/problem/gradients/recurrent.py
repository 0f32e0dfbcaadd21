"""Recurrent layers in a form that stacks: torch's kernels for whole layers do not.

The input's products are computed for all times at once; what is left is in ``recurrence``. Rows that are
computed one by one keep torch's kernels. Dropout between layers is torch's function in both, so that it is
counted (``holdfast.models.drawing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from holdfast.problem.gradients.recurrence import CELLS, State, recurrence


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
