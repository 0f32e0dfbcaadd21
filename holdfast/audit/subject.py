"""The run that is audited, its variants, and what an eavesdropper hears of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.contract import IDENTITY, Channel, Method
from holdfast.contract.aggregation import MEAN
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves
from holdfast.core.validation import Cohort
from holdfast.data import FederatedData
from holdfast.engines.common.profile import profile
from holdfast.engines.common.simulation import Simulation, Stepwise
from holdfast.experiments.plan import Planned
from holdfast.experiments.setting import Setting
from holdfast.privacy import DP, NodeDP
from holdfast.problem.model_problem import ModelProblem


@dataclass(frozen=True)
class Subject:
    """A method in a setting, for so many rounds."""

    label: str
    setting: Setting
    method: Method
    cohort: Cohort
    channel: Channel
    rounds: int
    noiseless: bool = False  # private gradients are clipped, and nothing is added

    @classmethod
    def of(cls, plan: Planned, job: Any) -> Subject:
        """A planned ``job``; one that cannot be audited is refused."""
        setting, method = plan.setting(job), plan.method(job)
        subject = cls(job.label, setting, method, job.cohort, job.channel, job.rounds)
        subject.check()
        return subject

    def check(self) -> None:
        """Refuses a run on which the attacks cannot be tried, with the reason."""
        data = self.setting.data
        if not isinstance(data, FederatedData) or not isinstance(data.x, Tensor) or data.y is None:
            raise HoldfastError(
                "audit: the attacks put samples in and leave them out, so they need pairs (x, class) in "
                "memory, not Datasets, streams or dictionaries"
            )
        if data.y.is_floating_point() or data.y.ndim != 1 or not self.setting.loss.per_sample:
            raise HoldfastError(
                "audit: the attacks guess classes from a loss of every sample; choose a classification with "
                "one label per sample, such as loss = 'cross-entropy'"
            )
        private = self.setting.terms.private
        if isinstance(private, NodeDP) and private.noise == "distributed":
            raise HoldfastError(
                "audit: with noise = 'distributed' a server sees no single message, and that is what is "
                "attacked; audit noise = 'server' or 'clients', or privacy of samples"
            )
        if int(data.counts.min()) < 2:
            raise HoldfastError("audit: a node has a single sample, which cannot be left out; use more data")
        if "links" in profile(self.method, self.setting.network).uses:
            raise HoldfastError(
                f"audit: {type(self.method).__name__} sends every neighbour something else, which the "
                "attacks do not understand; audit a method that sends all the same"
            )

    @property
    def data(self) -> FederatedData:
        assert isinstance(self.setting.data, FederatedData)
        return self.setting.data

    @property
    def problem(self) -> ModelProblem:
        return self.setting.problem

    @property
    def protections(self) -> list[str]:
        """The protections of samples, in words."""
        private, rule, channel = self.setting.terms.private, self.setting.network.aggregation, self.channel
        found = []
        if private is not None:
            unit = "of samples" if isinstance(private, DP) else f"of nodes, noise by the {private.noise}"
            found.append(
                f"differential privacy {unit}, epsilon {private.epsilon:g} at delta {private.delta:g}"
            )
        if not channel.transparent:
            found.append(f"channel {type(channel.chosen).__name__}")
        if not rule.plain:
            found.append(f"aggregation {type(rule).__name__}")
        return found

    @property
    def unprotected(self) -> Subject:
        """The same without any of ``protections``."""
        terms = self.setting.terms.model_copy(update={"private": None})
        network = replace(self.setting.network, aggregation=MEAN)
        return replace(self, setting=replace(self.setting, terms=terms, network=network), channel=IDENTITY)

    def with_data(self, data: FederatedData, seed: int) -> Subject:
        """The same run with other samples and minibatches, from the same initial model."""
        return replace(self, setting=replace(self.setting, data=data, seed=seed))

    def simulation(self) -> Simulation:
        """The run before its first round, to be taken step by step."""
        made = self.setting.simulation(
            self.method, self.cohort, self.channel, rounds=self.rounds, noiseless=self.noiseless
        )
        made.executor = Stepwise()
        return made


class Overheard(NamedTuple):
    """What one round reveals of the nodes."""

    before: Tensor  # [n, d]: their models before the round, which the nodes that mix with them know
    messages: Tensor  # [v, n, d]: every vector like a model that each of them sent, as it arrived
    sent: Tensor  # [n] bool: whether it took part
    after: Tensor  # [n, d]: their models after the round; with a server, what it made of all messages

    @property
    def models(self) -> Tensor:
        """[n, d]: the nodes' own models after their local work, found from the first vector of a message.

        Methods send models, or changes of them, which are smaller. An attacker that knows the method knows
        which.
        """
        sent = self.messages[0]
        changes = sent.norm(dim=1) < (sent - self.before).norm(dim=1)
        return torch.where(changes.unsqueeze(1), self.before + sent, sent)


def overheard(simulation: Simulation) -> Overheard:
    """Runs the next round and keeps what was sent in it."""
    nodes, dim = simulation.problem.nodes, simulation.problem.dim
    before, heard = simulation.models.detach().clone(), []
    sent = torch.zeros(nodes, dtype=torch.bool)

    def listen(message: Any, senders: Tensor) -> None:
        sent[senders] = True
        for vectors in leaves(message):
            if vectors.shape[-1] == dim:
                heard.append(torch.zeros_like(before).index_copy(0, senders, vectors.detach()))

    simulation.rounds.listener = listen
    simulation.step()
    simulation.rounds.listener = None
    return Overheard(before, torch.stack(heard) if heard else before[None], sent, simulation.models.detach())
