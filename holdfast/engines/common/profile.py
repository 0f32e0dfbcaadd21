"""What a method sends, keeps and asks for, found by a trial: its round is run on an objective that is zero.

The trial also checks that the method and its optimisers keep the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, cycle
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from holdfast.contract import IDENTITY, Algorithm, Channel, Method, Oracle, ServerAlgorithm
from holdfast.contract.channel import Mixing, Use
from holdfast.contract.parameters import Hyperparameters
from holdfast.core.randomness import coin
from holdfast.core.tree import Tree, leaves, row_size, tree_map
from holdfast.core.validation import Cohort
from holdfast.engines.common.channel_run import new_memories
from holdfast.engines.common.counters import Footprint, Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.engines.common.trial import (
    OF_SERVER,
    ROWS,
    Expected,
    Flip,
    RecordingOracle,
    RecordingPeers,
    Seen,
    ZeroProblem,
    check_optimizers,
)
from holdfast.topology import Network

# --- a trial -----------------------------------------------------------------------------------------------


DIM = 11  # a size that no other number of a trial has
LINKS = 3  # of a node in a trial: tensors with a row for each link are not like those with one for each node
MANY = 16  # rounds that are looked at where they differ


class Trial(NamedTuple):
    """What was seen of ``ROWS`` nodes alike, with ``LINKS`` links each, and models of ``dim`` numbers."""

    dim: int
    start: Seen
    rounds: list[Seen]
    state: Tree  # of the nodes, before the first round
    work: Work  # of all rounds

    @property
    def seen(self) -> list[Seen]:
        """At the start and in all rounds."""
        return [self.start, *self.rounds]


def tried(
    method: Method,
    network: Network,
    dim: int,
    coins: Callable[[], Flip],
    dtype: torch.dtype = torch.float64,
    rounds: Iterable[int] = (0,),
) -> Trial:
    """Runs ``method`` on the zero problem, at the start and in ``rounds``, and checks all that it gives.

    ``coins`` says how coins fall, at the start and in every round again. Where a server leads, all rounds are
    like the first.
    """
    x0, trial = torch.zeros(dim, dtype=dtype), Trial(dim, Seen(), [], (), Work())
    if isinstance(method, ServerAlgorithm):
        return _tried_with_server(method.at(0), network, x0, trial)
    assert isinstance(method, Algorithm)
    return _tried_among_nodes(method, network, x0, trial, coins, rounds)


def _tried_among_nodes(
    method: Algorithm,
    network: Network,
    x0: Tensor,
    trial: Trial,
    coins: Callable[[], Flip],
    rounds: Iterable[int],
) -> Trial:
    expected, name, rows = Expected(trial.dim), type(method).__name__, x0.expand(ROWS, -1)

    def peers(seen: Seen) -> RecordingPeers:
        return RecordingPeers(LINKS, x0, coins(), ROWS, seen)

    before = method.at(0).init(
        rows.clone(), _oracle(network, trial, 0, trial.start, Work()), peers(trial.start)
    )
    expected.rows(f"{name}.init", "the state", before, ROWS * LINKS)
    state = before
    for r in rounds:
        trial.rounds.append(seen := Seen())
        now = method.at(r)
        after = now.round(state, _oracle(network, trial, r, seen, trial.work), peers(seen))
        expected.rows(f"{name}.round", "the state", after, ROWS * LINKS)
        expected.alike(f"{name}.round", "the state", after, state, "init gave")
        for function, of in (("init", trial.start), ("round", seen)):
            for message in of.sent:
                expected.message(f"{name}.{function}", message)
        expected.alike(f"{name}.model", "the model", now.model(after), rows, "expected")
        expected.optional(now, after, rows)
        state = after
    return trial._replace(state=before)


def _tried_with_server(method: ServerAlgorithm[Any], network: Network, x0: Tensor, trial: Trial) -> Trial:
    expected, name, rows, seen = Expected(trial.dim), type(method).__name__, x0.expand(ROWS, -1), Seen()
    clients, server = method.init(rows.clone()), method.init_server(x0.clone())
    expected.rows(f"{name}.init", "the state", clients)
    expected.tensors(f"{name}.init_server", "the state", server, OF_SERVER, lambda t: t.ndim > 0)
    received = method.broadcast(server)
    expected.tensors(f"{name}.broadcast", "the message", received, OF_SERVER, lambda t: t.ndim > 0)
    oracle = _oracle(network, trial, 0, seen, trial.work)
    given = method.client(clients, received, oracle)
    after, message = expected.pair(
        f"{name}.client", given, "the client's new state and its message to the server"
    )
    expected.rows(f"{name}.client", "the state", after)
    expected.alike(f"{name}.client", "the state", after, clients, "init gave")
    expected.message(f"{name}.client", message)
    later = method.server(server, tree_map(lambda t: t[0], message), 1.0)
    expected.alike(f"{name}.server", "the state", later, server, "init_server gave")
    expected.alike(f"{name}.model", "the model", method.model(later), x0, "expected")
    answer = method.answer(later)
    expected.tensors(f"{name}.answer", "the message", answer, OF_SERVER, lambda t: t.ndim > 0)
    finished = method.finish(after, message, answer, oracle)
    expected.alike(f"{name}.finish", "the state", finished, clients, "init gave")
    expected.optional(method, finished, rows)
    seen.sent.append(message)
    seen.down += [received, answer] if method.capabilities.answers else [received]
    return trial._replace(rounds=[seen], state=clients)


def _oracle(network: Network, trial: Trial, round: int, seen: Seen, work: Work) -> Oracle:
    problem, nodes = ZeroProblem(network.nodes, trial.dim), torch.zeros(ROWS, dtype=torch.int64)
    return cast(Oracle, RecordingOracle(BatchOracle(problem, nodes, 0, round, work), seen))


def _alternating(heads: bool) -> Callable[[], Flip]:
    """Whatever their probability: a method may continue until one falls as it wants."""

    def coins() -> Flip:
        sides = cycle([heads, not heads])
        return lambda probability: next(sides)

    return coins


def _fair() -> Callable[[], Flip]:
    """This way and that, whatever their probability."""
    draws = count()
    return lambda: lambda probability: coin(0, 0, next(draws), 0.5)


# --- what was found ----------------------------------------------------------------------------------------


def profile(method: Method, network: Network) -> Profile:
    """What ``method`` does on ``network``; refuses one that does not keep the contract.

    There are three rounds on the zero problem. One is in float32, where coins fall the other way first; a
    solver may be asked for more than float32 can give, so methods with one are tried in float64 only. The
    others are in two dimensions, which tell d from a number.
    """
    dim, exact = max(DIM, method.capabilities.least_dim), method.capabilities.uses_solver
    check_optimizers(Expected(dim), method.at(0))
    tails = tried(method, network, dim, _alternating(False), torch.float64 if exact else torch.float32)
    one, two = (tried(method, network, d, _alternating(True)) for d in (dim, dim + 1))
    return Profile(method, network, tails, one, two)


@dataclass(frozen=True)
class Profile:
    """What ``method`` sends, keeps and asks for on ``network``; made by ``profile``, once for a job."""

    method: Method
    network: Network
    tails: Trial
    one: Trial
    two: Trial  # like ``one``, with models of one number more

    @property
    def messages(self) -> list[Tree]:
        """Those of a round, with ``ROWS`` rows, for models of ``DIM`` numbers or more."""
        return self.one.rounds[0].sent

    @cached_property
    def tosses_coins(self) -> bool:
        """Whether shared coins decide what happens in a round."""
        return any("coin" in seen.differs_by for seen in (*self.tails.seen, *self.one.seen))

    @cached_property
    def rounds_differ(self) -> bool:
        """Whether a round depends on chance or on its number."""
        asked = any(seen.differs_by for seen in (*self.tails.seen, *self.one.seen))
        return asked or has_schedules(self.method)

    @cached_property
    def uses(self) -> frozenset[Use]:
        """What the method asks for beyond ``exchange`` and ``mixed``."""
        trials = [self.tails, self.one, *([self._many] if self.rounds_differ else [])]
        before: set[Use] = {"warm start"} if self.one.start.sent else set()
        return frozenset(before.union(*(seen.uses for trial in trials for seen in trial.seen)))

    def sent_in_round(self, like: Tensor) -> list[Tree]:
        """Zeros like the messages of one node in a round, exchange by exchange; ``like`` is a model, [d].

        Of a method led by a server, the client's message. Where rounds differ, those of one that sends most.
        """
        if not (self.rounds_differ and self._among_nodes):
            return self._grown(self.messages, self.two.rounds[0].sent, like)
        many = self._many.rounds
        most = max(range(MANY), key=lambda r: len(many[r].sent))
        if _shapes(many[most].sent) == _shapes(self.messages):
            return self._grown(self.messages, self.two.rounds[0].sent, like)
        larger = tried(self.method, self.network, self.two.dim, _fair(), rounds=range(MANY))
        return self._grown(many[most].sent, larger.rounds[most].sent, like)

    def sent_in(self, round: int, coins: Callable[[], Flip], like: Tensor) -> tuple[list[Tree], list[Tree]]:
        """Zeros like what a node sends before the first round, and in ``round`` where ``coins`` fall so."""
        one, two = self.one, self.two
        if self.rounds_differ:
            one, two = (
                tried(self.method, self.network, trial.dim, coins, rounds=[round]) for trial in (one, two)
            )
        start = self._grown(one.start.sent, two.start.sent, like)
        return start, self._grown(one.rounds[0].sent, two.rounds[0].sent, like)

    def work(self, cohort: Cohort = "all") -> Work:
        """What a round takes of all nodes; ``sample_gradients`` counts minibatches (see ``ZeroProblem``)."""
        rows = self.network.nodes if cohort == "all" else cohort
        evaluations, minibatches = self.one.work.gradient_evaluations, self.one.work.sample_gradients
        return Work(evaluations * rows // ROWS, minibatches * rows // ROWS)

    def footprint(self, cohort: Cohort = "all", channel: Channel = IDENTITY) -> Footprint:
        """What a round costs; where rounds differ, this one."""
        nodes, links = self.network.nodes, self._links
        vectors, numbers = self._counted(self.one.rounds[0], self.two.rounds[0])
        times = links
        if not self._among_nodes:
            times = nodes if cohort == "all" else cohort
        work = self.work(cohort)
        start, _ = self._counted(self.one.start, self.two.start)
        return Footprint(
            vectors_at_start=start * self.network.at(0).directed_links,
            vectors_per_round=vectors * times,
            vectors_per_link=vectors * times / links,
            scalars_per_round=(numbers - vectors * self.one.dim) * times,
            state_vectors=self._state_vectors() + self._remembered_vectors(channel),
            gradients_per_round=work.gradient_evaluations / nodes,
            minibatches_per_round=work.sample_gradients / nodes,
        )

    @property
    def _among_nodes(self) -> bool:
        return isinstance(self.method, Algorithm)

    @property
    def _links(self) -> float:
        """Directed links, on average over the network's period."""
        period = self.network.period or 1
        return float(np.mean([self.network.at(round).directed_links for round in range(period)]))

    @cached_property
    def _many(self) -> Trial:
        """``MANY`` rounds in the one dimension, in which coins fall this way and that."""
        return tried(self.method, self.network, self.one.dim, _fair(), rounds=range(MANY))

    def _grown(self, one: Sequence[Tree], two: Sequence[Tree], like: Tensor) -> list[Tree]:
        """Zeros in a single row: sizes are numbers, or grow with the dimension."""

        def grow(a: Tensor, b: Tensor) -> Tensor:
            size = a.shape[-1] + (b.shape[-1] - a.shape[-1]) * (like.numel() - self.one.dim)
            return torch.zeros(1, size, dtype=like.dtype, device=like.device)

        return [tree_map(grow, a, b) for a, b in zip(one, two, strict=True)]

    @staticmethod
    def _counted(one: Seen, two: Seen) -> tuple[float, float]:
        """Vectors that a node sends over a link, or to a server and back; numbers in the one dimension."""
        a, b = (sum(map(row_size, [*seen.sent, *seen.over_links, *seen.down])) for seen in (one, two))
        return b - a, a

    def _state_vectors(self) -> float:
        """That nodes keep between rounds, all together."""
        rows = {ROWS: self.network.nodes, ROWS * LINKS: self.network.at(0).directed_links}
        pairs = zip(leaves(self.one.state), leaves(self.two.state), strict=True)
        return sum(rows[len(a)] * (b.numel() - a.numel()) / len(a) for a, b in pairs)

    def _remembered_vectors(self, channel: Channel) -> float:
        """That ``channel`` remembers of a round's messages, all together."""
        placed_here = placed(channel, self.method, self.network)
        if placed_here.transparent:
            return 0.0
        sizes = []
        for dim in (self.one.dim, self.two.dim):
            memories = new_memories(placed_here, self.sent_in_round(torch.zeros(dim, device="meta")))
            senders = sum(tensor.numel() for memory in memories for tensor in leaves(memory.sender))
            receivers = sum(tensor.numel() for memory in memories for tensor in leaves(memory.receiver))
            sizes.append((senders + (receivers if self._among_nodes else 0)) * self.network.nodes)
            sizes[-1] += 0 if self._among_nodes else receivers
        return float(sizes[1] - sizes[0])


def _shapes(messages: Sequence[Tree]) -> list[list[torch.Size]]:
    return [[tensor.shape for tensor in leaves(message)] for message in messages]


def has_schedules(part: object) -> bool:
    """Whether a method, or a part of it, has hyperparameters that change from round to round."""
    values = vars(part).values()
    return any(callable(v) or (isinstance(v, Hyperparameters) and has_schedules(v)) for v in values)


def placed(channel: Channel, method: Method, network: Network) -> Channel:
    """``channel`` as ``method`` uses it on ``network``."""
    can = method.capabilities
    if not network.is_server:
        return channel.placed(
            Mixing("neighbours", network.nodes, network.weights, twice=can.integrates_twice)
        )
    by: Literal["a leading server", "an averaging server"] = "an averaging server"
    if isinstance(method, ServerAlgorithm):
        by = "a leading server"
    return channel.placed(Mixing(by, network.nodes, compensated=can.compensates))
