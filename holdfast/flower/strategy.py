"""The server's side: a Flower ``Strategy`` that runs the server's part of a method."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import Tensor, nn

from holdfast.contract import Method, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.fingerprint import fingerprint
from holdfast.core.randomness import cohort
from holdfast.core.tree import Tree, tree_map
from holdfast.core.validation import Cohort
from holdfast.engines.common.fit import check_fit, check_unanswered
from holdfast.engines.common.profile import profile
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
from holdfast.problem.flat import FlatModel
from holdfast.topology import server

log = logging.getLogger("flwr")

POLL = 1.0  # seconds between looks at which clients are connected
Reply = tuple[Answer, Message]


class Strategy(FlowerStrategy):
    """``method`` led by, or averaged by, a Flower ServerApp with ``nodes`` clients of ``flower.Client``.

    ``model``: the module to begin with. ``cohort``: how many clients take part in a round. ``seed``: draws of
    cohorts, minibatches and coins depend on it, and are those of ``hf.train`` with the same seed.
    ``dtype``: of the models, "float32" or "float64". ``evaluation``: a strategy of Flower whose
    ``configure_evaluate`` and ``aggregate_evaluate`` are used, such as ``FedAvg(fraction_evaluate=1.0)``;
    without one, clients evaluate nothing.

    A client that fails, or is not there, is left out of its round, if the method allows for cohorts; its
    state stays as it was. Any other method ends with an error.
    """

    def __init__(
        self,
        method: Method,
        *,
        model: nn.Module,
        nodes: int,
        cohort: Cohort = "all",
        seed: int = 0,
        dtype: Literal["float32", "float64"] = "float32",
        evaluation: FlowerStrategy | None = None,
    ) -> None:
        check_fit(method, nodes, server(nodes), cohort)
        check_unanswered(method, "flower.Strategy")
        self.flat = FlatModel(model, torch.device("cpu"), getattr(torch, dtype))
        if self.flat.statistics:
            raise HoldfastError(
                "the model has BatchNorm, whose statistics flower.Strategy does not exchange: use GroupNorm "
                "or LayerNorm, or `holdfast federation` (docs/deploy.md)"
            )
        self.method, self.nodes, self.seed, self.dtype = method, nodes, seed, dtype
        self.fitted = method.for_model(self.flat.numbers)
        self.profile = profile(self.fitted, server(nodes))
        self.cohort_size = nodes if cohort == "all" else cohort
        self.evaluation, self.timeout, self.rounds = evaluation, 3600.0, 0
        self.members: dict[int, int] = {}  # Flower's id of each node, by number
        self.counts = [0] * nodes
        self.taken: dict[int, int] = {}  # by number: the last stage whose message was used
        self.x0: Tensor | None = None
        self.state: Tree = None  # the server's, of a method that it leads
        self.answered: list[Reply] = []  # the last replies of a stage that was averaged

    @property
    def initial_arrays(self) -> ArrayRecord:
        """The state of ``model``, for ``start``."""
        return self._arrays(self.flat.x0)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """As Flower's, from ``model`` unless there are ``initial_arrays``; ``timeout`` is per answer."""
        self.timeout, self.rounds = timeout, num_rounds
        begin = self.initial_arrays if initial_arrays is None else initial_arrays
        return super().start(grid, begin, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def summary(self) -> None:
        log.info("\t├──> holdfast: %r", self.method)
        log.info("\t└──> %d nodes, %d of them in a round", self.nodes, self.cohort_size)

    # --- training -------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round to the clients that a server leads.

        Where it only averages, they are sent here: there are as many exchanges as the method asks for.
        """
        self._meet(grid)
        if self.x0 is None:
            self.x0 = self._flat(arrays)
            if isinstance(self.fitted, ServerAlgorithm):
                self.state = self.fitted.at(0).init_server(self.x0.clone())
            else:
                self._average(0, grid)
        if not isinstance(self.fitted, ServerAlgorithm):
            self._average(server_round, grid)
            return []
        received = self.fitted.at(server_round - 1).broadcast(self.state)
        wanted = cohort(self.seed, server_round - 1, self.nodes, self.cohort_size).tolist()
        return [
            self._message(
                i, server_round, {"received": received} | ({} if i in self.taken else {"x0": self.x0})
            )
            for i in wanted
            if i in self.members
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Takes in the mean of the messages, of which a method for cohorts may lack some."""
        if not isinstance(self.fitted, ServerAlgorithm):
            model = as_tree(
                self._mean(self.answered, "model"), self.flat.x0[None], "the models of the clients"
            )
            return self._arrays(model[0]), _metrics(self.answered)
        answered = self._read(replies, server_round, expected=self.cohort_size)
        method = self.fitted.at(server_round - 1)
        like = self.profile.sent_in_round(self.flat.x0)[0]
        mean = as_tree(self._mean(answered, "message"), like, "the messages of the clients")
        mean = tree_map(lambda t: t[0], mean)
        self.state = method.server(self.state, mean, len(answered) / self.nodes)
        self.taken |= {answer.node: server_round for answer, _ in answered}
        return self._arrays(method.model(self.state)), _metrics(answered)

    def _average(self, stage: int, grid: Grid) -> None:
        """A stage of a method without a leader: averages until every node is done with it.

        Clients that are done with the stage before have sent the first message of this one with their answer.
        """
        means = [self._mean(self.answered, "message")] if self._asks(self.answered) else []
        while True:
            given = {"means": tuple(means)} | ({"x0": self.x0} if stage == 0 else {})
            ahead = stage < self.rounds
            messages = [self._message(i, stage, given, len(means), ahead) for i in range(self.nodes)]
            replies = grid.send_and_receive(messages, timeout=self.timeout)
            self.answered = self._read(replies, stage, expected=self.nodes)
            if len({answer.done for answer, _ in self.answered}) > 1:
                raise HoldfastError(f"stage {stage}: some nodes exchange and others do not")
            if self.answered[0][0].done:
                break
            means.append(self._mean(self.answered, "message"))
        self.taken = dict.fromkeys(range(self.nodes), stage)

    @staticmethod
    def _asks(answered: list[Reply]) -> bool:
        """Whether there are messages among the answers whose mean is wanted."""
        return bool(answered) and bool(below(from_record(answered[0][1].content[ARRAYS]), "message"))

    def _mean(self, answered: list[Reply], part: str) -> Named:
        """The mean of the arrays ``part`` of all, [1, ...], added up in the order of the nodes."""
        total: Named = {}
        for answer, reply in answered:
            found = below(from_record(reply.content[ARRAYS]), part)
            where = f"the message of node {answer.node}"
            total = tree_map(torch.add, total, as_tree(found, total, where)) if total else found
        return tree_map(lambda t: (t / len(answered))[None], total)

    def _read(self, replies: Iterable[Message], stage: int, expected: int) -> list[Reply]:
        """The replies of ``stage`` by number; raises if too few came."""
        found: dict[int, Reply] = {}
        failures = []
        for reply in replies:
            if reply.has_error():
                failures.append(reply.error.reason)
                continue
            answer = read_about(Answer, reply.content)
            if answer.stage != stage or answer.node in found:
                raise HoldfastError(
                    f"stage {stage}: unexpected answer {answer!r}; two clients of one partition-id?"
                )
            found[answer.node] = answer, reply
        if len(found) < expected:
            text = f"stage {stage}: {len(found)} of {expected} clients answered in time and without an error"
            text = "; ".join([text, *failures])
            if not found or not self._may_lack:
                raise HoldfastError(f"{text}; {type(self.method).__name__} cannot do without them")
            log.warning("%s; the others are left out", text)
        return [found[i] for i in sorted(found)]

    @property
    def _may_lack(self) -> bool:
        """Whether a round can do without some clients of its cohort."""
        return isinstance(self.method, ServerAlgorithm)

    # --- which clients take part ---------------------------------------------------------------------------

    def _meet(self, grid: Grid) -> None:
        """Asks each connected client for its number; waits for those that the method needs."""
        until = time.monotonic() + self.timeout
        while True:
            ids = set(grid.get_node_ids())
            self.members = {i: each for i, each in self.members.items() if each in ids}
            unknown = ids - set(self.members.values())
            for answer, reply in self._greet(unknown, grid):
                self.members[answer.node] = reply.metadata.src_node_id
                self.counts[answer.node] = answer.samples
            begun = self.x0 is not None
            if len(self.members) == self.nodes or (begun and self._may_lack and self.members):
                return
            if time.monotonic() > until:
                missing = sorted(set(range(self.nodes)) - self.members.keys())
                raise HoldfastError(
                    f"waited {self.timeout:.0f} s for the clients with partition-id {missing}"
                )
            time.sleep(POLL)

    def _greet(self, unknown: set[int], grid: Grid) -> list[Reply]:
        if not unknown:
            return []
        messages = [self._to(each, Control(stage=JOIN, **self._common)) for each in sorted(unknown)]
        found: list[Reply] = []
        for reply in grid.send_and_receive(messages, timeout=self.timeout):
            if reply.has_error():
                raise HoldfastError(f"a client cannot take part: {reply.error.reason}")
            answer = read_about(Answer, reply.content)
            if answer.node in self.members or answer.node in [each.node for each, _ in found]:
                raise HoldfastError(f"two clients have partition-id {answer.node}: give each its own")
            found.append((answer, reply))
        return found

    @property
    def _common(self) -> dict[str, Any]:
        """What every message says."""
        method = fingerprint(self.method)
        return {"method": method, "seed": self.seed, "dtype": self.dtype, "counts": self.counts}

    def _message(self, node: int, stage: int, given: Any, means: int = 0, ahead: bool = False) -> Message:
        taken = self.taken.get(node, -1)
        control = Control(stage=stage, taken=taken, means=means, ahead=ahead, **self._common)
        return self._to(self.members[node], control, given)

    @staticmethod
    def _to(member: int, control: Control, given: Any = ()) -> Message:
        group = str(max(control.stage, 0))
        return Message(content(control, given), member, MessageType.TRAIN, group_id=group)

    # --- models ---------------------------------------------------------------------------------------

    def _arrays(self, row: Tensor) -> ArrayRecord:
        return ArrayRecord(self.flat.module(row).state_dict())

    def _flat(self, arrays: ArrayRecord) -> Tensor:
        values = arrays.to_torch_state_dict()
        if missing := self.flat.shapes.keys() - values.keys():
            raise HoldfastError(
                f"initial_arrays: expected the model's state_dict, which has {sorted(missing)}"
            )
        return torch.cat([values[name].reshape(-1) for name in self.flat.shapes]).to(self.flat.x0)

    # --- evaluation is Flower's own -------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self.evaluation is None:
            return []
        messages: Iterable[Message] = self.evaluation.configure_evaluate(server_round, arrays, config, grid)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        if self.evaluation is None:
            return None
        return self.evaluation.aggregate_evaluate(server_round, replies)


def _metrics(answered: list[Reply]) -> MetricRecord | None:
    """The mean loss of the minibatches, every client counted alike as in the objective."""
    found = [reply.content.metric_records["metrics"] for _, reply in answered]
    losses = [float(each["train-loss"]) for each in found if "train-loss" in each]
    return MetricRecord({"train-loss": sum(losses) / len(losses)}) if losses else None
