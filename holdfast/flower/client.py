"""The client's side: a function of (message, context), as ``ClientApp.train`` takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord
from torch import Tensor, nn

from holdfast.contract import Algorithm, Inbox, Method, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.fingerprint import fingerprint
from holdfast.core.randomness import coin
from holdfast.core.tree import Tree, tree_map
from holdfast.data.per_node import as_data
from holdfast.engines.common.channel_run import Received
from holdfast.engines.common.counters import Work
from holdfast.engines.common.oracle import INITIAL_STEP, BatchOracle
from holdfast.engines.common.trial import state_like
from holdfast.experiments.setting import build_problem
from holdfast.flower.records import (
    ARRAYS,
    JOIN,
    Answer,
    Control,
    Named,
    as_tree,
    below,
    content,
    from_record,
    read_about,
    to_record,
)
from holdfast.problem.model_problem import ModelProblem
from holdfast.topology import server

# --- what a client keeps between messages, in the state that Flower keeps for it ------------------------
#
# A client computes a new state before it knows whether its message reaches the server. So it keeps the state
# before as well, and every message of the server says which one it has used. So after a lost message, client
# and server still agree on the client's state.


KEPT = "holdfast.kept"


def _record(stage: int) -> str:
    return f"holdfast.state.{stage}"


class Memory:
    """The states of one client in one run, by stage."""

    def __init__(self, context: Context) -> None:
        self.records, self.run = context.state, str(context.run_id)
        kept = self.records.config_records.get(KEPT)
        # Flower may pass on states of an earlier run.
        same_run = kept is not None and kept["run"] == self.run
        self.stages: list[int] = list(kept["stages"]) if same_run else []

    def read(self, stage: int, like: Any) -> Tree:
        """The state after ``stage``, a tree like ``like``; what comes later did not reach the server."""
        if stage not in self.stages:
            raise HoldfastError(
                f"this client has no state of stage {stage}, only of {self.stages or 'none'}: its SuperNode "
                "was started anew, or another client has its partition-id; start the run again"
            )
        self._keep([stage])
        return as_tree(from_record(self.records.array_records[_record(stage)]), like, "the client's state")

    def clear(self) -> None:
        """The client starts again: the server has used nothing of it."""
        self._keep([])

    def write(self, stage: int, state: Tree) -> None:
        """Keeps the ``state`` after ``stage`` beside the one it was made from."""
        self.records[_record(stage)] = to_record(state)
        self._keep([*(kept for kept in self.stages if kept < stage), stage])

    def _keep(self, stages: list[int]) -> None:
        names = {_record(stage) for stage in stages}
        for name in [name for name in self.records.array_records if name.startswith(_record(0)[:-1])]:
            if name not in names:
                del self.records[name]
        self.stages = stages
        self.records[KEPT] = ConfigRecord({"run": self.run, "stages": stages})


# --- A method without a leader, averaged by a server that a client can only answer ----------------------
#
# A Flower client keeps no process between messages. So a round is computed from its beginning with the means
# that are known, until it asks for one that is not: that message is the answer. Draws are functions of node,
# round and step, so every repetition computes the same numbers.


M = TypeVar("M")


class _MeanWantedError(Exception):
    """The round continues once the mean of all clients' ``message`` is known."""

    def __init__(self, message: Any) -> None:
        self.message = message


@dataclass
class ReplayedPeers:
    """The link to a server of ``nodes`` nodes whose first ``known`` means of a round are in ``means``."""

    nodes: int
    seed: int
    round: int
    means: Named
    known: int
    like: Tensor
    draws: int = 0
    exchanges: int = 0

    @property
    def degree(self) -> Tensor:
        return torch.full((1, 1), self.nodes - 1).to(self.like)

    def exchange(self, message: M, sporadic: bool = False) -> Inbox[M]:
        if self.exchanges == self.known:
            raise _MeanWantedError(message)
        mean = as_tree(below(self.means, str(self.exchanges)), message, "the server's mean")
        mean = tree_map(lambda t: t.to(self.like.device), mean)
        self.exchanges += 1
        return Received(mean, lambda: tree_map(lambda m, own: self.nodes * m - own, mean, message))

    def coin(self, probability: float) -> bool:
        self.draws += 1
        return coin(self.seed, self.round, self.draws, probability)

    @property
    def edges(self) -> NoReturn:
        raise HoldfastError("edges: a server has no links between nodes")


def replay(
    method: Algorithm, state: Tree, x0: Tensor | None, oracle: BatchOracle, peers: ReplayedPeers
) -> tuple[Any, Any]:
    """(the state after the stage, None), or (None, the message whose mean is wanted).

    ``x0`` [d]: the model to begin with, at the start only.
    """
    try:
        after = method.round(state, oracle, peers) if x0 is None else method.init(x0[None], oracle, peers)
    except _MeanWantedError as wanted:
        return None, wanted.message
    return after, None


# --- the client's side: a function of (message, context), as ``ClientApp.train`` takes it ---------------


def partition_id(context: Context) -> int:
    """The node's number as Flower's simulator gives it, and as a SuperNode receives it by --node-config."""
    if "partition-id" not in context.node_config:
        raise HoldfastError(
            "the SuperNode does not know its number: start it with --node-config 'partition-id=0', 1, ... up "
            "to one less than the number of nodes, or give flower.Client a `node` of your own"
        )
    return int(context.node_config["partition-id"])


class Client:
    """Trains as the method says, and keeps the method's client state in ``context.state``.

    ``method``: the same as the strategy's. ``model``: a module like the strategy's; frozen parameters are
    taken from it, trained ones come from the server. ``data``: a function of Flower's context that returns
    this node's samples as ``hf.train`` takes those of one: a pair (x, y), a dictionary of tensors or a
    map-style Dataset. ``node``: a function that returns its number, 0 to n - 1. ``options``: ``loss``,
    ``step``, ``batch_size``, ``l2`` and so on, and ``device``, as ``hf.build_problem`` has them.

    Register it with ``ClientApp.train``: ``app.train()(flower.Client(...))``.
    """

    def __init__(
        self,
        method: Method,
        *,
        model: nn.Module,
        data: Callable[[Context], Any],
        node: Callable[[Context], int] = partition_id,
        **options: Any,
    ) -> None:
        if settled := {"seed", "dtype", "buffers"} & options.keys():
            raise HoldfastError(f"{', '.join(sorted(settled))}: the strategy says that to all clients")
        self.method, self.model, self.data, self.node, self.options = method, model, data, node, options
        self._built: tuple[Any, ModelProblem] | None = None

    def __call__(self, message: Message, context: Context) -> Message:
        control = read_about(Control, message.content)
        if control.method != fingerprint(self.method):
            raise HoldfastError(
                f"this client has {self.method!r}, and the server another method or other hyperparameters: "
                "give both the same"
            )
        node = self.node(context)
        if not 0 <= node < len(control.counts):
            last = len(control.counts) - 1
            raise HoldfastError(f"partition-id: {node}, but the strategy numbers its nodes 0 to {last}")
        problem = self._problem(node, control, context)
        samples = problem.samples(problem.here)
        if control.stage == JOIN:
            problem.check_model(None)
            return _reply(message, Answer(node=node, samples=samples, stage=JOIN, done=True), (), [])
        named = from_record(message.content.array_records[ARRAYS])
        named = {name: t.to(problem.x0.device) for name, t in named.items()}
        here = torch.tensor([node], device=problem.x0.device)
        stage = _Stage(control, self.method.for_model(problem.model.numbers), problem, here, Memory(context))
        done, sent = stage.run(named)
        about = Answer(node=node, samples=samples, stage=control.stage, done=done)
        return _reply(message, about, sent, stage.losses)

    def _problem(self, node: int, control: Control, context: Context) -> ModelProblem:
        """The node's objective; of a process that serves several nodes in turn, the last one's is kept."""
        key = (node, control.seed, control.dtype, control.counts)
        if self._built is None or self._built[0] != key:
            self._built = None
            data = as_data([self.data(context)]).at_site(node, np.array(control.counts))
            dtype = getattr(torch, control.dtype)
            options = {"precision": None} | self.options
            self._built = key, build_problem(self.model, data, seed=control.seed, dtype=dtype, **options)
        return self._built[1]


class _Stage:
    """One stage of the method, or a part of it, at the node ``here`` [1]."""

    def __init__(
        self, control: Control, method: Method, problem: ModelProblem, here: Tensor, memory: Memory
    ) -> None:
        self.control, self.method, self.problem, self.here = control, method, problem, here
        self.memory, self.losses = memory, list[Tensor]()

    def run(self, named: Named) -> tuple[bool, Any]:
        """Whether the stage is done, and the message to the server."""
        if (x0 := named.get("x0")) is not None:
            self.memory.clear()
        if isinstance(self.method, ServerAlgorithm):
            return True, {"message": self._led(self.method, x0, below(named, "received"))}
        assert isinstance(self.method, Algorithm)
        return self._averaged(self.method, x0, below(named, "means"))

    def _led(self, method: ServerAlgorithm[Any], x0: Tensor | None, received: Named) -> Tree:
        stage, like = self.control.stage, torch.empty_like(self.problem.x0, device="meta")
        method = method.at(stage - 1)
        state = self._before() if x0 is None else method.init(x0[None])
        shape = method.broadcast(method.init_server(like))
        oracle = self._oracle(stage)
        after, sent = method.client(state, as_tree(received, shape, "the server's message"), oracle)
        self.losses = oracle.losses
        self.memory.write(stage, method.finish(after, sent, (), oracle))
        return tree_map(lambda t: t[0], sent)

    def _averaged(self, method: Algorithm, x0: Tensor | None, means: Named) -> tuple[bool, Any]:
        control, begun = self.control, self._oracle(self.control.stage)
        before = self._before() if x0 is None else None
        after, message = self._replay(method, control.stage, before, x0, begun, means, control.means)
        self.losses = begun.losses
        if message is not None:
            return False, {"message": message}
        self.memory.write(control.stage, after)
        answer = {"model": method.at(max(control.stage - 1, 0)).model(after)[0]}
        if control.ahead:  # saves a message for every round; without further messages, nothing is lost
            following = control.stage + 1
            _, message = self._replay(method, following, after, None, self._oracle(following), {}, 0)
            answer |= {} if message is None else {"message": message}
        return True, answer

    def _replay(
        self,
        method: Algorithm,
        stage: int,
        before: Any,
        x0: Tensor | None,
        oracle: BatchOracle,
        means: Named,
        known: int,
    ) -> tuple[Any, Any]:
        """The state after ``stage`` and None; or None and a message of one row whose mean is wanted."""
        nodes, r = len(self.control.counts), max(stage - 1, 0)
        peers = ReplayedPeers(nodes, self.control.seed, r, means, known, self.problem.x0)
        after, message = replay(method.at(r), before, x0, oracle, peers)
        return after, None if message is None else tree_map(lambda t: t[0], message)

    def _before(self) -> Tree:
        """The state that the server knows of."""
        like = torch.empty_like(self.problem.x0, device="meta")
        network = server(len(self.control.counts))
        expected = state_like(self.method, network, 0, like, lambda probability: False)
        kept = self.memory.read(self.control.taken, expected)
        return tree_map(lambda t: t.to(self.problem.x0.device), kept)

    def _oracle(self, stage: int) -> BatchOracle:
        oracle = BatchOracle(self.problem, self.here, self.control.seed, max(stage - 1, 0), Work())
        if stage == 0:
            oracle.step = INITIAL_STEP
        return oracle


def _reply(message: Message, about: Answer, sent: Tree, losses: list[Tensor]) -> Message:
    records = content(about, sent)
    records["metrics"] = MetricRecord({"num-examples": about.samples})
    if losses:
        records["metrics"]["train-loss"] = float(torch.cat(losses).mean())
    return Message(records, reply_to=message)
