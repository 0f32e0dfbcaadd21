"""Rounds that are prepared once and then replayed.

The algorithm is not changed for this. Whatever differs from round to round (the round's number, the cohort,
the hyperparameters that ``at`` changes) lies in buffers that are filled before each replay, and the new state
is written over the old one.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from holdfast.contract import Method
from holdfast.contract.parameters import Rate
from holdfast.core.errors import HoldfastError
from holdfast.core.memory import keep_freed_memory
from holdfast.core.randomness import Word
from holdfast.core.tree import leaves, tree_map
from holdfast.core.validation import hints
from holdfast.engines.common.counters import Counters
from holdfast.engines.common.oracle import MinibatchGradient
from holdfast.engines.common.rounds import Inputs
from holdfast.engines.common.simulation import Look, Simulation, Stepwise

# --- the numbers of a method that a replayed program takes as inputs ------------------------------------
#
# A program is prepared once, with a method as it is in one round. Whatever ``method.at(round)`` changes in a
# later round must reach the program from outside, so these numbers are replaced by tensors that are filled
# before each replay. Which ones change is found by comparing what ``at`` returns for the planned rounds.


Path = tuple[Hashable, ...]  # names of fields, keys and positions that lead to a value

_ABSENT = object()


class NotReplayableError(Exception):
    """Rounds cannot be prepared once and replayed. They run step by step instead, with the same numbers."""


class ChangingFieldError(NotReplayableError):
    """A field of the method changes in a way that a replayed program cannot follow."""


class MethodInputs:
    """``method`` for a program that replays ``rounds`` rounds from ``first`` on.

    Inputs are the numbers that change in these rounds, the rates that stay the same, so that what was
    compiled for one step size serves for all, and all tensors: a graph cannot copy them from the host.
    """

    def __init__(self, method: Method, first: int, rounds: int, device: torch.device) -> None:
        self._given = method
        self._now = method.at(first)
        self._parts = dict(_parts(self._now))
        changing = self._changing(range(first + 1, first + rounds))
        self.changing = [self._name(path) for path in self._parts if path in changing]
        rates = {(name,) for name, kind in hints(type(self._now)).items() if kind == Rate}
        self._buffers = {
            path: _buffer(value, device)
            for path, value in self._parts.items()
            if path in changing or (path in rates and _is_number(value)) or _is_tensor(value)
        }
        self.method: Method = _with(self._now, self._buffers)
        """The method with a tensor in place of every input."""

    def fill(self, round: int) -> None:
        """Puts the numbers of ``round`` into the inputs.

        Raises ``ChangingFieldError``, with the name of the field, if anything else differs from what the
        program was prepared for.
        """
        now = self._given.at(round)
        parts = self._parts if now is self._now else dict(_parts(now))
        for path in self._differing(parts):
            self._check_is_input(path, parts)
            if path not in self._buffers:
                raise ChangingFieldError(f"{self._name(path)} has a value that no planned round has")
        for path, buffer in self._buffers.items():
            value = parts[path]
            if isinstance(value, Tensor):
                buffer.copy_(value)
            else:
                buffer.fill_(value)

    def _changing(self, rounds: range) -> set[Path]:
        changing: set[Path] = set()
        for round in rounds:
            try:
                now = self._given.at(round)
            except HoldfastError:  # the run will stop there and say why; no later round is replayed
                break
            if now is not self._now:
                parts = dict(_parts(now))
                for path in self._differing(parts):
                    self._check_is_input(path, parts)
                    changing.add(path)
        return changing

    def _differing(self, parts: dict[Path, Any]) -> Iterator[Path]:
        if parts is self._parts:
            return
        for path in {**self._parts, **parts}:
            if not _same(self._parts.get(path, _ABSENT), parts.get(path, _ABSENT)):
                yield path

    def _check_is_input(self, path: Path, parts: dict[Path, Any]) -> None:
        """Refuses a value that changes and is neither a number nor a tensor of one shape and type."""
        before, after = self._parts.get(path, _ABSENT), parts.get(path, _ABSENT)
        numbers = _is_number(before) and _is_number(after)
        if not numbers and not (_is_tensor(before) and _is_tensor(after) and _form(before) == _form(after)):
            raise ChangingFieldError(f"{self._name(path)} changes from round to round and is not a number")

    def _name(self, path: Path) -> str:
        return ".".join([type(self._given).__name__, *map(str, path)])


def _children(value: Any) -> dict[Hashable, Any] | None:
    """What ``value`` consists of, by name; None if it is taken as a whole."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {**fields, **getattr(value, "__dict__", {})}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return None


def _parts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything inside ``value`` that is taken as a whole, and the type of everything that is not."""
    children = _children(value)
    yield path, value if children is None else type(value)
    for name, child in (children or {}).items():
        yield from _parts(child, (*path, name))


def _with(value: Any, buffers: dict[Path, Tensor], path: Path = ()) -> Any:
    """``value`` with the ``buffers`` put in their places; what has none inside stays the same object."""
    if path in buffers:
        return buffers[path]
    if not any(place[: len(path)] == path for place in buffers):
        return value
    new = {name: _with(child, buffers, (*path, name)) for name, child in (_children(value) or {}).items()}
    if isinstance(value, dict):
        return new
    if isinstance(value, list | tuple):
        return type(value)(*new.values()) if hasattr(value, "_fields") else type(value)(new.values())
    changed = copy.copy(value)
    for name, child in new.items():
        object.__setattr__(changed, str(name), child)
    return changed


def _buffer(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    # Numbers of Python are double precision, whole ones too where a method divides by them.
    return torch.tensor(float(value), device=device, dtype=torch.float64)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _form(a) == _form(b) and torch.equal(a, b)
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # such as arrays, whose comparison is an array
        return False


# --- rounds that are prepared once and then replayed ----------------------------------------------------


# Why a round may not be prepared, where it still runs step by step.
REFUSALS = (
    NotReplayableError,  # our own reasons
    HoldfastError,  # the method cannot continue; the step itself says so
    RuntimeError,  # what CUDA, the tracer and the compiler object to, and values read on the host
    *(TypeError, ValueError, AttributeError),  # the method uses an input in a way that only a number allows
    OSError,  # no compiler on this machine, or no place for what it writes
)
RECORD_FROM_LOOKS = 10  # recording a look takes the time of a few
Program = Callable[[], object]  # runs a round on the state of its ``Replay``

log = logging.getLogger(__name__)


class Replay:
    """A round of ``simulation`` on fixed memory, for so many ``rounds`` from the present one on."""

    def __init__(self, simulation: Simulation, rounds: int) -> None:
        now = simulation.rounds
        if now.network.sequence is not None or now.network.activity is not None:
            raise NotReplayableError("the network changes from round to round")
        if isinstance(vars(now.method).get("local_steps"), tuple) or now.steps is not None:
            raise NotReplayableError("nodes take unequal numbers of local steps")
        if now.capabilities.poisson_cohorts:
            raise NotReplayableError("how many clients take part differs from round to round")
        if now.recorded is not None:
            raise NotReplayableError("recorded cohorts differ in size")
        if now.cohort_size < now.problem.nodes and len(now.nodes) < now.problem.nodes:
            raise NotReplayableError("how many clients of a cohort are on a rank differs from round to round")
        self.rounds = now
        self.round = torch.tensor(simulation.round, device=now.nodes.device)
        self.cohort = now.cohort(simulation.round).clone()
        self.numbers = MethodInputs(now.method, simulation.round, rounds, now.nodes.device)
        # Where the round's number is asked for, its buffer stands in.
        self.inputs = Inputs(self.numbers.method, cast(int, self.round), self.cohort)
        self.state: Any = None  # what the program works on
        self.program: Program = lambda: None
        self.per_round = Counters()

    def fill(self, round: int) -> None:
        """Puts what ``round`` differs in into the buffers."""
        self.round.fill_(round)
        if self.rounds.cohort_size < self.rounds.problem.nodes:
            self.cohort.copy_(self.rounds.cohort(round))
        self.numbers.fill(round)

    def load(self, kept: Any) -> None:
        """The state as in ``kept``, every tensor in memory of its own."""
        self.state = None  # lets go of the old memory first
        self.state = tree_map(lambda t: t.to(self.round.device, copy=True), kept)

    def advance(self, state: Any, gradient: MinibatchGradient | None = None) -> Any:
        """The round, with the new state put where the old one was."""
        new = self.rounds.advance(state, self.inputs, Counters(), gradient)
        after = _apart(new, state)
        return tree_map(lambda old, new: old if old is new else old.copy_(new), state, after)

    def count(self, state: Any) -> None:
        """Finds what a round sends and computes by running one, which overwrites ``state``.

        What rounds make once and keep is made here too. No minibatch gradient is computed: none is looked at.
        """
        self.rounds.problem.get_ready()
        self.per_round = Counters()
        gradient = _no_gradient if self.rounds.problem.stochastic else None
        self.rounds.advance(state, self.inputs, self.per_round, gradient)


class Way(NamedTuple):
    """A way to run rounds, and what it is called."""

    words: str
    program: Callable[[Replay], Program]


class Replaying:
    """Replays rounds in the first of ``ways`` that works; otherwise runs them step by step.

    ``ways``: for so many rounds of a simulation, the ways that pay, the fastest first; none for short runs.
    ``done``: what happens to rounds there, human-readable. ``stepwise``: how to run rounds if no way works.
    ``record``: a function of a state that stays in place, as one that is faster to call.
    """

    def __init__(
        self,
        ways: Callable[[Simulation, int], list[Way]],
        done: str,
        stepwise: Callable[[Simulation, int], Stepwise],
        record: Callable[[Look], Look] = lambda look: look,
    ) -> None:
        self.ways, self.done, self.make_stepwise, self.record = ways, done, stepwise, record
        self.stepwise = Stepwise()
        self.replay: Replay | None = None  # while rounds are replayed

    def prepare(self, simulation: Simulation, rounds: int) -> str:
        start = time.perf_counter()
        self.replay = None
        ways = self.ways(simulation, rounds)
        if not ways:
            return self.stepwise.prepare(simulation, rounds)
        keep_freed_memory()
        # Trial rounds overwrite the state. It is kept on the host: a second one may not fit on the device.
        kept = tree_map(lambda t: t.detach().to("cpu", copy=True).contiguous(), simulation.state)
        trial, words, refusals = _first_that_works(simulation, rounds, ways, kept)
        if trial is None:
            simulation.state = tree_map(lambda t: t.to(simulation.nodes.device, copy=True), kept)
            self._fall_back(simulation, refusals[-1])
            self.stepwise = self.make_stepwise(simulation, rounds)
            description = self.stepwise.prepare(simulation, rounds)
            return f"{description}, as rounds cannot be {self.done}: {refusals[-1].reason}"
        self.replay = trial
        simulation.state = tree_map(lambda buffer, old: buffer.copy_(old), trial.state, kept)
        since = f", since a faster way failed: {refusals[0].reason}" if refusals else ""
        return f"{words}{since}; prepared in {time.perf_counter() - start:.1f} s"

    def step(self, simulation: Simulation) -> None:
        if self.replay is not None:
            try:
                self.replay.fill(simulation.round)
            except ChangingFieldError as error:
                self._fall_back(simulation, _refusal(error, self.replay))
                simulation.state = tree_map(torch.clone, simulation.state)
        if self.replay is None:
            self.stepwise.step(simulation)
            return
        self.replay.program()
        simulation.counters.add(self.replay.per_round)

    def put(self, old: Any, new: Any) -> Any:
        return new if self.replay is None else tree_map(lambda buffer, value: buffer.copy_(value), old, new)

    def repeated(self, simulation: Simulation, look: Look, times: int) -> Look:
        replay = self.replay
        # Only the state of replayed rounds stays in place. Where ranks have to meet, nothing is recorded.
        if replay is None or times < RECORD_FROM_LOOKS or simulation.world.size > 1:
            return look
        recorded = self.record(look)
        return lambda: recorded() if self.replay is replay else look()

    def _fall_back(self, simulation: Simulation, refusal: Refusal) -> None:
        """From here on rounds run step by step; logs why."""
        self.replay = None
        level = logging.WARNING if refusal.method_changes else logging.INFO
        log.log(level, "%s: rounds run step by step: %s", type(simulation.method).__name__, refusal.reason)


class Refusal(NamedTuple):
    """Why rounds cannot be replayed in some way."""

    reason: str
    method_changes: bool  # whether it is that the method's hyperparameters change from round to round


def _refusal(error: Exception, replay: Replay | None) -> Refusal:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    changing = replay.numbers.changing if replay else []
    if changing and not isinstance(error, NotReplayableError):
        reason += f" (what changes from round to round: {', '.join(changing)})"
    return Refusal(reason, bool(changing) or isinstance(error, ChangingFieldError))


def _first_that_works(
    simulation: Simulation, rounds: int, ways: list[Way], kept: Any
) -> tuple[Replay | None, str, list[Refusal]]:
    """Tries the ways in turn: a replay in the one that works, its words, and why those before it failed."""
    replay = None
    try:
        replay = Replay(simulation, rounds)
        replay.count(simulation.state)
    except REFUSALS as error:
        return None, "", [_refusal(error, replay)]
    simulation.state = ()  # there is a copy, and trials need the memory
    refusals: list[Refusal] = []
    for words, make in ways:
        replay.load(kept)
        refusal = None
        try:
            replay.program = make(replay)
        except REFUSALS as error:
            if simulation.nodes.is_cuda:
                torch.cuda.synchronize()
            refusal = _refusal(error, replay)
        # A way that fails on one rank is of no use to the others, which would wait for it.
        if not simulation.world.any(refusal is not None):
            return replay, words, refusals
        refusals.append(refusal or Refusal("it fails on another rank", False))
    return None, "", refusals


def _no_gradient(x: Tensor, nodes: Tensor, round: Word, step: Word) -> tuple[Tensor, Tensor]:
    zero = x.new_zeros(())
    return zero.expand(len(x)), zero.expand_as(x)


def _apart(after: Any, before: Any) -> Any:
    """``after`` without memory of another part of ``before``, which is about to be overwritten."""
    taken = {_memory(tensor) for tensor in leaves(before)}

    def own(buffer: Tensor, value: Tensor) -> Tensor:
        return value.clone() if value is not buffer and _memory(value) in taken else value

    return tree_map(own, before, after)


def _memory(tensor: Tensor) -> int:
    """The same for tensors with memory in common; while a round is traced, they have no addresses."""
    return int(tensor.untyped_storage()._cdata)
