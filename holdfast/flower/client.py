"""The client's side: a function of (message, context), as ``ClientApp.train`` takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, MetricRecord
from torch import Tensor, nn

from holdfast.contract import Algorithm, Method, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.fingerprint import fingerprint
from holdfast.core.tree import tree_map
from holdfast.data.handed import as_data
from holdfast.engines.common.counters import Work
from holdfast.engines.common.oracle import INITIAL_STEP, BatchOracle
from holdfast.engines.common.survey import EchoPeers, zero_oracle
from holdfast.experiments.assembly import build_problem
from holdfast.flower.memory import Memory
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
)
from holdfast.flower.replay import ReplayedPeers, replay
from holdfast.problem.model_problem import ModelProblem
from holdfast.topology import server


def partition_id(context: Context) -> int:
    """The node's number as Flower's simulator gives it, and as a SuperNode is told by --node-config."""
    if "partition-id" not in context.node_config:
        raise HoldfastError(
            "the SuperNode does not know its number: start it with --node-config 'partition-id=0', 1, ... up "
            "to one less than the number of nodes, or give flower.Client a `node` of your own"
        )
    return int(context.node_config["partition-id"])


class Client:
    """Trains as the method says, and keeps the method's client state in ``context.state``.

    ``method``: the same as the strategy's. ``model``: a module like the strategy's; frozen parameters are
    taken from it, trained ones come from the server. ``data``: a function of Flower's context that gives
    this node's samples as ``hf.train`` takes those of one: a pair (x, y), a dictionary of tensors or a
    map-style Dataset. ``node``: a function that gives its number, 0 to n - 1. ``options``: ``loss``,
    ``step``, ``batch_size``, ``l2`` and so on, and ``device``, as ``hf.build_problem`` has them.

    An object is what ``ClientApp.train`` registers: ``app.train()(flower.Client(...))``.
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
        oracle = self._oracle(problem, node, control)
        done, sent = self._stage(control, named, problem, oracle, Memory(context))
        about = Answer(node=node, samples=samples, stage=control.stage, done=done)
        return _reply(message, about, sent, oracle.losses)

    def _stage(
        self, control: Control, named: Named, problem: ModelProblem, oracle: BatchOracle, memory: Memory
    ) -> tuple[bool, Any]:
        """One stage of the method, or a part of it: whether it is done, and what the server is sent."""
        r, nodes = max(control.stage - 1, 0), len(control.counts)
        method = self.method.for_model(problem.model.numbers).at(r)
        like = torch.empty_like(problem.x0, device="meta")
        if (x0 := named.get("x0")) is not None:
            memory.clear()

        def before() -> Any:
            kept = memory.read(control.taken, state_like(method, nodes, like))
            return tree_map(lambda t: t.to(problem.x0.device), kept)

        if isinstance(method, ServerAlgorithm):
            state = before() if x0 is None else method.init(x0[None])
            shape = method.broadcast(method.init_server(like))
            received = as_tree(below(named, "received"), shape, "the server's message")
            after, sent = method.client(state, received, oracle)
            memory.write(control.stage, after)
            return True, tree_map(lambda t: t[0], sent)
        assert isinstance(method, Algorithm)
        means = below(named, "means")
        peers = ReplayedPeers(nodes, control.seed, r, means, control.means, problem.x0)
        after, sent = replay(method, before() if x0 is None else None, x0, oracle, peers)
        if sent is not None:
            return False, tree_map(lambda t: t[0], sent)
        memory.write(control.stage, after)
        return True, method.model(after)[0]

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

    @staticmethod
    def _oracle(problem: ModelProblem, node: int, control: Control) -> BatchOracle:
        here, r = torch.tensor([node], device=problem.x0.device), max(control.stage - 1, 0)
        oracle = BatchOracle(problem, here, control.seed, r, Work())
        if control.stage == 0:
            oracle.step = INITIAL_STEP
        return oracle


def state_like(method: Method, nodes: int, like: Tensor) -> Any:
    """A tree like the state of one client, on the device "meta"."""
    if isinstance(method, ServerAlgorithm):
        return method.init(like[None])
    assert isinstance(method, Algorithm)
    peers = EchoPeers(server(nodes), 0, like, lambda probability: False)
    return method.init(like[None], zero_oracle(nodes, 0, like.numel()), peers)


def _reply(message: Message, about: Answer, sent: Any, losses: list[Tensor]) -> Message:
    records = content(about, sent)
    records["metrics"] = MetricRecord({"num-examples": about.samples})
    if losses:
        records["metrics"]["train-loss"] = float(torch.cat(losses).mean())
    return Message(records, reply_to=message)
