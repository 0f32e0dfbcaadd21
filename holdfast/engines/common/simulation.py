"""A run under way: the state of the nodes here, the round, and what it has cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from holdfast.contract import IDENTITY, Channel, Method
from holdfast.core.errors import HoldfastError
from holdfast.core.memory import keep_freed_memory
from holdfast.core.tree import from_named, named_leaves
from holdfast.core.validation import Cohort
from holdfast.core.world import World
from holdfast.engines.common.counters import Counters, Traffic, Work
from holdfast.engines.common.fit import Cohorts, StepsTaken
from holdfast.engines.common.oracle import MinibatchGradient
from holdfast.engines.common.peers import HERE, Place
from holdfast.engines.common.profile import Profile
from holdfast.engines.common.rounds import Rounds
from holdfast.engines.common.trial import ZeroProblem
from holdfast.privacy import Ledger
from holdfast.problem.problem import Problem
from holdfast.topology import Network

Look = Callable[[], Tensor]


class Executor(Protocol):
    """How rounds are run. One executor belongs to one simulation."""

    def prepare(self, simulation: Simulation, rounds: int) -> str:
        """Gets ready for so many rounds and says how they will be run; the state keeps its values."""

    def step(self, simulation: Simulation) -> None:
        """Runs the next round: changes the simulation's state and counters, not its round."""

    def put(self, old: Any, new: Any) -> Any:
        """The state to continue with where ``new`` replaces ``old``."""

    def repeated(self, simulation: Simulation, look: Look, times: int) -> Look:
        """``look``, a function of the state after a round, in the fastest way to call it so many times."""


class Stepwise:
    """Operation by operation, as the method is written, but for ``gradient``, if it is given."""

    def __init__(self, gradient: MinibatchGradient | None = None) -> None:
        self.gradient = gradient

    def prepare(self, simulation: Simulation, rounds: int) -> str:
        keep_freed_memory()
        compiled = ", only gradients compiled" if self.gradient else ""
        return f"{simulation.problem.description}, step by step{compiled}"

    def step(self, simulation: Simulation) -> None:
        now = simulation.rounds.inputs(simulation.round)
        simulation.state = simulation.rounds.advance(
            simulation.state, now, simulation.counters, self.gradient
        )

    def put(self, old: Any, new: Any) -> Any:
        return new

    def repeated(self, simulation: Simulation, look: Look, times: int) -> Look:
        return look


class Simulation:
    """One method on one problem over one network. ``step`` runs a round; everything else looks at it."""

    def __init__(
        self,
        method: Method,
        problem: Problem,
        network: Network,
        *,
        seed: int = 0,
        cohort: Cohort | Cohorts = "all",
        place: Place = HERE,
        executor: Executor | None = None,
        channel: Channel = IDENTITY,
        ledger: Ledger | None = None,
        round: int = 0,
        start: Tensor | None = None,
        steps: StepsTaken | None = None,
        profile: Profile | None = None,
    ) -> None:
        options: Any = {"seed": seed, "cohort": cohort, "place": place, "channel": channel, "steps": steps}
        self.rounds = Rounds(method, problem, network, profile=profile, **options)
        self.executor = executor or Stepwise()
        self.counters = Counters()
        self.round = round
        self.state = self.rounds.initial(self.counters, round, start)
        self.ledger = ledger  # of accesses to private data
        if ledger is not None:
            ledger.begin(astuple(self.counters.accesses))
        self.raise_pending()

    def __repr__(self) -> str:
        return f"Simulation({self.method!r}, {self.network!r}, after round {self.round})"

    def with_members(
        self, problem: Problem, network: Network, origins: Sequence[int], cohort: Cohort | Cohorts = "all"
    ) -> Simulation:
        """The same run with a new roster: ``problem`` and ``network`` are its nodes' objectives and links.

        The method starts again at the round under way, from the models that there are: node i from that of
        node ``origins[i]`` before. A node that stays is its own origin; one that joins has another.
        """
        if self.ledger is not None:
            raise HoldfastError("private: members cannot change, as the noise was found for those there are")
        rounds = self.rounds
        after = Simulation(
            self.method,
            problem,
            network,
            seed=rounds.seed,
            cohort=cohort,
            place=rounds.place,
            channel=rounds.channel.chosen,
            round=self.round,
            start=self.models[list(origins)],
        )
        after.counters.add(self.counters)
        return after

    def prepare(self, rounds: int) -> str:
        """Gets ready for so many rounds and says how they will be run."""
        description = self.executor.prepare(self, rounds)
        for noted in (self.rounds.lost, self.rounds.losses):
            noted.zero_()  # trial rounds do not count
        where = self.rounds.place.describe(self.network)
        return f"{where}; {description}" if where else description

    def step(self) -> None:
        """Runs the next communication round."""
        before = astuple(self.counters.accesses)
        self.executor.step(self)
        if self.ledger is not None:
            more = [now - then for now, then in zip(astuple(self.counters.accesses), before, strict=True)]
            self.ledger.record(more, self.rounds.clients_asked(self.round))
        self.raise_pending()
        self.round += 1

    def raise_pending(self, wait: bool = False) -> None:
        """Raises, everywhere alike, what went wrong in the last round.

        Whether numbers got lost in the channel is asked of a GPU only if ``wait``: it would synchronise.
        """
        self.rounds.place.raise_pending()
        if not self.rounds.channel.transparent and (wait or not self.rounds.lost.is_cuda):
            self.rounds.check_channel()

    @cached_property
    def work_per_round(self) -> Work:
        """What a round takes of all nodes, with ``sample_gradients`` counting minibatches.

        Where chance or the node decides, it is counted in a round on the zero problem.
        """
        rounds, profile = self.rounds, self.rounds.profile
        cohort: Cohort = "all" if rounds.cohort_size == self.problem.nodes else rounds.cohort_size
        unequal = isinstance(vars(self.method).get("local_steps"), tuple)
        if not (profile.tosses_coins or unequal or self.network.activity is not None):
            return profile.work(cohort)
        zero = ZeroProblem(self.problem.nodes, profile.one.dim)
        trial, counters = Rounds(self.method, zero, self.network, cohort=cohort, profile=profile), Counters()
        trial.advance(trial.initial(Counters()), trial.inputs(0), counters)
        return counters.work

    @property
    def private(self) -> bool:
        """Whether what methods see of the data is protected, and accounted for."""
        return self.ledger is not None

    @property
    def method(self) -> Method:
        return self.rounds.method

    @property
    def problem(self) -> Problem:
        return self.rounds.problem

    @property
    def network(self) -> Network:
        return self.rounds.network

    @property
    def world(self) -> World:
        return self.rounds.place.world

    @property
    def nodes(self) -> Tensor:
        """[m]: the numbers of the nodes here, ascending."""
        return self.rounds.nodes

    @property
    def traffic(self) -> Traffic:
        return self.counters.traffic

    @property
    def work(self) -> Work:
        return self.counters.work

    @property
    def models(self) -> Tensor:
        """The model after the last exchange of each node here, [m, d]; a server's is that of all."""
        return self.rounds.models(self.state)

    @property
    def personal_models(self) -> Tensor | None:
        """The personal model of each node here, [m, d], if the method trains any."""
        return self.rounds.personal(self.state)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all messages so far, each counted once."""
        return self.traffic.bits // 8

    def total_work(self) -> Work:
        """What all nodes, here and elsewhere, have computed so far."""
        return self.rounds.place.total(self.work)

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that ``restore`` needs to continue: the tensors here by name, and the counters of all nodes."""
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in named_leaves(self.state)
        }
        counters = Counters(self.traffic, self.total_work(), self.counters.accesses)
        released = {} if self.ledger is None else {"released": self.ledger.as_list()}
        return tensors, {"round": self.round, **released, **counters.as_dict()}

    def restore(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Continues from a ``snapshot``."""
        self.state = self.executor.put(self.state, from_named(self.state, tensors))
        self.round = counters["round"]
        self.rounds.lost.zero_()
        self.counters = Counters.of(counters, self.problem.x0.element_size())
        if self.ledger is not None:
            self.ledger.restore(counters["released"])
        if not self.world.leads:
            self.counters.work = Work()  # the leader's counts what was done before
