"""What a round is made of where it is prepared once and then replayed.

The algorithm is not changed for this. Whatever differs from round to round (the round's number, the cohort,
the hyperparameters that ``at`` changes) lives in buffers that are filled before each replay.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from holdfast.engines.simulate.fused import FusedRound
from holdfast.engines.simulate.inputs import ChangingFieldError, MethodInputs, NotReplayableError
from holdfast.engines.simulate.peers import Traffic
from holdfast.engines.simulate.simulation import Simulation
from holdfast.errors import HoldfastError
from holdfast.objective.flat import widened
from holdfast.objective.model_objective import ModelObjective
from holdfast.objective.oracle import Work
from holdfast.registry import is_ours
from holdfast.tree import leaves, tree_map

Advance = Callable[[Any], Any]  # from a state to the state after the round

# Why a round may not be prepared, where it still runs step by step.
REFUSALS = (
    NotReplayableError,  # our own reasons
    HoldfastError,  # the method cannot go on; the step itself says so
    RuntimeError,  # what CUDA, the tracer and the compiler object to, and values read on the host
    *(TypeError, ValueError, AttributeError),  # the method uses an input in a way that only a number allows
    OSError,  # no compiler on this machine, or no place for what it writes
)

log = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """Why rounds cannot be replayed in some way."""

    reason: str
    method_changes: bool  # whether it is that the method's hyperparameters change from round to round


def in_place(advance: Advance) -> Advance:
    """``advance`` with the new state put where the old one was."""

    def renew(state: Any) -> Any:
        after = _apart(advance(state), state)
        return tree_map(lambda old, new: old if old is new else old.copy_(new), state, after)

    return renew


class ReplayedSimulation(Simulation):
    """A ``Simulation`` whose rounds are replayed, once there is a program for them."""

    program: Callable[[], object] | None = None

    _inputs: MethodInputs | None = None

    def forget_program(self) -> None:
        """From here on rounds run step by step, until there is a new one."""
        self.program = None

    def step(self) -> None:
        if self.program is not None:
            try:
                self.fill()
            except ChangingFieldError as error:
                self.fall_back(self.refusal(error))
                self._load(self.state)
        if self.program is None:
            super().step()
            return
        self.program()
        for total, each in zip((self.traffic, self.work), self._per_round, strict=True):
            for name, amount in vars(each).items():
                setattr(total, name, getattr(total, name) + amount)
        self.round += 1

    def restore(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        static = self.state
        super().restore(tensors, counters)
        if self.program is not None:
            self.state = tree_map(lambda buffer, value: buffer.copy_(value), static, self.state)

    def buffered(self, rounds: int = 1) -> Advance:
        """A round with buffers in place of all that differs in so many ``rounds``, or from run to run."""
        self._inputs = None
        if self.network.sequence is not None or self.network.activity is not None:
            raise NotReplayableError("the network changes from round to round")
        device = self.everybody.device
        self._round_now = torch.tensor(self.round, device=device)
        self._chosen = self._cohort().clone()
        self._inputs = MethodInputs(self.method, self.round, rounds, device)
        method = self._inputs.method
        round_now = cast(int, self._round_now)  # where the round's number is asked for, its buffer stands in
        return lambda state: self._advance(method, state, round_now, self._chosen)

    def refusal(self, error: Exception) -> Refusal:
        """What ``error``, raised while rounds were prepared, means."""
        reason, changing = first_line(error), self._inputs.changing if self._inputs else []
        if changing and not isinstance(error, NotReplayableError):
            reason += f" (what changes from round to round: {', '.join(changing)})"
        return Refusal(reason, bool(changing) or isinstance(error, ChangingFieldError))

    def fall_back(self, refusal: Refusal) -> str:
        """From here on rounds run step by step; logs why, and returns it."""
        level = logging.WARNING if refusal.method_changes else logging.INFO
        log.log(level, "%s: rounds run step by step: %s", type(self.method).__name__, refusal.reason)
        self.forget_program()
        return refusal.reason

    def _fused(self, advance: Advance) -> Advance:
        """``advance`` compiled; of our own methods, on wider rows."""
        assert isinstance(self.objective, ModelObjective)
        state = self._widen() if is_ours(self.method) else self.state
        fused = FusedRound(advance, state, self.objective)
        return lambda _: fused(state)

    def _widen(self) -> Any:
        """The state where vectors like the model are wider; what it was becomes a view of that.

        A user's method may count its columns or divide by them, ours do not.
        """
        dim, narrow = self.objective.dim, self.state

        def like_the_model(tensor: Tensor) -> bool:
            return tensor.ndim > 0 and tensor.shape[-1] == dim

        wide = tree_map(lambda t: widened(t) if like_the_model(t) else t, narrow)
        self.state = tree_map(lambda w, t: w[..., :dim] if like_the_model(t) else w, wide, narrow)
        return wide

    def count(self, advance: Advance) -> None:
        """What a round sends and computes, found by running one: a replay counts nothing.

        What rounds make once and keep is made here too. No minibatch gradient is computed: none is looked at.
        """
        self.traffic, self.work = Traffic(), Work()
        if isinstance(self.objective, ModelObjective):
            _ = self.objective.row_grads.samples_at_once, self.objective.row_grads.stackable
            with self.objective.gradients_by(lambda x, *_: x.new_zeros(()).expand_as(x)):
                advance(self.state)
        else:
            advance(self.state)
        self._per_round = copy.copy(self.traffic), copy.copy(self.work)

    def _load(self, kept: Any) -> None:
        """The state as it was, every tensor in memory of its own."""
        self.state = None  # lets go of the old memory first
        self.state = tree_map(lambda t: t.to(self.everybody.device, copy=True), kept)

    def fill(self) -> None:
        """Puts what this round differs in into the buffers."""
        self._round_now.fill_(self.round)
        if self.cohort_size < self.objective.nodes:
            self._chosen.copy_(self._cohort())
        assert self._inputs is not None
        self._inputs.fill(self.round)


def _apart(after: Any, before: Any) -> Any:
    """``after`` without memory of another part of ``before``, which is about to be overwritten."""
    taken = {_memory(tensor) for tensor in leaves(before)}

    def own(buffer: Tensor, value: Tensor) -> Tensor:
        return value.clone() if value is not buffer and _memory(value) in taken else value

    return tree_map(own, before, after)


def _memory(tensor: Tensor) -> int:
    """The same for tensors with memory in common; while a round is traced, they have no addresses."""
    return int(tensor.untyped_storage()._cdata)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
